"""Somebody's caches beside ours: a kept set is ours bit for bit, and entries of its own cost what they cost."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ActivationError, ConfigError
from perturbkv.models.forward import run_with_cache
from perturbkv.models.loading import ByteTokenizer
from perturbkv.pipeline.sample import measure
from perturbkv.schema import VARIABLES
from perturbkv.selection.grid import configuration, grid
from perturbkv.selection.policies import caches
from tests.oracle import theory
from tests.oracle.decoder import Decoder, Step
from tests.support import somebodys
from tests.support.models import HEADS, exact_adapter, tiny_adapter, tiny_model, token_ids
from tests.support.resolved import answer, trace_sample
from tests.support.traces import kept_of

IDS, STEPS = token_ids(29, seed=4), 3
PROMPT = Prompt("s", IDS, 0)
SNAPKV = configuration(16, selection="attention", granularity="kv", window=5, kernel=3)
APART = ("kept_offset", "stage1_count", "theta_hat", "theta_hat_relax", "sigma_stage1", "sigma_topk")
"""Where a code lies, and what depends on the order in which a set was filled, which nobody tells."""
ISOLATED = ("perturbation_isolated", "perturbation_isolated_l2", "perturbation_isolated_cosine")


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(caches._REGISTERED)
    yield
    caches._REGISTERED.clear()
    caches._REGISTERED.update(before)


def traced(*makes: Callable[..., Any], adapter: Any = None, **more: Any) -> dict[str, np.ndarray]:
    """The arrays of SnapKV, of the row that keeps all, and of somebody's caches."""
    policies = [caches.external(make, f"own{index}") for index, make in enumerate(makes)]
    configs = (
        SNAPKV,
        configuration(1.0, selection="attention", granularity="kv", window=5),
        *grid(12, policy=policies),
    )
    run = RunConfig("m", "d", configs, **{"steps": STEPS, "save": ("outputs",), **more})
    prompt = Prompt("s", IDS, 0, question_tokens=7) if "scenario" in more else PROMPT
    return dict(trace_sample(adapter or exact_adapter("llama", *HEADS["GQA"]), prompt, run).arrays)


def differing(arrays: dict[str, np.ndarray], first: int, second: int) -> set[str]:
    """Names of the variables in which two configurations differ by a bit."""
    told = [name for name in arrays if VARIABLES[name].dims[:1] == ("config",) and name not in APART]
    return {name for name in told if not np.array_equal(arrays[name][first], arrays[name][second], equal_nan=True)}


def test_the_plain_cache_is_the_row_that_keeps_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    measured = measure.propagated_quantities
    monkeypatch.setattr(
        measure, "propagated_quantities", lambda adapter, full, evicted, token: seen.append(evicted)
        or measured(adapter, full, evicted, token),
    )  # fmt: skip
    arrays = traced(somebodys.plain)
    for record in seen:
        assert torch.equal(record.logits[0], record.logits[3])
        for name in ("head_output", "hidden", "query"):
            assert all(torch.equal(layer[0], layer[3]) for layer in getattr(record, name)), name
    assert len(seen) == STEPS
    assert arrays["own_entries"].tolist() == [0, 0, 0]
    assert arrays["held_share"].tolist()[1:] == [1, 1]
    assert (arrays["perturbation_isolated"][2] <= arrays["noise_floor_isolated"]).all()


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_snapkvs_kept_set_is_snapkvs_row(order: str) -> None:
    """Whatever the order in which somebody stores it."""
    adapter = exact_adapter("llama", *HEADS["GQA"])
    first = trace_sample(adapter, PROMPT, RunConfig("m", "d", (SNAPKV,), steps=STEPS))
    along = 1 if order == "ascending" else -1
    positions = [[kept_of(first.arrays, 0, layer, head)[::along] for head in (0, 2)] for layer in range(2)]
    arrays = traced(partial(somebodys.kept, positions=positions), adapter=adapter)
    summed = {f"perturbation_propagated{kind}" for kind in ("", "_l2", "_cosine")}  # by products of all rows together
    assert differing(arrays, 0, 2) <= summed
    for name in summed:
        np.testing.assert_allclose(arrays[name][2], arrays[name][0], rtol=1e-13)
    assert arrays["own_entries"].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(arrays["theta_hat"][2], arrays["theta"][2])


