"""Without a trace each analysis makes the one that it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.storage.trace.trace_file import read_run
from tests.support.asked import instead

Run = Callable[..., Any]


@pytest.fixture
def unbudgeted(tiny: list[object]) -> list[object]:
    """The tiny run without its budget: prompts of 182 tokens, window 8."""
    place = tiny.index("--budget")
    return tiny[:place] + tiny[place + 2 :]


@pytest.mark.slow
def test_restrictions_are_measured_beside_single_entries_per_head(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv(
        "ablation", "--restrictions", *instead(tiny, "--budget", 80), "-o", "out", "--json", "--format", "pdf"
    )
    assert ran.code == 0, ran.err
    settings = ran.json()["settings"]
    assert [setting["baseline"]["selection"] for setting in settings] == ["attention", "two-stage"]
    names = ["kv(block=16)", "kv(block=32)", "layer", "layer(block=16)", "layer(block=32)", "head", "model",
             "model(reduce=union)", "query"]  # fmt: skip
    for setting in settings:
        assert [row["name"] for row in setting["rows"]] == names
        held = {row["name"]: row["held_over_full_treatment"] for row in setting["rows"]}
        assert held["layer"] == setting["rows"][0]["held_over_full_baseline"] >= held["kv(block=16)"]
        assert held["layer(block=16)"] == held["kv(block=16)"]
        assert held["head"] == held["model"] == held["model(reduce=union)"] == held["layer"]
    assert Path("out/ablation-restrictions.pdf").exists()


def test_budgets_by_head_are_restricted_to_blocks_alone(perturbkv: Run, tiny: list[object]) -> None:
    asked = [*instead(tiny, "--budget", 80), "--policy", "adakv"]
    told = perturbkv("ablation", "--restrictions", *asked, "--dry-run", "--json").json()
    assert [one["config"]["granularity"] for one in told["kept"][::2]] == [
        "kv",
        "kv(block=16)",
        "kv(block=32)",
        "query",
    ]


@pytest.mark.slow
def test_at_alpha_0_the_uniform_control_is_unpooled_attention(perturbkv: Run, tiny: list[object]) -> None:
    told = perturbkv("ablation", *tiny, "--alpha", 0, "--granularity", "query", "-o", "out", "--json").json()
    rows = {row["name"]: row for row in told["settings"][0]["rows"]}
    uniform, unpooled = (rows[name]["isolated"] for name in ("two-stage-uniform", "attention-unpooled"))
    assert uniform["treatment_mean"] == unpooled["treatment_mean"]


@pytest.mark.slow
def test_budgets_that_nobody_chose_are_left_out_where_they_do_not_fit(perturbkv: Run, unbudgeted: list[object]) -> None:
    ran = perturbkv("layers", *unbudgeted, "--budgets", "-o", "out", "--format", "png")
    assert ran.code == 0, ran.err
    assert {str(config.budget) for config in read_run(Path("out/trace.h5")).configs} == {"0.05", "0.1", "0.2", "0.4"}
