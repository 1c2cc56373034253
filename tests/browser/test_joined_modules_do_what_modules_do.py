"""The independent oracle of the joined module: Chromium loads the same modules one by one."""

from __future__ import annotations

import json
from typing import Any

from tests.support.modules import SOURCES, of

SITE = "http://modules.test/"


def said(browser: Any, files: dict[str, str]) -> list[str]:
    """What a page prints whose files are these; none of them leaves this process."""
    page, printed = browser.new_page(), []
    page.on("console", lambda one: printed.append(one.text))
    page.on("pageerror", lambda one: printed.append(str(one)))

    def answer(route: Any) -> None:
        name = route.request.url.removeprefix(SITE)
        kind = "text/html" if name.endswith(".html") else "text/javascript"
        route.fulfill(body=files[name], content_type=kind) if name in files else route.fulfill(status=404)

    page.route("**/*", answer)
    page.goto(f"{SITE}index.html")
    for _ in range(500):  # ten seconds, which a busy machine may need
        if any("404" not in line for line in printed):
            break
        page.wait_for_timeout(20)
    page.close()
    return [line for line in printed if "404" not in line]


def test_joined_modules_do_what_modules_do(browser: Any) -> None:
    alone = said(browser, {"index.html": '<!doctype html><script type="module" src="main.js"></script>', **SOURCES})
    joined = said(browser, {"index.html": f'<!doctype html><script type="module">{of(SOURCES)}</script>'})
    assert alone == joined
    assert [json.loads(line) for line in joined] == [[40, 21, 2]]


def test_a_module_that_does_something_else_is_told_apart(browser: Any) -> None:
    other = {**SOURCES, "deep-er.js": SOURCES["deep-er.js"].replace("base = 20", "base = 21")}
    assert [
        json.loads(line) for line in said(browser, {"index.html": f'<script type="module">{of(other)}</script>'})
    ] == [[42, 22, 2]]
