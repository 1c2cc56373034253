"""The estimate of a run's time grows with its work, and gives way to what the first sample took."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from unittest import mock

import pytest

from perturbkv.cli import console, planned_run
from perturbkv.cli.options import RunOptions
from perturbkv.cli.planned_run import plan
from perturbkv.pipeline.run.plan import Plan


@pytest.fixture
def planned(model: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(planned_run, "_operations_per_second", lambda planned, rows: 1e6)
    run = RunOptions(model=str(model), dataset=str(data), samples=2, budget=["24"], window=8)
    return plan(run, run.configs(["attention", "two-stage"]))


def test_the_estimate_grows_with_samples_steps_and_configurations(planned: Plan) -> None:
    usual = planned_run.estimate_seconds(planned)
    assert usual > 0
    longer = dataclasses.replace(planned, run=dataclasses.replace(planned.run, steps=50))
    fewer = dataclasses.replace(planned, run=dataclasses.replace(planned.run, configs=planned.run.configs[:1]))
    one = dataclasses.replace(
        planned, prompts=dataclasses.replace(planned.prompts, prompts=planned.prompts.prompts[:1])
    )
    assert planned_run.estimate_seconds(longer) > usual > planned_run.estimate_seconds(fewer)
    assert planned_run.estimate_seconds(one) == pytest.approx(usual / 2, rel=0.1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3, "a few seconds"), (44, "about 44 s"), (100, "about 1.7 min"), (7300, "about 2 h"), (3e5, "about 3.5 days")],
)
def test_a_duration_is_rounded(seconds: float, text: str) -> None:
    assert planned_run.format_duration(seconds) == text


@pytest.mark.parametrize(("estimate", "notes"), [(1.0, []), (400.0, ["4 samples"])])
def test_a_long_run_tells_its_estimate_once(
    planned: Plan, monkeypatch: pytest.MonkeyPatch, estimate: float, notes: list[str]
) -> None:
    monkeypatch.setattr(planned_run, "estimate_seconds", lambda planned: estimate)
    shown = io.StringIO()
    with mock.patch.object(console, "err", console.Console(file=shown)):
        progress = planned_run.with_time_note(lambda done, total: None, planned)
        for done in (5, 6, 7):
            progress(done, 9)
    assert [line[: len(note)] for line, note in zip(shown.getvalue().splitlines(), notes, strict=True)] == notes
