"""L1, L2 and 1 − cos of outputs that differ by much, by little and by nothing, against sums of 80 decimal digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbkv import theory
from tests.oracle import theory as naive

GENERATOR = np.random.default_rng(0)
D_MODEL = 24
DIGITS = 1e-100
"""The oracle's own rounding: of equal vectors it gives some 1e-120 instead of 0."""


def found(full: np.ndarray, moved: np.ndarray) -> tuple[float, float, float]:
    made = theory.distances(torch.from_numpy(full), torch.from_numpy(moved))
    return float(made.l1), float(made.l2), float(made.cosine)


@settings(deadline=None, max_examples=60)
@given(st.integers(-14, 3), st.integers(-30, 30), st.integers(0, 10**6))
def test_distances_of_vectors_that_differ_by_any_share_of_their_length(share: int, scale: int, seed: int) -> None:
    """The second vector is the exact sum of the first and the difference, so that the oracle sees both as they are."""
    draw = np.random.default_rng(seed)
    full = np.round(draw.normal(size=D_MODEL) * 2**20) * 2.0**scale
    moved = np.round(draw.normal(size=D_MODEL) * 10.0**share * 2**44) * 2.0 ** (scale - 24)
    l1, l2, cosine = found(full, moved)
    assert l1 == pytest.approx(naive.l1(moved), rel=1e-12, abs=0)
    assert l2 == pytest.approx(naive.l2(moved), rel=1e-12, abs=0)
    assert cosine == pytest.approx(naive.cosine_of_sum(full, moved), rel=1e-9, abs=DIGITS)


def test_subtracting_the_cosine_from_1_would_lose_what_is_measured() -> None:
    """Vectors at an angle of 1e-10: 1 − cos is 5e-21, which float64 cannot tell from 0 beside 1."""
    full, across = np.zeros(D_MODEL), np.zeros(D_MODEL)
    full[0], across[1] = 3.0, 3e-10
    assert found(full, across)[2] == pytest.approx(5e-21, rel=1e-12, abs=0)
    assert 1 - float(torch.cosine_similarity(*map(torch.from_numpy, (full, full + across)), dim=0)) in (0, 2**-53)


@pytest.mark.parametrize("stretch", [1e-6, 0.5, 7.0])
def test_an_output_that_is_only_scaled_has_no_cosine_distance(stretch: float) -> None:
    full = GENERATOR.normal(size=D_MODEL)
    assert found(full, (stretch - 1) * full)[2] < (4 * 2**-52 * max(1, 1 / stretch)) ** 2
    across = GENERATOR.normal(size=D_MODEL) * 1e-5 * stretch
    moved = (stretch - 1) * full + across
    assert found(full, moved)[2] == pytest.approx(naive.cosine_of_sum(full, moved), rel=1e-4, abs=0)


def test_opposite_and_vanishing_outputs() -> None:
    full = GENERATOR.normal(size=D_MODEL)
    nothing = np.zeros(D_MODEL)
    assert found(full, -3 * full)[2] == pytest.approx(2, rel=1e-14)
    assert found(full, -full)[2] == 1
    assert found(nothing, full)[2] == 1
    assert found(nothing, nothing) == (0, 0, 0)
    assert found(full, nothing) == (0, 0, 0)


def test_distances_are_of_what_the_heads_contribute_not_of_their_vectors() -> None:
    """Heads (row, head, d_head) before W_O that differ alike, but not where W_O sends both to the same place."""
    heads, d_head, rows = 3, 4, 2
    w_o = GENERATOR.normal(size=(D_MODEL, heads * d_head))
    full, evicted = GENERATOR.normal(size=(heads, d_head)), GENERATOR.normal(size=(rows, heads, d_head))
    slices = theory.head_slices(torch.from_numpy(w_o), heads)
    output = theory.project_outputs(torch.from_numpy(full), slices)
    made = theory.distances(output, theory.project_outputs(torch.from_numpy(evicted - full), slices))
    for row in range(rows):
        for head in range(heads):
            projection = naive.head_slice(w_o, head, d_head)
            u, v = full[head] @ projection, evicted[row, head] @ projection
            assert float(made.l1[row, head]) == pytest.approx(naive.l1(v - u), rel=1e-12)
            assert float(made.l2[row, head]) == pytest.approx(naive.l2(v - u), rel=1e-12)
            assert float(made.cosine[row, head]) == pytest.approx(naive.cosine_distance(u, v), rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "epsilon"),
    [(torch.bfloat16, 2**-7), (torch.float16, 2**-10), (torch.float32, 2**-23), (torch.float64, 2**-52)],
    ids=str,
)
def test_a_floor_is_what_was_measured_and_at_least_one_rounding(dtype: torch.dtype, epsilon: float) -> None:
    full = torch.from_numpy(GENERATOR.normal(size=(4, D_MODEL)))
    full[3] = 0
    measured = torch.tensor([0.0, 0.25 * epsilon, 100.0, 0.0], dtype=torch.float64)
    floors = theory.noise_floors(theory.Distances(measured, measured, measured), full, dtype)
    for head in range(3):
        u, seen = full[head].numpy(), float(measured[head])
        assert float(floors.l1[head]) == pytest.approx(naive.floor(seen, naive.l1(u), epsilon), rel=1e-12)
        assert float(floors.l2[head]) == pytest.approx(naive.floor(seen, naive.l2(u), epsilon), rel=1e-12)
        assert float(floors.cosine[head]) == pytest.approx(max(seen, epsilon**2 / 2), rel=1e-12, abs=0)
    assert min(float(kind[3]) for kind in (floors.l1, floors.l2, floors.cosine)) > 0


def test_the_cosine_floor_is_the_distance_that_one_rounding_of_a_vectors_length_makes() -> None:
    u, across = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    u[0], across[1] = 1, torch.finfo(torch.float32).eps
    still = theory.Distances(*(torch.zeros((), dtype=torch.float64) for _ in range(3)))
    floor = float(theory.noise_floors(still, u, torch.float32).cosine)
    assert float(theory.distances(u, across).cosine) == pytest.approx(floor, rel=1e-6, abs=0)
