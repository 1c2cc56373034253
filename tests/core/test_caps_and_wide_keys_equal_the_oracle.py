"""Soft caps on logits, and keys wider than values: every quantity against a loop over heads and entries."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perturbkv import theory
from perturbkv.cache import ragged
from perturbkv.cache.compact import CompactLayer
from perturbkv.cache.entries import KeptEntries, borrow
from perturbkv.cache.external_cache import recover_positions
from perturbkv.cache.makers import FullStep, entry_bits
from perturbkv.cache.quantisation import quantise_entries
from perturbkv.cache.sliding import SlidingLayer, Window
from perturbkv.cache.stand_in import make_stand_in
from perturbkv.configs.choice import Choice
from perturbkv.configs.precision import check_precisions, correction_bits, stored_bits
from perturbkv.configs.resources import CHUNK_BYTES, Shape
from perturbkv.errors import ConfigError, UnreadableCacheError
from perturbkv.scoring import score_registry
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.replay_view import ReplayView
from perturbkv.scoring.value_norms import euclidean_value_norms, projected_value_norms
from perturbkv.selection.grid import configuration
from perturbkv.selection.layer_statistics import LayerStatistics
from perturbkv.selection.page_selection import PagedLayer
from perturbkv.selection.policies import registry
from perturbkv.selection.resolved_config import resolve
from perturbkv.theory import Softmax
from tests.oracle import later_scores, policies
from tests.oracle import scores as naive_scores
from tests.oracle import theory as naive
from tests.oracle.theory import Array, capped
from tests.support.layers import SCALE, layer_view
from tests.support.varlen import varlen

HEADS, KV_HEADS, N, D_KEY, D_VALUE = 4, 2, 24, 9, 5
CAP = 0.7
"""Far below the largest logit of these queries."""
SINKS = torch.tensor([1.5, -2.0, 0.0, 0.4], dtype=torch.float64)
UNCAPPED = ("obcache-key", "obcache-joint")
"""Scores whose formula holds for plain logits alone."""


def wide(cap: float | None = CAP, sinks: Tensor | None = SINKS, n: int = N) -> LayerView:
    return layer_view(HEADS, KV_HEADS, n, 7, d_key=D_KEY, d_value=D_VALUE, cap=cap, sinks=sinks)


def arrays(seen: LayerView) -> tuple[Array, Array, Array]:
    return seen.queries.numpy(), seen.keys.numpy(), seen.values.numpy()


def attended(query: Array, keys: Array, values: Array, cap: float | None, sink: float | None) -> Array:
    """One head's output, entry by entry."""
    logits = [capped(SCALE * math.fsum(query * key), cap) for key in keys]
    weights = naive.softmax(logits if sink is None else [*logits, sink])
    output = np.zeros(values.shape[1])
    for weight, value in zip(weights, values, strict=False):
        output += weight * value
    return output


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
@pytest.mark.parametrize("cap", [None, CAP, 50.0])
def test_a_decoding_querys_weights(cap: float | None, sinks: Tensor | None) -> None:
    seen = wide(cap, sinks)
    weights, sink = theory.decode_weights(seen.queries[:, -1], seen.keys, seen.softmax)
    beside = None if sinks is None else sinks.numpy()
    expected = naive.decode_attention(seen.queries[:, -1].numpy(), seen.keys.numpy(), SCALE, beside, cap)
    found = weights if sinks is None else torch.cat([weights, sink.unsqueeze(-1)], dim=-1)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    if cap == CAP:
        plain, _ = theory.decode_weights(seen.queries[:, -1], seen.keys, Softmax(SCALE, sinks=sinks))
        assert (plain - weights).abs().max() > 0.01


