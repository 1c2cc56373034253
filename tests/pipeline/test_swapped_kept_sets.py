"""Mixtures of two configurations' kept sets: both ends are the trace's bit for bit, the middle is the oracle's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.patching import Mixture
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.variants import mixtures as swapping
from perturbkv.pipeline.variants.mixtures import MixtureSample
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.storage.patching_file import PatchingRow, PatchingStore
from perturbkv.trace import Trace
from tests.oracle import theory
from tests.oracle.decoder import Decoder
from tests.support.models import exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import trace_sample

LAYERS, LENGTH, QUESTION, STEPS, ROWS = 4, 36, 7, 2, 5
PROMPTS = [Prompt(f"s{seed}", token_ids(LENGTH, seed=seed), 0, question_tokens=QUESTION) for seed in (1, 2, 3)]


def adapter_of() -> Adapter:
    return exact_adapter("llama", 4, 2, layers=LAYERS)


def sides(granularity: str, policy: str = "snapkv") -> tuple[EvictionConfig, ...]:
    return pk.grid(14, selection=("attention", "two-stage"), policy=policy, window=5, granularity=granularity)


class Case:
    """One prompt, measured as a trace and ready to be mixed."""

    def __init__(self, granularity: str, scenario: str = "regular", policy: str = "snapkv") -> None:
        self.adapter, self.scenario = adapter_of(), scenario
        configs = sides(granularity, policy)
        run = RunConfig("m", "d", configs, samples=1, steps=STEPS, scenario=scenario)
        self.trace = Trace.from_samples(run, [trace_sample(self.adapter, PROMPTS[0], run)], {})
        self.sample = MixtureSample(self.adapter, PROMPTS[0], ResolvedRun.from_run(run), Resources(), ROWS)
        self.ends = [Mixture.of_layers(LAYERS, self.sample.kept_heads, range(side * LAYERS)) for side in (0, 1)]

    def masks(self, mixture: Mixture) -> list[np.ndarray]:
        """(head, n) per layer, put together by hand from the positions that the trace says each side keeps."""
        heads, group = self.adapter.heads, self.adapter.heads // self.sample.kept_heads
        n = LENGTH - (QUESTION if self.scenario == "context-only" else 0)
        found = []
        for layer in range(LAYERS):
            mask = np.zeros((heads, n), dtype=bool)
            for head in range(heads):
                side = int(mixture.layers[layer][head // group])
                mask[head, self.trace.kept(0, side, layer, head)] = True
            found.append(mask)
        return found


@pytest.fixture(
    scope="module",
    params=[("query", "regular", "snapkv"), ("kv", "context-only", "snapkv"), ("query", "regular", "adakv")],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def test_both_ends_are_the_traces_bit_for_bit(case: Case) -> None:
    rows, arrays = case.sample.measure(case.ends, case.ends).rows, case.trace.arrays
    for side, row in enumerate(rows):
        assert row.values["drift"] == tuple(arrays["hidden_drift_l1"][0, side, :, -1].tolist())
        assert row.values["final_drift"] == tuple(arrays["final_drift_l1"][0, side].tolist())
        assert row.values["kl"] == tuple(arrays["logit_kl"][0, side].tolist())
        assert row.heads == arrays["perturbation_propagated"][0, side].tolist()
        assert row.held == pytest.approx(float(arrays["held_share"][0, side]))
    assert rows[0].values["drift"] != rows[1].values["drift"]


@pytest.mark.parametrize(
    "configs",
    [
        pk.grid(14, selection=("attention", "two-stage"), window=5, granularity="kv", precision="quantise(bits=8)"),
        tuple(
            pk.grid(14, policy=f"streaming-llm(sinks={sinks}, positions=in-cache)", selection="position", window=5)[0]
            for sinks in (2, 4)
        ),
    ],
    ids=["few bits", "positions in the cache"],
)
def test_sides_that_store_or_place_their_entries_otherwise_are_the_traces_too(
    configs: tuple[EvictionConfig, ...],
) -> None:
    adapter = exact_adapter("llama", 4, 2, layers=LAYERS, d_head=32)
    run = RunConfig("m", "d", configs, samples=1)
    arrays = trace_sample(adapter, PROMPTS[0], run).arrays
    sample = MixtureSample(adapter, PROMPTS[0], ResolvedRun.from_run(run), Resources(), ROWS)
    ends = [Mixture.of_layers(LAYERS, sample.kept_heads, range(side * LAYERS)) for side in (0, 1)]
    rows = sample.measure(ends).rows
    for side, row in enumerate(rows):
        assert row.values["drift"] == tuple(arrays["hidden_drift_l1"][side, :, -1].tolist())
        assert row.values["kl"] == tuple(arrays["logit_kl"][side].tolist())
    assert rows[0].values["kl"] != rows[1].values["kl"]


def mixed(case: Case) -> list[Mixture]:
    """Layers and single heads of both sides, drawn."""
    drawn = np.random.default_rng(5)
    heads = case.sample.kept_heads
    layers = [Mixture.of_layers(LAYERS, heads, set(places)) for places in ([0], [1, 3], [2])]
    cells = drawn.random((2, LAYERS, heads)) < 0.5
    return [*layers, *(Mixture(tuple(map(tuple, one.tolist()))) for one in cells)]


def test_a_mixture_is_what_the_oracle_decodes_from_mixed_masks(case: Case) -> None:
    mixtures = mixed(case)
    for mixture, row in zip(mixtures, case.sample.measure(mixtures, mixtures).rows, strict=True):
        masks = case.masks(mixture)
        n = masks[0].shape[1]
        full, evicted = Decoder(case.adapter.model), Decoder(case.adapter.model)
        for token in PROMPTS[0].token_ids:
            full.step(token)
        for token in PROMPTS[0].token_ids[:n]:
            evicted.step(token)
        kept = sum(int(mask.sum()) for mask in masks) / (case.adapter.heads // case.sample.kept_heads)
        assert row.held == pytest.approx(kept / (LAYERS * case.adapter.kv_heads * n))
        tokens = (*PROMPTS[0].token_ids[n:], *case.trace.arrays["token_id"][0].tolist())
        for later, token in enumerate(tokens):
            seen = [np.pad(mask, ((0, 0), (0, later)), constant_values=True) for mask in masks]
            found = evicted.step(token, seen)
            step = later - (LENGTH - n)
            if step >= 0:
                check_step(case, row, step, full.step(token), found)


def check_step(case: Case, row: PatchingRow, step: int, full: object, found: object) -> None:
    """One step's drift, KL and heads against what the oracle decoded."""
    drift = theory.l1(full.hidden[-1] - found.hidden[-1])  # type: ignore[attr-defined]
    assert row.values["drift"][step] == pytest.approx(drift, rel=1e-6)
    assert row.values["final_drift"][step] == pytest.approx(theory.l1(full.final - found.final), rel=1e-6)  # type: ignore[attr-defined]
    assert row.values["kl"][step] == pytest.approx(theory.kl(full.logits, found.logits), rel=1e-5)  # type: ignore[attr-defined]
    total = 0.0
    for layer in range(LAYERS):
        w_o = case.adapter.output_projection(layer).double().numpy()
        for head in range(case.adapter.heads):
            own = theory.head_slice(w_o, head, case.adapter.d_value)
            moved = theory.l1((full.head_output[layer][head] - found.head_output[layer][head]) @ own)  # type: ignore[attr-defined]
            assert row.heads is not None
            assert row.heads[step][layer][head] == pytest.approx(moved, rel=1e-6, abs=1e-12)
            total += moved
    assert row.values["propagated"][step] == pytest.approx(total, rel=1e-6)


