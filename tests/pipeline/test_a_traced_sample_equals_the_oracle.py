"""One sample through the whole pipeline against the naive decoder, which evicts by masking."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import pytest

from perturbkv.configs.budget import Budget
from perturbkv.configs.choice import parse
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.pipeline.samples import trace_sample
from perturbkv.selection.grid import configuration
from perturbkv.trace import SampleTrace
from tests.oracle import policies, selection, theory
from tests.oracle.decoder import Decoder, Step
from tests.support.configs import flat
from tests.support.models import FAMILIES, HEADS, exact_adapter, token_ids

LENGTH, WINDOW, STEPS, QUESTION = 36, 5, 2, 7
HEAD_SCORES = ((1.0, 5.0, 2.0, 2.0), (3.0, 1.0, 1.0, 9.0))
RELATIVE = 1e-5


def configs(granularity: str) -> tuple[EvictionConfig, ...]:
    base = EvictionConfig(14, "snapkv(kernel=3)", window=WINDOW, granularity=granularity)
    names = ("attention", "two-stage", "hindsight", "value")
    wide = replace(base, budget=Budget(0.6), selection=parse("two-stage(alpha=0.5, score=pooled, epsilon=1e-4)"))
    ends = replace(base, selection=parse("hindsight-attention"), protect_first=3, protect_recent=0.5)
    return (*(replace(base, selection=parse(name)) for name in names), wide, ends)


def pair(granularity: str) -> tuple[EvictionConfig, ...]:
    return configs(granularity)[:2]


def policy_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    fields = {"window": WINDOW, "kernel": 3, "granularity": granularity, "history": 12}
    names = ("pyramidkv", "adakv", "headkv", "h2o", "scissorhands", "tova")
    made = [configuration(14, policy=name, **fields) for name in names]
    adakv = parse("adakv(safeguard=guaranteed, floor=0.7, kernel=3)")
    guaranteed = replace(made[1], policy=adakv, protect_first=2, selection=parse("two-stage(split=total)"))
    return (*made, replace(made[1], selection=parse("attention")), replace(made[3], window=3), guaranteed)


def position_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """Rows at the prompt's positions and rows at those of their own cache, of several lengths, in one batch."""
    base = EvictionConfig(14, "streaming-llm", "position", WINDOW, granularity=granularity)
    inside = replace(base, policy=parse("streaming-llm(positions=in-cache)"))
    without = parse("streaming-llm(positions=in-cache, sinks=0)")
    some = (inside, replace(inside, budget=Budget(9), policy=without), replace(inside, protect_first=6), base)
    return (
        *some,
        EvictionConfig(Budget(14), window=WINDOW, granularity=granularity),
        replace(inside, budget=Budget(0.7)),
    )


def block_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    """Whole blocks of several sizes beside single entries, in one batch."""
    fields = {"window": WINDOW, "kernel": 3, "granularity": granularity}
    made = [
        configuration(15, block=4, **fields),
        configuration(15, block=4, selection="attention", block_score="max", **fields),
        configuration(22, block=8, alpha=0.5, **fields),
        configuration(21, block=4, protect_first=3, protect_recent=7, **fields),
        configuration(18, block=4, policy="pyramidkv(beta=4)", **fields),
        configuration(18, block=4, policy="h2o", **fields),
        configuration(14, **fields),
        configuration(18, policy="streaming-llm(positions=in-cache)", block=4, window=WINDOW, granularity=granularity),
    ]
    return tuple(made) if granularity == "layer" else (*made, configuration(18, block=4, policy="adakv", **fields))


def attention_of(held: dict[str, np.ndarray], scale: float) -> np.ndarray:
    """(head, key), with a sink's weight behind the entries' where there is one."""
    return theory.decode_attention(held["query"], held["key"], scale, held["sinks"])


