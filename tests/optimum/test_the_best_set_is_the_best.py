"""The searches against all subsets of small heads, by loops written from METHOD's formulas."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from perturbkv.optimum import exact
from perturbkv.optimum.exact import HeadEntries, best_set
from perturbkv.optimum.search import improve_by_swaps, search_head, search_head_with_proof

SEEDS = range(6)


def head(seed: int, entries: int = 11, model: int = 5, window: int = 2, sink: float = 0.0) -> HeadEntries:
    draw = np.random.default_rng(seed)
    logits = 2 * draw.normal(size=entries)
    weights = np.exp(logits) / np.exp(logits).sum() * (1 - sink)
    always = np.arange(entries) >= entries - window
    return HeadEntries(weights, draw.normal(size=(entries, model)), always, sink)


def naive(entries: HeadEntries, kept: tuple[int, ...]) -> float:
    """L = ‖o − Σ A'𝒱‖₁, A' the softmax over what is kept and the sink, entry by entry."""
    model, mass = entries.projected.shape[1], entries.sink + sum(float(entries.attention[place]) for place in kept)
    moved = 0.0
    for dim in range(model):
        full = sum(float(a) * float(v) for a, v in zip(entries.attention, entries.projected[:, dim], strict=True))
        left = sum(float(entries.attention[place]) / mass * float(entries.projected[place, dim]) for place in kept)
        moved += abs(full - left)
    return moved


def every(entries: HeadEntries, size: int) -> dict[tuple[int, ...], float]:
    """All sets of a size that hold what always stays, and their L."""
    settled = tuple(np.flatnonzero(entries.always_kept).tolist())
    free = np.flatnonzero(~entries.always_kept).tolist()
    return {
        tuple(sorted((*chosen, *settled))): naive(entries, (*chosen, *settled))
        for chosen in combinations(free, size - len(settled))
    }


def started(entries: HeadEntries, size: int) -> np.ndarray:
    return entries.kept_set(entries.free_indices[: size - int(entries.always_kept.sum())])


@pytest.mark.parametrize("sink", [0.0, 0.4])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_fraction_is_the_isolated_perturbation(seed: int, sink: float) -> None:
    entries = head(seed, sink=sink)
    for kept, expected in list(every(entries, 5).items())[::7]:
        mask = np.isin(np.arange(len(entries.attention)), kept)
        assert entries.perturbation(mask) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("sink", [0.0, 0.4])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_proven_set_is_the_best_of_all_subsets(seed: int, sink: float) -> None:
    entries = head(seed, entries=12, sink=sink)
    found, least = best_set(entries, started(entries, 6), 30), every(entries, 6)
    best = min(least, key=lambda kept: least[kept])
    assert found.is_optimal
    assert tuple(np.flatnonzero(found.kept).tolist()) == best
    assert found.perturbation == pytest.approx(least[best], rel=1e-12)
    assert found.lower_bound <= least[best]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_swap_improves_a_settled_set(seed: int) -> None:
    entries = head(seed)
    found, least = improve_by_swaps(entries, started(entries, 5), 30), every(entries, 5)
    kept = set(np.flatnonzero(found.kept).tolist())
    assert found.settled and found.perturbation <= entries.perturbation(started(entries, 5))
    near = [value for other, value in least.items() if len(kept - set(other)) == 1]
    assert min(near) >= found.perturbation * (1 - 1e-9)


def test_a_bound_holds_when_the_time_is_up() -> None:
    """Nothing is called proven that is not; the bound lies below the true least all the same."""
    for seed in SEEDS:
        entries = head(seed, entries=12)
        found = best_set(entries, started(entries, 6), 1e-6)
        assert not found.is_optimal
        assert found.lower_bound <= min(every(entries, 6).values())
    open_end = improve_by_swaps(head(0, entries=40), started(head(0, entries=40), 20), 0.0)
    assert not open_end.settled


def test_an_unfinished_program_proves_a_bound_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver's F divided by the least mass bounds every set; by the largest, the planted mistake, it would not."""
    too_high = 0
    for seed in SEEDS:
        entries = head(seed, entries=12)
        least, start = every(entries, 6), started(entries, 6)
        ratio = entries.perturbation(start)
        masses = {kept: sum(float(entries.attention[place]) for place in kept) for kept in least}
        proven = min((value - ratio) * masses[kept] for kept, value in least.items())
        monkeypatch.setattr(exact, "_solve", lambda *asked, F=proven: (None, F))
        found = best_set(entries, start, 30)
        assert found.lower_bound == pytest.approx(max(0.0, ratio + proven / min(masses.values())), rel=1e-9)
        assert found.lower_bound <= min(least.values())
        too_high += ratio + proven / max(masses.values()) > min(least.values()) * (1 + 1e-9)
    assert too_high > 0


def test_searches_say_what_was_found() -> None:
    entries = head(3, entries=12)
    sets = [started(entries, 6), entries.kept_set(entries.free_indices[-4:])]
    least = min(every(entries, 6).values())
    proven, swapped = search_head_with_proof(entries, sets, 30, seed=0), search_head(entries, sets, 30)
    assert proven.perturbation == swapped.perturbation == tuple(map(entries.perturbation, sets))
    assert proven.best == pytest.approx(least) and proven.closed and proven.lower is not None
    assert swapped.best >= least * (1 - 1e-12) and swapped.lower is None and not swapped.closed
    assert (proven.entries, proven.kept, len(proven.positions)) == (12, 6, 6)
    with pytest.raises(ValueError, match="one size"):
        search_head(entries, [sets[0], entries.kept_set(entries.free_indices[:2])], 1)
    with pytest.raises(ValueError, match="always stays"):
        best_set(entries, ~entries.always_kept, 1)


def test_a_head_that_loses_nothing_is_proven_at_once() -> None:
    alike = HeadEntries(np.full(6, 1 / 6), np.ones((6, 3)), np.arange(6) >= 5)
    found = best_set(alike, alike.kept_set(np.array([0, 1])), 5)
    assert found.perturbation == pytest.approx(0, abs=1e-15)
