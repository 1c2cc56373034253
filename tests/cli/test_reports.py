"""`perturbkv report`: a line and a page, or a line and nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.trace import FailedSample
from tests.support.asked import refused
from tests.support.payloads import small_trace
from tests.support.traces import write

Run = Callable[..., Any]


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A finished trace in a folder of its own."""
    return small_trace().save(tmp_path / "runs" / "t.h5").relative_to(tmp_path)


def test_a_page_lies_beside_the_first_trace_and_one_line_says_so(perturbkv: Run, measured: Path) -> None:
    ran = perturbkv("report", measured)
    said = r"runs/report\.html: \d\.\d MB, 2 samples, 2 configurations; opens in any browser, without network\n"
    assert (ran.code, ran.err) == (0, "")
    assert re.fullmatch(said, ran.out.replace(" \n", " ")), ran.out
    assert Path("runs/report.html").read_text() == pk.report(pk.read_trace(measured)).html
    assert {one.name for one in Path("runs").iterdir()} == {"t.h5", "report.html"}


def test_json_says_the_same(perturbkv: Run, measured: Path) -> None:
    other = small_trace(samples=4).save("other.h5")
    told = perturbkv("report", other, measured, "-o", "deep/page.html", "--full", "--json").json()
    assert told["bytes"] == Path("deep/page.html").stat().st_size
    assert (told["file"], told["samples"], told["configurations"], told["full"]) == ("deep/page.html", 5, 4, True)
    assert [one["trace"] for one in told["traces"]] == ["other.h5", "runs/t.h5"]
    assert told["traces"][1]["trace_digest"] == pk.read_trace(measured).digest


CASES: dict[str, tuple[list[str], str]] = {
    "no trace": (["nothere.h5"], "expected a trace file at nothere.h5"),
    "another file": (["text.h5"], "expected a trace file"),
    "a folder for a trace": (["runs"], "runs"),
    "a folder for a page": (["runs/t.h5", "-o", "runs"], "got the folder runs"),
    "a file that is there": (["runs/t.h5", "-o", "there.html"], "--overwrite replaces it"),
    "the trace itself": (["runs/t.h5", "-o", "runs/t.h5", "--overwrite"], "expected another file than the trace"),
    "another kind of file": (["runs/t.h5", "-o", "page.pdf"], "to end in .html, got page.pdf; name it page.html"),
    "a trace twice": (["runs/t.h5", "runs/t.h5"], "runs/t.h5 twice; leave one out"),
    "a trace under two names": (["runs/t.h5", "runs/../runs/t.h5"], "expected every trace once"),
    "no complete sample": (["failed.h5"], "complete sample"),
    "no argument": ([], "Missing argument"),
}


@pytest.mark.parametrize(("asked", "said"), CASES.values(), ids=list(CASES))
def test_bad_input_is_one_line_and_leaves_nothing(perturbkv: Run, measured: Path, asked: list[str], said: str) -> None:
    Path("text.h5").write_text("no trace")
    Path("there.html").write_text("mine")
    write(Path("failed.h5"), FailedSample("f", "NaN"))
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    refused(perturbkv("report", *asked), said)
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
