from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perturbkv import theory
from perturbkv.scoring.value_norms import projected_value_norms
from tests.support.bounds import quantities

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
    attention = theory.decode_attention(torch.from_numpy(query), torch.from_numpy(key), 1.0)
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