class Naive:
    """What a naive float64 decoder does with entries in the prompt's place."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.adapter = exact_adapter("llama", *HEADS["GQA"])
        self.reference = Decoder(self.adapter.model)
        for token in IDS:
            last = self.reference.step(token)
        with torch.no_grad():
            cache = make(self.adapter.model, torch.tensor([IDS]), torch.ones(1, len(IDS), dtype=torch.int64))
        self.held = [(layer.keys[0].numpy(), layer.values[0].numpy()) for layer in cache.layers]
        self.own = self.reference.copy()
        for layer, (keys, values) in enumerate(self.held):
            self.own._keys[layer] = [list(head) for head in keys]
            self.own._values[layer] = [list(head) for head in values]
        self.tokens = [int(np.argmax(last.logits))]
        self.full: list[Step] = []
        for _ in range(STEPS):
            self.full.append(self.reference.step(self.tokens[-1]))
            self.tokens.append(int(np.argmax(self.full[-1].logits)))
        self.evicted = [self.own.step(token) for token in self.tokens[:-1]]

    def project(self, layer: int, head: int, mixed: np.ndarray) -> np.ndarray:
        size = self.reference.d_value
        return self.reference.w_o(layer)[:, head * size : (head + 1) * size] @ mixed

    def isolated(self, layer: int, step: int, head: int, keys: list[Any], values: list[Any]) -> float:
        """L of a head whose cache holds these before the decoded tokens."""
        n, kv_head = len(IDS), head * self.reference.kv_heads // self.reference.heads
        keys = [*keys, *self.reference._keys[layer][kv_head][n : n + step + 1]]
        values = [*values, *self.reference._values[layer][kv_head][n : n + step + 1]]
        query = self.full[step].query[layer][head]
        weights = theory.softmax([float(query @ key) * self.reference.scale for key in keys])
        mixed = np.sum([weight * value for weight, value in zip(weights, values, strict=True)], axis=0)
        return theory.l1(self.project(layer, head, self.full[step].head_output[layer][head] - mixed))

    def propagated(self, layer: int, step: int, head: int) -> float:
        moved = self.full[step].head_output[layer][head] - self.evicted[step].head_output[layer][head]
        return theory.l1(self.project(layer, head, moved))


@pytest.mark.parametrize(
    ("make", "kind"),
    [(somebodys.rounded, 1), (partial(somebodys.recent, budget=12), 0), (somebodys.merged, 2)],
    ids=["rounded", "kept", "merged"],
)
def test_entries_of_its_own_cost_what_the_naive_decoder_says(make: Callable[..., Any], kind: int) -> None:
    arrays, naive = traced(make), Naive(make)
    assert arrays["own_entries"][2] == kind
    for step in range(STEPS):
        for layer in range(2):
            for head in range(4):
                keys, values = (list(own[head // 2]) for own in naive.held[layer])
                isolated = naive.isolated(layer, step, head, keys, values)
                assert arrays["perturbation_isolated"][2, step, layer, head] == pytest.approx(isolated, rel=1e-9)
                propagated = naive.propagated(layer, step, head)
                assert arrays["perturbation_propagated"][2, step, layer, head] == pytest.approx(propagated, rel=1e-9)
            drift = theory.l1(naive.full[step].hidden[layer] - naive.evicted[step].hidden[layer])
            assert arrays["hidden_drift_l1"][2, step, layer] == pytest.approx(drift, rel=1e-9)
        divergence = theory.kl(naive.full[step].logits, naive.evicted[step].logits)
        assert arrays["logit_kl"][2, step] == pytest.approx(divergence, rel=1e-7)
    held = naive.held[0][0].shape[1]
    assert arrays["held_share"][2] == pytest.approx(held / len(IDS))


def test_a_bias_of_log_2_is_the_entry_twice() -> None:
    make = partial(somebodys.merged, weighs=True)
    arrays, naive = traced(make), Naive(lambda *inputs: _twice(somebodys.merged(*inputs)))
    for step in range(STEPS):
        for layer, head in ((0, 1), (1, 3)):
            keys, values = (list(own[head // 2]) for own in naive.held[layer])
            isolated = naive.isolated(layer, step, head, keys, values)
            assert arrays["perturbation_isolated"][2, step, layer, head] == pytest.approx(isolated, rel=1e-9)
            propagated = naive.propagated(layer, step, head)
            assert arrays["perturbation_propagated"][2, step, layer, head] == pytest.approx(propagated, rel=1e-9)
    assert arrays["held_share"][2] == pytest.approx(14 / 29)


def _twice(cache: Any) -> Any:
    for layer in cache.layers:
        layer.keys, layer.values = (kind.repeat_interleave(2, dim=2) for kind in (layer.keys, layer.values))
    return cache


def test_a_cache_that_forgets_while_it_decodes_is_called() -> None:
    """At step t it has the twelve last entries of prompt and text, and the new one's own."""
    arrays, naive = traced(somebodys.Forgetting), Naive(somebodys.plain)
    forgetting, evicted = naive.own, []
    forgetting = Decoder(naive.adapter.model)
    for token in IDS:
        forgetting.step(token)
    for step, token in enumerate(naive.tokens[:-1]):
        seen = np.arange(len(IDS) + step) >= len(IDS) + step - 12
        evicted.append(forgetting.step(token, [np.tile(seen, (4, 1))] * 2))
    naive.evicted = evicted
    for step in range(STEPS):
        for layer in range(2):
            for head in range(4):
                n, kv_head = len(IDS), head // 2
                attention = naive.reference._keys[layer][kv_head], naive.reference._values[layer][kv_head]
                prompt = [own[n + step - 12 : n] for own in attention]
                isolated = naive.isolated(layer, step, head, *prompt)
                assert arrays["perturbation_isolated"][2, step, layer, head] == pytest.approx(isolated, rel=1e-9)
                propagated = naive.propagated(layer, step, head)
                assert arrays["perturbation_propagated"][2, step, layer, head] == pytest.approx(propagated, rel=1e-9)
        divergence = theory.kl(naive.full[step].logits, evicted[step].logits)
        assert arrays["logit_kl"][2, step] == pytest.approx(divergence, rel=1e-7)
    assert arrays["kept_count"][2].tolist() == [[12] * 4] * 2
    assert arrays["own_entries"][2] == 1


