"""What `benchmarks.report_pages` reads of a page: its first paint, when it can be used, every change of choice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import report_pages
from perturbkv.errors import PerturbkvError
from perturbkv.reporting.html import page
from tests.support.payloads import reported


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A page with two of nearly everything to choose from."""
    path = tmp_path / "page.html"
    path.write_text(page(reported()))
    return path


Times = dict[str, list[float]]


def aside(work: Callable[[Path, int], Times], *asked: object) -> Times:
    """What it gives in a thread of its own, as Playwright's other browser lives in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work, *asked).result()  # type: ignore[arg-type]


def test_a_page_is_painted_and_then_ready(small: Path) -> None:
    found = aside(report_pages.first_times, small, 2)
    assert [len(times) for times in found.values()] == [2, 2]
    assert all(0 < one < 10 for times in found.values() for one in times)


def test_every_change_is_measured(small: Path) -> None:
    found = aside(report_pages.change_times, small, 2)
    assert len(found) == 15
    assert all(len(found[f"{name}, map on the screen"]) == 2 for name in ("baseline", "treatment", "measure", "sample"))
    assert found["budget, map on the screen"] == []  # there is one alone
    assert all(0 < one < 10 for times in found.values() for one in times)


def test_a_page_that_measures_nothing_is_told(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_pages, "_LONGEST", 0.5)
    small.write_text("<!doctype html><p>no report")
    with pytest.raises(PerturbkvError, match="expected performance"):
        aside(report_pages.first_times, small, 1)


def test_a_page_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(PerturbkvError, match="the browser failed: "):
        aside(report_pages.first_times, tmp_path / "nothere.html", 1)
