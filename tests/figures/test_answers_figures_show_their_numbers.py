"""Curves of answers that part, and what a judge gave: their artists hold the results' numbers."""

from __future__ import annotations

import numpy as np
import pytest

from perturbkv.analyses.quality.divergence import divergence
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.selection.grid import configuration
from perturbkv.storage.answers_file import WrittenAnswers
from tests.analyses.test_answers_part_by_hand import ROWS
from tests.support.answers import row, written
from tests.support.artists import artist, artists, overlapping, render, words

WIDTHS = pytest.mark.parametrize("width", [84, 174])
MANY = tuple(
    configuration(budget, policy=policy, selection=selection)
    for budget in (64, 128, 256) for policy in ("snapkv", "adakv") for selection in ("attention", "two-stage")
)  # fmt: skip


@WIDTHS
def test_both_panels_hold_their_curves_and_bands(width: int) -> None:
    result = divergence(written(*ROWS))
    figure = result.plot(width)
    for one in result.configs:
        assert one.forced is not None
        alike, kl = (
            artist(figure, panel, f"{kind} {one.config.label()}") for panel, kind in enumerate(("alike", "kl"))
        )
        np.testing.assert_allclose(alike.get_ydata(), one.alike_after(6)[0])
        np.testing.assert_allclose(kl.get_ydata(), one.forced.curve)
        np.testing.assert_allclose(kl.get_xdata(), range(6))
    assert len(artists(figure, 0, "alike band")) == len(artists(figure, 1, "kl band")) == 2
    assert "everything kept: 1.0e-09" in words(figure)
    assert overlapping(figure) == []
    assert len(render(figure)) > 1000


@pytest.mark.slow
@WIDTHS
def test_many_configurations_have_room_and_one_sample_without_kl_a_panel(width: int) -> None:
    rows = [row(f"s{place}", range(80), [[1]] * 12, [[0.1] * 80] * 12, MANY) for place in range(6)]
    figure = divergence(written(*rows, configs=MANY)).plot(width)
    assert artists(figure, 0, "alike band") == []
    assert overlapping(figure) == []
    alone = divergence(written(row("a", [1], [[2], [1]]))).plot(width)
    assert len(alone.axes) == 1
    assert overlapping(alone) == []
    empty = divergence(written(row("a", [], [[], []], [[], []]))).plot(width)
    assert len(render(empty)) > 1000


def answers(configs: tuple[EvictionConfig, ...]) -> WrittenAnswers:
    rows = [row(f"s{place}", [1], [[2]] * len(configs), configs=configs) for place in range(6)]
    return written(*rows, configs=configs)