def test_which_mixtures_share_a_batch_makes_no_difference(case: Case) -> None:
    mixtures = mixed(case)
    together = case.sample.measure(mixtures).rows
    for mixture, row in zip(mixtures, together, strict=True):
        (alone,) = case.sample.measure([mixture]).rows
        np.testing.assert_allclose(alone.values["drift"], row.values["drift"], rtol=1e-10)
        assert alone.heads is None


def small() -> Adapter:
    return tiny_adapter("llama", 4, 2, layers=LAYERS)


def drifts(path: Path) -> dict[tuple[str, str], float]:
    """Of each prompt and mixture, read from the file's lines."""
    lines = [json.loads(text) for text in path.read_text().splitlines()[1:]]
    return {(one["sample"], row["mixture"]): row["values"]["drift"][0] for one in lines for row in one["rows"]}


def test_exact_values_are_those_of_all_orders_and_drawn_ones_lie_around_them(tmp_path: Path) -> None:
    """Every subset's drift is read from the file, and the definition is a loop over all orders."""
    configs, path = sides("query"), tmp_path / "swap.jsonl"
    exact = pk.patching(
        small(), PROMPTS, *configs, question=pk.PatchingConfig(exact=True, greedy=0), path=path, progress=False
    ).shapley
    found, ids = drifts(path), [prompt.sample_id for prompt in PROMPTS]
    assert len(found) == 2**LAYERS * len(PROMPTS)

    def value(treated: Sequence[int]) -> np.ndarray:
        text = "".join("t" if layer in treated else "b" for layer in range(LAYERS))
        return np.array([found[name, text] for name in ids])

    naive = np.zeros((LAYERS, len(PROMPTS)))
    for order in itertools.permutations(range(LAYERS)):
        for place, player in enumerate(order):
            naive[player] += (value(order[: place + 1]) - value(order[:place])) / factorial(LAYERS)
    assert exact is not None
    np.testing.assert_allclose(exact.per_sample, naive, rtol=1e-9, atol=1e-9 * value(()).max())
    share = naive.sum(axis=1) / value(()).sum()
    np.testing.assert_allclose(exact.value, share, rtol=1e-9, atol=1e-12)
    inside, before = [], path.read_bytes()
    for seed in range(12):
        drawn = pk.patching(
            small(),
            PROMPTS,
            *configs,
            question=pk.PatchingConfig(permutations=32, greedy=0, seed=seed),
            path=path,
            progress=False,
        )
        assert drawn.shapley is not None
        inside += (np.abs(drawn.shapley.value - share) <= drawn.shapley.sampling + 1e-12).tolist()
        assert drawn.shapley.value.sum() == pytest.approx(share.sum())
    assert np.mean(inside) >= 0.8
    assert path.read_bytes() == before  # no mixture is measured twice, whoever asks for it


