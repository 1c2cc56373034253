"""Tables of scores as LaTeX (in the paper's layout, ruled by booktabs), Markdown and CSV, and their captions."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from math import isnan

from perturbkv.analyses import text
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.quality.graded_tasks import metrics_text, term_notes
from perturbkv.analyses.quality.score_columns import FULL, Cell, Layout, Row, ScoreColumn
from perturbkv.analyses.stats.intervals import MIN_SAMPLES
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.escaping import escape_line as in_a_line
from perturbkv.escaping import escape_markdown

BEST = "the highest mean of its budget, granularity and protection, by looking, for which no interval allows"
"""Meaning of bold scores and stars."""


def scores_note(datasets: Sequence[ScoreColumn]) -> str:
    """Return the note on metrics, number of samples, and terms that are not the data sets' own."""
    return " ".join([grades_note(datasets), *terms_notes(datasets)])


def grades_note(datasets: Sequence[ScoreColumn]) -> str:
    """Return the note on the metrics of the scores and the number of samples."""
    graded = metrics_text([(one.name, one.tasks[0].terms) for one in datasets])
    return f"Scores × 100: means of {graded}, n = {sample_counts(datasets)}."


def terms_notes(datasets: Sequence[ScoreColumn]) -> list[str]:
    """Return sentences on answers' length, cut prompts and chat templates that are not the data sets' own."""
    return term_notes([(one.name, one.tasks[0].terms) for one in datasets])


def sample_counts(datasets: Sequence[ScoreColumn]) -> str:
    """Return the number of samples: '5 to 6 of each data set', or '6' for one data set."""
    sizes = sorted({one.samples for one in datasets})
    counts = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return counts + (" of each data set" if len(datasets) > 1 else "")


def caption(datasets: Sequence[ScoreColumn]) -> str:
    """Return the caption of a table of scores: metrics, intervals, and the meaning of bold numbers."""
    return f"{scores_note(datasets)} {brackets_note(datasets)} Bold: {BEST}."


def brackets_note(datasets: Sequence[ScoreColumn]) -> str:
    """Return the note on intervals in brackets and ranges in parentheses, for those that the table has."""
    several = "; over several data sets each one's interval counts by itself" if len(datasets) > 1 else ""
    kinds = {one.full_interval.kind for one in datasets if one.full_interval is not None}
    parts = [f"In brackets: 95 % intervals over samples{several}."] if "interval" in kinds else []
    if few := [one.name for one in datasets if one.samples < MIN_SAMPLES]:
        range_ = "; in parentheses the range of single samples" if "range" in kinds else ""
        parts.append(f"Too few samples for intervals: {', '.join(few)}{range_}.")
    return " ".join(parts)


COMMENT = "% perturbkv quality: needs \\usepackage{booktabs} and \\usepackage{graphicx}\n"
"""The first line of a LaTeX file of scores."""
_SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "−": "$-$", "–": "--", "…": r"\dots{}", "α": r"$\alpha$", "×": r"$\times$",
    "·": r"$\cdot$", "‖": r"$\Vert$", "→": r"$\rightarrow$",
}  # fmt: skip
"""Characters that are commands in TeX, or that not every engine has a glyph for."""


def latex(layouts: Sequence[Layout], caption: str) -> str:
    """Return every table in LaTeX, as a float over both columns of a page with the caption above it."""
    return COMMENT + "\n".join("\n".join(_float_environment(layout, caption)) + "\n" for layout in layouts)


def escape_latex(text: str) -> str:
    """Return the text with TeX's special characters escaped."""
    return "".join(_SIGNS.get(sign, sign) for sign in in_a_line(text))


def _float_environment(layout: Layout, caption: str) -> Iterator[str]:
    """Yield the lines of a LaTeX float with the table and its caption."""
    yield r"\begin{table*}"
    yield r"\centering"
    yield rf"\caption{{{escape_latex(caption)}}}"
    yield r"\resizebox{\textwidth}{!}{%"
    yield from _tabular(layout)
    yield "}"
    yield r"\end{table*}"


def _tabular(layout: Layout) -> Iterator[str]:
    """Yield the lines of the LaTeX table."""
    yield rf"\begin{{tabular}}{{lrr{'r' * len(layout.columns)}}}"
    yield r"\toprule"
    if any(kind for kind, _ in layout.kinds):
        yield _latex_row(["", "", "", *_kind_headings(layout)])
        yield "".join(_kind_rules(layout))
    yield _latex_row(["method", "$b$", "cache share", *map(escape_latex, layout.columns)])
    yield r"\midrule"
    for row in layout.rows:
        if layout.starts_group(row):
            yield r"\midrule"
        yield from _latex_rows(row)
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _kind_headings(layout: Layout) -> list[str]:
    """Return the LaTeX headings of kinds of tasks, each over its columns."""
    return [rf"\multicolumn{{{count}}}{{c}}{{{escape_latex(kind)}}}" for kind, count in layout.kinds]


