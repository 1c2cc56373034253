"""Formulas of the paper, distances and bounds, against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbkv import theory
from perturbkv.scoring import value_norms
from perturbkv.scoring.scores.snapkv import SnapKV
from perturbkv.scoring.value_norms import projected_value_norms
from perturbkv.scoring.window_attention import pool
from tests.oracle import theory as naive
from tests.support.bounds import quantities
from tests.support.layers import layer_view
from tests.support.models import HEADS

GENERATOR = np.random.default_rng(0)
D_HEAD, D_MODEL, KEYS = 6, 10, 23


def layer(heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    normal = GENERATOR.normal
    return {
        "query": normal(size=(heads, D_HEAD)) * 2,
        "window": normal(size=(heads, 5, D_HEAD)) * 2,
        "key": normal(size=(kv_heads, KEYS, D_HEAD)),
        "value": normal(size=(kv_heads, KEYS, D_HEAD)),
        "w_o": normal(size=(D_MODEL, heads * D_HEAD)),
    }


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


@pytest.fixture(params=HEADS.values(), ids=HEADS)
def arrays(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    return layer(*request.param)


def masks(heads: int) -> tuple[np.ndarray, np.ndarray]:
    kept = GENERATOR.random((3, heads, KEYS)) < 0.5
    kept[..., -4:] = True
    return kept, kept & (GENERATOR.random(kept.shape) < 0.6) | (np.arange(KEYS) >= KEYS - 4)


def test_value_norms(arrays: dict[str, np.ndarray]) -> None:
    expected = naive.projected_value_norms(arrays["value"], arrays["w_o"], len(arrays["query"]))
    given = tensors(arrays)
    for chunk_bytes in (1, 1000, 2**28):
        found = value_norms.projected_value_norms(given["value"], given["w_o"], chunk_bytes)
        np.testing.assert_allclose(found, expected, rtol=1e-10)
        low = value_norms.projected_value_norms(given["value"].float(), given["w_o"].float(), chunk_bytes)
        assert low.dtype == torch.float32
        np.testing.assert_allclose(low, expected, rtol=1e-5)


def test_window_attention(arrays: dict[str, np.ndarray]) -> None:
    given = tensors(arrays)
    expected = naive.window_attention(arrays["window"], arrays["key"], 0.4)
    heads, window = given["window"].shape[:2]
    seen = layer_view(heads, len(given["key"]), 9, 0, window, queries=given["window"], keys=given["key"])
    np.testing.assert_allclose(SnapKV().score(seen), expected, rtol=1e-10)


def test_decode_attention(arrays: dict[str, np.ndarray]) -> None:
    given = tensors(arrays)
    expected = naive.decode_attention(arrays["query"], arrays["key"], 0.4)
    np.testing.assert_allclose(
        theory.decode_attention(given["query"], given["key"], theory.Softmax(0.4)), expected, rtol=1e-10
    )


@pytest.mark.parametrize(("kind", "kernel"), [("max", 7), ("max", 3), ("average", 5), ("average", 1), ("none", 7)])
def test_pooling(kind: str, kernel: int) -> None:
    row = GENERATOR.random((2, 17))
    expected = [naive.pool(list(values), kind, kernel) for values in row]
    np.testing.assert_allclose(pool(torch.from_numpy(row), kind, kernel), expected, rtol=1e-12)


def test_isolated_perturbation_and_bounds(arrays: dict[str, np.ndarray]) -> None:
    given = tensors(arrays)
    heads, kv_heads = len(arrays["query"]), len(arrays["key"])
    attention = naive.decode_attention(arrays["query"], arrays["key"], 0.4)
    value_norms = naive.projected_value_norms(arrays["value"], arrays["w_o"], heads)
    kept, stage1 = masks(heads)
    found, moved = quantities(
        torch.from_numpy(attention), torch.from_numpy(value_norms), given["value"], given["w_o"],
        torch.from_numpy(kept), torch.from_numpy(stage1),
    )  # fmt: skip
    for config in range(len(kept)):
        for head in range(heads):
            a, v = list(attention[head]), list(value_norms[head])
            n, s = list(kept[config, head]), list(stage1[config, head])
            values = arrays["value"][head // (heads // kv_heads)]
            projection = naive.head_slice(arrays["w_o"], head, D_HEAD)
            expected = {
                "theta": naive.theta(a, v, n),
                "theta_hat": naive.theta_hat(a, v, n, s),
                "theta_hat_relax": naive.theta_hat_relax(a, v, n, s),
                "retained_mass": naive.mass(a, n),
                "sigma_stage1": naive.mass(a, s),
            }
            for name, number in expected.items():
                assert float(getattr(found, name)[config, head]) == pytest.approx(number, rel=1e-9)
            assert float(moved[config, head]) == pytest.approx(naive.perturbation(a, n, values, projection), rel=1e-9)


def test_sigma_topk_counts_entries_of_each_head() -> None:
    attention = GENERATOR.dirichlet(np.ones(9), size=2)
    counts = torch.tensor([[0, 3], [9, 30]])
    found = theory.sigma_topk(theory.largest_sums(torch.from_numpy(attention)), counts)
    for config in range(2):
        for head in range(2):
            expected = naive.sigma_topk(list(attention[head]), 1.0, int(counts[config, head]))
            assert float(found[config, head]) == pytest.approx(expected, rel=1e-12)


def test_drift_and_logit_divergence() -> None:
    full, evicted = GENERATOR.normal(size=31), GENERATOR.normal(size=(2, 31))
    drift = theory.drift(torch.from_numpy(full), torch.from_numpy(evicted))
    log_full, log_evicted = (theory.log_probabilities(torch.from_numpy(logits)) for logits in (full, evicted))
    divergence, agreement = theory.logit_divergence(log_full, log_evicted)
    taken = theory.draft_acceptance(log_full, log_evicted)
    found = theory.token_log_probability(log_evicted, torch.tensor(7))
    for row in range(2):
        difference = evicted[row] - full
        assert float(drift.l1[row]) == pytest.approx(naive.l1(difference), rel=1e-12)
        assert float(drift.l2[row]) == pytest.approx(np.sqrt(np.sum(difference**2)), rel=1e-12)
        assert float(drift.cosine[row]) == pytest.approx(naive.cosine_distance(full, evicted[row]), rel=1e-9)
        assert float(found[row]) == pytest.approx(naive.log_probability(evicted[row], 7), rel=1e-9)
        assert float(divergence[row]) == pytest.approx(naive.kl(full, evicted[row]), rel=1e-9)
        assert bool(agreement[row]) == (int(np.argmax(full)) == int(np.argmax(evicted[row])))
        assert float(taken[row]) == pytest.approx(naive.draft_acceptance(full, evicted[row]), rel=1e-12)


LOGITS = st.lists(st.tuples(*[st.floats(-50, 50)] * 2), min_size=1, max_size=40)


@settings(max_examples=200)
@given(LOGITS)
def test_what_is_taken_of_a_draft_is_bounded_by_kl(logits: list[tuple[float, float]]) -> None:
    """Pinsker: 1 − a ≤ √(KL / 2); and Bretagnolle and Huber's, for a large KL: 1 − a ≤ √(1 − exp(−KL))."""
    full, evicted = (theory.log_probabilities(torch.tensor(each)) for each in zip(*logits, strict=True))
    divergence, _ = theory.logit_divergence(full, evicted[None])
    lost, kl = 1 - float(theory.draft_acceptance(full, evicted[None])), max(0.0, float(divergence))
    assert 0 <= lost <= min(math.sqrt(kl / 2), math.sqrt(-math.expm1(-kl))) + 1e-7
    assert float(theory.draft_acceptance(full, full[None])) == pytest.approx(1, abs=1e-12)


