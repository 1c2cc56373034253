"""A prefill along lines is that of the naive decoder, which looks at one entry after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.variants import readers as pipeline_lined
from perturbkv.selection.grid import configuration
from perturbkv.selection.kept_sets import KeptSets
from perturbkv.selection.resolved_config import resolve
from perturbkv.selection.sparse_lines import SparsePrefillGroup, measured_positions
from perturbkv.trace import SampleTrace
from tests.oracle import selection, theory
from tests.oracle.sample import QUESTION, Reference
from tests.support.configs import flat
from tests.support.models import HEADS, exact_adapter, token_ids
from tests.support.resolved import trace_sample
from tests.support.traces import kept_of

LENGTH, WINDOW, RELATIVE = 44, 5, 1e-6
CASES = [
    ("llama", "GQA", "query", "regular"),
    ("llama", "MHA", "query", "context-only"),
    ("qwen3", "GQA", "kv", "regular"),
    ("phi3", "MQA", "kv", "context-only"),
    ("granite", "GQA", "kv", "regular"),
    ("olmo2", "MHA", "query", "regular"),
]
Case = tuple[SampleTrace, Reference]


def lined(selection: str = "attention", budget: float = 17, **more: Any) -> EvictionConfig:
    options = {"last": 9, "first": 2} | more.pop("options", {})
    policy = f"vertical-slash({', '.join(f'{name}={value}' for name, value in options.items())})"
    return resolve(configuration(budget, policy=policy, selection=selection, **{"window": WINDOW, **more}))


def every_way(granularity: str) -> tuple[EvictionConfig, ...]:
    """Every way to choose lines but the drawn one, beside an eviction and a budget that covers the prompt."""
    group = {"reduce": "max", "product": "mean-of-products"} if granularity == "kv" else {}
    made = [
        lined(granularity=granularity),
        lined("two-stage(alpha=0.5)", granularity=granularity),
        lined("two-stage(alpha=0)", granularity=granularity),
        lined("two-stage(alpha=0.3, norm=l2)", 20, granularity=granularity, **group),
        lined("two-stage(alpha=0)", 0.5, granularity=granularity, options={"vertical": 0.0, "first": 0}),
        lined("attention", 13, granularity=granularity, options={"vertical": 1.0, "last": 64}),
        lined("attention", 14, granularity=granularity, options={"sums": "free"}),
        lined("two-stage(alpha=0.4)", 18, granularity=granularity, options={"sums": "free", "last": 20}),
        lined("attention", 1.0, granularity=granularity),
        configuration(17, kernel=3, window=WINDOW, granularity=granularity),
    ]
    return tuple(made)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    family, heads, granularity, scenario = request.param
    adapter, ids = exact_adapter(family, *HEADS[heads]), token_ids(LENGTH, seed=3)
    run = RunConfig("m", "d", every_way(granularity), scenario=scenario)
    sample = trace_sample(adapter, Prompt("s", ids, 0, question_tokens=QUESTION), run)
    return sample, Reference(adapter.model, ids, run)


def lined_of(reference: Reference) -> list[tuple[int, EvictionConfig]]:
    return [(place, config) for place, config in enumerate(reference.run.configs) if config.has_sparse_prefill]


def test_what_the_last_query_looks_at_is_stored(case: Case) -> None:
    sample, reference = case
    for place, config in lined_of(reference):
        for layer in range(reference.decoder.layers):
            for head, (kept, stage1) in enumerate(reference.kept(layer, config)):
                assert kept_of(sample.arrays, place, layer, head) == kept
                assert sample.arrays["kept_count"][place, layer, head] == len(kept) <= config.kept_entries(reference.n)
                assert sample.arrays["stage1_count"][place, layer, head] == len(stage1) - WINDOW


def at(reference: Reference, config: EvictionConfig, layer: int, head: int, position: int) -> dict[str, float]:
    """Isolated quantities of one query of the prompt, by sums over entries."""
    decoder, d_head = reference.decoder, reference.decoder.d_head
    kv_head = head // (decoder.heads // decoder.kv_heads)
    query, entries = reference.prompt[position].query[layer][head], range(position + 1)
    a = theory.softmax([float(query @ decoder.keys[layer][kv_head][i]) * decoder.scale for i in entries])
    norms = [float(reference.norms(layer, 0)[head][i]) for i in entries]
    values = np.array(decoder.values[layer][kv_head][: position + 1])
    seen = [lines.seen(position) for lines in reference.lines(layer, config)[head]]
    kept, stage1 = ([i in one for i in entries] for one in seen)
    projection = theory.head_slice(decoder.w_o(layer), head, d_head)
    full, masked = (theory.head_output(a, values, projection), theory.evicted_output(a, kept, values, projection))
    members = selection.groups(flat(config), decoder.heads, decoder.kv_heads)
    alpha = float(selection.alpha(flat(config), next(one for one in members if head in one), layer))
    return {
        "perturbation_isolated": theory.l1(full - masked),
        "perturbation_isolated_l2": theory.l2(full - masked),
        "perturbation_isolated_cosine": theory.cosine_distance(full, masked),
        "theta": theory.theta(a, norms, kept),
        "theta_hat": theory.theta_hat(a, norms, kept, stage1),
        "theta_hat_relax": theory.theta_hat_relax(a, norms, kept, stage1),
        "retained_mass": theory.mass(a, kept),
        "sigma_stage1": theory.mass(a, stage1),
        "sigma_topk": theory.sigma_topk(a, alpha, len(seen[0])),
    }


def mean_at(reference: Reference, config: EvictionConfig, layer: int, head: int) -> dict[str, float]:
    """The means over the queries that are measured."""
    each = [
        at(reference, config, layer, head, position)
        for position in measured_positions(resolve(config), reference.n, "s")
    ]
    return {name: float(np.mean([one[name] for one in each])) for name in each[0]}


@pytest.mark.slow
def test_isolated_quantities_are_means_over_the_prompts_queries(case: Case) -> None:
    sample, reference = case
    for place, config in lined_of(reference):
        for layer, head in np.ndindex(reference.decoder.layers, reference.decoder.heads):
            for name, expected in mean_at(reference, config, layer, head).items():
                found = float(sample.arrays[name][place, 0, layer, head])
                assert found == pytest.approx(expected, rel=RELATIVE, abs=1e-12), (name, place, layer, head)


def before_them(group: SparsePrefillGroup, positions: torch.Tensor) -> KeptSets:
    return _seen(group, positions - 1)


def first_alone(layer: FullLayer, group: SparsePrefillGroup, *more: Any) -> dict[str, torch.Tensor]:
    alone, known = replace(group, measured_positions=group.measured_positions[:1]), layer.statistics.queries
    known[alone.measured_positions] = [queries[:, :1] for queries in known[group.measured_positions]]
    return _isolated(layer, alone, *more)


_seen, _isolated = SparsePrefillGroup.attention_masks, pipeline_lined.isolated_along_lines


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [(SparsePrefillGroup, "attention_masks", before_them), (pipeline_lined, "isolated_along_lines", first_alone)],
)
def test_wrong_isolated_quantities_are_found(
    where: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, ids = exact_adapter("llama", *HEADS["GQA"]), token_ids(LENGTH, seed=3)
    run = RunConfig("m", "d", (lined(),))
    reference = Reference(adapter.model, ids, run)
    expected = mean_at(reference, lined(), 1, 2)["perturbation_isolated"]

    def off() -> float:
        found = trace_sample(adapter, Prompt("s", ids, 0), run).arrays["perturbation_isolated"][0, 0, 1, 2]
        return abs(float(found) - expected)

    assert off() < 1e-9
    monkeypatch.setattr(where, name, wrong)
    assert off() > 1e-3


def test_bounds_stand_in_their_order(case: Case) -> None:
    sample, reference = case
    places = [place for place, _ in lined_of(reference)]
    moved, theta, hat = (sample.arrays[name][places] for name in ("perturbation_isolated", "theta", "theta_hat"))
    assert (moved <= theta * (1 + 1e-9) + 1e-12).all() and (theta <= hat * (1 + 1e-9) + 1e-12).all()
    assert (moved[:-1] > 0).any(axis=(1, 2, 3)).all()


def test_what_a_prefill_along_lines_leaves_is_decoded_from(case: Case) -> None:
    sample, reference = case
    arrays, decoder = sample.arrays, reference.decoder
    for place, config in lined_of(reference):
        (full,), (own,) = reference.full, reference.evicted(config)
        for layer in range(decoder.layers):
            for head, (u, v) in enumerate(zip(full.head_output[layer], own.head_output[layer], strict=True)):
                projection = theory.head_slice(decoder.w_o(layer), head, decoder.d_head)
                same(arrays["perturbation_propagated"][place, 0, layer, head], theory.l1((u - v) @ projection))
        for layer, (u, v) in enumerate(zip(full.hidden, own.hidden, strict=True)):
            same(arrays["hidden_drift_l1"][place, 0, layer], theory.l1(u - v))
        same(arrays["final_drift_l1"][place, 0], theory.l1(full.final - own.final))
        assert float(arrays["logit_kl"][place, 0]) == pytest.approx(
            theory.kl(full.logits, own.logits), rel=1e-4, abs=1e-12
        )


def same(found: np.generic, expected: float) -> None:
    assert float(found) == pytest.approx(expected, rel=RELATIVE, abs=1e-10)


def test_the_share_is_of_all_pairs_of_query_and_entry(case: Case) -> None:
    """Of the prefill of its own, whose lines are chosen layer by layer from what came before."""
    sample, reference = case
    pairs, decoder = reference.n * (reference.n + 1) / 2, reference.decoder
    for place, config in lined_of(reference):
        looked = sum(reference.looked_at(config)) / (decoder.layers * decoder.heads * pairs)
        assert float(sample.arrays["held_share"][place]) == pytest.approx(looked)
        assert bool(sample.arrays["evicted"][place]) == (looked < 1)
