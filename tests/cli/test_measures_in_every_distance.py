"""`perturbkv question measures`: it makes its trace, reads a finished one, and refuses nonsense first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.storage.trace.trace_file import read_run, read_trace

Run = Callable[..., Any]
NAMES = [
    "attention",
    "two-stage",
    "two-stage(norm=l2)",
    "attention-unpooled",
    "hindsight",
    "hindsight(norm=l2)",
    "random",
]


@pytest.fixture
def small(tiny: list[object]) -> list[object]:
    """Figures in one format, which is quicker."""
    return [*tiny, "--format", "png"]


@pytest.mark.slow
def test_it_measures_its_own_trace(perturbkv: Run, small: list[object]) -> None:
    ran = perturbkv("question", "measures", *small, "-o", "out", "--json")
    assert ran.code == 0, ran.err
    assert [str(config.selection) for config in read_run(Path("out/trace.h5")).configs] == NAMES
    (setting,) = ran.json()["settings"]
    assert [one["treatment"]["selection"] for one in setting["comparisons"]] == NAMES[1:]
    assert {one["baseline"]["selection"] for one in setting["comparisons"]} == {"attention"}
    assert [(one["baseline"]["selection"], one["treatment"]["selection"]) for one in setting["norms"]] == [
        ("two-stage", "two-stage(norm=l2)"), ("hindsight", "hindsight(norm=l2)"),
    ]  # fmt: skip
    assert {one["target"] for one in setting["links"]} == {"kl"}
    assert Path("out/measures.png").exists()
    shown = perturbkv("question", "measures", "out/trace.h5", "--format", "png", "--json").json()
    assert shown["settings"] == ran.json()["settings"]


@pytest.mark.slow
def test_what_selects_changes_what_is_kept_and_no_bound(perturbkv: Run, small: list[object]) -> None:
    """Each configuration alone keeps what it keeps beside the others, and θ stays in L1."""
    perturbkv("trace", *small[:-2], "--selection", "two-stage", "--selection", "two-stage(norm=l2)", "-o", "both.h5")
    perturbkv("trace", *small[:-2], "--selection", "two-stage(norm=l2)", "-o", "alone.h5")
    both, alone = read_trace(Path("both.h5")), read_trace(Path("alone.h5"))
    np.testing.assert_array_equal(both.arrays["kept_count"][:, 1:], alone.arrays["kept_count"])
    for name in ("theta", "perturbation_isolated"):
        np.testing.assert_allclose(both.arrays[name][:, 1:], alone.arrays[name], rtol=1e-6)
    assert not both.same_kept(0, 1).all()
    assert (both.arrays["theta"] >= both.arrays["perturbation_isolated"] * (1 - 1e-6)).all()


@pytest.mark.slow
def test_others_are_compared_on_request(perturbkv: Run, small: list[object]) -> None:
    ran = perturbkv(
        "question",
        "measures",
        *small,
        "--compare",
        "two-stage,value,value(norm=l2)",
        "--granularity",
        "kv",
        "-o",
        "out",
    )
    assert ran.code == 0, ran.err
    assert "of two-stage" in ran.out and "value(norm=l2)" in ran.out
    asked = ["--compare", "two-stage,value", "--format", "png", "-o", "again", "--json"]
    again = perturbkv("question", "measures", "out/trace.h5", *asked).json()
    shown = pk.measures(pk.read_trace(Path("out/trace.h5")), "two-stage", "value").to_dict()
    assert again["settings"] == shown["settings"]


def test_a_dry_run_tells_the_configurations(perturbkv: Run, small: list[object]) -> None:
    told = perturbkv("question", "measures", *small, "--dry-run", "--json").json()
    assert [one["config"]["selection"] for one in told["kept"]] == NAMES
    asked = ["--compare", "attention,two-stage,two-stage(norm=l1)", "--dry-run", "--json"]
    assert len(perturbkv("question", "measures", *small, *asked).json()["kept"]) == 2, "two that mean the same are one"
