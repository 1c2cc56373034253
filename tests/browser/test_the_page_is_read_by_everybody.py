"""Keyboard, narrow and dark screens, paper, screen readers, an address that is kept, long prompts, missing parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perturbkv.analyses.measurements import Measurements
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import SampleTrace, Trace
from tests.browser.conftest import watched
from tests.browser.reports import choose, html, measured, settle, text
from tests.support.traces import kept, run_config, sample_trace

Open = Callable[..., Any]
GOLDEN = Path(__file__).resolve().parents[1] / "store" / "golden"
PARTS = ("verdict", "map", "scatter", "head", "prompt", "layers", "assumption", "budgets", "ablation", "answers")


def ready(shown: Any) -> Any:
    shown.page.wait_for_selector("body[data-ready=all]", timeout=20000)
    settle(shown)
    return shown


def scroll_through(shown: Any) -> None:
    """Every part once on the screen."""
    for part in PARTS:
        shown.page.evaluate(f"document.getElementById('{part}').scrollIntoView({{behavior: 'instant'}})")
        settle(shown)


def test_the_address_keeps_the_choice(opened: Open, browser: Any) -> None:
    shown = ready(opened(html()))
    choose(shown, baseline="attention-unpooled", treatment="attention", budget="48", measure="theta")
    shown.page.select_option("#head select[name=layer]", "7")
    shown.page.select_option("#assumption select[name=sigma]", "retained_mass")
    settle(shown)
    told = shown.page.url.partition("#")[2]
    again = watched(browser, shown.path)
    again.page.goto(f"{shown.path.as_uri()}#{told}")
    again.page.reload()
    ready(again)
    for name, value in {"baseline": "attention-unpooled", "budget": "48", "measure": "theta"}.items():
        assert again.page.input_value(f"#choose select[name={name}]") == value
    assert again.page.input_value("#head select[name=layer]") == "7"
    assert text(again, "#verdict .said") == text(shown, "#verdict .said")
    again.page.context.close()


@pytest.mark.parametrize(
    "address",
    [
        "#baseline=nobody&budget=1e9&measure=alert(1)",
        "#__proto__=1&constructor=2&head=99-99",
        "#sample=%E0%A4%A",
        "#main",
    ],
)
def test_an_address_that_names_nothing_there_is_left_out(opened: Open, address: str) -> None:
    shown = opened(html())
    shown.page.goto(shown.path.as_uri() + address)
    shown.page.reload()
    ready(shown)
    assert shown.page.input_value("#choose select[name=baseline]") == "attention"
    assert shown.quiet()


def test_the_skip_link_leads_to_the_choices_and_leaves_the_address(opened: Open) -> None:
    shown = ready(opened(html()))
    choose(shown, budget="48")
    told = shown.page.url
    shown.page.keyboard.press("Tab")
    shown.page.keyboard.press("Enter")
    assert shown.page.evaluate("document.activeElement.id") == "main"
    assert shown.page.url == told


def test_arrow_keys_walk_over_the_map_and_are_told(opened: Open) -> None:
    shown = ready(opened(html()))
    shown.page.select_option("#head select[name=layer]", "3")
    shown.page.select_option("#head select[name=head]", "2")
    settle(shown)
    shown.page.focus("#map svg.map")
    for key, expected in (("ArrowRight", (4, 2)), ("ArrowDown", (4, 3)), ("ArrowLeft", (3, 3)), ("ArrowUp", (3, 2))):
        shown.page.keyboard.press(key)
        settle(shown)
        layer, head = expected
        assert text(shown, "#head table caption").startswith(f"Layer {layer}, head {head} ")
        assert text(shown, "#live").startswith(f"layer {layer}, head {head}, ")
        assert shown.page.evaluate("document.activeElement.classList.contains('map')")


NAMELESS = """[...document.querySelectorAll('button, input, select, canvas, svg, summary, [tabindex="0"]')].filter(
  (one) => one.getAttribute('aria-hidden') !== 'true' && !one.closest('[aria-hidden=true]') &&
    !(one.getAttribute('aria-label') || one.labels?.length || one.textContent.trim())).map((one) => one.outerHTML)"""


def test_everything_can_be_reached_by_tab_and_has_a_name(opened: Open) -> None:
    shown = ready(opened(html()))
    assert shown.page.evaluate(NAMELESS) == []
    levels = shown.page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(later - former <= 1 for former, later in zip(levels, levels[1:], strict=False))
    seen = set()
    for _ in range(80):
        shown.page.keyboard.press("Tab")
        seen.add(shown.page.evaluate("document.activeElement.name || document.activeElement.className.baseVal"))
    assert {"baseline", "treatment", "budget", "measure", "sample", "show", "map", "layer", "head", "colour"} <= seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_screen(opened: Open, width: int, scheme: str) -> None:
    shown = ready(opened(html(), viewport={"width": width, "height": 800}, color_scheme=scheme))
    scroll_through(shown)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    for part in PARTS:
        box = shown.page.locator(f"#{part}").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width + 1, part
    assert shown.quiet()


CONTRAST = """(selector) => {
  const channels = (colour) => {  // as the browser itself draws it, however it is written
    const pen = document.createElement('canvas').getContext('2d');
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const bright = (colour) => {
    const [r, g, b] = channels(colour).map((one) => {
      const share = one / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const one = document.querySelector(selector);
  const paper = bright(getComputedStyle(document.documentElement).backgroundColor);
  const ink = bright(getComputedStyle(one).color);
  return (Math.max(paper, ink) + 0.05) / (Math.min(paper, ink) + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_paper(opened: Open, scheme: str) -> None:
    shown = ready(opened(html(), color_scheme=scheme))
    for selector in ("h1", ".about", ".said", ".legend", "#map .caption", "#prompt .text .none", "footer"):
        assert shown.page.evaluate(CONTRAST, selector) >= 4.5, selector
    dark = shown.page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert dark == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(23, 23, 27)")


def test_nothing_moves_by_itself_for_who_wants_no_motion(opened: Open) -> None:
    for motion, expected in (("reduce", "auto"), ("no-preference", "smooth")):
        shown = ready(opened(html(), reduced_motion=motion))
        assert shown.page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == expected
        assert shown.page.evaluate("document.getAnimations().length") == 0


def test_it_prints_on_a4_with_all_parts_on_light_paper(opened: Open, tmp_path: Path) -> None:
    shown = ready(opened(html(), color_scheme="dark"))
    printed = shown.page.pdf(format="A4", print_background=True)
    assert printed.startswith(b"%PDF") and 2 <= printed.count(b"/Type /Page\n") <= 12
    shown.page.emulate_media(media="print")
    settle(shown)
    assert shown.page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    for part in PARTS:
        assert shown.page.locator(f"#{part} .pane > *").count() > 0, part


def framed(shown: Any) -> str:
    """The text that is marked as found."""
    return "".join(shown.page.locator("#prompt .found").all_text_contents())


def test_the_prompt_is_searched_and_the_answer_found(opened: Open) -> None:
    shown = ready(opened(html()))
    shown.page.locator("#prompt .tools").scroll_into_view_if_needed()
    held, sample = measured(), 1
    choose(shown, sample=held.sample_ids[sample])
    wanted = str(held.arrays["prompt_text"][sample])
    shown.page.fill("#prompt input[type=search]", "magic number")
    settle(shown)
    assert text(shown, "#prompt .found-count") == f"1 of {wanted.lower().count('magic number')}"
    shown.page.keyboard.press("Enter")
    settle(shown)
    assert text(shown, "#prompt .found-count").startswith("2 of ")
    assert framed(shown).strip().lower() == "magic number"
    shown.page.fill("#prompt input[type=search]", "nowhere to be found")
    settle(shown)
    assert text(shown, "#prompt .found-count") == "not found"
    shown.page.click("#prompt .tools button:has-text('Jump to the answer')")
    settle(shown)
    (expected, *_) = json.loads(str(held.arrays["expected_answers"][sample]))
    assert framed(shown).strip() == expected


def long_trace(tokens: int = 100_000) -> Trace:
    """A prompt so long that a page which makes an element of each token stands still."""
    draw = np.random.default_rng(0)
    words = [" attention", " output", " evicted", " key", " value", "\n"]
    pieces = [words[place] for place in draw.integers(0, len(words), tokens)]
    starts = np.cumsum([0, *map(len, pieces[:-1])]).astype(np.int32)
    made = dict(sample_trace("long", optional=True).arrays)
    made |= {"prompt_tokens": np.asarray(tokens), "prompt_count": np.asarray(tokens), "prompt_start": starts}
    made |= {"prompt_token": starts + 1, "prompt_text": np.asarray("".join(pieces))}
    count, rows = tokens // 10, made["kept_count"].size
    made["kept_count"] = np.full(made["kept_count"].shape, count)
    positions = np.concatenate([np.sort(draw.choice(tokens, count, replace=False)) for _ in range(rows)])
    offsets = (np.arange(rows) * count).reshape(made["kept_count"].shape)
    return Trace.from_samples(
        run_config(1), [SampleTrace("long", made | kept(made, offsets, positions.astype(np.int32)))], {}
    )


def test_of_a_hundred_thousand_tokens_only_those_on_the_screen_are_elements(opened: Open) -> None:
    shown = ready(opened(html(long_trace())))
    shown.page.evaluate("document.getElementById('prompt').scrollIntoView({behavior: 'instant'})")
    settle(shown)
    box = shown.page.locator("#prompt .text")
    assert shown.page.evaluate("document.querySelector('#prompt .text').textContent.length") > 400_000
    counts = []
    for place in (0, 0.5, 1):
        box.evaluate(f"(one) => {{ one.scrollTop = {place} * one.scrollHeight; }}")
        settle(shown)
        counts.append(shown.page.locator("#prompt .chunk span").count())
    assert 0 < max(counts) < 10_000
    shown.page.fill("#prompt input[type=search]", "evicted key value attention")
    settle(shown)
    assert " of " in text(shown, "#prompt .found-count")
    assert framed(shown).strip() == "evicted key value attention"
    assert shown.page.locator("#prompt .found").first.is_visible()
    assert shown.quiet()


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("*.h5")))
def test_traces_without_parts_are_shown_and_what_they_lack_is_said(opened: Open, name: str) -> None:
    held = read_trace(GOLDEN / name)
    shown = ready(opened(html(held)))
    scroll_through(shown)
    assert shown.quiet()
    if "prompt_text" not in held.arrays:
        assert "perturbkv" in text(shown, "#prompt .lacks")
    assert shown.page.locator("#answers .lacks").count() > 0


def test_traces_stand_side_by_side_on_one_scale(opened: Open) -> None:
    held = measured()
    other = held.sel(sample=list(held.sample_ids[:3]), budget=48)
    shown = ready(opened(html(held, other)))
    choose(shown, budget="48")
    scroll_through(shown)
    for part in PARTS:
        assert shown.page.locator(f"#{part} .of-trace").count() == 2, part
    ends = [" ".join(one.split()) for one in shown.page.locator("#map .legend").all_inner_texts()]
    assert ends[0] == ends[1]
    choose(shown, budget="96")
    assert "holds no attention at the budget 96" in text(shown, "#verdict .of-trace:nth-child(2) .lacks")
    assert shown.quiet()


def test_what_no_head_changes_is_said_to_be_the_same(opened: Open) -> None:
    """Both selections share stage 1, so σ of it differs nowhere: no interval and no verdict stand beside that."""
    shown = ready(opened(html()))
    choose(shown, baseline="attention", treatment="two-stage", measure="sigma_stage1")
    assert "is the same in all 270 heads" in text(shown, "#verdict .said")
    assert "[" not in text(shown, "#verdict .tiles > div:first-child")


def test_a_bound_that_is_no_evidence_is_not_coloured(opened: Open) -> None:
    shown = ready(opened(html()))
    choose(shown, baseline="attention", treatment="two-stage", budget="48", measure="theta_hat", sample="")
    held = measured()
    sigma = Measurements(held, "report")["sigma_stage1"].mean(axis=0)
    places = [place for place, one in enumerate(held.run.configs)
              if one.budget.value == 48 and one.selection.name in ("attention", "two-stage")]  # fmt: skip
    silent = int((sigma[places].min(axis=0) <= 0.5).sum())
    empty = shown.page.locator("#map svg.map > g").first.locator('rect[fill="none"]').count()
    assert 0 < silent < 270 and empty == silent
    assert f"of {270 - silent} with σ > 0.5" in text(shown, "#verdict .tiles > div:nth-child(2)")


def test_the_prompt_is_that_of_the_sample_in_which_the_head_changes_most(opened: Open) -> None:
    shown = ready(opened(html()))
    choose(shown, baseline="attention", treatment="two-stage", budget="48", measure="isolated", sample="")
    shown.page.select_option("#head select[name=layer]", "12")
    settle(shown)
    head = int(shown.page.input_value("#head select[name=head]"))
    held = measured()
    sides = [place for place, one in enumerate(held.run.configs)
             if one.budget.value == 48 and one.selection.name in ("attention", "two-stage")]  # fmt: skip
    moved = np.abs(np.diff(held.arrays["perturbation_isolated"][:, sides, 0, 12, head], axis=1))[:, 0]
    assert f"the prompt of sample {held.sample_ids[int(moved.argmax())]}, " in text(shown, "#prompt .caption")
