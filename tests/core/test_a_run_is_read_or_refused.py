"""A run's JSON is the run that wrote it, or a ConfigError in one line: nothing else comes out of a file's text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from perturbkv.configs.run import RunConfig
from perturbkv.errors import PerturbkvError
from perturbkv.selection.grid import configuration

RUN = RunConfig("m", "d", (configuration(64, selection="two-stage(alpha=0.5)"),), save=("outputs",), max_tokens=900)


def nested(depth: int) -> Any:
    deep: Any = {"choice": "a", "options": {}}
    for _ in range(depth):
        deep = {"choice": "a", "options": {"b": deep}}
    return deep


def test_a_run_reads_what_it_wrote() -> None:
    assert RunConfig.from_json(RUN.to_json()) == RUN


OTHERS: dict[type, list[Any]] = {
    str: [None, 7, [], {}, True],
    bool: [None, 1, "true"],
    int: [None, 1.5, "8", [], True],
    dict: [None, 7, "x", [1]],
    list: [None, 7, "x", [1], [[None]]],
}
"""A JSON value's kind -> what stands in its place."""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (name, value)
        for name, held in json.loads(RUN.to_json()).items()
        for value in OTHERS[type(held)]
        if (name, value) != ("max_tokens", None)
    ],
    ids=str,
)
def test_an_entry_of_another_kind_is_refused(name: str, value: Any) -> None:
    document = {**json.loads(RUN.to_json()), name: value}
    with pytest.raises(PerturbkvError) as told:
        RunConfig.from_json(json.dumps(document))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", json.loads(RUN.to_json())["configs"][0])
@pytest.mark.parametrize("value", [None, [], "x y(", float("nan"), True, [[1]], {"alpha": [1]}], ids=str)
def test_an_entry_of_a_configuration_of_another_kind_is_refused(name: str, value: Any) -> None:
    document = json.loads(RUN.to_json())
    document["configs"][0][name] = value
    with pytest.raises(PerturbkvError) as told:
        RunConfig.from_json(json.dumps(document))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "[]", "3", '"run"', "{}", "NaN", "[" * 100_000, '{"configs": [3]}', '{"configs": {"a": 1}}'],
    ids=lambda text: text[:20],
)
def test_what_is_no_run_is_refused(text: str) -> None:
    with pytest.raises(PerturbkvError, match="expected a run configuration as JSON") as told:
        RunConfig.from_json(text)
    assert not re.search("NoneType|object is not|argument", str(told.value))  # Python's own words


@pytest.mark.parametrize("depth", [16, 300])
def test_choices_inside_each_other_without_end_are_refused(depth: int) -> None:
    document = json.loads(RUN.to_json())
    document["configs"][0]["policy_options"] = {"pool": nested(depth)}
    with pytest.raises(PerturbkvError, match="at most 16 choices inside each other"):
        RunConfig.from_json(json.dumps(document))


def test_a_known_option_out_of_its_range_is_refused() -> None:
    document = json.loads(RUN.to_json())
    document["configs"][0]["selection_options"]["alpha"] = 1.5
    with pytest.raises(PerturbkvError, match=r"alpha of selection 'two-stage' must lie in \[0, 1\], got 1.5"):
        RunConfig.from_json(json.dumps(document))
