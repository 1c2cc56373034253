"""The stamp of random weights lies on nothing else, whatever stands at the top of a figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from matplotlib.figure import Figure

from perturbkv.analyses.quality.divergence import divergence
from tests.analyses.test_answers_part_by_hand import ROWS
from tests.figures.test_figures_show_their_numbers import DRAWN
from tests.figures.test_the_quality_figure_shows_its_numbers import made
from tests.support.answers import written
from tests.support.artists import overlapping, words


def stamped(result: Any, width: int) -> Figure:
    return replace(result, identity=replace(result.identity, random_weights=True)).plot(width)


RESULTS: dict[str, Callable[[], Any]] = {
    "quality": lambda: made("qasper", "multi_news"),
    "quality of one": lambda: made("needle"),
    "divergence": lambda: divergence(written(*ROWS)),
}


@pytest.mark.parametrize("width", [84, 174])
@pytest.mark.parametrize("name", RESULTS)
def test_the_stamp_lies_on_nothing(name: str, width: int) -> None:
    result = RESULTS[name]()
    figure = stamped(result, width)
    assert "random weights" in words(figure)
    assert overlapping(figure) == []
    assert "random weights" not in words(result.plot(width))


@pytest.mark.parametrize("name", DRAWN)
def test_nor_in_the_figures_of_a_trace(name: str) -> None:
    figure = DRAWN[name][0]()
    assert "random weights" in words(figure)
    assert [pair for pair in overlapping(figure) if any("random weights" in text for text in pair)] == []
