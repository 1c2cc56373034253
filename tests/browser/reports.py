"""A real model's trace with everything that a page can show, and what a page says of it."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import perturbkv as pk
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.reporting.html import page
from perturbkv.reporting.payload import payload
from perturbkv.trace import Trace

SELECTIONS = ["attention", "two-stage", "attention-unpooled", "two-stage-uniform"]
BUDGETS = [48, 96]


@cache
def measured() -> Trace:
    """Five needle prompts on the embedded model, with steps, attention and answers."""
    model = pk.load_model("smollm2-135m-q4_1")
    prompts = pk.load_prompts("needle", model, samples=5, lengths=[260], depths=[0.3])
    configs: list[EvictionConfig] = []
    for budget in BUDGETS:
        configs += pk.grid(budget, selection=SELECTIONS, granularity="kv")
    found = pk.measure(
        model, prompts, configs, settings=pk.Settings(steps=3, save=("outputs", "effect"), generate=6), progress=False
    )
    assert isinstance(found, Trace)
    return found


def html(*traces: Trace, **options: Any) -> str:
    """The page of these traces."""
    return page(payload(traces or (measured(),), **options))


def choose(shown: Any, **choices: str) -> None:
    """Choose in the bar at the top, and wait until the page has drawn it."""
    for name, value in choices.items():
        shown.page.select_option(f"#choose select[name={name}]", value)
    settle(shown)


def settle(shown: Any) -> None:
    """Wait until everything is drawn and nothing waits."""
    shown.page.wait_for_selector('body[data-stale="0"]', timeout=20_000)
    shown.page.wait_for_timeout(30)


def text(shown: Any, selector: str) -> str:
    """What stands there, in one line."""
    return " ".join(shown.page.locator(selector).first.inner_text().split())


def tiles(shown: Any) -> dict[str, str]:
    """Name -> number, of the tiles that say what changes."""
    boxes = shown.page.locator("#verdict .tiles > div")
    told = [boxes.nth(place).inner_text().splitlines() for place in range(boxes.count())]
    return {lines[0]: lines[1] for lines in (list(filter(None, one)) for one in told)}


def number(value: float) -> str:
    """A number as the page writes it: three digits."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e−{abs(int(exponent))}".replace("-", "−")
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace("-", "−")
    digits = f"{value:.3g}"
    whole = digits if "e" not in digits else f"{float(digits):.0f}"
    return _padded(whole).replace("-", "−")


def _padded(digits: str) -> str:
    """Three significant digits, zeros at the end too."""
    held = re.sub(r"^-?0*\.?0*", "", digits).replace(".", "")
    short = 3 - len(held)
    if short <= 0:
        return digits
    return (digits if "." in digits else f"{digits}.") + "0" * short


def ratio(value: float) -> str:
    """A ratio as the page writes it."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def estimate(value: str, interval: Any, shown: Any) -> str:
    """A number with its interval as the page writes it."""
    return value if interval is None else f"{value} [{shown(interval.low)}, {shown(interval.high)}]"
