"""`pk.report`: a page that shows itself in a notebook and is written as one file, or not at all."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.errors import ConfigError, OutputError, TraceError
from perturbkv.reporting import report
from perturbkv.trace import FailedSample, Trace
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
