"""Text that would be markup, code or an address, in every place that somebody else's text may reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perturbkv.reporting.html import page
from tests.support.payloads import HOSTILE, everywhere, reported

Open = Callable[..., Any]
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
