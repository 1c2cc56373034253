"""What stands on the page equals what the analyses find, for every pair, measure and part; told by clicking there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.analyses.heads.head_comparison import summarise
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.tokens.fates import BASELINE, BOTH, NEITHER, QUESTION, TREATMENT
from perturbkv.analyses.verdicts import DISTANCES
from tests.browser.conftest import watched
from tests.browser.reports import (
    BUDGETS,
    SELECTIONS,
    choose,
    estimate,
    html,
    measured,
    number,
    ratio,
    settle,
    text,
    tiles,
)
from tests.support.paged import compressed_again, configs, paged

MARKS = {BOTH: "both", BASELINE: "baseline", TREATMENT: "treatment", NEITHER: "none", QUESTION: "question"}


@pytest.fixture(scope="module")
def shown(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html(), encoding="utf-8")
    opened = watched(browser, path, viewport={"width": 1280, "height": 900})
    opened.page.wait_for_selector("body[data-ready=all]", timeout=20000)
    settle(opened)
    yield opened
    assert opened.quiet()
    opened.page.context.close()


def sides(first: str, second: str, budget: int) -> tuple[Any, Any]:
    held = {(one.selection.name, one.budget.value): one for one in measured().run.configs}
    return held[first, budget], held[second, budget]


def pairs() -> list[tuple[str, str, int]]:
    return [(one, other, budget) for budget in BUDGETS for one in SELECTIONS for other in SELECTIONS if one != other]


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("kind", ["isolated", "propagated"])
def test_tiles_are_what_heads_finds_for_every_pair(shown: Any, kind: str, distance: str) -> None:
    choose(shown, sample="", measure=f"{kind}{DISTANCES[distance].suffix}")
    for first, second, budget in pairs():
        choose(shown, baseline=first, treatment=second, budget=str(budget))
        found = getattr(summarise(measured(), *sides(first, second, budget), distance=distance), kind)
        told = tiles(shown)
        assert told["heads + / = / −"] == f"{found.improved} / {found.tied} / {found.worsened}"
        assert told["Σ over the baseline’s"] == f"× {estimate(ratio(found.sum_ratio), found.sum_ratio_interval, ratio)}"
        share = f"{100 * found.better_share:.0f} %"
        assert told["heads better"] == estimate(share, found.better_share_interval, lambda end: f"{100 * end:.0f}")


def signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)


@pytest.mark.parametrize("kind", ["isolated", "propagated"])
def test_the_map_tells_what_a_heads_loss_costs_the_text(shown: Any, kind: str) -> None:
    first, second = sides("attention", "two-stage", 96)
    choose(shown, baseline="attention", treatment="two-stage", budget="96", measure=f"effect_{kind}", sample="")
    held = measured()
    means = held.arrays[f"effect_{kind}"].mean(axis=(0, 2))
    both = [means[held.run.configs.index(side)] for side in (first, second)]
    for show, values in (("treatment", both[1]), ("baseline", both[0]), ("change", None)):
        shown.page.select_option("#map select[name=show]", show)
        settle(shown)
        for head in (0, int(both[0].argmin()), int(both[0].argmax())):
            shown.page.evaluate("document.getElementById('map').scrollIntoView({block: 'center', behavior: 'instant'})")
            box = cells(shown).nth(head).bounding_box()
            shown.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            told = [number(float(side.flat[head])) for side in both]
            expected = f"{told[0]} → {told[1]} nat" if values is None else f"{signed(float(values.flat[head]))} nat"
            assert expected in text(shown, "#tooltip"), (show, head)
    assert "change of log p" in text(shown, "#verdict .said")


def cells_of(shown: Any, part: str) -> list[list[str]]:
    """The rows of a part's table."""
    rows = shown.page.locator(f"#{part} tbody tr")
    return [rows.nth(row).inner_text().split("\t") for row in range(rows.count())]


def test_kinds_of_tokens_are_those_of_heads(shown: Any) -> None:
    choose(shown, baseline="attention", treatment="two-stage", budget="96", measure="isolated", sample="")
    found = pk.compare_heads(measured().sel(budget=96), "attention", "two-stage").token_kinds
    assert len(found) > 1
    for row, one in zip(cells_of(shown, "kinds"), found, strict=True):
        assert row[:3] == [one.kind, str(one.samples), str(one.steps)]
        assert row[4] == written(one.propagated_ratio, one.propagated_ratio_interval, ratio)
    choose(shown, baseline="two-stage", treatment="attention")
    assert text(shown, "#kinds .lacks").startswith("Kinds of tokens are compared with attention as the baseline")


