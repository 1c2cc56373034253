"""Without a trace each question makes the one that it needs, and asked of that trace it gives the same answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.storage.trace.trace_file import read_run

Run = Callable[..., Any]
NEEDLES = ["--samples", 4, "--lengths", "300,340", "--depths", "0,1", "--haystack", "noise", "--max-new-tokens", 4]
SHARES = (0.05, 0.1, 0.2, 0.4)
QUESTIONS: dict[str, tuple[tuple[float, ...], int, set[str]]] = {
    "heads": ((24,), 2, {"heads"}),
    "heads --compare attention,two-stage,random": ((24, 0.5), 6, {"heads-attention-two-stage-random"}),
    "heads --compare streaming-llm,snapkv:two-stage": ((24,), 2, {"heads"}),
    "layers --per-sample": ((24,), 2, {"layers", "layers-samples"}),
    "layers --budgets": (SHARES, 8, {"layers", "layers-budgets"}),
    "assumption --step 1": ((24, 60), 2, {"assumption"}),
    "bound-tightness --step 1": ((24, 60), 14, {"bound-tightness", "bound-tightness-heads"}),
    "ablation": ((24,), 27, {"ablation"}),
    "ablation --restrictions": ((80,), 20, {"ablation-restrictions"}),
    "ablation --methods tova,h2o": ((24,), 6, {"ablation-methods", "ablation-methods-budgets"}),
    "horizon": ((24,), 2, {"horizon", "horizon-heads"}),
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


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
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
