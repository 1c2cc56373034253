"""The public functions on a trace, held against what the commands print of the same trace."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from tests.support.measured import MEASURED

Run = Callable[..., Any]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return Path(shutil.copy(MEASURED, tmp_path / "measured.h5"))


@pytest.mark.parametrize("treatments", [["two-stage"], ["two-stage", "value"]])
def test_heads(perturbkv: Run, measured: Path, treatments: list[str]) -> None:
    trace = pk.read_trace(measured)
    result = pk.compare_heads(trace, "attention", treatments)
    compare = ",".join(["attention", *treatments])
    told = perturbkv("heads", measured, "--compare", compare, "-o", "out", "--json").json()
    assert result.to_dict()["comparisons"] == told["comparisons"]
    assert len(result) == len(told["comparisons"]) > 0


def test_layers_samples_and_budgets(perturbkv: Run, measured: Path) -> None:
    trace, sides = pk.read_trace(measured), ("attention", ["two-stage", "value"])
    options = ["--compare", "attention,two-stage,value", "--per-sample", "--budgets"]
    told = perturbkv("layers", measured, *options, "-o", "out", "--json").json()
    assert pk.layer_drift(trace, *sides).to_dict() == {"drifts": told["drifts"]}
    assert pk.last_layer(trace, *sides).to_dict() == {"per_sample": told["per_sample"]}
    assert pk.budget_curves(trace, *sides).to_dict() == told["budgets"]


def test_the_screen_begins_with_the_conclusion_and_ends_with_notes_that_stand_once(
    perturbkv: Run, measured: Path
) -> None:
    trace = pk.read_trace(measured)
    shown = perturbkv("layers", measured, "--per-sample", "--budgets", "-o", "out").out
    found = [pk.layer_drift(trace), pk.last_layer(trace), pk.budget_curves(trace)]
    words = " ".join(shown.split())
    assert words.startswith(" ".join(" ".join(one.conclusion() for one in found).split()))
    for line in {line for one in found for line in one.notes().splitlines()}:
        assert " ".join(line.split()) in words
    assert all(len(line) <= 80 for line in shown.splitlines())
    title = next(line for line in shown.splitlines() if line.startswith(f"{trace.run.model} · "))
    assert shown.index(title) < shown.index("drift after the last layer")