def written(value: float, interval: Any, shown: Any) -> str:
    """A number with its interval, or with the range of few samples."""
    if interval is None:
        return str(shown(value))
    low, high = shown(interval.low), shown(interval.high)
    return f"{shown(value)} ({low} … {high})" if interval.kind == "range" else f"{shown(value)} [{low}, {high}]"


def test_perplexity_is_that_of_every_cache(shown: Any) -> None:
    found = pk.perplexity(measured())
    told = cells_of(shown, "perplexity")
    assert told[0][:3] == ["full cache", "", written(found.full, found.full_interval, number)]
    for row, one in zip(told[1:], found.configs, strict=True):
        assert row[2] == written(one.perplexity, one.perplexity_interval, number)
        assert row[3] == written(one.ratio, one.ratio_interval, number)
    assert text(shown, "#perplexity .said") == found.conclusion()


def test_some_heads_are_tied_there() -> None:
    """Otherwise the test above would not tell a page without ties from one with them."""
    found = [summarise(measured(), *sides(*pair)).isolated.tied for pair in pairs()]
    assert max(found) > 0


def test_a_single_sample_is_that_sample(shown: Any) -> None:
    first, second = sides("attention", "two-stage", 96)
    for place, sample in enumerate(measured().sample_ids[:2]):
        choose(shown, baseline="attention", treatment="two-stage", budget="96", measure="propagated", sample=sample)
        alone = summarise(measured().sel(sample=sample), first, second).propagated
        counts = f"{alone.improved} / {alone.tied} / {alone.worsened}"
        told = tiles(shown)
        assert (told["Σ over the baseline’s"], told["heads + / = / −"]) == (f"× {ratio(alone.sum_ratio)}", counts), (
            place
        )
    choose(shown, sample="")


def cells(shown: Any) -> Any:
    return shown.page.locator("#map svg.map > g").first.locator("rect")


def test_hovering_tells_both_means_and_a_click_opens_the_head(shown: Any) -> None:
    choose(shown, baseline="attention", treatment="two-stage", budget="96", measure="isolated", sample="")
    found = summarise(measured(), *sides("attention", "two-stage", 96)).isolated
    layers, heads = found.verdict.shape
    assert cells(shown).count() == layers * heads
    for layer, head in ((0, 0), (3, 7), (layers - 1, heads - 1)):
        shown.page.evaluate("document.getElementById('map').scrollIntoView({block: 'center', behavior: 'instant'})")
        box = cells(shown).nth(layer * heads + head).bounding_box()
        at = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        shown.page.mouse.move(*at)
        said = text(shown, "#tooltip")
        both = [number(float(side[layer, head])) for side in (found.baseline_mean, found.treatment_mean)]
        assert said.startswith(f"layer {layer}, head {head}")
        assert f"{both[0]} → {both[1]} L1" in said
        word = {1: "better", 0: "tied", -1: "worse"}[int(found.verdict[layer, head])]
        assert word in said
        shown.page.mouse.click(*at)
        settle(shown)
        of = "mean of 5 samples, mean over decode steps"
        assert text(shown, "#head table caption") == f"Layer {layer}, head {head} ({of})"


def test_hatched_cells_are_the_tied_heads(shown: Any) -> None:
    for first, second, budget in pairs()[:6]:
        choose(shown, baseline=first, treatment=second, budget=str(budget), measure="isolated", sample="")
        found = summarise(measured(), *sides(first, second, budget)).isolated
        assert shown.page.locator("#map g.ties rect").count() == found.tied


def test_the_table_of_a_head_is_what_the_trace_holds(shown: Any) -> None:
    choose(shown, baseline="attention", treatment="two-stage", budget="48", measure="isolated", sample="")
    choice = {"layer": "12", "head": "4"}
    for name, value in choice.items():
        shown.page.select_option(f"#head select[name={name}]", value)
    settle(shown)
    rows = shown.page.locator("#head tbody tr")
    told = {one[0]: one[1:] for one in (rows.nth(row).inner_text().split("\t") for row in range(rows.count()))}
    held = measured()
    places = [held.run.configs.index(side) for side in sides("attention", "two-stage", 48)]
    for name, variable in {
        "isolated": "perturbation_isolated",
        "propagated, L2": "perturbation_propagated_l2",
        "θ": "theta",
        "θ̂": "theta_hat",
        "S": "retained_mass",
        "σ, stage 1": "sigma_stage1",
    }.items():
        means = Measurements(held, "report")[variable][:, places, 12, 4].mean(axis=0)
        assert told[name][:2] == [number(float(mean)) for mean in means], name