def test_four_entries_worked_out_by_hand() -> None:
    """A = (.5, .25, .125, .125), ν = (1, 2, 4, 8), kept {0, 3}, stage 1 {0}: S = .625, C = 2.5, σ = .5."""
    attention = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64)
    value_norms = torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=torch.float64)
    kept = torch.tensor([[[True, False, False, True]]])
    stage1 = torch.tensor([[[True, False, False, False]]])
    found, _ = quantities(attention, value_norms, torch.ones(1, 4, 1), torch.ones(1, 1), kept, stage1)
    assert float(found.retained_mass) == 0.625
    assert float(found.theta) == pytest.approx(2.5 - (2 - 1.6) * 1.5)
    assert float(found.theta_hat) == pytest.approx(2.5)
    assert float(found.theta_hat_relax) == pytest.approx(2.5)


WIDTH = 24
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
    full = np.round(draw.normal(size=WIDTH) * 2**20) * 2.0**scale
    moved = np.round(draw.normal(size=WIDTH) * 10.0**share * 2**44) * 2.0 ** (scale - 24)
    l1, l2, cosine = found(full, moved)
    assert l1 == pytest.approx(naive.l1(moved), rel=1e-12, abs=0)
    assert l2 == pytest.approx(naive.l2(moved), rel=1e-12, abs=0)
    assert cosine == pytest.approx(naive.cosine_of_sum(full, moved), rel=1e-9, abs=DIGITS)


def test_subtracting_the_cosine_from_1_would_lose_what_is_measured() -> None:
    """Vectors at an angle of 1e-10: 1 − cos is 5e-21, which float64 cannot tell from 0 beside 1."""
    full, across = np.zeros(WIDTH), np.zeros(WIDTH)
    full[0], across[1] = 3.0, 3e-10
    assert found(full, across)[2] == pytest.approx(5e-21, rel=1e-12, abs=0)
    assert 1 - float(torch.cosine_similarity(*map(torch.from_numpy, (full, full + across)), dim=0)) in (0, 2**-53)


