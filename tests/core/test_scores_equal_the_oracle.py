"""Every score of a later method against loops in float64, at the edges of its formula, and however heads are cut up."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import pytest
import torch

from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.errors import ConfigError
from perturbkv.scoring import score_registry
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import LayerView, Rotation
from perturbkv.selection.grid import configuration
from perturbkv.selection.layer_statistics import LayerStatistics
from perturbkv.selection.ranking import Scores
from perturbkv.selection.resolved_config import resolve
from tests.oracle import scores as naive
from tests.support.layers import SCALE, layer_view
from tests.support.models import HEADS

PER_ENTRY = tuple(naive.OF_ENTRY)
ALL = (*PER_ENTRY, "expected-attention")
FREQUENCIES = np.array([1.0, 0.3])
"""Four of the six components of a head are rotary."""
FACTOR = 1.25


def rotary(positions: range) -> Rotation:
    angles = torch.tensor(positions, dtype=torch.float64).unsqueeze(-1) * torch.from_numpy(FREQUENCIES).repeat(2)
    return Rotation(FACTOR * angles.cos(), FACTOR * angles.sin())


def turned(vector: np.ndarray, position: int) -> np.ndarray:
    return naive.rotated(vector, position, FREQUENCIES, FACTOR)


def computed(name: str, seen: LayerView, chunk_bytes: int = CHUNK_BYTES) -> torch.Tensor:
    """Per query head."""
    score = score_registry.build(name).unpooled()
    found = layer_scores(seen, [score], chunk_bytes)[score]
    return found.repeat_interleave(seen.heads // len(found), dim=0)


def expected(name: str, seen: LayerView) -> np.ndarray:
    arrays = (seen.queries.numpy(), seen.keys.numpy(), seen.values.numpy())
    return naive.of_layer(name, *arrays, SCALE, seen.window)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", PER_ENTRY)
def test_a_score_is_its_formula(name: str, heads: tuple[int, int]) -> None:
    seen = layer_view(*heads, n=30, seed=2)
    wanted = expected(name, seen)
    np.testing.assert_allclose(computed(name, seen).numpy(), wanted, rtol=1e-10)
    assert wanted.all()


@pytest.mark.parametrize("name", PER_ENTRY)
def test_values_far_from_zero_cost_no_more_than_their_length(name: str) -> None:
    """Distances from one matrix product lose what 1e-16 of the squared lengths is beside them."""
    seen = layer_view(4, 2, n=30, seed=3)
    seen = layer_view(4, 2, n=30, seed=3, values=seen.values + 100)
    np.testing.assert_allclose(computed(name, seen).numpy(), expected(name, seen), rtol=1e-9)


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(
    "options",
    [{}, {"n_future": 5, "sinks": 2}, {"use_covariance": False}, {"epsilon": 0.02}, {"use_vnorm": False}, {"sinks": 0}],
    ids=str,
)
def test_expected_attention_is_its_formula(options: dict[str, Any], heads: tuple[int, int]) -> None:
    seen = layer_view(*heads, n=30, seed=4)
    unrotated = seen.queries.numpy()
    queries = np.array([[turned(query, place) for place, query in enumerate(head)] for head in unrotated])
    seen = layer_view(*heads, n=30, seed=4, queries=torch.from_numpy(queries), rotary=rotary)
    arrays = (unrotated, seen.keys.numpy(), seen.values.numpy())
    wanted = naive.expected_attention(*arrays, SCALE, turned, **options)[:, : seen.prefix]
    written = ", ".join(f"{name}={str(value).lower()}" for name, value in options.items())
    found = computed(f"expected-attention({written})" if written else "expected-attention", seen)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-10)
    sinks = options.get("sinks", 4)
    assert wanted[:, sinks:].all()
    assert not wanted[:, :sinks].any()


def test_expected_attention_refuses_an_epsilon_without_effect() -> None:
    with pytest.raises(ConfigError, match="epsilon of expected-attention has no effect with use_vnorm=false"):
        score_registry.build("expected-attention(epsilon=0.1, use_vnorm=false)")


@pytest.mark.parametrize("n", [1, 2, 5, 6, 9])
@pytest.mark.parametrize("name", ALL)
def test_short_prompts_have_a_finite_score_for_each_entry_before_the_window(name: str, n: int) -> None:
    """Inside the window there is none; behind it the sinks may be all there is."""
    found = computed(name, layer_view(4, 2, n=n, seed=2, rotary=rotary))
    assert found.shape == (4, max(0, n - 5))
    assert found.isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_heads_in_parts_score_alike(name: str) -> None:
    seen = layer_view(6, 3, n=40, seed=5, rotary=rotary)
    assert len(list(seen.parts(1))) == 3
    torch.testing.assert_close(computed(name, seen, chunk_bytes=1), computed(name, seen), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("name", ALL)
def test_half_precision_gives_what_the_rounded_inputs_give(name: str) -> None:
    """Inputs are rounded, what is made of them is not."""
    exact = layer_view(4, 2, n=60, seed=6, rotary=rotary)
    kinds = ("queries", "keys", "values", "norms", "projection")
    rounded = {kind: getattr(exact, kind).to(torch.bfloat16) for kind in kinds}
    found = computed(name, layer_view(4, 2, n=60, seed=6, rotary=rotary, **rounded))
    again = {kind: held.double() for kind, held in rounded.items()}
    wanted = computed(name, layer_view(4, 2, n=60, seed=6, rotary=rotary, **again))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-3 if name == "expected-attention" else 1e-10, atol=1e-300)


def heavy(logit: float, where: int, n: int = 12, rows: int = 3) -> LayerView:
    """Every query's logit on entry `where` is `logit`; those on the others lie within 0.5 of 0."""
    draw = torch.Generator().manual_seed(7)
    keys = torch.zeros(1, n, 6, dtype=torch.float64)
    keys[0, :, 0] = torch.rand(n, generator=draw, dtype=torch.float64) / SCALE - 0.5 / SCALE
    keys[0, where, 0] = logit / SCALE
    queries = torch.zeros(2, n, 6, dtype=torch.float64)
    queries[..., 0] = 1
    queries[1, :, 0] = 1 + torch.arange(n) / 50
    values = torch.randn(1, n, 6, generator=draw, dtype=torch.float64) + 3
    return layer_view(2, 1, n=n, seed=1, window=rows, queries=queries, keys=keys, values=values)