def _kind_rules(layout: Layout) -> Iterator[str]:
    """Yield the LaTeX rule below the heading of each kind of task."""
    first = 4  # after method, budget and cache share
    for kind, count in layout.kinds:
        if kind:
            yield rf"\cmidrule(lr){{{first}-{first + count - 1}}}"
        first += count


def _latex_rows(row: Row) -> Iterator[str]:
    """Yield a configuration's LaTeX rows: scores, then their intervals in small type."""
    yield _latex_row(
        [
            escape_latex(row.method),
            escape_latex(row.budget),
            text.cache_share(row.cache_share),
            *map(_latex_score, row.cells),
        ]
    )
    intervals = [_latex_interval(cell) for cell in row.cells]
    if any(intervals):
        yield _latex_row(["", "", "", *intervals])


def _latex_score(cell: Cell) -> str:
    """Return a score in LaTeX, bold where it is the best."""
    shown = escape_latex(cell.write(cell.value, None))
    return rf"\textbf{{{shown}}}" if cell.best else shown


def _latex_interval(cell: Cell) -> str:
    """Return a score's interval in LaTeX, in small type; empty without an interval."""
    shown = escape_latex(cell.write(cell.value, cell.interval).partition(" ")[2])
    return rf"{{\tiny {shown}}}" if shown else ""


def _latex_row(cells: Sequence[str]) -> str:
    """Return the cells as a row of a LaTeX table."""
    return " & ".join(cells) + r" \\"


MARKDOWN = "<!-- perturbkv quality -->\n"
"""The first line of a Markdown file of scores."""
CSV = ("config", "policy", "selection", "budget", "held")
"""The first columns of a CSV file of scores."""


def markdown(layouts: Sequence[Layout], caption: str) -> str:
    """Return the caption, then every table in Markdown, with the best score of each group in bold."""
    return "\n".join([f"{MARKDOWN}{escape_markdown(caption)}\n", *map(_markdown_table, layouts)])


def _markdown_table(layout: Layout) -> str:
    """Return one table in Markdown."""
    heads = ["method", "b", "cache share", *map(escape_markdown, _column_names(layout))]
    rule = ["---", *["---:"] * (len(heads) - 1)]
    rows = [_markdown_row(one) for one in layout.rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, rule, *rows))


def _column_names(layout: Layout) -> list[str]:
    """Return the name of each column with its kind."""
    kinds = [kind for kind, count in layout.kinds for _ in range(count)]
    return [f"{kind}: {name}" if kind else name for kind, name in zip(kinds, layout.columns, strict=True)]


def _markdown_row(row: Row) -> list[str]:
    """Return the cells of a row in Markdown."""
    return [
        escape_markdown(row.method),
        row.budget,
        text.cache_share(row.cache_share),
        *map(_markdown_cell, row.cells),
    ]


def _markdown_cell(cell: Cell) -> str:
    """Return a score with its interval in Markdown, bold where it is the best."""
    score, space, ends = cell.write(cell.value, cell.interval).partition(" ")
    return f"**{score}**{space}{ends}" if cell.best else f"{score}{space}{ends}"


def csv(layout: Layout, configs: Sequence[EvictionConfig]) -> str:
    """Return a table as CSV: a row per method; per column its number (a score × 100) and the ends of its interval."""
    import pyarrow as pa
    import pyarrow.csv

    from perturbkv.storage.trace.export import escape_formulas

    names = [*CSV, *(f"{name}{end}" for name in layout.columns for end in ("", " low", " high"))]
    heads = escape_formulas(pa.RecordBatch.from_pydict({"name": names})).column(0).to_pylist()
    named, measured = zip(*(_csv_row(row, configs) for row in layout.rows), strict=True)
    texts = [pa.array(column, pa.string()) for column in zip(*named, strict=True)]
    values = [pa.array(column, pa.float64()) for column in zip(*measured, strict=True)]
    buffer = io.BytesIO()
    pyarrow.csv.write_csv(escape_formulas(pa.RecordBatch.from_arrays([*texts, *values], names=heads)), buffer)
    return buffer.getvalue().decode()


def _csv_row(row: Row, configs: Sequence[EvictionConfig]) -> tuple[list[str], list[float | None]]:
    """Return the text cells and the numbers of a row of the CSV."""
    labels = {"config": FULL} if row.index is None else config_columns(configs[row.index])
    texts = [labels.get(name, "") for name in CSV[:-1]]
    return texts, [row.cache_share, *(number for cell in row.cells for number in _csv_numbers(cell))]


def _csv_numbers(cell: Cell) -> list[float | None]:
    """Return a number at the cell's scale and the ends of its interval; None for what is missing."""
    ends = (None, None) if cell.interval is None else (cell.interval.low, cell.interval.high)
    values = (None if isnan(cell.value) else cell.value, *ends)
    return [None if value is None else cell.scale * value for value in values]
