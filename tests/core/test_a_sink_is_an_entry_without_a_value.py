"""A sink in the softmax counts as an entry that always stays and has no value (METHOD: Attention sinks)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perturbkv import theory
from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.scoring import score_registry
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import LayerView
from tests.oracle import scores as naive
from tests.oracle import theory as naive_theory
from tests.support.layers import SCALE, layer_view

OF_WINDOW = ("snapkv", "tova", "caote", "dropkv", "obcache-value", "obcache-key", "obcache-joint", "value-norm", "lava")
SINKS = torch.tensor([1.5, -2.0, 0.0, 4.0], dtype=torch.float64)


def computed(name: str, seen: LayerView, chunk_bytes: int = CHUNK_BYTES) -> torch.Tensor:
    score = score_registry.build(name)
    return layer_scores(seen, [score], chunk_bytes)[score]


def with_entry(seen: LayerView, sinks: torch.Tensor) -> LayerView:
    """The same without sinks, and one more entry at the front: no value, and the sink's logit for every query."""

    def wider(vectors: torch.Tensor, column: float) -> torch.Tensor:
        return torch.cat([vectors, torch.full_like(vectors[..., :1], column)], dim=-1)

    key = torch.zeros(4, 1, 6, dtype=torch.float64)
    first = torch.cat([key, (sinks / SCALE).view(4, 1, 1)], dim=-1)
    nothing = torch.zeros(4, 1, 7, dtype=torch.float64)
    return layer_view(
        4, 4, seen.entries + 1, 0, queries=wider(torch.cat([seen.queries[:, :1], seen.queries], dim=1), 1.0),
        keys=torch.cat([first, wider(seen.keys, 0.0)], dim=1),
        values=torch.cat([nothing, wider(seen.values, 0.0)], dim=1),
        norms=torch.nn.functional.pad(seen.norms, (1, 0)),
    )  # fmt: skip


@pytest.mark.parametrize("sharp", [1.0, 20.0, 900.0])
@pytest.mark.parametrize("name", OF_WINDOW)
def test_scores_are_those_beside_such_an_entry(name: str, sharp: float) -> None:
    """Up to logits at which one entry takes all the weight that float64 can tell from 1."""
    plain = layer_view(4, 4, n=30, seed=2)
    own, sinks = plain.queries * sharp, SINKS * sharp
    seen = layer_view(4, 4, n=30, seed=2, queries=own, sinks=sinks)
    wanted = computed(name, with_entry(layer_view(4, 4, n=30, seed=2, queries=own), sinks))[:, 1:]
    found = computed(name, seen)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-14 * float(wanted.abs().max()))
    if sharp == 1.0:
        assert (found - computed(name, plain)).abs().max() > 1e-3 * found.abs().max()


@pytest.mark.parametrize("name", [name for name in naive.OF_ENTRY if name != "knorm"])
def test_scores_are_their_formulas_beside_a_sink(name: str) -> None:
    seen = layer_view(4, 2, n=30, seed=2, sinks=SINKS)
    arrays = (seen.queries.numpy(), seen.keys.numpy(), seen.values.numpy())
    wanted = naive.of_layer(name, *arrays, SCALE, seen.window, SINKS.numpy())
    np.testing.assert_allclose(computed(name, seen).numpy(), wanted, rtol=1e-9)


@pytest.mark.parametrize("name", [*OF_WINDOW, "h2o", "scissorhands", "defensive"])
def test_heads_in_parts_have_their_own_sinks(name: str) -> None:
    seen = layer_view(4, 2, n=40, seed=5, sinks=SINKS)
    assert len(list(seen.parts(1))) == 2
    torch.testing.assert_close(computed(name, seen, 1), computed(name, seen), rtol=1e-12, atol=1e-300)


def test_what_stays_has_the_sinks_mass_and_nothing_else_of_it() -> None:
    seen = layer_view(4, 2, n=12, seed=3, sinks=SINKS)
    query, kept = seen.queries[:, -1], torch.zeros(1, 4, 12, dtype=torch.bool)
    kept[..., 3:7] = True
    attention, sink = theory.decode_weights(query, seen.keys, seen.softmax)
    beside = naive_theory.decode_attention(query.numpy(), seen.keys.numpy(), SCALE, SINKS.numpy())
    np.testing.assert_allclose(torch.cat([attention, sink.unsqueeze(-1)], dim=-1), beside, rtol=1e-12)
    found = theory.kept_sums(attention, theory.stack_summands(seen.values, seen.norms), kept, sink)
    np.testing.assert_allclose(found.mass[0], beside[:, 3:7].sum(axis=-1) + beside[:, -1], rtol=1e-12)
    plain = theory.kept_sums(attention, theory.stack_summands(seen.values, seen.norms), kept)
    assert torch.equal(found.weighted, plain.weighted) and torch.equal(found.mixed, plain.mixed)


def test_the_bound_of_theorem_2_holds_beside_a_sink() -> None:
    """L ≤ θ whatever is kept, nothing but the sink and one entry too."""
    seen = layer_view(4, 2, n=12, seed=4, sinks=SINKS)
    query, draw = seen.queries[:, -1], torch.Generator().manual_seed(1)
    kept = torch.rand(200, 4, 12, generator=draw) < torch.rand(200, 1, 1, generator=draw)
    kept[..., -1] = True
    attention, sink = theory.decode_weights(query, seen.keys, seen.softmax)
    summands = theory.stack_summands(seen.values, seen.norms)
    stays = theory.kept_sums(attention, summands, kept, sink)
    whole = summands.sums(attention.unsqueeze(0))
    slices = theory.head_slices(seen.projection, 4)
    output = theory.project_outputs(whole.mixed[0], slices)
    moved = theory.isolated_perturbation(whole.mixed, stays.mixed, stays.mass, slices, output).l1
    limits = theory.bounds(whole.weighted[0], summands.smallest_norms(), stays, stays)
    assert (moved <= limits.theta * (1 + 1e-12) + 1e-12).all()
