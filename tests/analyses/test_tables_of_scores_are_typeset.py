"""Tables of scores as LaTeX, Markdown and CSV: laid out as the paper's, whatever data sets and policies are called."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.cells import cell_len

from perturbkv.analyses.quality.quality import Quality, quality
from perturbkv.analyses.quality.score_tables import escape_latex
from perturbkv.display import Table
from perturbkv.trace import Trace
from tests.support.graded import graded
from tests.support.measured import config

CONFIGS = tuple(
    config(selection, budget, policy=policy)
    for budget in (64, 0.4, 0.2)
    for policy in ("snapkv", "adakv")
    for selection in ("attention", "two-stage")
)
LONGBENCH = ("lcc", "qasper", "multifieldqa_en", "passage_retrieval_en", "multi_news")


def traces(names: tuple[str, ...], samples: int = 6) -> list[Trace]:
    made = []
    for seed, name in enumerate(names):
        draw = np.random.default_rng(seed)
        made.append(graded(name, draw.random(samples), draw.random((samples, len(CONFIGS))), CONFIGS,
                           held=draw.random(len(CONFIGS))))  # fmt: skip
    return made


@pytest.fixture(scope="module")
def result() -> Quality:
    return quality(traces(LONGBENCH))


def rows_of(latex: str) -> list[list[str]]:
    """Cells of every row of the last table."""
    body = latex[latex.rindex(r"\toprule") :]
    return [line.removesuffix(r" \\").split(" & ") for line in body.splitlines() if line.endswith(r" \\")]


def test_latex_is_balanced_and_every_row_has_every_column(result: Quality) -> None:
    latex = result.to_latex()
    assert latex.count("{") - latex.count(r"\{") == latex.count("}") - latex.count(r"\}")
    assert re.findall(r"\\begin\{(\S+?)\}", latex) == ["table*", "tabular"] * 2
    assert sorted(re.findall(r"\\begin\{(\S+?)\}", latex)) == sorted(re.findall(r"\\end\{(\S+?)\}", latex))
    spec = latex[latex.rindex(r"\begin{tabular}{") :].splitlines()[0]
    columns = len(spec.removeprefix(r"\begin{tabular}{").removesuffix("}"))
    assert columns == 3 + 5 + 1
    for row in rows_of(latex):
        spanned = sum(int(found) - 1 for cell in row for found in re.findall(r"\\multicolumn\{(\d+)\}", cell))
        assert len(row) + spanned == columns


def test_the_full_cache_comes_first_then_budgets_from_the_smallest(result: Quality) -> None:
    rows = [row for row in rows_of(result.to_latex()) if row[0] and row[0] != "method"]
    assert [row[0] for row in rows] == ["full cache", *["snapkv:attention", "snapkv:two-stage", "adakv:attention",
                                                        "adakv:two-stage"] * 3]  # fmt: skip
    assert [row[1] for row in rows] == ["", *["0.2"] * 4, *["0.4"] * 4, *["64"] * 4]
    assert rows[0][3] == f"{100 * result.datasets[0].full:.1f}"
    assert result.to_latex().count(r"\midrule") == 2 * 4


def test_data_sets_stand_beneath_their_kinds_with_the_average_last(result: Quality) -> None:
    latex = result.to_latex()
    kinds, names = rows_of(latex)[:2]
    spans = ((2, "single-document QA"), (1, "summarisation"), (1, "synthetic"), (1, "code"), (1, ""))
    assert kinds[3:] == [rf"\multicolumn{{{count}}}{{c}}{{{kind}}}" for count, kind in spans]
    assert names[3:] == ["qasper", r"multifieldqa\_en", r"multi\_news", r"passage\_retrieval\_en", "lcc", "average"]
    assert r"\cmidrule(lr){4-5}\cmidrule(lr){6-6}\cmidrule(lr){7-7}\cmidrule(lr){8-8}" in latex
    first = latex[: latex.index(r"\end{table*}")]
    assert "single-document QA & summarisation & synthetic & code & average" in first


def test_the_best_of_a_budget_is_bold_and_intervals_stand_beneath(result: Quality) -> None:
    column = result.datasets[0]
    best = max(range(4), key=lambda place: column.methods[8 + place].score)  # b = 0.2 is the last in the run
    rows = rows_of(result.to_latex())
    at = next(place for place, row in enumerate(rows) if row[1] == "0.2") + 2 * best
    assert rows[at][3] == rf"\textbf{{{100 * column.methods[8 + best].score:.1f}}}"
    found = column.methods[8 + best].score_interval
    assert found is not None
    assert rows[at + 1][3] == rf"{{\tiny [{100 * found.low:.1f}, {100 * found.high:.1f}]}}"
    assert sum(cell.startswith(r"\textbf") for row in rows for cell in row) == 3 * 6


def test_what_tex_would_read_is_text() -> None:
    assert escape_latex(r"a_b & 50 % #1 $x$ {y} ~^\ −1 … <z>") == (
        r"a\_b \& 50 \% \#1 \$x\$ \{y\} \textasciitilde{}\textasciicircum{}\textbackslash{} $-$1 \dots{} "
        r"\textless{}z\textgreater{}"
    )
    assert escape_latex("Q4_1 → float32") == r"Q4\_1 $\rightarrow$ float32"
    assert escape_latex("two\nlines\x1b") == r"two\textbackslash{}nlines\textbackslash{}x1b"
    odd = quality([replace(one, run=replace(one.run, model=r"a\input{x}&")) for one in traces(("qasper",))])
    assert r"\input" not in odd.to_latex()
    assert r"a\textbackslash{}input\{x\}\&" in odd.to_latex()


def test_captions_say_what_brackets_parentheses_and_bold_are(result: Quality) -> None:
    few = quality(traces(("qasper", "lcc"), samples=3))
    for page, fewer in ((result.to_latex(), few.to_latex()), (result.to_markdown(), few.to_markdown())):
        assert "In brackets: 95" in page
        assert "Too few samples" not in page
        assert "Bold: the highest mean of its budget, granularity and protection, by looking" in page
        assert "In brackets" not in fewer
        assert "Too few samples for intervals: qasper, lcc; in parentheses the range of single samples." in fewer


def test_one_data_set_makes_one_table_without_an_average() -> None:
    alone = quality(traces(("needle",)))
    assert len(alone.layouts()) == 1
    assert "average" not in alone.to_latex()
    assert "average" not in alone.to_csv()


def test_markdown_has_a_rule_for_every_column_and_odd_names_stay_text(result: Quality) -> None:
    page = result.to_markdown()
    assert page.startswith("<!-- perturbkv quality -->\n")
    tables = [part.splitlines() for part in page.split("\n\n") if part.startswith("|")]
    assert len(tables) == 2
    for table in tables:
        assert {line.count("|") for line in table} == {table[0].count("|")}
        assert set(table[1]) <= set("| -:")
        assert len(table) == 2 + 13
    assert "| single-document QA: multifieldqa\\_en |" in page
    assert page.count("**") == 2 * 3 * (5 + 6)
    piped = quality([*traces(("a|b*c.jsonl",))])
    assert "a\\|b\\*c" in piped.to_markdown()


def test_csv_holds_scores_and_both_ends_of_their_intervals(result: Quality) -> None:
    rows = list(csv.DictReader(io.StringIO(result.to_csv())))
    assert [row["config"] for row in rows][:1] == ["full cache"]
    by_label = {row["config"]: row for row in rows}
    for place, one in enumerate(result.configs):
        row, average = by_label[one.label()], result.average.methods[place]
        assert average.score_interval is not None
        told = [float(row[name]) for name in ("average", "average low", "average high")]
        assert told == pytest.approx(
            [100 * average.score, 100 * average.score_interval.low, 100 * average.score_interval.high]
        )
        assert (row["policy"], row["budget"]) == (one.policy.name, str(one.budget))
        assert float(row["held"]) == pytest.approx(average.cache_share)


def test_csv_of_a_single_sample_has_empty_ends_and_nothing_that_a_spreadsheet_computes() -> None:
    alone = quality(traces(("=cmd.jsonl",), samples=1))
    text = alone.to_csv()
    rows = list(csv.reader(io.StringIO(text)))
    assert not any(cell.startswith(("=", "+", "-", "@")) for row in rows for cell in row)
    assert rows[1][rows[0].index("'=cmd low")] == ""


def test_files_of_one_name_and_names_of_other_columns_keep_their_numbers() -> None:
    alike = quality(traces(("one/held.jsonl", "two/held.jsonl", "average.jsonl")))
    names, full, *_ = csv.reader(io.StringIO(alike.to_csv()))
    assert [name for name in names[5:] if not name.endswith((" low", " high"))] == [
        "one/held.jsonl", "two/held.jsonl", "average.jsonl", "average",
    ]  # fmt: skip
    assert [float(one) for one in full[5::3]] == pytest.approx(
        [100 * one.full for one in (*alike.datasets, alike.average)]
    )
    held = quality(traces(("held.jsonl",)))
    assert next(csv.reader(io.StringIO(held.to_csv())))[4:6] == ["held", "held"]


@pytest.mark.slow
def test_screens_are_80_columns_wide_however_many_data_sets_there_are() -> None:
    names = ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh", "passage_retrieval_en", "repobench-p",
             "ruler:niah_multiquery", "ruler:niah_multivalue", "ruler:niah_single_1", "ruler:niah_multikey_1",
             "ruler:niah_multikey_2", "needle", "a_file_of_somebody_else_with_a_long_name.jsonl")  # fmt: skip
    for samples in (3, 6):
        found = quality(traces(names, samples))
        assert max(map(cell_len, repr(found).splitlines())) <= 80
        titles = " ".join(part.title for part in found.details() if isinstance(part, Table))
        assert all(name in titles for name in names[:-1])