def test_tokens_are_coloured_by_their_fate_and_losses_are_listed(shown: Any) -> None:
    sample = measured().sample_ids[1]
    choose(shown, baseline="attention", treatment="two-stage", budget="48", measure="isolated", sample=sample)
    shown.page.select_option("#prompt select[name=colour]", "fate")
    shown.page.select_option("#head select[name=layer]", "12")
    shown.page.select_option("#head select[name=head]", "4")
    settle(shown)
    found = pk.tokens(measured().sel(budget=48), sample, 12, 4)
    shown.page.locator("#prompt .text").scroll_into_view_if_needed()
    classes = shown.page.evaluate("[...document.querySelectorAll('#prompt .chunk span')].map((one) => one.className)")
    assert [name.split()[0] for name in classes] == [MARKS[fate] for fate in found.fates]
    assert found.losses
    lost = {loss.position for side in found.losses for loss in side}
    assert {place for place, name in enumerate(classes) if "lost" in name.split()} == lost
    tables = shown.page.locator("#prompt .lost table")
    for place, losses in enumerate(found.losses):
        rows = tables.nth(place).locator("tbody tr")
        told = [rows.nth(row).inner_text().split("\t") for row in range(rows.count())]
        assert [int(row[2].replace(",", "")) for row in told] == [loss.position for loss in losses]
        for row, loss in zip(told, losses, strict=True):
            percent = float(row[3].removesuffix(" %").replace("e−", "e-"))
            assert percent == pytest.approx(100 * loss.share, rel=6e-3, abs=0.5 if loss.share >= 0.1 else 0)
    shown_text = shown.page.evaluate("document.querySelector('#prompt .text').textContent")
    assert shown_text == "".join(found.prompt.pieces)
    choose(shown, sample="")


def test_layers_say_the_ratio_after_the_last_one(shown: Any) -> None:
    for distance, measure in (("l1", "isolated"), ("cosine", "propagated_cosine")):
        choose(shown, baseline="attention", treatment="two-stage", budget="96", measure=measure, sample="")
        (series,) = pk.layer_drift(measured(), "attention", "two-stage", distance=distance).members
        drift = next(one for one in series if one.baseline.budget.value == 96)
        band = drift.ratio_interval
        assert band is not None
        end = estimate(ratio(float(drift.ratio[-1])), band.at(-1), ratio)
        captions = shown.page.locator("#layers .caption").all_inner_texts()
        assert f"treatment over baseline: × {end} after layer 29" in captions


def test_the_assumption_counts_heads_below(shown: Any) -> None:
    choose(shown, baseline="attention", treatment="two-stage", budget="48", sample="")
    for reading in ("sigma_stage1", "sigma_topk", "retained_mass"):
        shown.page.select_option("#assumption select[name=sigma]", reading)
        settle(shown)
        found = [
            next(one for one in pk.assumption(measured(), side).configs if one.config.budget.value == 48)
            for side in ("attention", "two-stage")
        ]
        below = [int((one.readings[reading].mean <= 0.5).sum()) for one in found]
        told = shown.page.locator("#assumption .caption").all_inner_texts()
        words = ["1 head" if count == 1 else f"{count} heads" for count in below]
        assert [f"at most 0.5 in {word} of 270" in line for word, line in zip(words, told, strict=True)] == [True, True]


def titles(shown: Any, part: str) -> list[str]:
    """What hovering over the points of a part's charts says."""
    found: list[str] = shown.page.evaluate(
        f"[...document.querySelectorAll('#{part} title')].map((one) => one.textContent)"
    )
    return found


def test_budgets_are_the_medians_of_kl_and_the_shares_of_tokens(shown: Any) -> None:
    choose(shown, baseline="attention", treatment="two-stage", budget="96", measure="propagated", sample="")
    told = titles(shown, "budgets")
    found = pk.budget_curves(measured(), "attention", SELECTIONS[1:])
    for curve in found:
        for place, config in enumerate(curve.configs):
            name = f"{config.selection.name}, budget {config.budget.value}\n"
            kl, top1 = (float(getattr(curve.medians, quantity)[place]) for quantity in ("kl", "top1"))
            for shown_value in (number(kl), f"{100 * top1:.0f}"):
                assert any(one.startswith(f"{name}{shown_value} [") for one in told), (name, shown_value)


def test_the_ablation_is_that_of_the_analysis(shown: Any) -> None:
    choose(shown, budget="48")
    told = titles(shown, "ablation")
    setting = next(one for one in pk.ablation(measured()).settings if one.baseline.budget.value == 48)
    assert setting.rows
    for row in setting.rows:
        for kind in ("isolated", "propagated"):
            found = getattr(row, kind)
            end = f"{kind}: × {estimate(ratio(found.sum_ratio), found.sum_ratio_interval, ratio)}"
            assert any(row.name in one and one.endswith(end) for one in told), (row.name, end)


