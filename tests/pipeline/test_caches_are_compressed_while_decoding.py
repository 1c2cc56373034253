"""Caches that are compressed again and again while a text is read, against a naive decoder with masks that grow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.analyses import verdicts
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import PerturbkvError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample import one_sample
from perturbkv.pipeline.sample.capture import intercept_attention
from perturbkv.schema import AT_CHOSEN_STEPS, PLACES, VARIABLES
from perturbkv.selection.kept_sets import kept_masks_of
from tests.oracle import theory
from tests.oracle.decoder import Decoder, Step
from tests.pipeline.test_long_generation_is_compressed import BUDGET, PROMPT, WINDOW, Naive, config
from tests.support.hybrids import HYBRIDS, hybrid_adapter
from tests.support.models import GATED, exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import trace_sample

N, SINK, RECENT = len(PROMPT.token_ids), 4, 64
KEPT_WHOLE = 10_000


def run(*configs: EvictionConfig, steps: int = 30, **fields: Any) -> RunConfig:
    return RunConfig("m", "d", configs, steps=steps, **fields)


def given(steps: int, seed: int = 3) -> Prompt:
    """A prompt whose text is drawn, so that it never ends."""
    return Prompt("s", PROMPT.token_ids, 0, text_tokens=token_ids(steps + 1, seed=seed))


class Followed(Naive):
    """Reads a text, is cut every `every` tokens, and notes at each step what it holds and what it held before a cut."""

    def __init__(self, adapter: Adapter, chosen: EvictionConfig) -> None:
        super().__init__(adapter, chosen)
        self.full = Decoder(adapter.model)
        self.place: list[list[dict[int, int]]] = [[{} for _ in layer] for layer in self.held]

    def follow(self, tokens: tuple[int, ...], every: int) -> list[dict[str, Any]]:
        for token in PROMPT.token_ids:
            self._step(token)
            self.full.step(token)
        return [self._noted(token, step, every) for step, token in enumerate(tokens)]

    def _noted(self, token: int, step: int, every: int) -> dict[str, Any]:
        before = [[list(held) for held in layer] for layer in self.held]
        cut = step % every == 0
        if cut:
            self._compress()
            self._note_places(before)
        held = [[list(one) for one in layer] for layer in self.held]
        self._step(token)
        return {"before": before, "held": held, "cut": cut, "full": self.full.step(token), "evicted": self.last,
                "place": [[dict(one) for one in layer] for layer in self.place], "entries": N + step}  # fmt: skip

    def _note_places(self, before: list[list[list[int]]]) -> None:
        entries = self.decoder.position
        for layer, heads in enumerate(before):
            for head, held in enumerate(heads):
                for position in set(held) - set(self.held[layer][head]):
                    recent = position >= entries - RECENT
                    other = "recent" if recent else "prompt" if position < N else "own text"
                    self.place[layer][head][position] = PLACES.index("sink" if position < SINK else other)

    def _step(self, token: int) -> np.ndarray:
        decoder, step = self.decoder, self.decoder.step

        def noted(*arguments: Any) -> Step:
            self.last = step(*arguments)
            return self.last

        decoder.step = noted  # type: ignore[method-assign]
        try:
            return super()._step(token)
        finally:
            decoder.step = step  # type: ignore[method-assign]


def expected(naive: Followed, notes: list[dict[str, Any]], layer: int, head: int, step: int) -> dict[str, Any]:
    """Every quantity of one head at one step, entry by entry."""
    note, decoder = notes[step], naive.full
    entries = note["entries"] + 1
    kv_head = head * decoder.kv_heads // decoder.heads
    keys, values = (np.array(kind[layer][kv_head])[:entries] for kind in (decoder.keys, decoder.values))
    query, sinks = note["full"].query[layer][head], decoder.sinks(layer)
    beside = [] if sinks is None else [float(sinks[head])]
    weights = theory.softmax([*(decoder.scale * float(query @ key) for key in keys), *beside])
    gate = note["full"].gates[layer].reshape(-1)
    columns = theory.head_slice(decoder.w_o(layer) * gate, head, decoder.d_value)
    values = np.array([*values, *(np.zeros(decoder.d_value) for _ in beside)])

    def stays(held: list[int]) -> list[bool]:
        return [place in held or place == entries - 1 for place in range(entries)] + [True] * len(beside)

    now, was = (stays(note[name][layer][head]) for name in ("held", "before"))
    outputs = [theory.evicted_output(weights, kept, values, columns) for kept in (was, now)]
    norms = [theory.l1(value @ columns) for value in values]
    total = sum(a * norm for a, norm in zip(weights, norms, strict=True))
    place = note["place"][layer][head]
    went = [p for p in place if was[p] and not now[p]]
    slice_of = theory.head_slice(decoder.w_o(layer), head, decoder.d_value)
    moved = (note["full"].head_output[layer][head] - note["evicted"].head_output[layer][head]) @ slice_of
    return {
        "perturbation_isolated": theory.perturbation(weights, now, values, columns),
        "perturbation_propagated": theory.l1(moved),
        "theta": theory.theta(weights, norms, now),
        "retained_mass": theory.mass(weights, now),
        "perturbation_carried": theory.perturbation(weights, was, values, columns) if note["cut"] else np.nan,
        "perturbation_added": theory.l1(outputs[1] - outputs[0]) if note["cut"] else np.nan,
        "held_entries": sum(now) - len(beside),
        "went_entries": [sum(place[p] == kind for p in went) for kind in range(len(PLACES))],
        "went_output": [
            sum(weights[p] * norms[p] for p in went if place[p] == kind) / total for kind in range(len(PLACES))
        ],
        "gone_attention": [sum(weights[p] for p in place if place[p] == kind) for kind in range(len(PLACES))],
    }


@pytest.mark.parametrize(
    ("family", "policy", "fields", "steps"),
    [
        ("llama", "snapkv", {}, 30),
        ("llama", "adakv", {}, 30),
        (GATED, "snapkv", {}, 30),
        pytest.param("gemma3_text", "snapkv", {"protect_first": 2}, 30, marks=pytest.mark.slow),
        pytest.param("llama", "snapkv", {}, 256, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "adakv", {}, 256, marks=pytest.mark.slow),
    ],
)
def test_every_quantity_equals_the_naive_runs(family: str, policy: str, fields: dict[str, Any], steps: int) -> None:
    adapter, chosen, every = exact_adapter(family, 4, 2, seed=1), config(policy, **fields), 7
    prompt = given(steps)
    found = trace_sample(adapter, prompt, run(chosen, steps=steps, text="given", compress_every=every)).arrays
    naive = Followed(adapter, chosen)
    notes = naive.follow(tuple(found["token_id"].tolist()), every)
    for step in range(steps) if steps < 100 else range(0, steps, 13):
        kl = theory.kl(notes[step]["full"].logits, notes[step]["evicted"].logits)
        np.testing.assert_allclose(found["logit_kl"][0, step], kl, rtol=1e-4, atol=1e-12)
        for layer in range(len(adapter.layers)):
            for head in range(adapter.heads):
                for name, value in expected(naive, notes, layer, head, step).items():
                    floor = 1e-9 if name.startswith(("perturbation", "theta")) else 1e-12
                    np.testing.assert_allclose(
                        found[name][0, step, layer, head], value, rtol=1e-5, atol=floor, err_msg=f"{name} at {step}"
                    )


@pytest.mark.parametrize("family", ["llama", GATED])
def test_isolated_quantities_stand_at_compressions_and_chosen_steps(family: str) -> None:
    small, large = config("snapkv"), replace(config("adakv"), budget=Budget(BUDGET + 4))
    adapter, prompt = exact_adapter(family, 4, 2, seed=1), given(30)
    whole = run(small, large, text="given", compress_over=BUDGET + 8)
    every = trace_sample(adapter, prompt, whole).arrays
    found = trace_sample(adapter, prompt, replace(whole, isolated_every=9)).arrays
    cut = every["went_entries"].sum(axis=(2, 3, 4)) > 0
    assert not np.array_equal(*cut)
    chosen = np.isin(np.arange(30), [0, 9, 18, 27, 29])
    for name, array in every.items():
        if name not in AT_CHOSEN_STEPS:
            np.testing.assert_array_equal(found[name], array, err_msg=name)
        elif "config" in VARIABLES[name].dims:
            measured = np.where((chosen | cut)[..., None, None], array, np.nan)
            np.testing.assert_array_equal(found[name], measured, err_msg=name)
        else:
            measured = np.where((chosen | cut.any(axis=0))[:, None, None], array, np.nan)
            np.testing.assert_array_equal(found[name], measured, err_msg=name)


def missed_of(naive: Followed, notes: list[dict[str, Any]], heads: int, layers: int) -> np.ndarray:
    missed = np.zeros(len(notes))
    for note in notes:
        for layer in range(layers):
            for head in range(heads):
                kv_head = head * naive.full.kv_heads // heads
                keys = np.array(naive.full.keys[layer][kv_head])[: note["entries"] + 1]
                query = note["full"].query[layer][head]
                weights = theory.softmax([naive.full.scale * float(query @ key) for key in keys])
                for position in note["place"][layer][head]:
                    if position >= N:
                        missed[position - N] += weights[position] / heads / layers
    return missed


def test_what_the_text_later_misses_of_itself() -> None:
    adapter, chosen = exact_adapter("llama", 4, 2, seed=1), config("snapkv")
    found = trace_sample(adapter, given(30), run(chosen, text="given", compress_every=7)).arrays
    naive = Followed(adapter, chosen)
    notes = naive.follow(tuple(found["token_id"].tolist()), 7)
    expected_sums = missed_of(naive, notes, adapter.heads, len(adapter.layers))
    assert (expected_sums > 0).sum() > 10
    np.testing.assert_allclose(found["missed_attention"][0], expected_sums, rtol=1e-6, atol=1e-12)


def assert_equal(found: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    for name, array in other.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_one_cut_at_the_prompts_end_is_the_one_shot_trace(scenario: str) -> None:
    configs = [config("snapkv"), config("adakv"), config("random", seed=1)]
    prompt = Prompt("s", token_ids(40, seed=4), 0, question_tokens=7)
    adapter = tiny_adapter()
    once = trace_sample(adapter, prompt, run(*configs, scenario=scenario)).arrays
    again = trace_sample(adapter, prompt, run(*configs, scenario=scenario, compress_every=KEPT_WHOLE)).arrays
    assert_equal(again, once)
    assert np.isnan(again["perturbation_carried"][:, 1:]).all()
    np.testing.assert_allclose(
        again["perturbation_added"][:, 0], once["perturbation_isolated"][:, 0], rtol=1e-9, atol=1e-12
    )


def test_a_limit_that_is_never_reached_is_the_row_that_keeps_everything() -> None:
    chosen, whole = config("snapkv"), replace(config("snapkv"), budget=Budget(1.0))
    adapter, prompt = tiny_adapter(), Prompt("s", token_ids(40, seed=4), 0)
    kept = trace_sample(adapter, prompt, run(whole)).arrays
    never = trace_sample(adapter, prompt, run(chosen, compress_over=KEPT_WHOLE)).arrays
    assert not never["evicted"].any()
    assert not never["gone_attention"].any()
    assert_equal(never, {name: array for name, array in kept.items() if name != "stage1_count"})


def test_a_limit_cuts_to_the_budget_whenever_it_is_passed() -> None:
    chosen, prompt = config("snapkv"), given(60)
    found = trace_sample(tiny_adapter(), prompt, run(chosen, steps=60, text="given", compress_over=24)).arrays
    held = found["held_entries"][0, :, 0, 0]
    cuts = np.flatnonzero(found["went_entries"][0].sum(axis=(1, 2, 3)))
    assert held[0] == N + 1
    assert held.max() == 25
    assert (held[cuts] == BUDGET + 1).all()
    assert len(cuts) > 2
    assert np.array_equal(cuts, np.flatnonzero(~np.isnan(found["perturbation_carried"][0, :, 0, 0])))


def test_a_prompt_that_is_protected_stays() -> None:
    chosen = replace(config("snapkv(keep=prompt)"), budget=Budget(N + WINDOW + 4))
    prompt = given(40)
    found = trace_sample(tiny_adapter(), prompt, run(chosen, steps=40, text="given", compress_every=8)).arrays
    went = found["went_entries"][0].sum(axis=(0, 1, 2))
    assert went[PLACES.index("prompt")] == went[PLACES.index("sink")] == 0
    assert went[PLACES.index("recent")] > 0
    assert (found["held_entries"][0, 8::8] == N + WINDOW + 4 + 1).all()


def masked_logits(adapter: Adapter, prompt: Prompt, tokens: np.ndarray, seen: list[Any]) -> list[torch.Tensor]:
    """Logits after each token from the model's own cache; `seen[step][layer]` (head, key) masks what is held there."""
    cache, logits = DynamicCache(config=adapter.config), []

    def attend(stock, module, args, kwargs):  # type: ignore[no-untyped-def]
        query, key, value = args[:3]
        layer, repeats = adapter.layer_of(module), query.shape[1] // key.shape[1]
        held = torch.ones(query.shape[1], key.shape[2], dtype=torch.bool)
        mask = now[layer]
        held[:, : mask.shape[-1]] = mask
        keys, values = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        scores = (query @ keys.mT * (kwargs.get("scaling") or query.shape[-1] ** -0.5)).masked_fill(
            ~held[None, :, None], -torch.inf
        )
        return (scores.softmax(dim=-1) @ values).transpose(1, 2).contiguous(), None

    with torch.inference_mode():
        adapter.model(input_ids=torch.tensor([list(prompt.token_ids)]), past_key_values=cache)
        for step, token in enumerate(tokens):
            now = seen[step]
            with intercept_attention(adapter, attend):
                logits.append(
                    adapter.model(input_ids=torch.tensor([[int(token)]]), past_key_values=cache).logits[0, -1]
                )
    return logits