def test_a_query_stands_where_the_cache_decodes() -> None:
    """Keys turned to 0, 1, … and new tokens behind them attend as at their own positions."""
    arrays = traced(partial(somebodys.recent, budget=12), somebodys.in_place)
    for name in ("perturbation_isolated", "perturbation_propagated", "hidden_drift_l1"):
        np.testing.assert_allclose(arrays[name][3], arrays[name][2], rtol=1e-7, err_msg=name)
    assert arrays["own_entries"].tolist() == [0, 0, 0, 1]
    np.testing.assert_array_equal(arrays["kept_count"][3], arrays["kept_count"][2])


def test_a_question_is_read_over_the_cache() -> None:
    arrays = traced(partial(somebodys.recent, budget=12), somebodys.in_place, scenario="context-only")
    np.testing.assert_allclose(arrays["perturbation_propagated"][3], arrays["perturbation_propagated"][2], rtol=1e-7)
    np.testing.assert_allclose(arrays["perturbation_isolated"][3], arrays["perturbation_isolated"][2], rtol=1e-7)
    np.testing.assert_allclose(arrays["text_logp"][3], arrays["text_logp"][2], rtol=1e-7)


def test_a_prefill_of_its_own_has_no_isolated_perturbation() -> None:
    arrays = traced(somebodys.own_prefill)
    for name in (*ISOLATED, "perturbation_eviction", "perturbation_change"):
        assert np.isnan(arrays[name][2]).all() and not np.isnan(arrays[name][:2]).any(), name
    assert (arrays["perturbation_propagated"][2] > 0).all() and np.isfinite(arrays["logit_kl"][2]).all()


