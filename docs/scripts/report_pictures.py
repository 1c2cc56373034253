"""The pictures of docs/how-to/report.md: a report's parts as Chromium shows them, at the width of a page of text.

`make report-pictures` makes the trace, too: python docs/scripts/report_pictures.py runs/report/trace.h5
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

import perturbkv as pk

FIGURES = Path(__file__).parents[1] / "figures"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
WIDTH, HEIGHT, NARROW = 1180, 1150, 360
CHOICE = "#baseline=attention&treatment=two-stage&budget={budget}&measure=propagated&sample={sample}&head={head}"
"""What the pictures show; the head is the one whose output the treatment changes most in that sample."""


def main(path: str, folder: str = str(FIGURES)) -> None:
    """Make every picture of the report of one trace, in docs/figures or another folder."""
    trace, figures = pk.read_trace(path), Path(folder)
    shown = pk.tokens(trace)
    choice = CHOICE.format(
        budget=shown.baseline.budget,
        sample=shown.prompt.sample,
        head=f"{shown.shown.layer}-{shown.shown.head}",
    )
    with tempfile.TemporaryDirectory() as made, sync_playwright() as playwright:
        page = Path(made) / "report.html"
        pk.report(trace, page)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=ARGUMENTS)
        for name, take in PICTURES.items():
            narrow, dark = name.endswith("narrow"), name.endswith("dark")
            opened = browser.new_page(
                viewport={"width": NARROW if narrow else WIDTH, "height": HEIGHT},
                color_scheme="dark" if dark else "light",
            )
            opened.goto(page.as_uri() + ("" if "mean" in name else choice))
            opened.wait_for_selector("body[data-ready=all]")
            opened.wait_for_timeout(1500)
            take(opened, str(figures / f"report-{name}.png"))
            opened.close()
        browser.close()


def _screen(page: Any, path: str) -> None:
    """Save a picture of what a reader sees first."""
    page.screenshot(path=path)


def _part(name: str) -> Callable[[Any, str], None]:
    """Return a function that saves a picture of one part of the page."""

    def take(page: Any, path: str) -> None:
        page.evaluate("document.getElementById('choose').style.position = 'static'")
        page.locator(f"#{name}").screenshot(path=path)

    return take


PICTURES: dict[str, Callable[[Any, str], None]] = {
    "mean": _screen,
    "head": _part("head"),
    "prompt": _part("prompt"),
    "layers-mean": _part("layers"),
    "assumption-mean": _part("assumption"),
    "budgets-mean": _part("budgets"),
    "ablation-mean": _part("ablation"),
    "answers-mean": _part("answers"),
    "dark": _screen,
    "narrow": _screen,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
