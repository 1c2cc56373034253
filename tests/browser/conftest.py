"""A page opened from disk in the system's Chromium, and all that it complained of or asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
_WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (one) =>
  window.violations.push(`${one.violatedDirective}: ${one.blockedURI} ${one.sample}`));
"""


@dataclass
class Opened:
    """A page and what happened in it: console errors, exceptions, dialogs; requests for anything but itself."""

    page: Page
    path: Path
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def violations(self) -> list[str]:
        """What the policy refused, in the page and in its frames."""
        return [one for frame in self.page.frames for one in frame.evaluate("window.violations ?? []")]

    def ready(self, frame: int = 0) -> Any:
        """The frame, when it has drawn. The policy lets Playwright evaluate nothing while it waits, so this asks."""
        shown = self.page.frames[frame]
        assert self.soon(lambda: shown.evaluate("performance.getEntriesByName('ready').length > 0")), self.errors
        return shown

    def soon(self, happened: Callable[[], bool]) -> bool:
        """Whether something happens within ten seconds, which a busy machine may need."""
        for _ in range(500):
            if happened():
                return True
            self.page.wait_for_timeout(20)
        return False

    def quiet(self) -> bool:
        """Whether nothing at all was complained of or asked for."""
        self.page.wait_for_timeout(100)
        return (self.errors, self.requests, self.violations()) == ([], [], [])


def launched(playwright: Any, *more: str) -> Browser:
    """Chromium without a window."""
    found = shutil.which("chromium")
    assert found, "make test-browser installs chromium"
    return playwright.chromium.launch(executable_path=found, headless=True, args=[*ARGUMENTS, *more])  # type: ignore[no-any-return]


def watched(browser: Browser, path: Path, **context: Any) -> Opened:
    """The page of a file, opened from disk."""
    made = browser.new_context(**context)
    made.add_init_script(_WATCH)
    found = Opened(made.new_page(), path)
    found.page.on("console", lambda one: found.errors.append(one.text) if one.type in ("error", "warning") else None)
    found.page.on("pageerror", lambda one: found.errors.append(str(one)))
    found.page.on("dialog", lambda one: (found.errors.append(f"dialog: {one.message}"), one.dismiss()))
    found.page.on("request", lambda one: found.requests.append(one.url) if one.url != path.as_uri() else None)
    found.page.goto(path.as_uri())
    return found


@pytest.fixture(scope="session")
def playwright() -> Iterator[Any]:
    with sync_playwright() as running:
        yield running


@pytest.fixture(scope="session")
def browser(playwright: Any) -> Iterator[Browser]:
    running = launched(playwright)
    yield running
    running.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Write a page, open it from disk, watch it; options are those of Playwright's context."""
    pages: list[Opened] = []

    def one(html: str, **context: Any) -> Opened:
        path = tmp_path / f"page{len(pages)}.html"
        path.write_bytes(html.encode())
        pages.append(watched(browser, path, **context))
        return pages[-1]

    yield one
    for page in pages:
        page.page.context.close()