def _decode_hiding(model: Any, cache: Any, token: Any, step: int) -> Any:
    """Of the prompt's entries the last twelve are seen alone."""
    seen = cache.get_seq_length() + token.shape[1]
    mask = torch.zeros(1, 1, token.shape[1], seen, dtype=torch.float64)
    mask[..., : len(IDS) - 12] = -torch.inf
    positions = torch.arange(seen - token.shape[1], seen).unsqueeze(0)
    return model(input_ids=token, past_key_values=cache, position_ids=positions, attention_mask=mask).logits


def _hiding(*inputs: Any) -> Any:
    return somebodys.plain(*inputs)


_hiding.decode = _decode_hiding  # type: ignore[attr-defined]


def _decode_one_by_one(model: Any, cache: Any, token: Any, step: int) -> Any:
    return torch.cat([somebodys.in_place.decode(model, cache, token[:, [place]], step + place)
                      for place in range(token.shape[1])], dim=1)  # fmt: skip


def _one_by_one(*inputs: Any) -> Any:
    return somebodys.in_place(*inputs)


_one_by_one.decode = _decode_one_by_one  # type: ignore[attr-defined]


def test_attention_that_is_not_over_what_it_gets_has_no_isolated_perturbation() -> None:
    arrays = traced(_hiding, partial(somebodys.recent, budget=12))
    np.testing.assert_allclose(arrays["perturbation_propagated"][2], arrays["perturbation_propagated"][3], rtol=1e-7)
    assert np.isnan(arrays["perturbation_isolated"][2]).all() and arrays["own_entries"][2] == 2


def test_a_question_that_is_read_token_by_token_has_no_isolated_perturbation() -> None:
    arrays = traced(_one_by_one, partial(somebodys.recent, budget=12), scenario="context-only")
    np.testing.assert_allclose(arrays["perturbation_propagated"][2], arrays["perturbation_propagated"][3], rtol=1e-7)
    np.testing.assert_allclose(arrays["first_logp"][2], arrays["first_logp"][3], rtol=1e-7)
    assert np.isnan(arrays["perturbation_isolated"][2]).all()


def test_a_decode_that_reads_a_token_twice_is_one_line() -> None:
    def twice(*inputs: Any) -> Any:
        return somebodys.in_place(*inputs)

    def decode(model: Any, cache: Any, token: Any, step: int) -> Any:
        somebodys.in_place.decode(model, copy.deepcopy(cache), token, step)
        return somebodys.in_place.decode(model, cache, token, step)

    twice.decode = decode  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="its decode runs the model more often than once for a token"):
        traced(twice)


def test_other_passes_than_that_which_fills_the_cache_are_seen() -> None:
    """Queries of a plain pass of the repeated prompt cost nothing; a plain pass hides no changed one."""

    def repeated(model: Any, input_ids: Any, attention_mask: Any) -> Any:
        somebodys.plain(model, torch.cat([input_ids, input_ids], dim=1), attention_mask)
        return somebodys.recent(model, input_ids, attention_mask, budget=12)

    def in_parts(model: Any, input_ids: Any, attention_mask: Any) -> Any:
        cache = somebodys.plain(model, input_ids[:, :20], attention_mask)
        run_with_cache(model, input_ids[:, 20:], cache)
        return cache

    def hidden(model: Any, input_ids: Any, attention_mask: Any) -> Any:
        cache = somebodys.recent(model, input_ids[:, :20], attention_mask, budget=12)
        run_with_cache(model, input_ids[:, 20:], cache, position_ids=torch.arange(20, 29).unsqueeze(0))
        somebodys.plain(model, input_ids, attention_mask)
        return cache

    arrays = traced(repeated, partial(somebodys.recent, budget=12), in_parts, hidden)
    np.testing.assert_array_equal(arrays["perturbation_isolated"][2], arrays["perturbation_isolated"][3])
    assert np.isnan(arrays["perturbation_isolated"]).any(axis=(1, 2, 3)).tolist() == [*[False] * 5, True]


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_windows_of_sliding_layers_are_its_own(family: str) -> None:
    """Halved values in sliding layers alone are no kept set's loss: they are decoded, and have no isolated part."""

    def halved(*inputs: Any) -> Any:
        cache = somebodys.plain(*inputs)
        for layer in cache.layers[::2]:
            layer.values = layer.values / 2
        return cache

    adapter = exact_adapter(family, 4, 2)
    arrays = traced(halved, partial(somebodys.recent, budget=12), adapter=adapter)
    assert (arrays["perturbation_propagated"][2] > 1e-3).all() and np.isnan(arrays["perturbation_isolated"][2]).all()
    assert arrays["own_entries"].tolist() == [0, 0, 1, 0], "a plain cache's windows are the prompt's"


