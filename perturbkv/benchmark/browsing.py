"""A report in headless Chromium: when it is painted, when it can be used, and how long a change of choice takes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from perturbkv.benchmark.rows import NO_BROWSER
from perturbkv.errors import ConfigError, PerturbkvError

_ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
_LONGEST = 60.0
"""Seconds that a page may take until it is there."""
_PARTS = ("verdict", "map", "prompt")
"""Parts of the page that are on the screen while its choices change, one after the other."""
_PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_READY = "performance.getEntriesByName('ready')[0]?.startTime"
_WHOLE = "document.body.dataset.ready === 'all' || undefined"
_CHANGES = "performance.getEntriesByName('change').map((one) => one.duration)"
_CHOOSE = """([name, place]) => {
  const list = document.querySelector(`#choose select[name=${name}]`);
  if (list === null || list.options.length < 2) return false;
  list.selectedIndex = (list.selectedIndex + place) % list.options.length;
  list.dispatchEvent(new Event("input", { bubbles: true }));
  list.dispatchEvent(new Event("change", { bubbles: true }));
  return true;
}"""


def first_times(path: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds from opening the file until the first paint and until choices can be made, each time in a new window.

    Raises ConfigError where there is no browser, PerturbkvError where the page does not come.
    """
    found: dict[str, list[float]] = {"paint": [], "ready": []}
    with _chromium() as browser:
        for _ in range(repeats):
            page = _opened(browser, path)
            for name, asked in (("paint", _PAINTED), ("ready", _READY)):
                found[name].append(_waited(page, asked) / 1000)
            page.context.close()
    return found


def changes(path: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds that each change of choice took, by what was changed and what was on the screen.

    Raises ConfigError where there is no browser, PerturbkvError where the page does not measure its changes.
    """
    found: dict[str, list[float]] = {}
    with _chromium() as browser:
        page = _opened(browser, path)
        _waited(page, _WHOLE)
        for part in _PARTS:
            page.evaluate("(id) => document.getElementById(id)?.scrollIntoView()", part)
            for name in ("baseline", "treatment", "budget", "measure", "sample"):
                own = [_changed(page, name) for _ in range(repeats)]
                found[f"{name}, {part} on the screen"] = [one for one in own if one is not None]
        page.context.close()
    return found


@contextmanager
def _chromium() -> Iterator[Any]:
    path = shutil.which("chromium")
    if path is None or find_spec("playwright") is None:
        raise ConfigError(NO_BROWSER)
    from playwright.sync_api import Error, sync_playwright

    try:
        with sync_playwright() as running:
            browser = running.chromium.launch(executable_path=path, headless=True, args=list(_ARGUMENTS))
            yield browser
            browser.close()
    except Error as error:
        msg = f"the browser failed: {str(error).splitlines()[0]}"
        raise PerturbkvError(msg) from None


def _opened(browser: Any, path: Path) -> Any:
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(path.resolve().as_uri())
    return page


def _changed(page: Any, name: str) -> float | None:
    """Seconds of one change; None where there is nothing to choose."""
    before = len(page.evaluate(_CHANGES))
    if not page.evaluate(_CHOOSE, [name, 1]):
        return None
    spent = _poll(page, lambda: (page.evaluate(_CHANGES)[before:] or [None])[0], f"a change of {name}")
    return spent / 1000


def _waited(page: Any, asked: str) -> float:
    return _poll(page, lambda: page.evaluate(asked), asked)


def _poll(page: Any, ask: Callable[[], Any], what: str) -> float:
    """The first answer. The page's policy lets no text be evaluated in it, so that it cannot wait itself."""
    end = time.perf_counter() + _LONGEST
    while time.perf_counter() < end:
        if (found := ask()) is not None:
            page.wait_for_timeout(200)  # let what is drawn when nothing else is to be done come to its end
            return float(found)
        page.wait_for_timeout(20)
    msg = f"expected {what} within {_LONGEST:g} seconds, got nothing"
    raise PerturbkvError(msg)
