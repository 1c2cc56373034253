"""Without a trace each question makes the one that it needs, and asked of that trace it gives the same answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.storage.trace.trace_file import read_run
from tests.support.asked import instead, refused

Run = Callable[..., Any]
NEEDLES = ["--samples", 4, "--lengths", "300,340", "--depths", "0,1", "--haystack", "noise", "--max-new-tokens", 4]
SHARES = (0.05, 0.1, 0.2, 0.4)
QUESTIONS: dict[str, tuple[tuple[float, ...], int, set[str]]] = {
    "heads": ((24,), 2, {"heads"}),
    "heads --compare attention,two-stage,random": ((24, 0.5), 6, {"heads-attention-two-stage-random"}),
    "heads --compare streaming-llm,snapkv:two-stage": ((24,), 2, {"heads"}),
    "heads --distance effect": ((24,), 2, {"heads-effect"}),
    "layers --per-sample": ((24,), 2, {"layers", "layers-samples"}),
    "layers --budgets": (SHARES, 8, {"layers", "layers-budgets"}),
    "assumption --step 1": ((24, 60), 2, {"assumption"}),
    "bound-tightness --step 1": ((24, 60), 14, {"bound-tightness", "bound-tightness-heads"}),
    "ablation": ((24,), 27, {"ablation"}),
    "ablation --restrictions": ((80,), 20, {"ablation-restrictions"}),
    "ablation --bytes": ((24,), 5, {"ablation-bytes"}),
    "ablation --methods tova,h2o": ((24,), 6, {"ablation-methods", "ablation-methods-budgets"}),
    "horizon": ((24,), 2, {"horizon", "horizon-heads", "horizon-steps"}),
    "tokens --layer 1 --head 2": ((24,), 2, {"tokens"}),
    "needle": ((40,), 6, {"needle", "needle-digits", "needle-depths", "needle-correlation"}),
    "correlation": ((40, 60), 12, {"correlation"}),
    "budget --max-kl 1000": (SHARES, 8, {"budget"}),
    "budget --cliff": (SHARES, 16, {"budget-cliff"}),
}
"""Question -> the run's budgets, its number of configurations, the figures."""
UNBOUNDED = "budget --max-kl 1000"
"""Two samples have no bound, so that it exits with 2."""


def answer(ran: Any) -> dict[str, Any]:
    """The document without what says how it was asked for."""
    return {key: value for key, value in ran.json().items() if key not in ("asked", "figures")}


@pytest.mark.parametrize(
    "question", [one if one == "horizon" else pytest.param(one, marks=pytest.mark.slow) for one in QUESTIONS]
)
def test_a_question_makes_its_trace_and_answers_the_same_from_it(
    perturbkv: Run, model: Path, data: Path, question: str
) -> None:
    budgets, configs, figures = QUESTIONS[question]
    words = question.split()
    prompts = NEEDLES if words[0] in ("needle", "correlation") else ["--dataset", data, "--samples", 2]
    window = [] if "--cliff" in words else ["--window", 8]
    steps = ["--steps", 3] if {"--step", "horizon"} & {*words} else []
    run = ["--model", model, *prompts, *window, *steps, *(part for one in budgets for part in ("--budget", one))]
    ran = perturbkv(*words, *run, "-o", "out", "--format", "png", "--json")
    assert ran.code == (2 if question == UNBOUNDED else 0), ran.err
    left = {path.name for path in Path("out").iterdir()}
    assert left == {"trace.h5", "summary.json", *(f"{name}.png" for name in figures)}
    assert len(read_run(Path("out/trace.h5")).configs) == configs
    again = perturbkv(*words, "out/trace.h5", "-o", "again", "--format", "png", "--json")
    assert (again.code, answer(again)) == (ran.code, answer(ran)), again.err


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


def test_a_dry_run_of_an_analysis_runs_nothing(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    told = perturbkv("ablation", *tiny, "--dry-run", "--json").json()
    assert len(told["kept"]) == 27
    assert {(one["config"]["budget"], one["entries"]) for one in told["kept"]} == {(24, 24)}
    assert list(tmp_path.iterdir()) == []


def test_equal_bytes_take_few_bits_beside_every_policy_and_of_nobodys_own_cache(
    perturbkv: Run, tiny: list[object]
) -> None:
    Path("mine.py").write_text("def halved(model, input_ids, attention_mask):\n    return None\n")
    policies = ["--policy", "streaming-llm", "--policy", "cache:mine.py:halved"]
    told = perturbkv("ablation", "--bytes", *tiny, *policies, "--precision", "quantise(bits=2)", "--dry-run", "--json")
    chosen = {(one["config"]["policy"], one["config"].get("precision", "full"), one["config"]["budget"])
              for one in told.json()["kept"]}  # fmt: skip
    assert chosen == {
        ("streaming-llm", "full", 24), ("streaming-llm", "quantise(bits=2)", 24), ("cache:mine.py:halved", "full", 24),
        ("snapkv", "quantise(bits=2)", 1.0),
    }  # fmt: skip
    refused(perturbkv("ablation", "--bytes", *tiny, "--precision", "full", "--dry-run"), "give several budgets")


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