def test_floors_are_those_of_caches_that_are_called() -> None:
    adapter = tiny_adapter("llama", *HEADS["GQA"])
    plain, called = traced(somebodys.plain, adapter=adapter), traced(somebodys.Forgetting, adapter=adapter)
    assert (called["noise_floor_isolated"] > 10 * plain["noise_floor_isolated"]).all(), "float32 against float64 sums"
    assert (called["noise_floor"] >= plain["noise_floor"]).all()


def test_other_random_entries_are_no_kept_set() -> None:
    def drawn(*inputs: Any) -> Any:
        cache = somebodys.plain(*inputs)
        for layer in cache.layers:
            layer.keys, layer.values = torch.randn_like(layer.keys), torch.randn_like(layer.values)
        return cache

    assert traced(drawn)["own_entries"][2] == 2


def test_an_entry_without_weight_is_none() -> None:
    """A bias of −∞ on all but the last twelve entries, and on all of them in one head."""

    def hidden(*inputs: Any) -> Any:
        cache = somebodys.plain(*inputs)
        for layer in cache.layers:
            layer.bias = torch.zeros(1, 4, len(IDS), dtype=torch.float64)
            layer.bias[..., : len(IDS) - 12] = -torch.inf
        return cache

    def nothing(*inputs: Any) -> Any:
        cache = hidden(*inputs)
        cache.layers[0].bias[:, 1] = -torch.inf
        return cache

    arrays = traced(hidden, partial(somebodys.recent, budget=12), nothing)
    for name in ("perturbation_isolated", "perturbation_propagated"):
        np.testing.assert_allclose(arrays[name][2], arrays[name][3], rtol=1e-7)
    assert np.isfinite(arrays["perturbation_isolated"][4]).all()


def test_parts_of_a_sample_with_and_without_such_caches_are_joined(tmp_path: Path) -> None:
    """A trace of ours that goes on with somebody's is that of one run."""
    policies = [caches.external(make) for make in (somebodys.merged, somebodys.rounded)]
    model = pk.load_model(tiny_model("llama", *HEADS["GQA"]), tokenizer=ByteTokenizer())
    configs = [SNAPKV, *grid(12, policy=policies)]
    first = pk.measure(model, [PROMPT], [SNAPKV], path=tmp_path / "t.h5", settings=pk.Settings(steps=2), progress=False)
    assert "own_entries" not in first.arrays
    joined = pk.measure(model, [PROMPT], configs, path=tmp_path / "t.h5", settings=pk.Settings(steps=2), progress=False)
    assert joined.arrays["own_entries"].tolist() == [[0, 2, 1]]
    assert pk.read_trace(tmp_path / "t.h5").arrays["own_entries"].tolist() == [[0, 2, 1]]


def test_what_stands_for_no_entry_has_no_kept_set() -> None:
    arrays = traced(somebodys.merged)
    for name in ("theta", "theta_hat", "theta_hat_relax", "sigma_stage1", "sigma_topk", "retained_mass"):
        assert np.isnan(arrays[name][2]).all() and not np.isnan(arrays[name][:2]).any(), name
    assert (arrays["lost_position"][2] == -1).all() and (arrays["lost_position"][0] != -1).any()
    assert (arrays["kept_count"][2] == 0).all()


def test_answers_are_its_own() -> None:
    """Of a row of the batch, and of a cache that is called: the same entries answer the same."""
    arrays = traced(partial(somebodys.recent, budget=12), somebodys.in_place, somebodys.plain, generate=9)
    generated = arrays["generated"].tolist()
    assert generated[2] == generated[3]
    assert generated[4] == arrays["generated_full"].tolist()


