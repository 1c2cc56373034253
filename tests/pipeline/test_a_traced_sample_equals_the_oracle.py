"""One sample through the whole pipeline against the naive decoder, which evicts by masking."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from perturbkv.config import Budget, EvictionConfig, RunConfig
from perturbkv.datasets.encode import EncodedPrompt
from perturbkv.policies import registry
from perturbkv.runner import trace_sample
from perturbkv.trace import SampleTrace
from tests.oracle import policies, selection, theory
from tests.oracle.decoder import Decoder, Step
from tests.support.models import FAMILIES, HEADS, exact_adapter, token_ids

LENGTH, WINDOW, STEPS, QUESTION = 36, 5, 2, 7
HEAD_SCORES = ((1.0, 5.0, 2.0, 2.0), (3.0, 1.0, 1.0, 9.0))
RELATIVE = 1e-5


def configs(granularity: str) -> tuple[EvictionConfig, ...]:
    base = EvictionConfig(budget=Budget(14), window=WINDOW, granularity=granularity, kernel=3)
    names = ("attention", "two-stage", "hindsight", "value")
    wide = replace(base, budget=Budget(0.6), alpha=0.5, stage2_score="pooled", epsilon=1e-4)
    ends = replace(base, selection="hindsight-attention", protect_first=3, protect_recent=0.5)
    return (*(replace(base, selection=name) for name in names), wide, ends)


def policy_configs(granularity: str) -> tuple[EvictionConfig, ...]:
    fields = {"window": WINDOW, "kernel": 3, "granularity": granularity, "history": 12}
    names = ("pyramidkv", "adakv", "headkv", "h2o", "scissorhands", "tova")
    made = [registry.configured("paper", Budget(14), name, **fields) for name in names]
    guaranteed = replace(made[1], safeguard="guaranteed", floor=0.7, protect_first=2, split="total")
    return (*made, replace(made[1], selection="attention"), replace(made[3], window=3), guaranteed)


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
            "w_o": cell.weights[f"model.layers.{layer}.self_attn.o_proj.weight"],
        }

    @functools.cache  # noqa: B019
    def kept(self, layer: int, config: EvictionConfig) -> list[tuple[list[int], list[int]]]:
        held, scale = self.layer(layer, 0), self.decoder.d_head**-0.5
        query = np.stack([step.query[layer] for step in self.prompt[: self.n]], axis=1)
        accumulated = policies.accumulate(config, query, held["key"][:, : self.n], scale)
        norms = theory.projected_value_norms(held["value"][:, : self.n], held["w_o"], self.decoder.heads)
        realised = theory.decode_attention(held["query"], held["key"], scale)
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
            records.append(decoder.step(token, masks))
        return records[len(self.ids) - self.n :]


CASES = [
    *((family, "GQA", "query", "regular", "selections") for family in FAMILIES),
    ("llama", "MHA", "query", "regular", "selections"),
    ("qwen3", "MQA", "kv", "regular", "selections"),
    ("llama", "GQA", "kv", "context-only", "selections"),
    ("phi3", "GQA", "kv", "regular", "selections"),
    ("llama", "GQA", "query", "regular", "policies"),
    ("qwen3", "GQA", "kv", "regular", "policies"),
    ("llama", "GQA", "query", "context-only", "policies"),
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[SampleTrace, Reference]:
    family, heads, granularity, scenario, kind = request.param
    adapter, ids = exact_adapter(family, *HEADS[heads]), token_ids(LENGTH, seed=1)
    chosen = configs(granularity) if kind == "selections" else policy_configs(granularity)
    run = RunConfig("m", "d", chosen, steps=STEPS, save=("outputs",), scenario=scenario, head_scores=HEAD_SCORES)
    prompt = EncodedPrompt("s", ids, 0, question_tokens=QUESTION)
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


def test_isolated_quantities(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    heads, group = reference.decoder.heads, reference.decoder.heads // reference.decoder.kv_heads
    for index, config in enumerate(reference.run.configs):
        for layer in range(reference.decoder.layers):
            sets = reference.kept(layer, config)
            for step in range(STEPS):
                held = reference.layer(layer, step)
                attention = theory.decode_attention(held["query"], held["key"], reference.decoder.d_head**-0.5)
                norms = theory.projected_value_norms(held["value"], held["w_o"], heads)
                for head in range(heads):
                    kept, stage1 = (
                        [i in chosen or i >= reference.n for i in range(LENGTH + step + 1)] for chosen in sets[head]
                    )
                    a, v = list(attention[head]), list(norms[head])
                    projection = theory.head_slice(held["w_o"], head, reference.decoder.d_head)
                    expected = {
                        "perturbation_isolated": theory.perturbation(a, kept, held["value"][head // group], projection),
                        "theta": theory.theta(a, v, kept),
                        "theta_hat": theory.theta_hat(a, v, kept, stage1),
                        "theta_hat_relax": theory.theta_hat_relax(a, v, kept, stage1),
                        "retained_mass": theory.mass(a, kept),
                        "sigma_stage1": theory.mass(a, stage1),
                        "sigma_topk": theory.sigma_topk(a, config.alpha, len(sets[head][0])),
                    }
                    for name, number in expected.items():
                        found = float(sample.arrays[name][index, step, layer, head])
                        assert found == pytest.approx(number, rel=RELATIVE), (name, index, layer, step, head)


def test_propagated_quantities(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    arrays = sample.arrays
    for index, config in enumerate(reference.run.configs):
        for step, (full, evicted) in enumerate(zip(reference.full, reference.evicted(config), strict=True)):
            for layer in range(reference.decoder.layers):
                w_o = reference.layer(layer, 0)["w_o"]
                moved = full.head_output[layer] - evicted.head_output[layer]
                for head in range(reference.decoder.heads):
                    projection = theory.head_slice(w_o, head, reference.decoder.d_head)
                    found = float(arrays["perturbation_propagated"][index, step, layer, head])
                    assert found == pytest.approx(theory.l1(moved[head] @ projection), rel=RELATIVE)
                    norm = float(arrays["output_norm"][step, layer, head])
                    assert norm == pytest.approx(theory.l1(full.head_output[layer][head] @ projection), rel=RELATIVE)
                difference = full.hidden[layer] - evicted.hidden[layer]
                found = float(arrays["hidden_drift_l1"][index, step, layer])
                assert found == pytest.approx(theory.l1(difference), rel=RELATIVE)
                found = float(arrays["hidden_drift_l2"][index, step, layer])
                assert found == pytest.approx(np.linalg.norm(difference), rel=RELATIVE)
                cosine = theory.cosine_distance(full.hidden[layer], evicted.hidden[layer])
                assert float(arrays["hidden_drift_cosine"][index, step, layer]) == pytest.approx(cosine, rel=1e-4)
            assert float(arrays["final_drift_l1"][index, step]) == pytest.approx(
                theory.l1(full.final - evicted.final), rel=RELATIVE
            )
            assert float(arrays["logit_kl"][index, step]) == pytest.approx(
                theory.kl(full.logits, evicted.logits), rel=1e-4
            )
            same = int(np.argmax(full.logits)) == int(np.argmax(evicted.logits))
            assert bool(arrays["top1_agreement"][index, step]) == same


def test_saved_outputs(case: tuple[SampleTrace, Reference]) -> None:
    sample, reference = case
    for step, full in enumerate(reference.full):
        for layer in range(reference.decoder.layers):
            held = reference.layer(layer, step)
            attention = theory.decode_attention(held["query"], held["key"], reference.decoder.d_head**-0.5)
            stored = sample.arrays["attention_full"][step, layer]
            np.testing.assert_allclose(stored[:, : LENGTH + step + 1], attention, rtol=1e-5)
            assert np.isnan(stored[:, LENGTH + step + 1 :]).all()
            np.testing.assert_allclose(sample.arrays["head_output_full"][step, layer], full.head_output[layer],
                                       rtol=1e-4, atol=1e-6)  # fmt: skip
            np.testing.assert_allclose(sample.arrays["hidden_full"][step, layer], full.hidden[layer], rtol=1e-4,
                                       atol=1e-6)  # fmt: skip