@pytest.mark.parametrize("family", [HYBRIDS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in HYBRIDS[1:])])
def test_beside_recurrent_layers_caches_are_compressed_likewise(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, chosen, prompt = hybrid_adapter(family), config("adakv", granularity="kv"), given(24)
    seen_sets: list[Any] = []
    whole: list[Any] = []
    original = one_sample.measure_layer

    def watched(sample: Any, index: int, groups: Any, later: Any, finite: Any) -> Any:
        seen_sets[:] = [later]
        whole.append(kept_masks_of(groups)[0])
        return original(sample, index, groups, later, finite)

    monkeypatch.setattr(one_sample, "measure_layer", watched)
    found = trace_sample(adapter, prompt, run(chosen, steps=24, text="given", compress_every=7)).arrays
    (later,) = seen_sets
    assert sorted(later) == [7, 14, 21]
    seen, now = [], [mask.repeat_interleave(adapter.heads // len(mask), dim=0) for mask in whole]
    for step in range(24):
        if step in later:
            now = [one.kept.repeat_interleave(adapter.heads // len(one.kept), dim=0) for one in later[step][0]]
        seen.append(now)
    nothing = [[mask.new_ones(mask.shape) for mask in layers] for layers in seen]
    evicted = masked_logits(adapter, prompt, found["token_id"], seen)
    full = masked_logits(adapter, prompt, found["token_id"], nothing)
    for step in range(24):
        kl = theory.kl(full[step].double().numpy(), evicted[step].double().numpy())
        np.testing.assert_allclose(found["logit_kl"][0, step], kl, rtol=2e-3, atol=1e-5)
    assert found["logit_kl"].max() > 1e-3


@pytest.mark.parametrize(
    ("fields", "settings", "told"),
    [
        ({}, {"compress_every": 4, "compress_over": 20}, "exclude each other"),
        ({}, {"compress_every": 4, "save": ("effect",)}, "effects .* are of one kept set"),
        ({"policy": "snapkv(keep=prompt)"}, {}, "evicts among decoded tokens alone; compress caches again by"),
        (
            {"policy": "snapkv(keep=prompt)"},
            {"compress_every": 4},
            "protects: the 14 entries of sample 's' and the last",
        ),
        ({"selection": "hindsight"}, {"compress_every": 4}, "'hindsight' looks at the next query"),
        ({}, {"isolated_every": 4}, "isolated_every .* chooses steps where caches are compressed again"),
        ({}, {"compress_every": 4, "isolated_every": 0}, "isolated_every .* must be at least 1, got 0"),
        ({}, {"compress_every": 2.5}, "compress_every must be a whole number, got 2.5"),
        ({"precision": "quantise"}, {"compress_every": 4}, "stores other entries than the prompt's"),
        ({"policy": "snapkv(positions=in-cache)"}, {"compress_every": 4}, "stores other entries than the prompt's"),
    ],
)
def test_what_cannot_be_is_one_line(fields: dict[str, Any], settings: dict[str, Any], told: str) -> None:
    adapter = tiny_adapter()
    chosen: dict[str, Any] = {"policy": "snapkv", "window": WINDOW, **fields}
    with pytest.raises(PerturbkvError, match=told):
        pk.measure(
            adapter, [Prompt("s", PROMPT.token_ids, 0)], pk.grid(BUDGET, **{"selection": "attention", **chosen}),
            settings=pk.Settings(**settings), progress=False,
        )  # fmt: skip


@pytest.mark.parametrize("by", ["samples", "configs"])
def test_shards_and_a_run_that_goes_on_give_what_one_process_does(by: str, tmp_path: Path) -> None:
    adapter = tiny_adapter()
    prompts = [pk.Prompt.from_text(f"{place} The quick brown fox jumps over it.", adapter, continuation="again, " * 4)
               for place in range(2)]  # fmt: skip
    asked = (adapter, prompts, pk.grid([16, 12], policy=["snapkv", "tova"], selection="attention", window=4))
    settings = pk.Settings(steps=20, text="given", compress_every=6)
    alone = pk.measure(*asked, settings=settings, progress=False)
    for number in (2, 1):
        last = pk.measure(
            *asked, settings=settings, path=tmp_path / "t.h5", shard=pk.Shard(number, 2, by), progress=False
        )
    part = pk.measure(adapter, prompts[:1], asked[2], settings=settings, path=tmp_path / "part.h5", progress=False)
    assert len(part.sample_ids) == 1
    for name in ("gone_attention", "held_entries", "went_entries", "perturbation_carried", "missed_attention"):
        np.testing.assert_allclose(last.arrays[name], alone.arrays[name], rtol=1e-4, atol=1e-7, err_msg=name)
        np.testing.assert_allclose(part.arrays[name], alone.arrays[name][:1], rtol=1e-4, atol=1e-7, err_msg=name)


def test_two_budgets_stay_two_where_a_limit_leaves_the_prompt_whole() -> None:
    adapter, prompt = tiny_adapter(), given(30)
    configs = pk.grid([BUDGET, 8], selection="attention", window=WINDOW)
    run_of = RunConfig("m", "d", tuple(configs), steps=30, text="given", compress_over=20)
    found = trace_sample(adapter, prompt, run_of).arrays
    assert found["evicted"].tolist() == [1, 1]  # not at the prompt's end, but later
    first = [np.flatnonzero(row.sum(axis=(1, 2, 3)))[0] for row in found["went_entries"]]
    assert found["held_entries"][[0, 1], first, 0, 0].tolist() == [BUDGET + 1, 9]


def test_equal_sets_of_the_prompt_are_no_equal_caches_later() -> None:
    adapter, prompt = tiny_adapter(), given(40)
    budget = N + WINDOW + 4
    configs = pk.grid(budget, policy="snapkv(keep=prompt)", selection=["attention", "random"], window=WINDOW)
    settings = pk.Settings(steps=40, text="given", compress_every=8)
    trace = pk.measure(adapter, [prompt], configs, settings=settings, progress=False)
    sums = trace.arrays["perturbation_propagated"].sum(axis=(2, 3, 4))[0]
    assert abs(sums[1] / sums[0] - 1) > 0.01
    assert not verdicts.equal_isolated(trace, 0, 1).any()
    compared = pk.compare_heads(trace, "attention", "random")
    assert "up to rounding" not in compared.conclusion()


def test_the_question_stays_with_a_protected_prompt() -> None:
    prompt = Prompt("s", token_ids(30, seed=4), 0, question_tokens=8, text_tokens=token_ids(41, seed=3))
    chosen = replace(config("snapkv(keep=prompt)"), budget=Budget(30 + WINDOW + 4))
    made = run(chosen, steps=40, text="given", compress_every=8, scenario="context-only")
    found = trace_sample(tiny_adapter(), prompt, made).arrays
    went = found["went_entries"][0].sum(axis=(0, 1, 2))
    assert went[PLACES.index("prompt")] == went[PLACES.index("sink")] == 0
    assert went.sum() > 0
