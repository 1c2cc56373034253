"""KVzip's replay: its passes, its scores against a naive decoder, and that nothing else notices that it ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from perturbkv import theory
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import DatasetError, PluginError
from perturbkv.models.adapter import Adapter
from perturbkv.models.loading import ByteTokenizer
from perturbkv.pipeline.sample import prefill as reading
from perturbkv.pipeline.sample.replay import replay_passes
from perturbkv.schema import VARIABLES
from perturbkv.scoring import replay_view, window_attention
from perturbkv.scoring.compute import compute_replay
from perturbkv.scoring.replay_view import Replay
from perturbkv.scoring.scores.kvzip import KVzip
from perturbkv.selection.grid import configuration
from tests.oracle import later_scores as naive
from tests.support.models import EXPERTS, FAMILIES, HEADS, MIXED, PLAIN, exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import answer, asked, prefill, prefill_and_evict, trace_sample

LENGTH, QUESTION, CHUNK, SINKS = 23, 6, 9, 3
PROMPT = Prompt("s", token_ids(LENGTH, seed=4), 0, question_tokens=QUESTION)


def config(policy: str = "kvzip", budget: int = 9, **fields: object) -> EvictionConfig:
    own = {"chunk": CHUNK, "sinks": SINKS} if policy.startswith("kvzip") else {}
    return configuration(budget, policy=policy, selection="attention", **{**own, **fields})


class Chatting(ByteTokenizer):
    chat_template = "yes"

    def apply_chat_template(self, turns: Sequence[dict[str, str]], **given: Any) -> str:
        return f"<user>{turns[0]['content']}</user><model>"


def test_passes_ask_in_the_released_words_and_remind_of_eight_tokens() -> None:
    context = list(token_ids(23, seed=1))
    made = list(replay_passes(ByteTokenizer(), context, Replay(chunk=10, wording="released", sinks=4)))
    assert [part for part, _ in made] == [slice(0, 10), slice(10, 20), slice(20, 23)]
    later = b"\n\nRepeat the part of the previous context exactly, starting with "
    assert made[0][1] == [*b"\n\nRepeat the previous context exactly.", *b"\n", *context[:10]]
    assert made[1][1] == [*later, *context[2:10], *b"\n", *context[10:20]]
    assert made[2][1] == [*later, *context[12:20], *b"\n", *context[20:]]
    worded = list(replay_passes(Chatting(), context, Replay(chunk=10, wording="kvpress", sinks=4)))
    assert worded[1][1] == [*later[:-1], *context[2:10], *b"</user><model>", *context[10:20]]


def test_a_part_shorter_than_eight_tokens_reminds_of_itself_alone() -> None:
    context = list(range(7))
    made = list(replay_passes(ByteTokenizer(), context, Replay(chunk=3, wording="released", sinks=4)))
    assert made[2][1][-5:] == [3, 4, 5, 10, 6]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["kvzip", "kvzip-plus"])
@pytest.mark.parametrize(
    ("family", "heads"), [*((family, "GQA") for family in (*PLAIN, *MIXED)), ("llama", "MHA"), ("qwen3", "MQA")]
)
def test_scores_of_a_replay(family: str, heads: str, policy: str) -> None:
    """Every entry's largest weight in its own part's pass; parts of 9, 9 and 5 tokens."""
    adapter, chosen = exact_adapter(family, *HEADS[heads]), config(policy)
    context = list(PROMPT.token_ids)
    read = prefill(adapter, context, [chosen], Resources(), "s").statistics.scored[asked(chosen)]
    how = Replay(CHUNK, "released", SINKS)
    wanted = [(range(LENGTH)[part], tokens) for part, tokens in replay_passes(adapter.tokenizer, context, how)]
    decoder, seen = naive.replay(adapter.model, context, wanted)
    for layer, rows in enumerate(read):
        made = [naive.kvzip(decoder, one, layer, LENGTH, SINKS, policy == "kvzip-plus") for one in seen]
        expected = np.concatenate(made, axis=1)[:, : LENGTH - chosen.window]
        np.testing.assert_allclose(rows.numpy(), expected, rtol=1e-7, atol=1e-12)


def test_blocks_of_queries_are_bounded_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, chosen = exact_adapter("llama", 4, 2), config()

    def scores() -> list[torch.Tensor]:
        return prefill(adapter, PROMPT.token_ids, [chosen], Resources(), "s").statistics.scored[asked(chosen)]

    whole, made = scores(), []
    original = theory.softmax_with_sinks
    monkeypatch.setattr(window_attention, "block_bytes", lambda device: 8 * 300)
    monkeypatch.setattr(theory, "softmax_with_sinks", lambda *given: made.append(given[0]) or original(*given))
    for one, other in zip(scores(), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    assert max(block.numel() for block in made) <= 300


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in EXPERTS])
def test_nothing_else_notices_a_replay(family: str, scenario: str) -> None:
    """The reference, and what other configurations keep and lose by it, bit for bit."""
    adapter, others = tiny_adapter(family), (config("snapkv", window=4), config("adakv", window=4))
    alone, beside = (
        trace_sample(adapter, PROMPT, RunConfig("m", "d", chosen, steps=2, scenario=scenario, save=("outputs",)))
        for chosen in ((*others, config("tova"), config("tova", budget=8)), (*others, config(), config("kvzip-plus")))
    )
    reference = [name for name in alone.arrays if "config" not in VARIABLES[name].dims]
    assert {"token_id", "output_norm"} <= set(reference)
    for name in reference:
        if name not in ("kept_code", "cache_bytes", "cache_padding_bytes"):  # of all rows together
            np.testing.assert_array_equal(alone.arrays[name], beside.arrays[name], err_msg=name)
    for name in ("kept_count", "theta", "perturbation_isolated", "sigma_stage1"):
        axis = VARIABLES[name].dims.index("config")
        one, other = (made.arrays[name].take([0, 1], axis) for made in (alone, beside))
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_the_cache_is_left_as_it_was() -> None:
    adapter = tiny_adapter(layers=3)
    alone, beside = (
        prefill(adapter, PROMPT.token_ids, chosen, Resources(), "s")
        for chosen in ([config("snapkv", window=4)], [config(), config("kvzip-plus")])
    )
    assert torch.equal(alone.logits, beside.logits)
    for one, other in zip(alone.cache.layers, beside.cache.layers, strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
        assert one.keys.untyped_storage().nbytes() == other.keys.untyped_storage().nbytes()


def forwards(adapter: Adapter, chosen: Sequence[EvictionConfig]) -> int:
    """Forward passes of the decoder that a prefill takes."""
    passed: list[int] = []
    handle = adapter.model.model.register_forward_hook(lambda *given: passed.append(1))
    with handle:
        prefill(adapter, PROMPT.token_ids, chosen, Resources(), "s")
    return len(passed)


def test_a_replay_runs_where_it_is_needed_and_once_for_all_that_share_it() -> None:
    adapter, parts = tiny_adapter(), 3
    assert forwards(adapter, [config("snapkv", window=4)]) == 1
    shared = [config(), config(budget=12), config("kvzip-plus"), config(window=3), config(across="layer")]
    assert forwards(adapter, shared) == 1 + parts
    assert forwards(adapter, [*shared, config(chunk=LENGTH)]) == 1 + parts + 1


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_every_new_policy_is_measured_and_generates(granularity: str) -> None:
    """Kept sets while reading are those of a trace; the model keeps what was asked for, to the entry."""
    adapter = tiny_adapter(layers=3)
    names = ("lava", "defensive", "defensive-layer", "kvzip", "kvzip-plus")
    chosen = tuple(
        config(name, 12, granularity=granularity, **({} if "kvzip" in name else {"window": 4})) for name in names
    )
    traced = trace_sample(adapter, PROMPT, RunConfig("m", "d", chosen, scenario="context-only")).arrays
    context, _ = PROMPT.parts("context-only")
    read = prefill_and_evict(adapter, context, chosen, "s", with_full=True)
    sets = adapter.heads if granularity == "query" else adapter.kv_heads
    for row in range(len(chosen)):
        lengths = [[len(keys) for keys, _ in layer.entries(row + 1).sets()] for layer in read.cache.layers]
        assert sum(map(sum, lengths)) == 3 * sets * 12
        for layer, own in enumerate(lengths):
            counted = traced["kept_count"][row, layer].tolist()
            assert [count for count in own for _ in range(adapter.heads // len(own))] == counted
    answers = answer(adapter, PROMPT, chosen, 4, scenario="context-only")
    assert len(answers.evicted) == len(chosen)


def test_all_layers_are_let_go_once_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at all layers waits for them; a run of other policies still holds one full layer at most."""
    made: list[Any] = []
    original = reading.full_cache
    monkeypatch.setattr(reading, "full_cache", lambda adapter: made.append(original(adapter)) or made[-1])
    adapter = tiny_adapter(layers=3)
    for policy in ("kvzip", "lava", "snapkv"):
        fields = {} if policy == "kvzip" else {"window": 4}
        prefill_and_evict(adapter, PROMPT.token_ids, [config(policy, 12, **fields)], "s")
        assert sum(layer.keys.numel() for layer in made[-1].layers) == 0