def decimals(name: str, seen: LayerView, head: int, j: int) -> float:
    """The naive formula in 460 digits, where 1 − a is as good as any number."""
    with localcontext() as context:
        context.prec, context.Emin, context.Emax = 460, -(10**6), 10**6
        values = [[Decimal(float(x)) for x in row] for row in seen.values[0]]
        weights = []
        for i in range(seen.prefix, seen.entries):
            z = [Decimal(SCALE) * Decimal(float(seen.queries[head, i, 0])) * Decimal(float(seen.keys[0, k, 0]))
                 for k in range(i + 1)]  # fmt: skip
            whole = [entry.exp() for entry in z]
            weights.append([entry / sum(whole) for entry in whole] + [Decimal(0)] * (seen.entries - i - 1))
        if name == "caote":
            weights = [[sum(column) / len(weights) for column in zip(*weights, strict=True)]]
        total = Decimal(0)
        for a in weights:
            outputs = [sum(a[k] * values[k][c] for k in range(seen.entries)) for c in range(6)]
            apart = sum((outputs[c] - values[j][c]) ** 2 for c in range(6))
            total += (a[j] / (1 - a[j])) ** 2 * apart
        return float(total.sqrt() if name == "caote" else total)


@pytest.mark.parametrize("logit", [3.0, 20.0, 38.0, 45.0, 640.0, 700.0, 720.0, 800.0])
@pytest.mark.parametrize("name", ["caote", "dropkv"])
def test_an_entry_that_takes_all_the_weight_has_its_limit(name: str, logit: float) -> None:
    """At 45 a is 1 in float64, at 720 the other weights lose digits, at 800 they are 0."""
    seen = heavy(logit, where=2)
    found = computed(name, seen)
    for head in range(2):
        assert found[head, 2] == pytest.approx(decimals(name, seen, head, 2), rel=1e-10)
    assert found.isfinite().all()
    if logit == 800.0:
        assert (seen.attention[..., 2] == 1).all()
        assert not seen.attention.sum(dim=-1).sub(1).any()
        assert (found[:, 2] > 0.1).all()
        assert not found[:, 3:].any()