@pytest.mark.parametrize("cap", [None, CAP])
def test_isolated_perturbation_and_its_bound(cap: float | None) -> None:
    """Theorem 1 and 2 of the capped weights; the sink is one more entry of value 0, which always stays."""
    seen = wide(cap)
    query, kept = seen.queries[:, -1], torch.rand(3, HEADS, N, generator=torch.Generator().manual_seed(1)) < 0.4
    kept[..., -1] = True
    attention, sink = theory.decode_weights(query, seen.keys, seen.softmax)
    summands = theory.stack_summands(seen.values, seen.norms)
    whole, sums = summands.sums(attention.unsqueeze(0)), theory.kept_sums(attention, summands, kept, sink)
    slices = theory.head_slices(seen.projection, HEADS)
    output = theory.project_outputs(whole.mixed[0], slices)
    moved = theory.isolated_perturbation(whole.mixed, sums.mixed, sums.mass, slices, output).l1
    bounds = theory.bounds(whole.weighted[0], summands.smallest_norms(), sums, sums)
    weights = naive.decode_attention(query.numpy(), seen.keys.numpy(), SCALE, SINKS.numpy(), cap)
    norms = naive.projected_value_norms(seen.values.numpy(), seen.projection.numpy(), HEADS)
    np.testing.assert_allclose(seen.norms, norms, rtol=1e-12)
    for config in range(len(kept)):
        for head in range(HEADS):
            stays = [*kept[config, head].tolist(), True]
            values = np.vstack([seen.values[head // 2].numpy(), np.zeros(D_VALUE)])
            projection = naive.head_slice(seen.projection.numpy(), head, D_VALUE)
            a, v = list(weights[head]), [*norms[head], 0.0]
            expected = naive.perturbation(a, stays, values, projection)
            assert float(moved[config, head]) == pytest.approx(expected, rel=1e-10)
            assert float(bounds.theta[config, head]) == pytest.approx(naive.theta(a, v, stays), rel=1e-10)
            assert expected <= float(bounds.theta[config, head]) * (1 + 1e-12)


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 1])
@pytest.mark.parametrize("name", naive_scores.OF_ENTRY)
def test_scores_of_single_entries(name: str, chunk_bytes: int) -> None:
    cap = None if name in UNCAPPED else CAP
    seen, score = wide(cap), score_registry.build(name).unpooled()
    expected = naive_scores.of_layer(name, *arrays(seen), SCALE, seen.window, SINKS.numpy(), cap=cap)
    found = layer_scores(seen, [score], chunk_bytes)[score]
    np.testing.assert_allclose(found.repeat_interleave(HEADS // len(found), dim=0), expected, rtol=1e-9)


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "scissorhands", "tova"])
def test_scores_of_rows_of_attention(policy: str) -> None:
    seen, chosen = wide(), configuration(20, policy=policy, window=5)
    score = registry.build(chosen.policy).score.unpooled()
    expected = policies.accumulate(chosen, *arrays(seen)[:2], SCALE, SINKS.numpy(), cap=CAP)
    np.testing.assert_allclose(layer_scores(seen, [score], 1)[score], expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", ["lava", "defensive", "r-kv"])
def test_scores_of_a_whole_layer(name: str) -> None:
    seen, score = wide(), score_registry.build(name)
    queries, keys, values = arrays(seen)
    rows = policies.rows(queries, keys, SCALE, seen.prefix, SINKS.numpy(), CAP)
    if name == "lava":
        expected = later_scores.lava(rows, values, "none", 1, seen.prefix)
        score = score.unpooled()
    elif name == "r-kv":
        expected = later_scores.r_kv(queries, keys, SCALE, seen.window, cap=CAP)
    else:
        expected = later_scores.defensive(rows, seen.norms.numpy(), KV_HEADS, "average", 5, seen.prefix)
    np.testing.assert_allclose(layer_scores(seen, [score], CHUNK_BYTES)[score], expected, rtol=1e-10)


def test_a_replays_weights_and_norms() -> None:
    seen, sinks, chunk = wide(), 2, 10
    view = ReplayView(
        seen.queries[:, -12:], seen.keys, seen.values, None, seen.projection, seen.softmax, sinks, chunk, 0, "s"
    )
    rows = policies.rows(*arrays(seen)[:2], SCALE, N - 12, SINKS.numpy(), CAP)[..., sinks : sinks + chunk]
    found = torch.zeros(HEADS, 12, chunk, dtype=torch.float64)
    for heads, queries, weights in view.attention_blocks():
        found[heads, queries] = weights
    np.testing.assert_allclose(found, rows, rtol=1e-10)
    norms = naive.projected_value_norms(seen.values[:, view.part].numpy(), seen.projection.numpy(), HEADS, True)
    np.testing.assert_allclose(view.norms(), norms, rtol=1e-10)


def test_value_norms_are_of_the_values_width() -> None:
    seen = wide()
    for norms, euclidean in ((projected_value_norms, False), (euclidean_value_norms, True)):
        expected = naive.projected_value_norms(seen.values.numpy(), seen.projection.numpy(), HEADS, euclidean)
        np.testing.assert_allclose(norms(seen.values, seen.projection), expected, rtol=1e-10)


def test_parts_of_a_layer_have_their_own_slices_of_the_projection() -> None:
    seen = wide()
    parts = list(seen.parts(1))
    assert len(parts) == KV_HEADS and torch.equal(torch.cat([part.w_o for part in parts]), seen.w_o)
    for head in range(HEADS):
        np.testing.assert_array_equal(seen.w_o[head], naive.head_slice(seen.projection.numpy(), head, D_VALUE))


def test_no_capped_logit_exceeds_its_pages_bound() -> None:
    seen = wide()
    statistics = LayerStatistics(torch.zeros(HEADS, seen.prefix), seen.norms[:, : seen.prefix], KV_HEADS, 0, 1, "s")
    logits = theory.decode_logits(seen.queries[:, -1], seen.keys, seen.softmax)
    for size in (1, 4):
        bounds = PagedLayer.from_keys(statistics, seen.keys, seen.softmax, size).bounds(seen.queries[:, -1])
        largest = logits[:, : bounds.shape[1] * size].view(HEADS, -1, size).amax(dim=-1)
        assert (bounds >= largest - 1e-12).all() and (bounds <= CAP).all()
        if size == 1:
            torch.testing.assert_close(bounds, largest)


POSITIONS = {
    "query": [[0, 3, 4, 11], [5], [1, 2, 3, 6, 7], [0, 9]],
    "kv": [[0, 2, 5, 6, 7], [1, 10, 11]],
    "everything": None,
}
"""What the rows of a compact layer keep of 12 entries of the prompt."""


def compact_layer(seen: LayerView, prompt: int, decoded: int, passing: bool) -> CompactLayer:
    """A row for each of `POSITIONS`, after some decoded tokens."""
    keys, values = seen.keys[:, :prompt], seen.values[:, :prompt]
    rows = []
    for sets in POSITIONS.values():
        if sets is None:
            rows.append(borrow(keys, values))
        else:
            owners = [index * KV_HEADS // len(sets) for index in range(len(sets))]
            kinds = ([kind[own, kept] for own, kept in zip(owners, sets, strict=True)] for kind in (keys, values))
            rows.append(KeptEntries.of(*kinds))
    layer = CompactLayer(rows, HEADS, prompt, passing=passing)
    layer.attached = True
    for token in range(prompt, prompt + decoded):
        layer.append(
            *(kind[None, :, token : token + 1].expand(len(rows), -1, -1, -1) for kind in (seen.keys, seen.values))
        )
    return layer


def never(*given: Any) -> Any:
    raise AssertionError("the kernel knows no cap")


@pytest.mark.parametrize("passing", [False, True], ids=["stored", "passing"])
@pytest.mark.parametrize("path", ["padded", "packed"])
@pytest.mark.parametrize("cap", [None, CAP])
def test_a_compact_cache_attends_to_what_it_keeps(
    cap: float | None, path: str, passing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last two tokens at once; CUDA's kernel takes equal widths, and is not asked where logits are capped."""
    d_value = D_KEY if path == "packed" else D_VALUE
    seen = layer_view(HEADS, KV_HEADS, N, 7, d_key=D_KEY, d_value=d_value, cap=cap, sinks=SINKS)
    if path == "packed":
        monkeypatch.setattr(ragged, "kernel_for", lambda keys, values: varlen if cap is None else never)
    prompt, decoded, queries = 12, 10, 2
    layer = compact_layer(seen, prompt, decoded, passing)
    end = prompt + decoded
    query = seen.queries[:, end - queries : end].unsqueeze(0).expand(len(POSITIONS), -1, -1, -1)
    found = layer.attend(query, seen.softmax)
    assert found.shape == (len(POSITIONS), queries, HEADS, d_value)
    for row, sets in enumerate(POSITIONS.values()):
        for head in range(HEADS):
            kept = range(prompt) if sets is None else sets[head * len(sets) // HEADS]
            for place in range(queries):
                entries = [*kept, *range(prompt, end - queries + place + 1)]
                keys, values = (kind[head // 2, entries].numpy() for kind in (seen.keys, seen.values))
                expected = attended(query[row, head, place].numpy(), keys, values, cap, float(SINKS[head]))
                np.testing.assert_allclose(found[row, place, head], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("cap", [None, CAP])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_a_sliding_layer_attends_to_its_window(cap: float | None, sinks: Tensor | None) -> None:
    seen, size, prompt, decoded = wide(cap, sinks), 6, 12, 9
    window = Window(*(kind[:, prompt - size + 1 : prompt] for kind in (seen.keys, seen.values)), prompt, size)
    layer = SlidingLayer(window, HEADS, 2)
    layer.attached = True
    for token in range(prompt, prompt + decoded):
        layer.append(*(kind[None, :, token : token + 1].expand(2, -1, -1, -1) for kind in (seen.keys, seen.values)))
        query = seen.queries[None, :, token : token + 1].expand(2, -1, -1, -1)
        found = layer.attend(query, seen.softmax)
        assert found.shape == (2, 1, HEADS, D_VALUE)
        entries = list(range(token - size + 1, token + 1))
        for head in range(HEADS):
            keys, values = (kind[head // 2, entries].numpy() for kind in (seen.keys, seen.values))
            sink = None if sinks is None else float(sinks[head])
            expected = attended(query[0, head, 0].numpy(), keys, values, cap, sink)
            np.testing.assert_allclose(found[:, 0, head], [expected] * 2, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("correction", ["corrected(mass=stored)", "corrected-oracle"])
def test_a_stand_in_has_the_log_mass_of_capped_logits(correction: str) -> None:
    seen = wide()
    gone = torch.rand(HEADS, N, generator=torch.Generator().manual_seed(3)) < 0.5
    mean, other = seen.queries[:, -5:].mean(dim=1), seen.queries[:, -1]
    choice = configuration(12, window=5, correction=correction).correction
    made = make_stand_in(choice, mean, seen.keys, seen.values, gone, seen.softmax)
    asked = mean if correction != "corrected-oracle" else other
    found = made.logits(other.unsqueeze(1), seen.softmax).squeeze(1)
    for head in range(HEADS):
        places = torch.nonzero(gone[head]).flatten().tolist()
        keys, values = (kind[head // 2, places].numpy() for kind in (seen.keys, seen.values))
        mass = math.fsum(math.exp(capped(SCALE * math.fsum(asked[head].numpy() * key), CAP)) for key in keys)
        assert float(found[head]) == pytest.approx(math.log(mass), rel=1e-6)
        expected = attended(mean[head].numpy(), keys, values, CAP, None)
        np.testing.assert_allclose(made.value[head], expected, rtol=1e-9)


def test_a_step_of_the_full_run_compares_entries_by_their_own_softmax() -> None:
    seen = wide()
    query, prompt = seen.queries[:, -1], N - 3
    step = FullStep(
        query, seen.keys, seen.values, prompt, *theory.decode_weights(query, seen.keys, seen.softmax), seen.softmax
    )
    sets = POSITIONS["kv"]
    assert sets is not None
    entries = KeptEntries.of(*([kind[own, kept] for own, kept in enumerate(sets)] for kind in (seen.keys, seen.values)))
    found = step.attend(entries)
    for head in range(HEADS):
        own = head // 2
        places = [*sets[own], *range(prompt, N)]
        keys, values = (kind[own, places].numpy() for kind in (seen.keys, seen.values))
        expected = attended(query[head].numpy(), keys, values, CAP, float(SINKS[head]))
        np.testing.assert_allclose(found[head], expected, rtol=1e-10)
        logits = [capped(SCALE * math.fsum(query[head].numpy() * key), CAP) for key in seen.keys[own].numpy()]
        total = math.log(math.fsum(map(math.exp, [*logits, float(SINKS[head])])))
        assert float(step.log_total[head]) == pytest.approx(total, rel=1e-10)


def test_bytes_count_keys_and_values_each_in_its_width() -> None:
    seen = wide()
    row = KeptEntries.of(list(seen.keys[:, :7]), list(seen.values[:, :7]))
    assert entry_bits(row) == entry_bits(borrow(seen.keys[:, :7], seen.values[:, :7])) == 16 * 14 * (D_KEY + D_VALUE)
    layer = CompactLayer([row, borrow(seen.keys, seen.values)], HEADS, N)
    assert layer.kept_nbytes == (14 + 2 * N) * (D_KEY + D_VALUE) * 8 == layer.nbytes
    shape = Shape(3, HEADS, KV_HEADS, D_KEY, D_VALUE, 10, 100, itemsize=2, weights_bytes=0)
    assert shape.full_cache_bytes(N) == 3 * KV_HEADS * N * (D_KEY + D_VALUE) * 2
    few = resolve(configuration(12, window=2, precision="quantise(bits=4, group=4)"))
    stored = quantise_entries(row, few, 0)
    assert (stored.widths, stored.lengths) == ((D_KEY, D_VALUE), [7, 7])
    scales = D_KEY * math.ceil(5 / 4) + 5 * math.ceil(D_VALUE / 4)  # of 5 entries before the window
    bits = (16 * 2 + 4 * 5) * (D_KEY + D_VALUE) + 32 * scales
    assert stored_bits(few.precision, [7], 2, *stored.widths) == bits
    linear, oracle = (
        configuration(12, window=5, correction=text).correction
        for text in ("corrected(mass=linear)", "corrected-oracle")
    )
    assert correction_bits(linear, 10, 3, D_KEY, D_VALUE) == 3 * (16 * (D_KEY + D_VALUE) + 32)
    assert correction_bits(oracle, 10, 3, D_KEY, D_VALUE) == 16 * (3 * D_VALUE + 10 * D_KEY)


def test_a_budget_of_bytes_needs_one_size_of_heads() -> None:
    fills = Choice("quantise", {"bits": 4, "group": 32, "fill": D_KEY})
    with pytest.raises(ConfigError, match="one size of keys and values, and model 'm' has keys of 9 and values of 5"):
        check_precisions([fills], [0], D_KEY, D_VALUE, "m")
    check_precisions([Choice("full")], [0], D_KEY, D_VALUE, "m")


def test_entries_of_an_external_cache_are_found_by_keys_and_values_of_other_widths() -> None:
    seen = wide()
    full = [(seen.keys.unsqueeze(0), seen.values.unsqueeze(0))]
    kept = [0, 4, 5, 9]
    (found,) = recover_positions([(full[0][0][:, :, kept], full[0][1][:, :, kept])], full)
    assert [positions.tolist() for positions in found.positions] == [kept, kept]
    with pytest.raises(UnreadableCacheError, match="values of layer 0 have 4 components, the model's 5"):
        recover_positions([(full[0][0], full[0][1][..., :4])], full)


def test_the_kernel_is_asked_for_heads_of_one_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(ragged, "variable_length_attention", lambda: varlen)

    def made(width: int) -> Any:
        return SimpleNamespace(device=SimpleNamespace(type="cuda"), dtype=torch.float16, shape=(3, width))

    unchecked = inspect.unwrap(ragged.kernel_for)  # of what tells no more than a tensor's device, dtype and shape
    assert unchecked(made(128), made(128)) is varlen
    assert unchecked(made(192), made(128)) is None
