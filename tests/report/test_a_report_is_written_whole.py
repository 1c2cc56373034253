"""A page is written as one file or not at all, holds what there is room for, and says what it left out."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import json
import re
import time
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.errors import ConfigError, OutputError, TraceError
from perturbkv.reporting import page_blocks, report
from perturbkv.reporting.page_blocks import LIBRARIES, Blocks, Payload, blocks_limit
from perturbkv.reporting.payload import payload
from perturbkv.trace import FailedSample, Trace
from tests.support.decoded import array, bundle, inflated, numbers, trace_of
from tests.support.paged import configs, paged
from tests.support.payloads import small_trace
from tests.support.traces import run_config, sample_trace, trace

KNOWN = small_trace()


class Frames(HTMLParser):
    """Tags of a notebook's cell."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))


def test_a_report_is_the_page_that_it_saves(tmp_path: Path) -> None:
    shown = pk.report(KNOWN, tmp_path / "deep" / "report.html")
    assert (tmp_path / "deep" / "report.html").read_bytes() == shown.html.encode()
    assert shown.bytes == (tmp_path / "deep" / "report.html").stat().st_size
    assert (shown.samples, shown.configs) == (2, 2)
    assert shown.save(tmp_path / "b.html").read_bytes() == shown.html.encode()
    assert pk.report([KNOWN]).html == shown.html
    assert [one.name for one in tmp_path.rglob("*") if one.is_file()] == ["b.html", "report.html"]


def test_several_traces_stand_side_by_side() -> None:
    other = dataclasses.replace(small_trace(samples=4), run=run_config(4, model="other", dataset="d"))
    shown = pk.report([KNOWN, other])
    assert [title.partition(": ")[2] for title in re.findall(r"<h2>(.*?)</h2>", shown.html)] == ["m · d", "other · d"]
    assert (shown.samples, shown.configs) == (5, 4)


def test_a_report_says_what_it_is_in_a_line_and_shows_itself_in_a_frame() -> None:
    shown = dataclasses.replace(pk.report(KNOWN), title='"><img src=x>')
    assert re.fullmatch(r'Report of "><img src=x>: \d\.\d MB, 2 samples; \.save\(path\) writes it', repr(shown))
    ((tag, told),) = Frames(shown._repr_html_()).tags
    assert (tag, told["sandbox"], told["height"]) == ("iframe", "allow-scripts", "900")
    assert told["srcdoc"] == shown.html
    assert told["title"] == f"Report of {shown.title}"


@pytest.mark.parametrize(("full", "held"), [(False, "u2"), (True, "f4")])
def test_full_keeps_values_as_they_were_measured(full: bool, held: str) -> None:
    found = re.search(r'"sample":\{"block":"[^"]+","dtype":"(..)"', pk.report(KNOWN, full=full).html)
    assert found is not None
    assert found[1] == held


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("mine")
    with pytest.raises(OutputError, match="expected no file at .*overwrite=True replaces it"):
        pk.report(KNOWN, path)
    assert path.read_text() == "mine"
    pk.report(KNOWN, path, overwrite=True)
    assert path.read_text().startswith("<!doctype html>")
    with pytest.raises(OutputError, match="got the folder"):
        pk.report(KNOWN, tmp_path, overwrite=True)


def test_a_trace_is_never_replaced_by_its_report(tmp_path: Path) -> None:
    measured = pk.read_trace(KNOWN.save(tmp_path / "t.h5"))
    before = (tmp_path / "t.h5").read_bytes()
    with pytest.raises(OutputError, match="expected another file than the trace"):
        pk.report(measured, tmp_path / "t.h5", overwrite=True)
    assert (tmp_path / "t.h5").read_bytes() == before


def test_what_is_no_trace_is_refused_by_its_kind(tmp_path: Path) -> None:
    for wrong in ("runs/t.h5", tmp_path, 3, [KNOWN, "t.h5"]):
        with pytest.raises(ConfigError, match="expected a trace or a list of traces, got .*pk.read_trace"):
            pk.report(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="in a list"):
        pk.report(KNOWN, KNOWN)  # type: ignore[arg-type]


