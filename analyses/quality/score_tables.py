"""Tables of scores as LaTeX (in the paper's layout, ruled by booktabs), Markdown and CSV, and their captions."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import accumulate, pairwise
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
    return COMMENT + "\n".join(
        "\n".join([
            r"\begin{table*}",
            r"\centering",
            rf"\caption{{{escape_latex(caption)}}}",
            r"\resizebox{\textwidth}{!}{%",
            *_tabular(layout),
            "}",
            r"\end{table*}",
        ]) + "\n"
        for layout in layouts
    )  # fmt: skip


def escape_latex(text: str) -> str:
    """Return the text with TeX's special characters escaped."""
    return "".join(_SIGNS.get(sign, sign) for sign in in_a_line(text))


def _tabular(layout: Layout) -> list[str]:
    """Return the lines of the LaTeX table: kinds of tasks over their columns, then the rows, groups ruled apart."""
    kinds, first = [], 4  # the column after method, budget and cache share
    if any(kind for kind, _ in layout.kinds):
        heads = [rf"\multicolumn{{{count}}}{{c}}{{{escape_latex(kind)}}}" for kind, count in layout.kinds]
        ends = accumulate((count for _, count in layout.kinds), initial=first)
        spans = zip(layout.kinds, pairwise(ends), strict=True)
        rules = [rf"\cmidrule(lr){{{start}-{end - 1}}}" for (kind, _), (start, end) in spans if kind]
        kinds = [_latex_row(["", "", "", *heads]), "".join(rules)]
    rows = [line for row in layout.rows for line in [r"\midrule"] * layout.starts_group(row) + _latex_rows(row)]
    return [
        rf"\begin{{tabular}}{{lrr{'r' * len(layout.columns)}}}",
        r"\toprule",
        *kinds,
        _latex_row(["method", "$b$", "cache share", *map(escape_latex, layout.columns)]),
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
    ]


def _latex_rows(row: Row) -> list[str]:
    """Return a configuration's LaTeX rows: scores, the best in bold, then their intervals in small type, if any."""
    scores = [escape_latex(cell.write(cell.value, None)) for cell in row.cells]
    shown = [rf"\textbf{{{score}}}" if cell.best else score for cell, score in zip(row.cells, scores, strict=True)]
    names = [escape_latex(row.method), escape_latex(row.budget), text.cache_share(row.cache_share)]
    ends = [escape_latex(cell.write(cell.value, cell.interval).partition(" ")[2]) for cell in row.cells]
    intervals = [rf"{{\tiny {end}}}" if end else "" for end in ends]
    return [_latex_row([*names, *shown]), *([_latex_row(["", "", "", *intervals])] if any(ends) else [])]


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
    kinds = [kind for kind, count in layout.kinds for _ in range(count)]
    names = (f"{kind}: {name}" if kind else name for kind, name in zip(kinds, layout.columns, strict=True))
    heads = ["method", "b", "cache share", *map(escape_markdown, names)]
    rule = ["---", *["---:"] * (len(heads) - 1)]
    rows = [
        [escape_markdown(one.method), one.budget, text.cache_share(one.cache_share), *map(_markdown_cell, one.cells)]
        for one in layout.rows
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, rule, *rows))


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
    """Return the text cells of a row of the CSV, and its numbers at their cells' scale; None for what is missing."""
    labels = {"config": FULL} if row.index is None else config_columns(configs[row.index])
    numbers: list[float | None] = [row.cache_share]
    for cell in row.cells:
        ends = (None, None) if cell.interval is None else (cell.interval.low, cell.interval.high)
        values = (None if isnan(cell.value) else cell.value, *ends)
        numbers += [None if value is None else cell.scale * value for value in values]
    return [labels.get(name, "") for name in CSV[:-1]], numbers