@pytest.mark.parametrize("logit", [3.0, 20.0, 38.0, 45.0])
@pytest.mark.parametrize("name", ["caote", "dropkv"])
def test_where_the_window_takes_all_the_weight_the_prefix_gets_what_is_left(name: str, logit: float) -> None:
    seen = heavy(logit, where=9)
    found = computed(name, seen)
    for j in (0, 4, 8):
        assert found[1, j] == pytest.approx(decimals(name, seen, 1, j), rel=1e-10)


@pytest.mark.parametrize("name", ["obcache-value", "obcache-key", "obcache-joint", "value-norm", "caote", "dropkv"])
def test_weights_of_nothing_are_no_trouble(name: str) -> None:
    found = computed(name, heavy(-5000.0, where=2))
    assert found.isfinite().all()
    assert not found[:, 2].any()
    assert (found[:, 3] > 0).all()


def test_both_parts_of_obcache_are_never_below_zero() -> None:
    """An entry whose value its logit turns into nothing: v + z (v − o) = 0."""
    seen = layer_view(1, 1, n=12, seed=3, window=1)
    z = seen.logits[0, 0, 4]
    weight = seen.attention[0, 0, 4]
    others = seen.outputs[0, 0] - weight * seen.values[0, 4]
    values = seen.values.clone()
    values[0, 4] = z * others / (1 + z - z * weight)
    found = computed("obcache-joint", layer_view(1, 1, n=12, seed=3, window=1, values=values))
    assert 0 <= found[0, 4] < 1e-12 * found.max()


def test_distances_are_exact_for_the_heaviest_entry() -> None:
    seen = heavy(20.0, where=2)
    left = seen.left_out
    assert (left.index == 2).all()
    direct = (seen.values[0, 2] - seen.outputs).square().sum(dim=-1)
    assert (seen.distances[..., 2] / direct).sub(1).abs().max() < 1e-5, "o carries the rounding of v"
    np.testing.assert_allclose(seen.distances[..., 2], left.mass.square() * left.squared_distance, rtol=1e-15)
    np.testing.assert_allclose(seen.outputs, seen.attention @ seen.values, rtol=1e-14)


@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize("begin", [0, 3])
def test_scores_below_zero_are_pooled_over_the_entries_that_are_there(kind: str, begin: int) -> None:
    """Zeros beyond the ends would be the best scores of all."""
    n, kernel = 11, 5
    score = -torch.rand((2, n), generator=torch.Generator().manual_seed(3), dtype=torch.float64) - 1
    there = (torch.arange(n) >= begin).expand(2, -1)
    statistics = LayerStatistics(
        score.masked_fill(~there, 0.0), torch.ones((2, n)), 2, 0, 1, "s", valid=there if begin else None
    )
    chosen = configuration(
        4, policy=f"knorm(pool={kind}, kernel={kernel})", selection="attention", granularity="kv", window=1
    )
    found = Scores(statistics).attention(resolve(chosen))
    for head in range(2):
        for place in range(begin, n):
            inside = [float(score[head, i]) for i in range(max(begin, place - 2), min(n, place + 3))]
            expected = max(inside) if kind == "max" else math.fsum(inside) / len(inside)
            assert float(found[head, place]) == pytest.approx(expected, rel=1e-12)
