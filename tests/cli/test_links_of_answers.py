"""`perturbkv correlation`: of a trace that it makes, of finished ones, and what it refuses before anything is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from perturbkv.storage.trace.trace_file import read_run
from tests.support.linked import answered, methods

Run = Callable[..., Any]
NEEDLE = ["--lengths", "300,340", "--depths", "0,1", "--haystack", "noise", "--samples", 4, "--max-new-tokens", 4]


def narrow(text: str) -> bool:
    return all(cell_len(line) <= 80 for line in text.splitlines())


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    """A trace of two budgets in the current folder, of one data set."""

    def save(dataset: str, samples: int = 6, **more: Any) -> Path:
        draw = np.random.default_rng(len(dataset))
        moved = draw.lognormal(size=(samples, 6))
        scores = (moved * draw.lognormal(size=(samples, 6)) < 1).astype(float)
        configs = [*methods(3, 0.1), *methods(3, 0.2)]
        trace = answered(configs, scores, np.ones(samples), {"propagated": moved}, dataset=dataset, **more)
        return trace.save(tmp_path / f"{dataset}.h5")

    return save


def test_a_link_makes_the_trace_that_it_needs_and_reads_it_again(perturbkv: Run, model: Path) -> None:
    asked = ["--model", model, "--budget", 40, "--budget", 60, "--window", 8]
    compare = ["--compare", "snapkv:attention,snapkv:two-stage,snapkv:random"]
    ran = perturbkv("correlation", *asked, *NEEDLE, *compare, "-o", "out", "--format", "png")
    assert ran.code == 0, ran.err
    assert narrow(ran.out), ran.out
    assert {path.name for path in Path("out").iterdir()} == {"trace.h5", "correlation.png", "summary.json"}
    run = read_run(Path("out/trace.h5"))
    assert (run.generate, run.steps, len(run.configs)) == (4, 1, 6)
    told = json.loads(Path("out/summary.json").read_text())["analyses"]["correlation"]
    assert [one["name"] for one in told["settings"]] == ["40", "60"]
    again = perturbkv("correlation", "out/trace.h5", "-o", "again", "--json")
    assert again.code == 0, again.err
    assert again.json()["settings"] == told["settings"]


def test_traces_of_several_data_sets_are_pooled(perturbkv: Run, made: Callable[..., Path]) -> None:
    made("qasper"), made("triviaqa", 5)
    ran = perturbkv("correlation", "qasper.h5", "triviaqa.h5", "-o", "out", "--format", "png")
    assert ran.code == 0, ran.err
    assert narrow(ran.out), ran.out
    assert "qasper, triviaqa · 11 samples" in ran.out
    told = json.loads(Path("out/summary.json").read_text())["analyses"]["correlation"]
    assert [(part["dataset"], part["trace"], part["samples"]) for part in told["parts"]] == [
        ("qasper", "qasper.h5", 6), ("triviaqa", "triviaqa.h5", 5)
    ]  # fmt: skip
    assert [one["dataset"] for one in told["overall"]] == ["", "qasper", "triviaqa"]
    first_alone = perturbkv("correlation", "qasper.h5", "-o", "out")
    assert first_alone.code == 2
    assert "holds correlation with --trace ['triviaqa.h5']" in first_alone.err


def test_a_failed_sample_of_any_trace_is_told(perturbkv: Run, made: Callable[..., Path]) -> None:
    made("qasper"), made("trec")
    from perturbkv.storage.trace.trace_file import read_trace

    trace = read_trace(Path("trec.h5"))
    trace.failures["trec5"] = "planted"  # type: ignore[index]
    trace.save("trec.h5")
    ran = perturbkv("correlation", "qasper.h5", "trec.h5", "-o", "out", "--json")
    assert ran.code == 1
    assert "failed: planted" in ran.err
    assert ran.json()["failed"] == {"trec: trec5": "planted"}


def test_methods_of_a_finished_trace_are_chosen_by_name(perturbkv: Run, made: Callable[..., Path]) -> None:
    made("trec")
    ran = perturbkv("correlation", "trec.h5", "--compare", "attention,two-stage", "-o", "out")
    assert ran.code == 2
    assert "needs at least 3 methods of one budget to rank, got 2 of b=0.1, 2 of b=0.2" in ran.err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--compare", "snapkv:attention,snapkv:random"], "correlation ranks at least 3 methods of one budget, got"),
        (["--compare", ","], "--compare takes methods"),
        (["--lost", 0], "share above 0"),
        (["--lost", 1.5], "at most 1"),
        (["--right", 1], "score from 0 to below 1"),
        (["--max-new-tokens", 0], "must be at least 1, got 0"),
        (["--step", 1], "No such option: --step"),
        (["nothere.h5"], "nothere.h5"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    perturbkv: Run, model: Path, tmp_path: Path, more: list[object], said: str
) -> None:
    options = [] if "--trace" in more else ["--model", model, *NEEDLE[:-2]]
    ran = perturbkv("correlation", *options, *more, "-o", "out")
    assert ran.code == 2, ran.out
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_answers_that_nothing_graded_are_refused(perturbkv: Run, tiny: list[object]) -> None:
    perturbkv("trace", *tiny, "-o", "t.h5")
    ran = perturbkv("correlation", "t.h5", "-o", "out")
    assert ran.code == 2
    assert "correlation needs graded answers, t.h5 has none" in ran.err
    assert not Path("out").exists()