def test_a_page_that_cannot_be_made_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(payload: Any) -> str:
        raise RuntimeError

    monkeypatch.setattr(report, "page", fails)
    with pytest.raises(RuntimeError):
        pk.report(KNOWN, tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_shown_is_one_line(tmp_path: Path) -> None:
    failed = Trace.from_samples(run_config(1), [FailedSample("f", "NaN")], {"model": "m"})
    measured = KNOWN.save(tmp_path / "t.h5")
    cases: list[tuple[Any, type[Exception], str]] = [
        ((), ConfigError, "expected a trace or several for a report, got none"),
        ((KNOWN, KNOWN), ConfigError, "expected every trace once, got the trace in memory twice"),
        ((pk.read_trace(measured), pk.read_trace(measured)), ConfigError, r"t\.h5 twice"),
        (failed, TraceError, "with a complete sample, got the trace in memory"),
    ]
    for given, error, said in cases:
        with pytest.raises(error, match=said) as found:
            pk.report(given)
        assert "\n" not in str(found.value)


def test_the_examples_in_docstrings_run() -> None:
    ran = doctest.testmod(
        importlib.import_module("perturbkv.reporting.report"), extraglobs={"trace": trace(sample_trace(optional=True))}
    )
    assert ran.attempted > 0
    assert ran.failed == 0


SMALL, LARGE = 4_600_000, 23_000_000
"""Bytes of a page of 8 samples, 24 configurations and 270 heads, and of 32 samples and 1,024 heads."""


@cache
def usual() -> Payload:
    return payload([paged()])


def in_base64(page: Payload) -> int:
    return sum(-(-len(block) // 3) * 4 for block in page.blocks.values())


@pytest.mark.slow
def test_a_usual_trace_fills_its_page_and_no_more() -> None:
    told = trace_of(usual())
    assert SMALL * 0.95 < in_base64(usual()) + LIBRARIES <= SMALL
    assert len(json.dumps(usual().document)) < 60_000
    held = told["held_heads"]
    assert held["of"] == 8 * 270 and 8 * 20 < held["held"] < held["of"] and "--full" in held["why"]
    each = [len(prompt["held"]) for prompt in told["prompts"].values()]
    assert sum(each) == held["held"] and min(each) > 0.5 * max(each)
    assert told["arrays"]["sample"]["measures"] == list(range(13)) and "samples" not in told["lacks"]
    assert all(prompt["text"] and prompt["share"] for prompt in told["prompts"].values())


@pytest.mark.slow
def test_answers_take_of_the_room_for_heads() -> None:
    trace = paged()
    long = np.array([[f"{sample} {config} " * 400 for config in range(24)] for sample in range(8)], dtype=object)
    texts = {"answer_full": long[:, 0], "answer": long}
    page = payload([dataclasses.replace(trace, arrays={**trace.arrays, **texts})])
    taken = len(json.dumps(trace_of(page)["answers"], ensure_ascii=False))
    assert taken > 300_000
    assert SMALL * 0.95 < in_base64(page) + LIBRARIES + taken <= SMALL
    assert trace_of(page)["held_heads"]["held"] < trace_of(usual())["held_heads"]["held"]


def test_a_bound_that_four_bytes_cannot_hold_is_infinite(recwarn: pytest.WarningsRecorder) -> None:
    blocks = Blocks("t")
    blocks.put_floats("mean", np.array([1e300, 1.0]))
    assert inflated(Payload("", (), {}, blocks.blocks), "t-mean") == bytes([0, 0, 0, 0, 128, 128, 127, 63])
    assert not recwarn.list


@pytest.mark.slow
def test_the_heads_that_change_most_are_those_that_are_held() -> None:
    trace, told = paged(), trace_of(usual())
    pairs = [pair for pair in told["pairs"] if {told["configs"][one]["side"] for one in pair} == {0, 1}]
    assert len(pairs) == 3
    moved = trace.arrays["perturbation_isolated"][5, :, 0] / trace.arrays["output_norm"][5, 0]
    change = np.max([abs(moved[second] - moved[first]) for first, second in pairs], axis=0).reshape(-1)
    first, *held = told["prompts"]["5"]["held"]
    expected = [place for place in np.argsort(-change, kind="stable").tolist() if place != first]
    assert held == expected[: len(held)]
    layer, head = divmod(held[-1], 9)
    assert bundle(usual(), 5, layer, head)["kept"][17] == trace.kept(5, 17, layer, head).tolist()


def test_full_pages_hold_every_head() -> None:
    page = payload([paged(3, configs(4, (0.1, 0.2)), 4, 8, 300)], full=True)
    told = trace_of(page)
    assert told["held_heads"] == {"of": 96, "held": 96, "why": ""}
    assert told["arrays"]["sample"]["dtype"] == "f4"
    assert sorted(told["prompts"]["2"]["held"]) == list(range(32))


@pytest.mark.slow
def test_a_large_trace_leaves_out_single_samples_of_bounds_before_those_of_perturbations() -> None:
    """As large as 32 samples × 24 configurations × 1,024 heads, in which nothing is like anything else."""
    begin = time.perf_counter()
    page = payload([paged(32, None, 32, 32, 4000, kept=False)])
    assert time.perf_counter() - begin < 60
    told = trace_of(page)
    assert in_base64(page) + LIBRARIES <= LARGE
    keys = [told["measures"][place]["key"] for place in told["arrays"]["sample"]["measures"]]
    assert {"isolated", "propagated", "retained_mass", "sigma_stage1"} <= set(keys)
    assert told["arrays"]["sample"]["shape"] == [len(keys), 32, 24, 32, 32]
    assert "--full" in told["lacks"]["samples"]


@pytest.mark.slow
def test_many_sides_leave_out_pairs_of_the_last_ones() -> None:
    of = tuple(configs(8, tuple(n / 100 for n in range(10, 30))))
    told = trace_of(page := payload([paged(2, of, 1, 2, 400)]))
    assert len(told["pairs"]) == 400 and told["pairs_left_out"] == 20 * 28 - 400
    assert {tuple(told["configs"][one]["side"] for one in pair) for pair in told["pairs"]} >= {(0, 1), (0, 2), (1, 2)}
    assert array(page, "pair_sum").shape == (13, 400, 2, 3)


@pytest.mark.parametrize("values", [0, 51_840, 400_000, 786_432])
def test_room_grows_with_the_values_of_a_trace(values: int) -> None:
    expected = np.interp(values, [51_840, 786_432], [SMALL, LARGE]) - LIBRARIES
    assert blocks_limit(values) == pytest.approx(expected, abs=1)


LOGARITHMIC = np.array([0.0, 1e-30, 3e-12, 0.7, 1.0, 1234.5, 1e20, np.inf, np.nan])


@pytest.mark.parametrize("values", [LOGARITHMIC, np.zeros(3), np.array([np.nan, np.inf]), np.array([5.0])])
def test_logarithms_keep_to_a_thousandth_and_zero_stays_zero(values: Any) -> None:
    scale = page_blocks.log_scale(values)
    np.testing.assert_allclose(numbers(page_blocks.encode(values, scale), scale.to_dict()), values, rtol=1e-3)


@pytest.mark.parametrize("values", [np.linspace(0, 1, 999), np.array([0.5, np.nan, np.inf]), np.array([0.1, 11.9])])
def test_shares_keep_to_a_ten_thousandth(values: Any) -> None:
    scale = page_blocks.linear_scale(values)
    np.testing.assert_allclose(numbers(page_blocks.encode(values, scale), scale.to_dict()), values, rtol=0, atol=1e-4)


def test_what_rounding_makes_negative_is_nothing() -> None:
    values = np.array([-1e-17, 2.0])
    assert page_blocks.encode(values, page_blocks.log_scale(values)).tolist()[0] == 0
