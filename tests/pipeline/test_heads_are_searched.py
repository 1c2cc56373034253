"""Single heads as a search sees them, against a whole trace of the same prompt; and which heads are searched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import BudgetError, ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.optimum.chain import with_known_query, with_references, without_pooling
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
        assert all(kept[view.entries.always].all() for kept in view.kept)


@pytest.mark.slow
def test_no_set_of_a_method_is_below_the_best_and_the_same_call_finds_the_same() -> None:
    model = tiny_adapter("llama", 4, 2)
    prompts = [replace(PROMPT, sample_id=name, token_ids=token_ids(90, seed=seed)) for seed, name in enumerate("ab")]
    asked = {"heads": 3, "proven": 2, "seconds": 20.0, "progress": False}
    found = pk.regret(model, prompts, CONFIGS[:2], **asked)
    assert found.to_dict() == pk.regret(model, prompts, CONFIGS[:2], **asked).to_dict()
    for row in found.records():
        assert row["best"] <= row["improved"] * (1 + 1e-12)
        assert row["improved"] <= row["perturbation"] * (1 + 1e-12) or row["part"] == "prefix"
        assert row["lower"] is None or row["lower"] <= row["best"]
    assert [part.part for part in found.parts] == ["prompt", "prefix"]
    assert (found.parts[0].heads, found.parts[1].heads) == (6, 4)
    assert [part.configs[0].budget.value for part in found.parts] == [14, 16]
    heads = {(row["sample"], row["layer"], row["head"]) for row in found.records() if row["part"] == "prompt"}
    other = pk.regret(model, prompts, CONFIGS[:2], **{**asked, "proven": 0}, seed=5)
    assert heads != {(row["sample"], row["layer"], row["head"]) for row in other.records()}


def test_a_prefix_is_the_first_token_and_the_prompts_own_middle() -> None:
    assert list(searching.short_probe(range(101), 5)) == [0, 48, 49, 50, 51]
    assert list(searching.short_probe(range(3), 64)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("asked", "plainly", "known"),
    [
        ("attention", "attention-unpooled", "hindsight-attention"),
        ("two-stage-uniform", "attention-unpooled", "hindsight-attention"),
        ("two-stage", "two-stage(alpha=0)", "hindsight"),
        ("two-stage(alpha=0.5, norm=l2)", "two-stage(alpha=0, norm=l2)", "hindsight(norm=l2)"),
        ("hindsight", "hindsight", "hindsight"),
        ("random", None, None),
        ("value", None, None),
    ],
)
def test_a_chain_changes_one_thing_at_a_time(asked: str, plainly: str | None, known: str | None) -> None:
    (config,) = pk.grid(32, selection=asked, window=4, protect_first=3)
    for found, told in ((without_pooling(config), plainly), (with_known_query(config), known)):
        assert found == (None if told is None else pk.grid(32, selection=told, window=4, protect_first=3)[0])


def test_a_score_that_estimates_no_attention_has_no_chain() -> None:
    for policy in ("knorm", "expected-attention", "h2o"):
        (config,) = pk.grid(32, policy=policy, selection="attention", window=4)
        assert without_pooling(config) is None and with_known_query(config) is None


def test_references_stand_behind_the_methods_of_their_budget() -> None:
    found = with_references(pk.grid([32, 64], selection=["two-stage", "attention"], window=4))
    told = [(config.budget.value, str(config.selection)) for config in found]
    names = ["two-stage", "attention", "two-stage(alpha=0.0)", "attention-unpooled", "hindsight", "hindsight-attention"]
    assert told == [(budget, name) for budget in (32, 64) for name in names]


def test_what_all_methods_protect_is_kept_by_the_best_set_too() -> None:
    model = tiny_adapter("llama", 4, 2)
    prompt = replace(PROMPT, token_ids=token_ids(90, seed=3))
    configs = pk.grid(20, window=5, selection=["attention", "two-stage"], protect_first=4, protect_recent=8)
    found = pk.regret(model, prompt, configs, heads=8, proven=0, progress=False)
    always = {0, 1, 2, 3, *range(82, 91)}
    rows = [row for sample in found.parts[0].rows for row in sample]
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
        searching.check([config], SearchSettings())


def test_searches_that_cannot_be_are_refused() -> None:
    for wrong in ({"heads": 0, "proven": 0}, {"heads": -1}, {"seconds": 0.0}, {"seconds": float("nan")}):
        with pytest.raises(ConfigError):
            SearchSettings(**wrong)
    with pytest.raises(BudgetError, match="window < budget < tokens"):
        SearchSettings(prefix=16)
    with pytest.raises(ConfigError, match="one window"):
        searching.check([EvictionConfig(14, window=5), EvictionConfig(14, window=4)], SearchSettings())
    ends = [EvictionConfig(64, window=5, protect_first=20)]
    with pytest.raises(BudgetError, match="proven=0"):
        searching.check(ends, SearchSettings())
    searching.check(ends, SearchSettings(proven=0))
