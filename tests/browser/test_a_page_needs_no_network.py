"""A page opens from disk, alone, in a notebook and without JavaScript; nothing leaves it, as the network log says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perturbkv.reporting.html import page
from perturbkv.reporting.report import Report
from tests.browser.conftest import launched, watched
from tests.support.payloads import reported

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
    assert all(part in text for head in payload.heads for part in (head.title, *head.warnings))
    assert "JavaScript" in shown.page.inner_text(".noscript")
