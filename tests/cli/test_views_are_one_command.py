"""Views of one command: each takes its own options, and what it does is summed up under its own name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.asked import instead, refused

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("words", "option", "needs"),
    [
        (["budget", "--bits", "4"], "--bits", "--bytes"),
        (["budget", "--cliff", "--by", "kl"], "--by", "--savings"),
        (["budget", "--savings", "--max-kl", "1"], "--max-kl", "does not go with --savings"),
        (["quality", "--pairwise"], "--pairwise", "--judge"),
        (["quality", "--divergence", "a.jsonl", "--metric", "f1"], "--metric", "does not go with --divergence"),
    ],
)
def test_an_option_of_another_view_is_refused(perturbkv: Run, words: list[str], option: str, needs: str) -> None:
    refused(perturbkv(*words), f"{option} has no effect here", needs, "leave it out")


def test_two_views_at_once_are_refused(perturbkv: Run) -> None:
    refused(perturbkv("budget", "--savings", "--cliff"), "expected one of --savings and --cliff")


def test_views_of_answers_take_one_file_of_answers(perturbkv: Run) -> None:
    refused(perturbkv("quality", "--divergence"), "one file of answers", "got none")
    refused(perturbkv("quality", "generation.jsonl"), "expected traces", "--divergence and --judge")
    ran = perturbkv("quality", "--divergence", "a.jsonl", "--samples", 3)
    refused(ran, "--samples has no effect on quality --divergence")


def test_each_view_keeps_its_own_options_under_its_own_name(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("ablation", "--restrictions", *instead(tiny, "--budget", 0.5), "-o", "out", "--format", "png")
    assert ran.code == 0, ran.err
    found = json.loads(Path("out/summary.json").read_text())["analyses"]
    assert {name: set(one["asked"]) for name, one in found.items()} == {"ablation-restrictions": {"step"}}
    assert Path("out/ablation-restrictions.png").exists()


def test_tokens_measures_its_trace_where_none_is_given(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("tokens", *tiny, "-o", "out", "--layer", 1, "--head", 2, "--json")
    assert ran.code == 0, ran.err
    again = perturbkv("tokens", "out/trace.h5", "--layer", 1, "--head", 2, "--json")
    assert again.json() == ran.json()
    assert [path.name for path in Path("out").iterdir()] == ["trace.h5"]


@pytest.mark.parametrize("scores", ["given", "missing"])
def test_head_scores_are_read_for_headkv_and_measured_without(perturbkv: Run, model: Path, scores: str) -> None:
    if scores == "given":
        Path("scores.json").write_text("{}")
        refused(perturbkv("trace", "--head-scores", "scores.json", "--model", model), "--policy headkv reads it")
    ran = perturbkv("trace", "--head-scores", "other.json", "--model", model, "--budget", 24)
    refused(ran, "--budget has no effect here", "--policy headkv")
    refused(perturbkv("trace", "--head-scores", "other.json", "--policy", "headkv", "--model", model), "other.json")
    assert not Path("other.json").exists()
