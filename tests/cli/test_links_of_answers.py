"""`perturbkv correlation`: of a trace that it makes, of finished ones, and what it refuses before anything is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.linked import answered, methods

Run = Callable[..., Any]


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


@pytest.mark.slow
def test_traces_of_several_data_sets_are_pooled(perturbkv: Run, made: Callable[..., Path]) -> None:
    made("qasper"), made("triviaqa", 5)
    ran = perturbkv("correlation", "qasper.h5", "triviaqa.h5", "-o", "out", "--format", "png")
    assert ran.code == 0, ran.err
    assert "11 samples" in ran.out
    told = json.loads(Path("out/summary.json").read_text())["analyses"]["correlation"]
    assert [(part["dataset"], part["trace"], part["samples"]) for part in told["parts"]] == [
        ("qasper", "qasper.h5", 6), ("triviaqa", "triviaqa.h5", 5)
    ]  # fmt: skip
    assert [one["dataset"] for one in told["overall"]] == ["", "qasper", "triviaqa"]
    first_alone = perturbkv("correlation", "qasper.h5", "-o", "out")
    assert first_alone.code == 2
    assert "--trace" in first_alone.err and "triviaqa.h5" in first_alone.err


@pytest.mark.slow
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