@pytest.mark.slow
def test_without_a_file_the_values_are_the_same_and_seeds_give_them_again(tmp_path: Path) -> None:
    def found(seed: int, path: Path | None = None) -> dict[str, Any]:
        question = pk.PatchingConfig(permutations=8, greedy=2, seed=seed)
        return pk.patching(small(), PROMPTS, *sides("kv"), question=question, path=path, progress=False).to_dict()

    first = found(3)
    assert first == found(3, tmp_path / "swap.jsonl")
    other = found(4)
    assert other["named"] == first["named"] and other["shapley"] != first["shapley"]


class Killed(BaseException):
    """What nobody catches."""


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 5, 14])
def test_a_call_that_was_killed_goes_on_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    question = pk.PatchingConfig(permutations=8, greedy=3, treatment_in=[[0]])
    asked: dict[str, Any] = {"question": question, "progress": False}
    monkeypatch.setattr(swapping, "MOST_ROWS", 3)
    undisturbed = pk.patching(small(), PROMPTS, *sides("query"), path=tmp_path / "one.jsonl", **asked)
    path, keep, left = tmp_path / "two.jsonl", PatchingStore.add, [batches]

    def dying(store: PatchingStore, *told: Any) -> None:
        if left[0] == 0:
            with path.open("a") as stream:
                stream.write('{"sample": "s1", "rows": [{"mix')  # what a killed process was writing
            raise Killed
        left[0] -= 1
        keep(store, *told)

    with monkeypatch.context() as patched:
        patched.setattr(PatchingStore, "add", dying)
        with pytest.raises(Killed):
            pk.patching(small(), PROMPTS, *sides("query"), path=path, **asked)
    again = pk.patching(small(), PROMPTS, *sides("query"), path=path, **asked)
    assert again.to_dict() == undisturbed.to_dict()
    assert path.read_bytes().splitlines()[1:] == (tmp_path / "one.jsonl").read_bytes().splitlines()[1:]


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "swap.jsonl"
    asked: dict[str, Any] = {"question": pk.PatchingConfig(permutations=0, greedy=0), "progress": False}
    pk.patching(small(), PROMPTS, *sides("query"), path=path, **asked)
    before = path.read_bytes()
    for prompts, configs in ((PROMPTS[:2], sides("query")), (PROMPTS, sides("kv"))):
        with pytest.raises(ConfigError, match=r"swap.jsonl, got one of .* another run; give --overwrite or another"):
            pk.patching(small(), prompts, *configs, path=path, **asked)
    assert path.read_bytes() == before
    pk.patching(small(), PROMPTS[:2], *sides("query"), path=path, overwrite=True, **asked)
    assert path.read_bytes() != before