def test_answers_stand_beside_the_expected_ones(shown: Any) -> None:
    choose(shown, baseline="attention", treatment="two-stage", budget="96", sample="")
    held = measured()
    rows = shown.page.locator("#answers tbody tr")
    assert rows.count() == len(held.sample_ids)
    place = held.run.configs.index(sides("attention", "two-stage", 96)[1])
    for row, _ in enumerate(held.sample_ids):
        cells = rows.nth(row).locator("td")
        wanted = [str(held.arrays["answer_full"][row]), str(held.arrays["answer"][row, place])]
        assert [cells.nth(cell).locator(".answer > span").inner_text().strip() for cell in (1, 3)] == [
            one.strip() or "(nothing)" for one in wanted
        ]
    means = [float(np.mean(held.arrays["digits"][:, place]))]
    assert any(number(means[0]) in one for one in titles(shown, "answers"))


@pytest.mark.parametrize("width", [420, 1280])
@pytest.mark.parametrize("with_text", [True, False], ids=["text", "ids"])
def test_what_was_missed_stands_at_every_token(opened: Any, width: int, with_text: bool) -> None:
    held = compressed_again(paged(2, configs(2, (0.1, 0.2)), layers=2, heads=3, tokens=203, steps=9))
    if not with_text:
        held = replace(held, arrays={name: array for name, array in held.arrays.items() if name != "token_text"})
    page = opened(html(held), viewport={"width": width, "height": 900})
    page.page.wait_for_selector("body[data-ready=all]", timeout=20000)
    sides = [place for place, one in enumerate(held.run.configs) if one.budget.value == 0.2]
    choose(page, budget="0.2", sample=held.sample_ids[1])
    page.page.evaluate("document.getElementById('missed').scrollIntoView({block: 'start', behavior: 'instant'})")
    settle(page)
    missed = held.arrays["missed_attention"][1, sides, :8]
    assert f"{number(missed.max())}: attention of later steps" in text(page, "#missed .legend")
    for place, config in enumerate(sides):
        box = page.page.locator("#missed .text").nth(place)
        spans = box.locator("span")
        assert spans.count() == 8
        marks = [spans.nth(step).get_attribute("class").split() for step in range(8)]
        assert ["compression" in names for names in marks] == [True, False] * 4
        gone = held.arrays["gone_attention"][1, config, :8].mean(axis=(0, 1, 2), dtype=np.float64)
        said = page.page.locator("#missed .said").nth(place).inner_text()
        assert f"{100 * gone.sum():.0f} % fell on what was gone: sink {gone_text(gone[0])}, prompt" in said
        assert "The cache was compressed before 4 of 8 steps." in said
        for step in (1, 2):
            spans.nth(step).hover()
            token = f"“ word{9 + step}”" if with_text else f"token {9 + step}"
            told = page.page.locator("#tooltip").inner_text().splitlines()
            assert told[:3] == [token, f"step {step}", f"missed {number(missed[place, step])}"]
            entries = held.arrays["held_entries"][1, config, step].mean()
            assert told[3].removesuffix(" entries held") == f"{entries:.1f}".removesuffix(".0")
            assert ("the cache was compressed right before" in told) == (step == 2)
        level = float(spans.nth(3).evaluate("(one) => one.style.getPropertyValue('--level')"))
        assert level == pytest.approx(missed[place, 3] / missed.max(), abs=0.006)
        row = page.page.locator("#missed table").nth(place).locator("tbody tr").first.inner_text().split("\t")
        assert row[1:3] == [str(missed[place].argmax()), number(missed[place].max())]
    assert page.page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.quiet()


def test_of_a_cache_that_others_compress_nothing_is_said_to_be_missed(opened: Any) -> None:
    held = compressed_again(paged(2, configs(2, (0.1,)), layers=2, heads=3, tokens=203, steps=9))
    names = ("missed_attention", "gone_attention", "perturbation_carried")
    without = {name: held.arrays[name].copy() for name in names}
    for one in without.values():
        one[:, 1] = np.nan
    page = opened(html(replace(held, arrays={**held.arrays, **without})))
    page.page.wait_for_selector("body[data-ready=all]", timeout=20000)
    settle(page)
    assert "Others compress this cache" in text(page, "#missed .beside > div:nth-child(2) .lacks")
    assert page.page.locator("#missed table").count() == page.page.locator("#missed .said").count() == 1
    assert page.quiet()


def gone_text(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{number(100 * share)} %"


def test_numbers_of_the_tests_are_written_as_on_the_page() -> None:
    values = (0.0, 0.5, 0.123456, 12.3456, 123.456, 999.6, 1234.5, 1e-5, 100.0, 20.0, -0.25)
    expected = ["0", "0.500", "0.123", "12.3", "123", "1000", "1,234", "1.0e−5", "100", "20.0", "−0.250"]
    assert [number(value) for value in values] == expected