class Reference:
    """Everything the oracle says of one sample."""

    def __init__(self, model: object, ids: tuple[int, ...], run: RunConfig) -> None:
        self.run, self.decoder = run, Decoder(model)
        self.n = len(ids) - (QUESTION if run.scenario == "context-only" else 0)
        self.prompt = [self.decoder.step(token) for token in ids]
        self.tokens = [int(np.argmax(self.prompt[-1].logits))]
        self.full: list[Step] = []
        for _ in range(run.steps):
            self.full.append(self.decoder.step(self.tokens[-1]))
            self.tokens.append(int(np.argmax(self.full[-1].logits)))
        self.model, self.ids = model, ids

    def layer(self, layer: int, step: int) -> dict[str, np.ndarray]:
        entries = len(self.ids) + step + 1
        cell = self.decoder
        return {
            "query": self.full[step].query[layer],
            "key": np.array(cell.keys[layer])[:, :entries],
            "value": np.array(cell.values[layer])[:, :entries],
            "w_o": cell.w_o(layer),
            "sinks": cell.sinks(layer),
        }

    @functools.cache  # noqa: B019
    def kept(self, layer: int, config: EvictionConfig) -> list[tuple[list[int], list[int]]]:
        held, scale = self.layer(layer, 0), self.decoder.scale
        query = np.stack([step.query[layer] for step in self.prompt[: self.n]], axis=1)
        accumulated = policies.accumulate(config, query, held["key"][:, : self.n], scale, held["sinks"])
        norms = theory.projected_value_norms(held["value"][:, : self.n], held["w_o"], self.decoder.heads)
        realised = attention_of(held, scale)[:, : held["key"].shape[1]]
        place = (layer, self.decoder.layers, self.run.head_scores)
        return selection.select(config, accumulated, norms, realised, self.n, self.decoder.kv_heads, *place)

    def evicted(self, config: EvictionConfig) -> list[Step]:
        """Decode again, entries outside the kept sets masked in every layer, from the question on."""
        decoder = Decoder(self.model)
        for token in self.ids[: self.n]:
            decoder.step(token)
        sets = [self.kept(layer, config) for layer in range(decoder.layers)]
        records = []
        for later, token in enumerate((*self.ids[self.n :], *self.tokens[: self.run.steps])):
            masks = [np.ones((decoder.heads, self.n + later), dtype=bool) for _ in sets]
            for mask, layer_sets in zip(masks, sets, strict=True):
                mask[:, : self.n] = [[position in kept for position in range(self.n)] for kept, _ in layer_sets]
            records.append(decoder.step(token, masks, flat(config).positions == "in-cache"))
        return records[len(self.ids) - self.n :]


WAYS = (("query", "context-only"), ("kv", "regular"), ("kv", "context-only"))
"""Granularities and scenarios that every family is held to in two configurations, beside the first in five."""
CASES = [
    *((family, "GQA", "query", "regular", "selections") for family in FAMILIES),
    *((family, "GQA", *way, "pair") for family in FAMILIES for way in WAYS),
    ("gpt_oss", "GQA", "kv", "context-only", "selections"),
    ("gpt_oss", "GQA", "kv", "context-only", "policies"),
    ("gemma3_text", "GQA", "kv", "context-only", "positions"),
    ("llama", "MHA", "query", "regular", "selections"),
    ("qwen3", "MQA", "kv", "regular", "selections"),
    ("llama", "GQA", "query", "regular", "policies"),
    ("qwen3", "GQA", "kv", "regular", "policies"),
    ("llama", "GQA", "query", "context-only", "policies"),
    ("llama", "MHA", "query", "regular", "positions"),
    ("phi3", "GQA", "kv", "regular", "positions"),
    ("qwen3", "MQA", "query", "regular", "positions"),
    ("llama", "GQA", "query", "context-only", "positions"),
    ("phi3", "MQA", "kv", "context-only", "positions"),
    ("qwen3", "GQA", "layer", "regular", "selections"),
    ("llama", "GQA", "layer", "regular", "blocks"),
    ("qwen3", "GQA", "kv", "context-only", "blocks"),
    ("llama", "MHA", "layer", "context-only", "blocks"),
    ("phi3", "MQA", "query", "regular", "blocks"),
    ("llama", "GQA", "kv", "context-only", "selections"),
    ("phi3", "GQA", "kv", "regular", "selections"),
]
CONFIGS = {
    "pair": pair,
    "selections": configs,
    "policies": policy_configs,
    "positions": position_configs,
    "blocks": block_configs,
}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[SampleTrace, Reference]:
    family, heads, granularity, scenario, kind = request.param
    adapter, ids = exact_adapter(family, *HEADS[heads]), token_ids(LENGTH, seed=1)
    chosen = CONFIGS[kind](granularity)
    run = RunConfig("m", "d", chosen, steps=STEPS, save=("outputs",), scenario=scenario, head_scores=HEAD_SCORES)
    prompt = Prompt("s", ids, 0, question_tokens=QUESTION)
    return trace_sample(adapter, prompt, run), Reference(adapter.model, ids, run)


