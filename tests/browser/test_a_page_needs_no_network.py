"""A page needs no network, shows text of others as text, and its times and pictures are its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report_pages
from perturbkv.errors import PerturbkvError
from perturbkv.reporting.html import page
from perturbkv.reporting.report import Report
from tests.browser.conftest import launched, watched
from tests.browser.reports import measured
from tests.support.payloads import HOSTILE, everywhere, reported

Open = Callable[..., Any]
NOTEBOOK = "<!doctype html><meta charset=utf-8><p>a notebook</p>"


def test_a_page_opens_from_disk_and_asks_for_nothing(opened: Open) -> None:
    payload = reported()
    shown = opened(page(payload))
    shown.ready()
    assert shown.page.title() == payload.title
    assert shown.quiet()


def asked_for(log: Path) -> set[str]:
    """Addresses of a network log that a page asked for: those with an initiator, and of every kind."""
    found = set()
    for event in json.loads(log.read_text())["events"]:
        told = event.get("params", {})
        if told.get("url") and told.get("initiator") not in (None, "not an origin"):
            found.add(told["url"])
    return found


def test_the_network_log_holds_no_request_of_the_page(playwright: Any, tmp_path: Path) -> None:
    for name, planted in (("own", ""), ("planted", '<img src="https://example.org/x.png">')):
        log, path = tmp_path / f"{name}.json", tmp_path / f"{name}.html"
        html = page(reported())
        path.write_text(html if not planted else f"<!doctype html>{planted}")
        browser = launched(playwright, f"--log-net-log={log}", "--net-log-capture-mode=Everything")
        shown = watched(browser, path)
        shown.page.wait_for_timeout(500)
        browser.close()
        assert [one for one in asked_for(log) if "example.org" in one or not planted] == (
            ["https://example.org/x.png"] if planted else []
        )


def test_a_notebook_shows_a_page_that_sees_nothing_of_it(opened: Open) -> None:
    payload = reported()
    shown = opened(NOTEBOOK + Report(payload.title, page(payload), 1, 2)._repr_html_())
    frame = shown.ready(1)
    assert frame.evaluate("[document.title, origin]") == [payload.title, "null"]
    assert shown.page.locator("iframe").get_attribute("title") == f"Report of {payload.title}"
    assert frame.evaluate("() => { try { return parent.document.title } catch (error) { return error.name } }") == (
        "SecurityError"
    )
    assert shown.quiet()


def test_without_javascript_the_head_is_there_and_a_line_says_why_the_rest_is_not(opened: Open) -> None:
    payload = reported()
    shown = opened(page(payload), java_script_enabled=False)
    text = shown.page.inner_text("body")
    assert all(part in text for header in payload.headers for part in (header.title, *header.warnings))
    assert "JavaScript" in shown.page.inner_text(".noscript")


MADE = "['img', 'iframe', 'object', 'embed', 'link', 'base', '[onerror]', '[onload]', 'a[href^=javascript]']"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_and_makes_nothing(opened: Open, text: str) -> None:
    shown, harmless = opened(page(everywhere(text))), opened(page(reported()))
    for one in (shown, harmless):
        one.ready()
        one.page.wait_for_timeout(300)
    made = f"{MADE}.filter((one) => document.querySelector(one) !== null)"
    assert shown.page.evaluate(made) == harmless.page.evaluate(made) == []
    scripts = "document.scripts.length"
    assert shown.page.evaluate(scripts) == harmless.page.evaluate(scripts)
    assert shown.page.locator("header dt").first.text_content() == text
    assert shown.quiet()


def test_a_planted_tag_is_found(opened: Open) -> None:
    html = page(reported())
    planted = html.replace("<footer>", "<footer><img src=x onerror=alert(1)>")
    assert planted != html
    shown = opened(planted)
    shown.ready()
    assert shown.page.evaluate(f"{MADE}.filter((one) => document.querySelector(one) !== null)") != []
    assert not shown.quiet()


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


DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_every_picture_of_its_page_is_taken(tmp_path: Path) -> None:
    trace = measured().save(tmp_path / "trace.h5")
    subprocess.run([sys.executable, DOCS / "scripts" / "report_pictures.py", trace, tmp_path], check=True, timeout=120)
    taken = {path.name for path in tmp_path.glob("*.png")}
    assert taken == set(re.findall(r"figures/(report-[\w-]+\.png)", (DOCS / "how-to" / "report.md").read_text()))
    assert all(path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for path in tmp_path.glob("*.png"))