def test_bytes_are_told_or_not() -> None:
    arrays = traced(somebodys.rounded, somebodys.merged, partial(somebodys.recent, budget=12))
    full = float(arrays["full_bytes"])
    assert arrays["held_bytes"][2] == 1000
    assert math.isnan(arrays["held_bytes"][3])
    assert arrays["held_bytes"][4] == pytest.approx(full * 12 / 29)
    assert arrays["resident_bytes"][2] == full  # float64 counts as the model's 16 bits
    assert arrays["resident_bytes"][3] == pytest.approx(full * 14 / 29)


def _longer(*inputs: Any) -> Any:
    cache = somebodys.plain(*inputs)
    for layer in cache.layers:
        layer.keys, layer.values = (torch.cat([kind, kind], dim=2) for kind in (layer.keys, layer.values))
    return cache


def _halves(*inputs: Any) -> Any:
    cache = somebodys.plain(*inputs)
    for layer in cache.layers:
        layer.keys = layer.keys.half()
    return cache


def _nan(*inputs: Any) -> Any:
    cache = somebodys.plain(*inputs)
    cache.layers[1].values[0, 0, 3, 1] = torch.nan
    return cache


def _changes_weights(model: Any, *inputs: Any) -> Any:
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(3)
    return somebodys.plain(model, *inputs)


def _fails(model: Any, input_ids: Any, attention_mask: Any) -> Any:
    raise RuntimeError("no room for it")


def _tells_nothing(*inputs: Any) -> Any:
    cache = somebodys.plain(*inputs)
    cache.nbytes = 0
    return cache


def _shapeless_bias(*inputs: Any) -> Any:
    cache = somebodys.plain(*inputs)
    for layer in cache.layers:
        layer.bias = torch.zeros(3)
    return cache


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (_longer, ConfigError, "layer 0 keeps 58 entries, more than the 29 that there were"),
        (_halves, ConfigError, "keys of layer 0 are torch.float16 on cpu, the model's torch.float64 on cpu"),
        (_nan, ActivationError, "the stored values of layer 1 hold NaN or Inf"),
        (_changes_weights, ConfigError, "it changed the model .weights of model.layers.1.self_attn.v_proj.weight."),
        (_fails, ConfigError, "reading the prompt raises RuntimeError: no room for it"),
        (lambda *inputs: None, ConfigError, "to return a transformers Cache, got NoneType"),
        (_tells_nothing, ConfigError, "expected nbytes of its cache to be a number of bytes above 0, got 0"),
        (_shapeless_bias, ConfigError, r"expected a bias \(1, 4 heads or 2 key/value heads, 29 entries\) in layer 0"),
    ],
)
def test_what_cannot_be_measured_is_one_line(make: Callable[..., Any], error: type[Exception], told: str) -> None:
    adapter = copy.deepcopy(exact_adapter("llama", *HEADS["GQA"]))
    with pytest.raises(error, match=told) as raised:
        traced(make, adapter=adapter)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_answers_are_those_of_generate(scenario: str) -> None:
    makes = (partial(somebodys.recent, budget=12), somebodys.rounded, somebodys.merged)
    arrays = traced(*makes, generate=9, scenario=scenario)
    adapter, prompt = exact_adapter("llama", *HEADS["GQA"]), Prompt("s", IDS, 0, question_tokens=7)
    configs = grid(12, policy=[f"cache:own{index}" for index in range(3)])
    found = answer(adapter, prompt, configs, 9, scenario=scenario)
    assert found.evicted == [[token for token in row if token >= 0] for row in arrays["generated"][2:].tolist()]
    assert found.held == pytest.approx(arrays["held_share"][2:].tolist())


def test_generate_says_where_answers_of_a_called_cache_are() -> None:
    configs = grid(12, policy=caches.external(somebodys.Forgetting))
    with pytest.raises(ConfigError, match="it decodes for itself, which is not possible here"):
        answer(exact_adapter("llama", *HEADS["GQA"]), PROMPT, configs, 4)
