"""The audit's figure: kept shares and noise floors are the result's, and what is not there is said."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from perturbkv.analyses.audit.audit import Audit
from perturbkv.analyses.audit.cache_entries import FLOORS
from perturbkv.figures.audit import draw_dump
from tests.audit import planted
from tests.audit.test_planted_faults_are_told_apart import audited
from tests.support.every_figure import dump_audit


def drawn(result: Audit, width_mm: float = 174) -> Figure:
    figure = result.plot(width_mm)
    figure.canvas.draw()
    return figure


@pytest.fixture(scope="module")
def result() -> Audit:
    return audited("llama", planted.rotated_again)


@pytest.mark.slow
def test_kept_shares_are_drawn_by_layer_and_position(result: Audit) -> None:
    (image,) = drawn(result).axes[0].images
    shares = np.zeros((3, 60))
    for head in range(2):
        shares[:, planted.positions(60, head).numpy()] += 0.5
    assert image.get_gid() == "kept"
    np.testing.assert_allclose(np.asarray(image.get_array()), shares)


@pytest.mark.parametrize("width_mm", [174, 84])
def test_a_line_per_situation_and_the_limit(result: Audit, width_mm: float) -> None:
    lines = {str(line.get_gid()): line for line in drawn(result, width_mm).axes[1].lines}
    assert list(lines) == ["single", "block", "batch", "limit"]
    for name, floors in result.floors_by_layer().items():
        np.testing.assert_allclose(np.asarray(lines[name].get_ydata()), np.fmax(floors, 0.05))
        assert floors[0] < FLOORS < floors[1]
    assert set(np.asarray(lines["limit"].get_ydata())) == {FLOORS}
    assert drawn(result, width_mm).axes[1].get_xlim() == (-0.5, result.layers - 0.5)


def test_what_was_not_seen_is_said() -> None:
    figure = drawn(audited("llama", planted.breaks))
    said = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert said == ["no kept sets were found", "no layer was seen while it decoded"]


@pytest.mark.parametrize("width_mm", [84, 174])
def test_the_distances_of_a_dump_are_drawn_by_layer(width_mm: float) -> None:
    """Typical and farthest entries, limit and floor, of keys and of values."""
    result = dump_audit()
    keys, values = draw_dump(result, width_mm).axes
    for kind, axes in enumerate((keys, values)):
        lines = {line.get_gid(): np.asarray(line.get_ydata()) for line in axes.lines}
        np.testing.assert_allclose(lines["typical"], result.typical[:, kind])
        np.testing.assert_allclose(lines["noise floor"], result.floors[:, kind])
        largest = np.max([one.distances[:, kind] for one in result.requests], axis=0)
        np.testing.assert_allclose(lines["farthest that does not differ"], largest)
        np.testing.assert_allclose(lines["limit of an entry"], result.limits[:, kind])
        assert np.isfinite(lines["farthest that differs"]).tolist() == [False, True, False]
        assert lines["farthest that differs"][1] == result.requests[0].differing_distances[1, kind] > 0.5
        assert axes.get_yscale() == "log"
        assert axes.get_xlim() == (-0.5, 2.5), "no tick stands beyond the layers, however many they are"