def test_bfloat16_and_prompts_inside_the_window_are_replayed() -> None:
    adapter = tiny_adapter(dtype=torch.bfloat16)
    short = Prompt("s", token_ids(5, seed=2), 0)
    chosen = (config(), config("kvzip-plus"), config(window=6))
    for prompt in (PROMPT, short):
        counts = trace_sample(adapter, prompt, RunConfig("m", "d", chosen)).arrays["kept_count"]
        assert (counts.sum(axis=(1, 2)) == 2 * 4 * min(9, len(prompt.token_ids))).all()


def test_a_replay_that_does_not_fit_the_model_is_refused() -> None:
    adapter = tiny_adapter(positions=LENGTH + 40)
    with pytest.raises(DatasetError, match="with the 48 of a replay's pass more than the model's 63 positions"):
        prefill(adapter, PROMPT.token_ids, [config()], Resources(), "s")


def test_a_score_of_somebody_else_that_replays_is_checked() -> None:
    class Wrong(KVzip):
        __module__ = "somebody"

        def score_replay(self, seen: Any) -> Any:
            return seen.queries

    seen = replay_view.ReplayView(
        torch.zeros(4, 3, 8),
        torch.zeros(2, 5, 8),
        torch.zeros(2, 5, 8),
        None,
        torch.zeros(9, 32),
        theory.Softmax(1.0),
        0,
        2,
        7,
        "s",
    )
    with pytest.raises(PluginError, match=r"score 'kvzip' gives the shape \(4, 3, 8\).*\(layer 7, sample 's'\)"):
        compute_replay(Wrong(), seen)
