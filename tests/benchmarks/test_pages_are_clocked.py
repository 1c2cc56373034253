"""`python -m benchmarks report`: sizes of pages and times in a browser, or why a row has none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import report_pages, rows
from benchmarks.__main__ import main
from perturbkv.errors import ConfigError, PerturbkvError, UnknownNameError
from perturbkv.storage.trace.trace_file import read_trace

SMALL, LARGE = {"samples": 1, "layers": 1, "heads": 2}, {"samples": 2, "layers": 2, "heads": 2}
FIRST = {"paint": [0.3, 0.1, 0.2], "ready": [0.9, 0.4, 0.5]}
CHANGES = {"budget": [0.01, 0.02], "sample": [0.3]}


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces that take no time to make, and a browser whose times are known."""
    monkeypatch.setattr(report_pages, "_SMALL", SMALL)
    monkeypatch.setattr(report_pages, "_LARGE", LARGE)
    monkeypatch.setattr(report_pages, "first_times", lambda path, repeats: FIRST if path.exists() else {})
    monkeypatch.setattr(report_pages, "change_times", lambda path, repeats: CHANGES if path.exists() else {})


def test_every_row_is_what_was_found(little: None) -> None:
    report = report_pages.measure(report_pages.Settings(tokens=200), rows.REPORT)
    found = {row.target.name: row for row in report.rows}
    assert list(found) == [target.name for target in rows.REPORT]
    times = {name: found[f"report-{name}"].value for name in ("paint", "ready", "change", "change-most")}
    assert times == {"paint": 0.2, "ready": 0.5, "change": 0.02, "change-most": 0.3}
    for name in ("small", "large"):
        row = found[f"report-{name}"]
        assert row.value == row.details["bytes"] / 1e6
        assert 0.4 < row.value < 5.0
    assert report.unmeasured_rows(*rows.EXCUSES) == []
    assert found["report-change-most"].verdict() == "falls short"


@pytest.mark.parametrize("lacking", ["chromium", "playwright"])
def test_without_a_browser_its_rows_say_so_and_nothing_failed(
    monkeypatch: pytest.MonkeyPatch, lacking: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(report_pages, "_SMALL", SMALL)
    monkeypatch.setattr(report_pages, "_LARGE", LARGE)
    monkeypatch.setattr(shutil, "which", lambda name: None if lacking == "chromium" else f"/bin/{name}")
    monkeypatch.setattr(report_pages, "find_spec", lambda name: None)
    assert main(["report", "--tokens", "200", "-o", str(tmp_path / "r.json")]) == 0
    told = {row["name"]: row["reason"] for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert {name for name, reason in told.items() if reason == rows.NO_BROWSER} == {
        "report-paint", "report-ready", "report-change", "report-change-most"
    }  # fmt: skip
    assert told["report-small"] == told["report-large"] == ""


def test_a_browser_that_fails_makes_the_command_fail(
    little: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(path: Path, repeats: int) -> dict[str, Any]:
        raise PerturbkvError("the browser failed: gone")

    monkeypatch.setattr(report_pages, "change_times", fails)
    assert main(["report", "--tokens", "200", "-o", str(tmp_path / "r.json")]) == 1
    document = json.loads((tmp_path / "r.json").read_text())
    reasons = {row["reason"] for row in document["rows"] if row["name"].startswith("report-change")}
    assert reasons == {"the browser failed: gone"}


def test_only_what_is_asked_for_is_measured(little: None) -> None:
    report = report_pages.measure(report_pages.Settings(tokens=200), rows.find_targets(["report-small"], rows.REPORT))
    assert [row.target.name for row in report.rows] == ["report-small"]
    with pytest.raises(UnknownNameError, match="report-small"):
        rows.find_targets(["small"], rows.REPORT)


@pytest.mark.parametrize("asked", [{"tokens": 99}, {"tokens": 100_001}, {"repeats": 0}])
def test_what_cannot_be_measured_is_refused(asked: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must lie between"):
        report_pages.Settings(**asked)


def test_a_made_trace_is_one_that_could_have_been_measured(tmp_path: Path) -> None:
    made = report_pages.synthetic_trace(2, 2, 3, 200)
    read = read_trace(made.save(tmp_path / "made.h5"))
    assert len(made.run.configs) == 24
    assert set(read.arrays) == set(made.arrays)
    for config, of in enumerate(made.run.configs):
        kept = made.kept(1, config, 1, 2)
        assert len(kept) == made.arrays["kept_count"][1, config, 1, 2] == int(of.budget.value * 200)
        np.testing.assert_array_equal(read.kept(1, config, 1, 2), kept)
