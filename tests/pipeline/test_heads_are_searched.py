"""Single heads as a search sees them, against a whole trace of the same prompt; and which heads are searched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import BudgetError, ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.run import searching
from perturbkv.pipeline.run.searching import SearchSettings, head_views
from perturbkv.pipeline.sample.sample_run import SampleRun
from perturbkv.selection.resolved_config import ResolvedRun
from tests.support.models import exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import trace_sample

LENGTH, QUESTION = 40, 6
CONFIGS = pk.grid(14, window=5, selection=["attention", "two-stage", "random", "hindsight-attention", "hindsight"])
PROMPT = Prompt("s", token_ids(LENGTH, seed=1), 0, question_tokens=QUESTION)


def every_head(adapter: Adapter) -> list[tuple[int, int]]:
    return [(layer, head) for layer in range(len(adapter.layers)) for head in range(adapter.heads)]


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
def test_a_heads_sets_perturb_as_its_trace_says(family: str, scenario: str) -> None:
    adapter = exact_adapter(family, 4, 2)
    run = RunConfig("m", "d", CONFIGS, scenario=scenario)
    measured = trace_sample(adapter, PROMPT, run).arrays["perturbation_isolated"][:, 0]
    parts = PROMPT.parts(scenario)
    sample = SampleRun.read(adapter, PROMPT, ResolvedRun.from_run(run), Resources(), rows=1)
    views = list(head_views(sample, every_head(adapter)))
    assert [(view.layer, view.head) for view in views] == every_head(adapter)
    for view in views:
        found = [view.entries.perturbation(kept) for kept in view.kept]
        np.testing.assert_allclose(found, measured[:, view.layer, view.head], rtol=1e-6, atol=1e-9)
        assert {int(kept.sum()) for kept in view.kept} == {14 + LENGTH - len(parts[0]) + 1}
        assert all(kept[view.entries.always_kept].all() for kept in view.kept)


@pytest.mark.slow
def test_no_set_of_a_method_is_below_the_best_and_the_same_call_finds_the_same() -> None:
    model = tiny_adapter("llama", 4, 2)
    prompts = [replace(PROMPT, sample_id=name, token_ids=token_ids(90, seed=seed)) for seed, name in enumerate("ab")]
    asked = {"heads": 3, "proven": 2, "seconds": 20.0, "progress": False}
    found = pk.search_kept_sets(model, prompts, CONFIGS, **asked)
    assert found.rows == pk.search_kept_sets(model, prompts, CONFIGS, **asked).rows
    every = [(row["sample"], head) for row in found.rows for head in row["heads"]]
    for _, head in every:
        assert head["best"] <= head["improved"] * (1 + 1e-12)
        assert head["part"] == "prefix" or head["improved"] <= min(head["perturbation"]) * (1 + 1e-12)
        assert head["lower"] is None or head["lower"] <= head["best"]
    assert [head["part"] for _, head in every[:5]] == ["prompt"] * 3 + ["prefix"] * 2
    assert {(head["part"], head["budget"]) for _, head in every} == {("prompt", "14"), ("prefix", "16")}
    heads = {(sample, head["layer"], head["head"]) for sample, head in every if head["part"] == "prompt"}
    other = pk.search_kept_sets(model, prompts, CONFIGS, **{**asked, "proven": 0}, seed=5)
    assert heads != {(row["sample"], head["layer"], head["head"]) for row in other.rows for head in row["heads"]}


@pytest.mark.slow
def test_killed_searches_go_on_and_others_are_refused(tmp_path: Path) -> None:
    model, path = tiny_adapter("llama", 4, 2), tmp_path / "searches.jsonl"
    prompts = [replace(PROMPT, sample_id=name, token_ids=token_ids(90, seed=seed)) for seed, name in enumerate("ab")]
    asked = {"heads": 2, "proven": 0, "path": path, "progress": False}
    whole = pk.search_kept_sets(model, prompts, CONFIGS, **asked)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:20])
    again = pk.search_kept_sets(model, prompts, CONFIGS, **asked)
    assert json.dumps(again.rows) == json.dumps(whole.rows)
    assert path.read_text() == "".join(lines)
    with pytest.raises(ConfigError, match="--overwrite"):
        pk.search_kept_sets(model, prompts, CONFIGS, **{**asked, "heads": 1})
    assert len(pk.search_kept_sets(model, prompts, CONFIGS, **{**asked, "heads": 1}, overwrite=True).rows) == 2


def test_a_prefix_is_the_first_token_and_the_prompts_own_middle() -> None:
    assert list(searching.short_probe(range(101), 5)) == [0, 48, 49, 50, 51]
    assert list(searching.short_probe(range(3), 64)) == [0, 1, 2]


def test_what_all_methods_protect_is_kept_by_the_best_set_too() -> None:
    model = tiny_adapter("llama", 4, 2)
    prompt = replace(PROMPT, token_ids=token_ids(90, seed=3))
    configs = pk.grid(20, window=5, selection=["attention", "two-stage"], protect_first=4, protect_recent=8)
    found = pk.search_kept_sets(model, prompt, configs, heads=8, proven=0, progress=False)
    always = {0, 1, 2, 3, *range(82, 91)}
    rows = [row for sample in found.rows for row in sample["heads"]]
    assert len(rows) == 8 and all(always <= set(row["positions"]) for row in rows)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (EvictionConfig(14, "adakv", window=5), "policy adakv, whose budgets are by head"),
        (EvictionConfig(14, "pyramidkv", window=5), "policy pyramidkv, whose budgets are by layer"),
        (EvictionConfig(14, window=5, granularity="kv"), "granularity kv"),
        (EvictionConfig(40, window=5, granularity="query(block=16)"), "granularity query(block=16)"),
        (EvictionConfig(14, window=5, precision="quantise(bits=4)"), "precision quantise(bits=4)"),
        (EvictionConfig(14, window=5, correction="corrected"), "correction corrected"),
    ],
)
def test_sets_that_cannot_be_compared_are_refused(config: EvictionConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("(", r"\(").replace(")", r"\)")):
        searching.check_search([config], SearchSettings())


def test_searches_that_cannot_be_are_refused() -> None:
    for wrong in ({"heads": 0, "proven": 0}, {"heads": -1}, {"seconds": 0.0}, {"seconds": float("nan")}):
        with pytest.raises(ConfigError):
            SearchSettings(**wrong)
    with pytest.raises(BudgetError, match="window < budget < tokens"):
        SearchSettings(prefix=16)
    with pytest.raises(ConfigError, match="one window"):
        searching.check_search([EvictionConfig(14, window=5), EvictionConfig(14, window=4)], SearchSettings())
    ends = [EvictionConfig(64, window=5, protect_first=20)]
    with pytest.raises(BudgetError, match="proven=0"):
        searching.check_search(ends, SearchSettings())
    searching.check_search(ends, SearchSettings(proven=0))