@pytest.mark.parametrize("stretch", [1e-6, 0.5, 7.0])
def test_an_output_that_is_only_scaled_has_no_cosine_distance(stretch: float) -> None:
    full = GENERATOR.normal(size=WIDTH)
    assert found(full, (stretch - 1) * full)[2] < (4 * 2**-52 * max(1, 1 / stretch)) ** 2
    across = GENERATOR.normal(size=WIDTH) * 1e-5 * stretch
    moved = (stretch - 1) * full + across
    assert found(full, moved)[2] == pytest.approx(naive.cosine_of_sum(full, moved), rel=1e-4, abs=0)


def test_opposite_and_vanishing_outputs() -> None:
    full = GENERATOR.normal(size=WIDTH)
    nothing = np.zeros(WIDTH)
    assert found(full, -3 * full)[2] == pytest.approx(2, rel=1e-14)
    assert found(full, -full)[2] == 1
    assert found(nothing, full)[2] == 1
    assert found(nothing, nothing) == (0, 0, 0)
    assert found(full, nothing) == (0, 0, 0)


def test_distances_are_of_what_the_heads_contribute_not_of_their_vectors() -> None:
    """Heads (row, head, d_head) before W_O that differ alike, but not where W_O sends both to the same place."""
    heads, d_head, rows = 3, 4, 2
    w_o = GENERATOR.normal(size=(WIDTH, heads * d_head))
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
    full = torch.from_numpy(GENERATOR.normal(size=(4, WIDTH)))
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


SLACK = 1e-9


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 24), st.floats(0.05, 6), st.floats(0, 1), st.floats(0, 1), st.integers(0, 10**6))
def test_the_bounds_stand_in_their_order(keys: int, sharpness: float, share: float, first: float, seed: int) -> None:
    """L ≤ θ ≤ θ̂ always; θ̂ ≤ θ̂_relax where σ > 0.5."""
    draw = np.random.default_rng(seed)
    query, key, value = (
        draw.normal(size=(4, 5)) * sharpness,
        draw.normal(size=(2, keys, 5)),
        draw.normal(size=(2, keys, 5)),
    )
    w_o = torch.from_numpy(draw.normal(size=(7, 20)))
    kept = draw.random((3, 4, keys)) < share
    kept[..., -1] = True
    stage1 = kept & (draw.random(kept.shape) < first)
    stage1[..., -1] = True
    attention = theory.decode_attention(torch.from_numpy(query), torch.from_numpy(key), theory.Softmax(1.0))
    norms = projected_value_norms(torch.from_numpy(value), w_o)
    n, s = torch.from_numpy(kept), torch.from_numpy(stage1)
    bounds, perturbation = quantities(attention, norms, torch.from_numpy(value), w_o, n, s)
    scale = (attention * norms).sum(dim=-1) / bounds.sigma_stage1
    assert (perturbation <= bounds.theta + SLACK * scale).all()
    assert (bounds.theta <= bounds.theta_hat + SLACK * scale).all()
    evidence = bounds.sigma_stage1 > 0.5
    assert (bounds.theta_hat <= bounds.theta_hat_relax + SLACK * scale)[evidence].all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(0, 10**6))
def test_keeping_everything_perturbs_nothing(keys: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    attention = torch.from_numpy(draw.dirichlet(np.ones(keys), size=4))
    value, w_o = torch.from_numpy(draw.normal(size=(2, keys, 5))), torch.from_numpy(draw.normal(size=(7, 20)))
    everything = torch.ones(1, 4, keys, dtype=torch.bool)
    norms = projected_value_norms(value, w_o)
    bounds, perturbation = quantities(attention, norms, value, w_o, everything, everything)
    torch.testing.assert_close(bounds.retained_mass, torch.ones(1, 4, dtype=torch.float64))
    assert bounds.theta.abs().max() < 1e-12
    assert perturbation.max() < 1e-12


@settings(max_examples=60, deadline=None)
@given(st.integers(3, 24), st.floats(0.1, 0.9), st.integers(0, 10**6))
def test_tightness_is_how_far_what_went_lies_from_what_stayed(keys: int, share: float, seed: int) -> None:
    """L = (1 − S) ‖μ_gone − μ_kept‖₁ and θ = (1 − S) (ν̄_gone + ν̄_kept), means weighted by attention."""
    draw = np.random.default_rng(seed)
    attention, value, w_o = draw.dirichlet(np.ones(keys)), draw.normal(size=(keys, 5)), draw.normal(size=(7, 5))
    kept = draw.random(keys) < share
    kept[-1], kept[0] = True, False
    projected = value @ w_o.T
    mass = attention[kept].sum()
    stayed, gone = attention * kept / mass, attention * ~kept / (1 - mass)
    mask = torch.from_numpy(kept)[None, None]
    weights, values, matrix = torch.from_numpy(attention)[None], torch.from_numpy(value)[None], torch.from_numpy(w_o)
    bounds, perturbation = quantities(weights, projected_value_norms(values, matrix), values, matrix, mask, mask)
    norms = np.abs(projected).sum(axis=1)
    np.testing.assert_allclose(perturbation[0, 0], (1 - mass) * np.abs((gone - stayed) @ projected).sum(), rtol=1e-9)
    np.testing.assert_allclose(bounds.theta[0, 0], (1 - mass) * (gone + stayed) @ norms, rtol=1e-9)