def test_tokens_are_the_full_runs_greedy_choice(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    assert sample.arrays["token_id"].tolist() == reference.tokens[:STEPS]


def test_kept_positions(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    offset, count, positions = (sample.arrays[f"kept_{name}"] for name in ("offset", "count", "position"))
    for index, config in enumerate(reference.run.configs):
        for layer in range(reference.decoder.layers):
            for head, (kept, stage1) in enumerate(reference.kept(layer, config)):
                start = offset[index, layer, head]
                assert positions[start : start + count[index, layer, head]].tolist() == kept
                assert sample.arrays["stage1_count"][index, layer, head] == len(stage1) - config.window


def test_the_cache_holds_each_set_once_per_key_value_head(case: tuple[SampleTrace, Reference]) -> None:
    """A set of all heads is held once for each key/value head; what a block holds counts whole."""
    sample, reference = case
    kv_heads, layers = reference.decoder.kv_heads, reference.decoder.layers
    for index, config in enumerate(reference.run.configs):
        sets = [reference.kept(layer, config) for layer in range(layers)]
        stored = len(sets[0]) if config.granularity.name == "query" else kv_heads
        held = sum(len(kept) for layer in sets for kept, _ in layer) * stored / len(sets[0])
        assert sample.arrays["held_share"][index] == pytest.approx(held / (layers * kv_heads * reference.n))
    assert sample.arrays["cache_bytes"] - sample.arrays["cache_padding_bytes"] == pytest.approx(
        sample.arrays["held_share"].sum() * layers * kv_heads * reference.n * 2 * reference.decoder.d_head * 8
    )


def test_bounds_stand_in_their_order(case: tuple[SampleTrace, Reference]) -> None:
    sample, _ = case
    moved, theta, hat, relaxed = (
        sample.arrays[name] for name in ("perturbation_isolated", "theta", "theta_hat", "theta_hat_relax")
    )
    assert (moved <= theta * (1 + 1e-9) + 1e-12).all()
    assert (theta <= hat * (1 + 1e-9) + 1e-12).all()
    evidence = sample.arrays["sigma_stage1"] > 0.5
    assert (hat <= relaxed * (1 + 1e-9) + 1e-12)[evidence].all()


def test_isolated_quantities(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    heads, group = reference.decoder.heads, reference.decoder.heads // reference.decoder.kv_heads
    for index, config in enumerate(reference.run.configs):
        for layer in range(reference.decoder.layers):
            sets = reference.kept(layer, config)
            for step in range(STEPS):
                held = reference.layer(layer, step)
                attention = attention_of(held, reference.decoder.scale)
                sunk = [True] * (held["sinks"] is not None)  # an entry that stays, without a value
                norms = theory.projected_value_norms(held["value"], held["w_o"], heads)
                for head in range(heads):
                    kept, stage1 = (
                        [i in chosen or i >= reference.n for i in range(LENGTH + step + 1)] + sunk
                        for chosen in sets[head]
                    )
                    a, smallest = list(attention[head]), min(norms[head])
                    v = [*norms[head], *(0.0 for _ in sunk)]
                    projection = theory.head_slice(held["w_o"], head, reference.decoder.d_head)
                    nothing = np.zeros((len(sunk), reference.decoder.d_head))
                    values = np.concatenate([held["value"][head // group], nothing])
                    entries = a[: len(a) - len(sunk)]
                    full = theory.head_output(a, values, projection)
                    evicted = theory.evicted_output(a, kept, values, projection)
                    expected = {
                        "perturbation_isolated": theory.perturbation(a, kept, values, projection),
                        "perturbation_isolated_l2": theory.l2(full - evicted),
                        "perturbation_isolated_cosine": theory.cosine_distance(full, evicted),
                        "theta": theory.theta(a, v, kept),
                        "theta_hat": theory.theta_hat(a, v, kept, stage1),
                        "theta_hat_relax": theory.theta_hat_relax(a, v, kept, stage1, smallest),
                        "retained_mass": theory.mass(a, kept),
                        "sigma_stage1": theory.mass(a, stage1),
                        "sigma_topk": theory.sigma_topk(entries, flat(config).alpha, len(sets[head][0]))
                        + sum(a[len(entries) :]),
                    }
                    for name, number in expected.items():
                        found = float(sample.arrays[name][index, step, layer, head])
                        least = 1e-24 if name.endswith("cosine") else 1e-12
                        assert found == pytest.approx(number, rel=RELATIVE, abs=least), (name, index, layer, step, head)


def test_the_losses_that_move_the_output_most(case: tuple[SampleTrace, Reference]) -> None:
    """Entry by entry: ‖A_i V_i W_O^h‖₁ of step 0, of what went, the largest ten of all."""
    sample, reference = case
    arrays, decoder = sample.arrays, reference.decoder
    for layer in range(decoder.layers):
        held = reference.layer(layer, 0)
        attention = attention_of(held, decoder.scale)[:, : held["key"].shape[1]]
        norms = theory.projected_value_norms(held["value"], held["w_o"], decoder.heads)
        for head in range(decoder.heads):
            added = [float(a * norm) for a, norm in zip(attention[head], norms[head], strict=True)]
            assert float(arrays["weighted_norm"][layer, head]) == pytest.approx(math.fsum(added), rel=RELATIVE)
            for index, config in enumerate(reference.run.configs):
                kept, _ = reference.kept(layer, config)[head]
                gone = sorted((-added[i], i) for i in range(reference.n) if i not in kept)[:10]
                places = [i for _, i in gone] + [-1] * (10 - len(gone))
                assert arrays["lost_position"][index, layer, head].tolist() == places
                lost = [-number for number, _ in gone] + [math.nan] * (10 - len(gone))
                np.testing.assert_allclose(arrays["lost_output"][index, layer, head], lost, rtol=RELATIVE)


def heads(reference: Reference, step: Step, layer: int) -> list[np.ndarray]:
    """o_h of every head: its contribution to the attention output."""
    w_o, d_head = reference.layer(layer, 0)["w_o"], reference.decoder.d_head
    return [vector @ theory.head_slice(w_o, head, d_head) for head, vector in enumerate(step.head_output[layer])]


def same(found: np.generic, expected: float) -> None:
    assert float(found) == pytest.approx(expected, rel=RELATIVE, abs=1e-30)


def test_propagated_quantities(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    arrays = sample.arrays
    for index, config in enumerate(reference.run.configs):
        for step, (full, evicted) in enumerate(zip(reference.full, reference.evicted(config), strict=True)):
            for layer in range(reference.decoder.layers):
                where = (index, step, layer)
                outputs = zip(heads(reference, full, layer), heads(reference, evicted, layer), strict=True)
                for head, (u, v) in enumerate(outputs):
                    same(arrays["perturbation_propagated"][*where, head], theory.l1(u - v))
                    same(arrays["perturbation_propagated_l2"][*where, head], theory.l2(u - v))
                    same(arrays["perturbation_propagated_cosine"][*where, head], theory.cosine_distance(u, v))
                u, v = full.hidden[layer], evicted.hidden[layer]
                same(arrays["hidden_drift_l1"][where], theory.l1(u - v))
                same(arrays["hidden_drift_l2"][where], theory.l2(u - v))
                same(arrays["hidden_drift_cosine"][where], theory.cosine_distance(u, v))
            same(arrays["final_drift_l1"][index, step], theory.l1(full.final - evicted.final))
            same(arrays["final_drift_l2"][index, step], theory.l2(full.final - evicted.final))
            same(arrays["final_drift_cosine"][index, step], theory.cosine_distance(full.final, evicted.final))
            assert float(arrays["logit_kl"][index, step]) == pytest.approx(
                theory.kl(full.logits, evicted.logits), rel=1e-4
            )
            alike = int(np.argmax(full.logits)) == int(np.argmax(evicted.logits))
            assert bool(arrays["top1_agreement"][index, step]) == alike


def test_what_is_compared_with_and_the_floors(case: tuple[SampleTrace, Reference]) -> None:
    """In float64 a floor is one rounding, or the few that were measured: never 0, and far below what is measured."""
    sample, reference = case
    arrays, epsilon = sample.arrays, 2.0**-52

    def floors(name: str, u: np.ndarray, *where: int) -> None:
        for kind, scale in (("", epsilon * theory.l1(u)), ("_l2", epsilon * theory.l2(u)), ("_cosine", epsilon**2 / 2)):
            found = float(arrays[name + kind][where])
            assert scale * (1 - RELATIVE) <= found < 1e4 * (scale if kind != "_cosine" else 1e4 * scale), name + kind

    for step, full in enumerate(reference.full):
        for layer in range(reference.decoder.layers):
            for head, u in enumerate(heads(reference, full, layer)):
                same(arrays["output_norm"][step, layer, head], theory.l1(u))
                same(arrays["output_norm_l2"][step, layer, head], theory.l2(u))
                floors("noise_floor", u, step, layer, head)
                floors("noise_floor_isolated", u, step, layer, head)
            same(arrays["hidden_norm"][step, layer], theory.l1(full.hidden[layer]))
            same(arrays["hidden_norm_l2"][step, layer], theory.l2(full.hidden[layer]))
            floors("hidden_noise_floor", full.hidden[layer], step, layer)
        same(arrays["final_norm"][step], theory.l1(full.final))
        floors("final_noise_floor", full.final, step)
        assert epsilon <= float(arrays["logit_kl_noise_floor"][step]) < 1e-12


def test_saved_outputs(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    for step, full in enumerate(reference.full):
        for layer in range(reference.decoder.layers):
            held = reference.layer(layer, step)
            attention = attention_of(held, reference.decoder.scale)[:, : LENGTH + step + 1]
            stored = sample.arrays["attention_full"][step, layer]
            np.testing.assert_allclose(stored[:, : LENGTH + step + 1], attention, rtol=1e-5)
            assert np.isnan(stored[:, LENGTH + step + 1 :]).all()
            np.testing.assert_allclose(sample.arrays["head_output_full"][step, layer], full.head_output[layer],
                                       rtol=1e-4, atol=1e-6)  # fmt: skip
            np.testing.assert_allclose(sample.arrays["hidden_full"][step, layer], full.hidden[layer], rtol=1e-4,
                                       atol=1e-6)  # fmt: skip
    for index, config in enumerate(reference.run.configs):
        for step, evicted in enumerate(reference.evicted(config)):
            found = (sample.arrays[name][index, step] for name in ("head_output", "hidden"))
            for stored, expected in zip(found, (evicted.head_output, evicted.hidden), strict=True):
                np.testing.assert_allclose(stored, expected, rtol=1e-5, atol=1e-6)
