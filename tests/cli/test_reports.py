"""`perturbkv report`: a line and a page, or a line and nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from tests.support.asked import refused
from tests.support.payloads import small_trace

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


@pytest.mark.slow
def test_json_says_the_same(perturbkv: Run, measured: Path) -> None:
    other = small_trace(samples=4).save("other.h5")
    told = perturbkv("report", other, measured, "-o", "deep/page.html", "--full", "--json").json()
    assert told["bytes"] == Path("deep/page.html").stat().st_size
    assert (told["file"], told["samples"], told["configurations"], told["full"]) == ("deep/page.html", 5, 4, True)
    assert [one["trace"] for one in told["traces"]] == ["other.h5", "runs/t.h5"]
    assert told["traces"][1]["trace_digest"] == pk.read_trace(measured).digest


@pytest.mark.slow
def test_a_page_without_suffix_is_an_html_file(perturbkv: Run, measured: Path) -> None:
    ran = perturbkv("report", measured, "-o", "x", "--json")
    assert ran.json()["file"] == "x.html"
    page = pk.report(pk.read_trace(measured), "y")
    assert Path("x.html").read_text() == Path("y.html").read_text() == page.html
    assert page.save("z") == Path("z.html")
    assert {one.name for one in Path().iterdir()} == {"runs", "x.html", "y.html", "z.html"}
    refused(perturbkv("report", measured, "-o", "x"), "x.html")
    with pytest.raises(pk.PerturbkvError, match="expected a page's name to end in .html, got a.pdf; name it a.html"):
        page.save("a.pdf")
