"""Runs of traces whose writer knew fewer options, against what they meant; other entries are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError
from perturbkv.selection.grid import configuration


def test_a_run_of_before_the_option_looked_at_l1_norms() -> None:
    for selection in ("two-stage(alpha=0.5)", "value", "hindsight", "attention"):
        run = RunConfig("m", "d", (configuration(64, selection=selection),))
        document = json.loads(run.to_json())
        known = document["configs"][0]["selection_options"].pop("norm", None)
        assert (known == "l1") is (selection != "attention")
        found = RunConfig.from_json(json.dumps(document))
        assert found == run
        assert (found.labels(), found.configs[0].flat()) == (run.labels(), run.configs[0].flat())


def test_a_configuration_whose_options_are_nobodys_is_refused() -> None:
    document = json.loads(RunConfig("m", "d", (configuration(64),)).to_json())
    flat: dict[str, Any] = {"budget": 64, "policy": "snapkv", "selection": "two-stage", "window": 8, "alpha": 0.25,
                            "pool": "max", "kernel": 7, "granularity": "query"}  # fmt: skip
    with pytest.raises(ConfigError, match="expected a run configuration as JSON, got one without 'policy_options'"):
        RunConfig.from_json(json.dumps({**document, "configs": [flat]}))
