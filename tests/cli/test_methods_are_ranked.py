"""`ablation --methods`: makes methods and their controls, ranks them, and says what it lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.storage.trace.trace_file import read_run
from tests.support.asked import instead, refused

Run = Callable[..., Any]


@pytest.mark.slow
def test_methods_are_measured_with_controls_of_the_same_protection(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("ablation", *tiny, "--methods", "tova,h2o", "-o", "out", "--json")
    assert ran.code == 0, ran.err
    asked = {(one.policy.name, one.selection.name, one.window, one.protect_recent)
             for one in read_run(Path("out/trace.h5")).configs}  # fmt: skip
    window = next(one.window for one in read_run(Path("out/trace.h5")).configs if one.policy.name == "h2o")
    for name in ("attention", "random"):
        assert {("snapkv", name, window, 0), ("snapkv", name, window, 0.5)} <= asked
    (setting, *_) = ran.json()["settings"]
    assert {row["name"] for row in setting["rows"]} == {"tova", "h2o"}
    assert Path("out/ablation-methods.png").exists() or Path("out/ablation-methods.svg").exists()
    alone = perturbkv("ablation", "out/trace.h5", "--methods", "h2o", "-o", "alone", "--json").json()
    assert [row["name"] for row in alone["settings"][0]["rows"]] == ["h2o"]
    refused(perturbkv("ablation", "out/trace.h5", "--methods", "h2o,caote", "-o", "absent"), "caote")


@pytest.mark.slow
def test_a_margin_is_kept_and_has_an_effect_on_the_ranking_alone(perturbkv: Run, tiny: list[object]) -> None:
    assert perturbkv("ablation", *tiny, "--methods", "h2o", "-o", "out").code == 0
    document = perturbkv("ablation", "out/trace.h5", "--methods", "h2o", "--margin", 0.1, "-o", "a", "--json").json()
    assert (document["margin"], document["asked"]["margin"]) == (0.1, 0.1)
    verdicts = document["settings"][0]["rows"][0]["controls"]["random"]
    assert verdicts["propagated_verdict"]["verdict"] == "undecided"  # two samples
    assert json.loads(Path("out/summary.json").read_text())["analyses"]["ablation-methods"]["margin"] == 0.05
    refused(perturbkv("ablation", "out/trace.h5", "--margin", 0.1, "-o", "b"), "--margin", "it needs --methods")
    for margin in (0, 1, -1, "nan"):
        ran = perturbkv("ablation", *tiny, "--methods", "h2o", "--margin", margin, "-o", "c")
        refused(ran, "expected --margin between 0 and 1", "0.05 is 5 %")
    assert not Path("c").exists()


def test_a_dry_run_tells_the_smallest_effect(perturbkv: Run, tiny: list[object]) -> None:
    six, four = (instead(tiny, "--samples", samples) for samples in (6, 4))
    asked = ["ablation", *six, "--methods", "h2o", "--dry-run"]
    told = perturbkv(*asked, "--json").json()["smallest_effect"]
    assert (told["samples"], told["margin"]) == (6, 0.05)
    assert told["better_below"] < 1 < told["worse_above"]
    shown = " ".join(perturbkv(*asked).out.split())
    runs = "four of five runs show it where prompts spread by"
    below, above = f"{told['better_below']:.2f}", f"{told['worse_above']:.2f}"
    assert f"smallest effect a sum {below} or {above} times the other's: {runs} 0.3" in shown
    equal = f"{told['equivalent_spread']:.2g} (docs/explanation/statistics.md)"
    assert f"within 5 % equal sums: {runs} at most {equal}" in shown
    plain = perturbkv("heads", *six, "--dry-run")
    assert "smallest effect" in plain.out
    assert "within 5 %" not in plain.out
    assert perturbkv("layers", *six, "--dry-run", "--json").json()["smallest_effect"] is None
    few = perturbkv("heads", *four, "--dry-run")
    assert "none: fewer than 5 samples have no interval" in " ".join(few.out.split())


@pytest.mark.slow
def test_all_says_what_it_leaves_out(perturbkv: Run, tiny: list[object]) -> None:
    roomier = [40 if one == 24 else one for one in tiny]
    ran = perturbkv("ablation", *roomier, "--methods", "all", "--dry-run")
    assert ran.code == 0, ran.err
    assert "granularity: headkv, quest" in " ".join(ran.err.split())
    alone = perturbkv("ablation", *roomier, "--methods", "quest,h2o", "-o", "pages")
    assert alone.code == 0 and "quest: nothing" in alone.out, alone.err
    in_blocks = perturbkv("ablation", *roomier, "--methods", "all", "--granularity", "kv(block=4)", "--dry-run")
    assert in_blocks.code == 0, in_blocks.err
    assert ": defensive, defensive-layer, headkv" in " ".join(in_blocks.err.split())


@pytest.mark.slow
def test_an_ablation_of_ranked_methods_compares_what_shares_a_setting(perturbkv: Run, tiny: list[object]) -> None:
    asked = ("--methods", "tova,h2o,pyramidkv,pyramidkv:two-stage,snapkv:two-stage", "-o", "out")
    assert perturbkv("ablation", *tiny, *asked).code == 0
    document = perturbkv("ablation", "out/trace.h5", "-o", "chain", "--json").json()
    held = {one["baseline"]["policy"]: [row["name"] for row in one["rows"]] for one in document["settings"]}
    assert len(document["settings"]) == 2
    assert held == {"snapkv": ["two-stage", "random"], "pyramidkv": ["two-stage"]}
    said = " ".join(perturbkv("ablation", "out/trace.h5", "-o", "chain").out.split())
    assert "4 configurations" in said
    assert all(policy in said for policy in held)
