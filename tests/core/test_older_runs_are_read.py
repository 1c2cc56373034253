"""Runs of trace formats 1 and 2, whose configurations held every option in one list, against what they meant."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perturbkv.configs.run import RunConfig
from perturbkv.selection.grid import configuration
from perturbkv.selection.policies import registry

OLD: dict[str, Any] = {
    "budget": 64, "policy": "snapkv", "selection": "two-stage", "window": 8, "alpha": 0.25, "split": "prefix",
    "stage2_score": "accumulated", "epsilon": 0.0, "pool": "max", "kernel": 7, "granularity": "query",
    "group_score": "mean", "group_product": "product-of-means", "sinks": 4, "seed": 0, "pyramid_beta": 20.0,
    "pyramid_line": "prefix", "floor": 0.2, "safeguard": "mixture", "head_beta": 1.01, "recent": 0.5, "history": 400,
    "protect_first": 0, "protect_recent": 0, "positions": "kept",
}  # fmt: skip


def read(*entries: dict[str, Any]) -> RunConfig:
    document = {**json.loads(RunConfig("m", "d", (configuration(64),)).to_json())}
    return RunConfig.from_json(json.dumps({**document, "configs": [{**OLD, **entry} for entry in entries]}))


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ({}, {}),
        ({"policy": "adakv", "floor": 0.5, "safeguard": "guaranteed"},
         {"policy": "adakv(floor=0.5, safeguard=guaranteed)"}),
        ({"policy": "pyramidkv", "pyramid_beta": 5.0}, {"policy": "pyramidkv(beta=5)"}),
        ({"policy": "headkv", "head_beta": 2.0, "pyramid_beta": 5.0}, {"policy": "headkv(beta=2)"}),
        ({"policy": "h2o", "pool": "none", "recent": 0.25, "kernel": 5}, {"policy": "h2o(recent=0.25)"}),
        ({"selection": "random", "seed": 3, "pool": "average"}, {"selection": "random(seed=3)"}),
        ({"alpha": 0}, {"selection": "two-stage(alpha=0)"}),
        (
            {"granularity": "kv", "group_product": "mean-of-products", "stage2_score": "pooled", "epsilon": 1e-4},
            {"granularity": "kv(product=mean-of-products)", "selection": "two-stage(score=pooled, epsilon=1e-4)"},
        ),
        ({"selection": "attention", "granularity": "kv", "group_product": "mean-of-products"},
         {"selection": "attention", "granularity": "kv"}),
    ],
)  # fmt: skip
def test_an_old_entry_is_todays_configuration(old: dict[str, Any], now: dict[str, Any]) -> None:
    (found,) = read(old).configs
    expected = configuration(64, window=8, **now)
    assert found == expected
    assert found.label() == expected.label()
    assert {name: type(value) for name, value in found.flat().items()} == {
        name: type(value) for name, value in expected.flat().items()
    }


def test_a_run_of_before_the_option_looked_at_l1_norms() -> None:
    """Of formats that name each choice's own options, too: what such a trace lacks is what it did."""
    for selection in ("two-stage(alpha=0.5)", "value", "hindsight", "attention"):
        run = RunConfig("m", "d", (configuration(64, selection=selection),))
        document = json.loads(run.to_json())
        known = document["configs"][0]["selection_options"].pop("norm", None)
        assert (known == "l1") is (selection != "attention")
        found = RunConfig.from_json(json.dumps(document))
        assert found == run
        assert (found.labels(), found.configs[0].flat()) == (run.labels(), run.configs[0].flat())


def test_two_entries_that_mean_the_same_stay_two_and_are_built_as_one() -> None:
    run = read({}, {"floor": 0.5, "sinks": 2}, {"policy": "pyramidkv"}, {"policy": "pyramidkv", "head_beta": 2.0})
    labels = run.labels()
    assert labels == [
        "snapkv:two-stage b=64 w=8 query",
        "snapkv:two-stage b=64 w=8 query sinks=2 floor=0.5",
        "pyramidkv:two-stage b=64 w=8 query",
        "pyramidkv:two-stage b=64 w=8 query head-beta=2.0",
    ]
    assert [config.flat() for config in run.configs[:2]] == [run.configs[0].flat()] * 2
    assert run.configs[3].policy["beta"] == 20.0, "that of the policy, not headkv's"
    assert RunConfig.from_json(run.to_json()).labels() == labels
    assert registry.build(run.configs[1].policy) == registry.build(run.configs[0].policy)