def test_answers_are_those_of_generate() -> None:
    adapter, configs = small(), sides("kv")
    prompts = [Prompt("s", token_ids(LENGTH, seed=1), 0, answers=("a b",), question_tokens=QUESTION)]
    trace: Trace = pk.measure(adapter, prompts, configs, settings=pk.Settings(generate=6), progress=False)
    found = pk.patching(
        adapter,
        prompts,
        *configs,
        settings=pk.Settings(generate=6),
        question=pk.PatchingConfig(outcome="score", treatment_in=[[0]]),
        progress=False,
    )
    assert found.named[0].score == pytest.approx(float(trace.arrays["score"][0, 1]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"treatment": 0}, "expected two different configurations to swap kept sets of"),
        ({"layers": [7]}, "expected layers of 0-3, which are measured, got 7"),
        ({"layers": [1]}, "expected at least 2 layers to tell apart, got 1"),
        ({"outcome": "score"}, "expects answers"),
        ({"greedy": 2, "prompts": 1}, "expects at least 2 samples, one to choose and one to judge, got 1"),
        ({"step": 3}, "expected a step from 0 to 0, got 3; --steps 4 records it"),
    ],
)
def test_what_cannot_be_swapped_is_one_line(change: dict[str, object], said: str) -> None:
    baseline, treatment = sides("query")
    asked = dict(change)
    prompts = PROMPTS[: int(asked.pop("prompts", 2))]  # type: ignore[call-overload]
    if "treatment" in asked:
        treatment, _ = baseline, asked.pop("treatment")
    with pytest.raises(ConfigError, match=said):
        question = pk.PatchingConfig(**asked)  # type: ignore[arg-type]
        once = pk.Settings(steps=1)
        pk.patching(small(), prompts, baseline, treatment, question=question, settings=once, progress=False)


def test_sides_of_two_granularities_and_budgets_that_evict_nothing_are_refused() -> None:
    (first, _), (_, second) = sides("query"), sides("kv")
    with pytest.raises(ConfigError, match="expected the same granularity on both sides"):
        pk.patching(small(), PROMPTS, first, second, progress=False)
    large = pk.grid(99, selection=("attention", "two-stage"), window=5)
    with pytest.raises(ConfigError, match="budget below the 36 tokens .*, got 99: nothing is evicted"):
        pk.patching(small(), PROMPTS, *large, progress=False)


def test_sides_of_layers_are_not_swapped_by_head() -> None:
    for granularity in ("layer", "model"):
        with pytest.raises(ConfigError, match=f"granularity '{granularity}' keeps one for all of them"):
            pk.patching(small(), PROMPTS, *sides(granularity), question=pk.PatchingConfig(by="heads"), progress=False)
