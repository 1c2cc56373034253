"""`ablation --methods`: makes methods and their controls, ranks them, and says what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from perturbkv.storage.trace.trace_file import read_run
from tests.support.asked import refused

Run = Callable[..., Any]


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
