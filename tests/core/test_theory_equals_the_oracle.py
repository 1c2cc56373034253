from __future__ import annotations

import numpy as np
import pytest
import torch

from perturbkv import theory
from perturbkv.scoring import value_norms
from perturbkv.scoring.scores.snapkv import SnapKV
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
    np.testing.assert_allclose(theory.decode_attention(given["query"], given["key"], 0.4), expected, rtol=1e-10)


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
    divergence, agreement = theory.logit_divergence(torch.from_numpy(full), torch.from_numpy(evicted))
    for row in range(2):
        difference = evicted[row] - full
        assert float(drift.l1[row]) == pytest.approx(naive.l1(difference), rel=1e-12)
        assert float(drift.l2[row]) == pytest.approx(np.sqrt(np.sum(difference**2)), rel=1e-12)
        assert float(drift.cosine[row]) == pytest.approx(naive.cosine_distance(full, evicted[row]), rel=1e-9)
        assert float(divergence[row]) == pytest.approx(naive.kl(full, evicted[row]), rel=1e-9)
        assert bool(agreement[row]) == (int(np.argmax(full)) == int(np.argmax(evicted[row])))


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
