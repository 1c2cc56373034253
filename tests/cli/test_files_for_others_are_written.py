"""What a command writes for others: a report's page, tables, figures in styles with their captions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.figures import finishing
from perturbkv.schema import TEXT
from tests.house.test_no_label_is_parsed import SWEPT, asked_of, made
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


def complete(path: str) -> Path:
    """A finished trace at this path, none of whose samples failed."""
    return small_trace().sel(sample=["s0", "s1"]).save(path)


def without_text(trace: pk.Trace) -> pk.Trace:
    """The trace as `--no-prompts` leaves it."""
    lean = {name: array for name, array in trace.arrays.items() if name not in TEXT}
    return dataclasses.replace(trace, arrays=lean)


def test_a_file_that_is_no_table_of_tokens_is_left_alone(perturbkv: Run) -> None:
    without_text(small_trace().sel(sample=["s0", "s1"])).save("a/t.h5")
    for suffix in ("csv", "parquet"):
        Path(f"a/t.tokens.{suffix}").write_text("mine")
    assert perturbkv("export", "a", "--overwrite").code == 0
    assert {Path(f"a/t.tokens.{suffix}").read_text() for suffix in ("csv", "parquet")} == {"mine"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["t.h5", "u.h5", "-o", "t.csv"], "--output names the tables of one trace, got 2 traces"),
        (["t.h5", "t.hdf5"], "expected a table per trace, got t.csv for two of them"),
        (["empty"], "in the folder empty, got none; name the traces themselves"),
    ],
)
def test_what_cannot_be_published_is_one_line(perturbkv: Run, words: list[str], error: str) -> None:
    Path("empty").mkdir()
    for name in ("t.h5", "u.h5", "t.hdf5"):
        Path(name).touch()  # refused before a trace is read
    before = sorted(Path().iterdir())
    refused(perturbkv("export", *words), error)
    assert sorted(Path().iterdir()) == before


CLIFF = ("budget", "--cliff", "t.h5", "--format", "pdf")


@pytest.fixture
def swept_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return made(SWEPT).save(tmp_path / "t.h5")


@pytest.mark.slow
@pytest.mark.usefixtures("swept_trace")
def test_a_papers_caption_stands_beside_its_figure_and_replaces_itself_alone(perturbkv: Run, tmp_path: Path) -> None:
    told = perturbkv(*CLIFF, "--style", "paper", "--columns", 1, "--json").json()
    names = [Path(figure).name for figure in told["figures"]]
    assert names == ["budget-cliff.pdf", "budget-cliff.caption.txt", "budget-cliff.caption.tex"]
    caption = tmp_path / "budget-cliff.caption.tex"
    assert caption.read_text().startswith("% Caption by perturbkv: trace ")
    assert perturbkv(*CLIFF, "--style", "paper").code == 0
    caption.write_text("my own words")
    refused(perturbkv(*CLIFF, "--style", "paper"), "budget-cliff.caption", "--overwrite")
    assert caption.read_text() == "my own words"


@pytest.mark.usefixtures("swept_trace")
def test_a_screens_figure_has_no_caption_beside_it(perturbkv: Run) -> None:
    told = perturbkv(*CLIFF, "--json").json()
    assert [Path(figure).name for figure in told["figures"]] == ["budget-cliff.pdf"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--style", "papr"), ["unknown style 'papr'; known: paper, "]),
        (("--style", "talk", "--columns", "1"), ["--columns 1 is 84 mm", "174 mm", "leave out --columns"]),
    ],
)
@pytest.mark.usefixtures("swept_trace")
def test_a_bad_style_is_one_line_and_leaves_nothing(
    perturbkv: Run, tmp_path: Path, options: tuple[str, ...], said: list[str]
) -> None:
    refused(perturbkv(*CLIFF, *options), *said)
    assert [path.name for path in tmp_path.iterdir()] == ["t.h5"]


@pytest.mark.slow
def test_a_figure_too_wide_for_a_column_says_what_to_type(
    perturbkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finishing, "_LEAST_PANEL_MM", 40)
    asked_of("horizon").save(tmp_path / "t.h5")
    ran = perturbkv("horizon", "t.h5", "--style", "paper", "--columns", 1, "--format", "png")
    refused(ran, "--columns 1 is too narrow for figure horizon", "mm; write --columns 2")
