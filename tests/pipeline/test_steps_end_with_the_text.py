"""METHOD, protocol 8: decode steps stop at the end of the full run's text, and nothing is measured after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample import one_sample
from perturbkv.pipeline.sample.decoding import count_text_steps
from perturbkv.schema import VARIABLES
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace import export
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import SampleTrace
from tests.pipeline.test_a_sweep_shares_one_prefill import Waiting
from tests.support.models import exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import trace_sample

STEPS = 6
TEXT_LOG_P = ("text_logp", "text_logp_full")
PROMPT = Prompt("s", token_ids(40, seed=3), 0, question_tokens=6)
CONFIGS = tuple(
    EvictionConfig(budget=Budget(budget), window=6, granularity=granularity)
    for budget, granularity in ((12, "query"), (20, "kv"), (1.0, "kv"))
)


def run(**fields: Any) -> RunConfig:
    return RunConfig("m", "d", CONFIGS, **{"steps": STEPS, "save": ("outputs",), **fields})


def ending(token: int | None) -> Adapter:
    """A model whose text ends at a token; at none where it is None."""
    adapter = exact_adapter("llama", 4, 2)
    adapter.tokenizer.eos_token_id = None
    adapter.model.generation_config.eos_token_id = token
    return adapter


def free_text(scenario: str) -> list[int]:
    """What is decoded where nothing ends."""
    return [int(token) for token in trace_sample(ending(None), PROMPT, run(scenario=scenario)).arrays["token_id"]]


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
@pytest.mark.parametrize("place", [0, 1, 3, STEPS - 1])
def test_nothing_is_measured_from_the_end_token_on(scenario: str, place: int) -> None:
    """What is measured before is what it would be without an end; behind stands NaN, token -1, other integers 0."""
    tokens = free_text(scenario)
    end = tokens[place]
    measured = max(1, tokens.index(end))
    whole = trace_sample(ending(None), PROMPT, run(scenario=scenario)).arrays
    found = trace_sample(ending(end), PROMPT, run(scenario=scenario)).arrays
    assert int(found["steps_measured"]) == measured
    assert int(whole["steps_measured"]) == STEPS
    assert found["token_id"].tolist() == tokens[:measured] + [-1] * (STEPS - measured)
    following = tokens[1 : tokens.index(end) + 1]
    assert found["next_token_id"].tolist() == following + [-1] * (STEPS - len(following))
    assert found.keys() == whole.keys()
    for name, array in found.items():
        dims = VARIABLES[name].dims
        if "step" not in dims or name in ("token_id", "next_token_id"):
            continue
        by_step, expected = (np.moveaxis(kind[name], dims.index("step"), 0) for kind in (found, whole))
        assert len(by_step) == STEPS
        assert array.dtype == np.dtype(VARIABLES[name].dtype)
        before = expected[:measured]
        if name == "attention_full":
            before = before[..., : by_step.shape[-1]]
        if name in TEXT_LOG_P and not following:  # the first token ends the text
            before = np.full_like(before, np.nan)
        np.testing.assert_allclose(by_step[:measured], before, rtol=1e-4, atol=1e-5)
        past = by_step[measured:]
        assert np.isnan(past).all() if array.dtype.kind == "f" else (past == 0).all()


def test_a_first_token_that_ends_the_text_is_measured_all_the_same() -> None:
    first = free_text("regular")[0]
    arrays = trace_sample(ending(first), PROMPT, run(steps=1)).arrays
    assert arrays["token_id"].tolist() == [first]
    assert int(arrays["steps_measured"]) == 1
    assert all(np.isnan(arrays[name]).all() for name in TEXT_LOG_P)  # no token follows
    others = {"lost_output", *TEXT_LOG_P}
    numbers = [array for name, array in arrays.items() if array.dtype.kind == "f" and name not in others]
    assert not any(np.isnan(array).any() for array in numbers)  # fewer than ten entries may have gone


def test_evicted_runs_decode_the_measured_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = free_text("regular")
    decoded: list[int] = []
    original = one_sample.decode_evicted

    def watched(adapter: Any, cache: Any, question: Any, given: torch.Tensor, *more: Any) -> Any:
        decoded.extend(given.tolist())
        return original(adapter, cache, question, given, *more)

    monkeypatch.setattr(one_sample, "decode_evicted", watched)
    end = next(token for token in tokens[1:] if token != tokens[0])
    trace_sample(ending(end), PROMPT, run())
    assert decoded == tokens[: tokens.index(end)]


def test_one_step_waits_for_nothing_and_several_once() -> None:
    for steps, waits in ((1, 0), (5, 1)):
        with Waiting() as mode:
            assert count_text_steps(torch.arange(steps), {3}) == min(steps, 3)
        assert len(mode.seen) <= waits


@pytest.mark.slow
def test_several_samples_may_end_at_several_steps(tmp_path: Path) -> None:
    """Such samples go through file, memory and export: a step past the end has no rows, every other has all."""
    names = ["ends", "goes-on"]
    tokens = free_text("regular")
    end = next(token for token in tokens[1:] if token != tokens[0])
    measured = tokens.index(end)
    samples = [
        SampleTrace(name, trace_sample(ending(token), PROMPT, run(samples=2)).arrays)
        for name, token in zip(names, (end, None), strict=True)
    ]
    writer = TraceWriter(tmp_path / "t.h5", run(samples=2), names, {})
    for sample in samples:
        writer.append(sample)
    trace = read_trace(writer.finish())
    assert trace.measured.tolist() == [[step < measured for step in range(STEPS)], [True] * STEPS]
    for place, sample in enumerate(samples):
        for name, array in sample.arrays.items():
            if not name.startswith("kept_") and name != "attention_full":
                np.testing.assert_array_equal(trace.arrays[name][place], array)
    assert export.write(trace, tmp_path / "t.parquet") == (measured + STEPS) * len(CONFIGS) * 2 * 4
    table = pyarrow.parquet.read_table(tmp_path / "t.parquet")
    of_first = table.filter(pyarrow.compute.equal(table["sample"], "ends"))
    assert set(of_first["step"].to_pylist()) == set(range(measured))
    assert not np.isnan(table["perturbation_propagated"].to_numpy()).any()
    where = {"config": CONFIGS[1].label(), "step": measured - 1, "layer": 1, "head": 2}
    (row,) = [row for row in of_first.to_pylist() if {name: row[name] for name in where} == where]
    assert row["perturbation_isolated"] == samples[0].arrays["perturbation_isolated"][1, measured - 1, 1, 2]
    assert row["token_id"] == tokens[measured - 1]
    assert row["steps_measured"] == measured


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_the_held_share_counts_entries_of_the_models_own_cache(scenario: str) -> None:
    """Budgets 12, 20 and all of n: a set per query head holds twice what one per key/value head would (g = 2)."""
    arrays = trace_sample(ending(None), PROMPT, run(scenario=scenario, steps=1)).arrays
    n = int(arrays["prompt_tokens"])
    assert arrays["held_share"].tolist() == pytest.approx([2 * 12 / n, 20 / n, 1])


def test_a_budget_of_two_fifths_of_the_entries_holds_more_than_the_grouped_cache() -> None:
    """METHOD, protocol 5: b = 0.4 n with a set per query head and g = 3 holds 1.20 of the cache."""
    adapter = tiny_adapter("llama", 6, 2)
    configs = tuple(
        EvictionConfig(budget=Budget(0.4), window=6, granularity=granularity, policy=policy)
        for granularity in ("query", "kv")
        for policy in ("snapkv", "adakv")
    )
    arrays = trace_sample(adapter, Prompt("s", token_ids(50), 0), RunConfig("m", "d", configs)).arrays
    assert arrays["held_share"].tolist() == pytest.approx([1.2, 1.2, 0.4, 0.4])
    positions = arrays["kept_count"][0].sum() / (2 * 2 * 50)
    assert arrays["held_share"][0] == pytest.approx(positions)
