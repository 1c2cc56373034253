"""Tables of scores as LaTeX (in the paper's layout, ruled by booktabs), Markdown and CSV, and their captions."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from perturbkv.analyses import text
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.quality.graded_tasks import metrics_text, term_notes
from perturbkv.analyses.quality.score_columns import FULL, Cell, Layout, Row, ScoreColumn
from perturbkv.analyses.stats.intervals import MIN_SAMPLES
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.escaping import escape_line as in_a_line

BEST = "the highest mean of its budget, granularity and protection, by looking, for which no interval allows"
"""Meaning of bold scores and stars."""


def scores_note(datasets: Sequence[ScoreColumn]) -> str:
    """Return what graded the scores, of how many samples, and which terms are not the data sets' own."""
    return " ".join([grades_note(datasets), *terms_notes(datasets)])


def grades_note(datasets: Sequence[ScoreColumn]) -> str:
    """Return what graded the scores, and of how many samples."""
    graded = metrics_text([(one.name, one.tasks[0].terms) for one in datasets])
    return f"Scores × 100: means of {graded}, n = {sample_counts(datasets)}."


def terms_notes(datasets: Sequence[ScoreColumn]) -> list[str]:
    """Return a sentence for each of answers' length, cut and chat template that is not the data sets' own."""
    return term_notes([(one.name, one.tasks[0].terms) for one in datasets])


def sample_counts(datasets: Sequence[ScoreColumn]) -> str:
    """Return '5 to 6 of each data set', or of one data set '6'."""
    sizes = sorted({one.samples for one in datasets})
    counts = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    return counts + (" of each data set" if len(datasets) > 1 else "")


def caption(datasets: Sequence[ScoreColumn]) -> str:
    """Return the caption of a table: its scores, brackets and bold numbers."""
    return f"{scores_note(datasets)} {brackets_note(datasets)} Bold: {BEST}."


def brackets_note(datasets: Sequence[ScoreColumn]) -> str:
    """Return what brackets and parentheses mean, as far as there are any."""
    several = "; over several data sets each one's interval counts by itself" if len(datasets) > 1 else ""
    kinds = {one.full_interval.kind for one in datasets if one.full_interval is not None}
    parts = [f"In brackets: 95 % intervals over samples{several}."] if "interval" in kinds else []
    if few := [one.name for one in datasets if one.samples < MIN_SAMPLES]:
        range_ = "; in parentheses the range of single samples" if "range" in kinds else ""
        parts.append(f"Too few samples for intervals: {', '.join(few)}{range_}.")
    return " ".join(parts)


COMMENT = "% perturbkv quality: needs \\usepackage{booktabs} and \\usepackage{graphicx}\n"
"""The first line of such a file."""
_SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "−": "$-$", "–": "--", "…": r"\dots{}", "α": r"$\alpha$", "×": r"$\times$",
    "·": r"$\cdot$", "‖": r"$\Vert$", "→": r"$\rightarrow$",
}  # fmt: skip
"""Characters that are commands in TeX, or that not every engine has a glyph for."""


def latex(layouts: Sequence[Layout], caption: str) -> str:
    """Return the LaTeX of every table as a float over both columns, its caption above it."""
    return COMMENT + "\n".join("\n".join(_float(layout, caption)) + "\n" for layout in layouts)


def escape_latex(text: str) -> str:
    """Return the text with TeX's characters escape_latex: nothing in it is a command."""
    return "".join(_SIGNS.get(sign, sign) for sign in in_a_line(text))


def _float(layout: Layout, caption: str) -> Iterator[str]:
    yield r"\begin{table*}"
    yield r"\centering"
    yield rf"\caption{{{escape_latex(caption)}}}"
    yield r"\resizebox{\textwidth}{!}{%"
    yield from _tabular(layout)
    yield "}"
    yield r"\end{table*}"


def _tabular(layout: Layout) -> Iterator[str]:
    yield rf"\begin{{tabular}}{{lrr{'r' * len(layout.columns)}}}"
    yield r"\toprule"
    if any(kind for kind, _ in layout.kinds):
        yield _latex_row(["", "", "", *_kind_headings(layout)])
        yield "".join(_rules(layout))
    yield _latex_row(["method", "$b$", "held / full", *map(escape_latex, layout.columns)])
    yield r"\midrule"
    for row in layout.rows:
        if layout.starts_group(row):
            yield r"\midrule"
        yield from _latex_rows(row)
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _kind_headings(layout: Layout) -> list[str]:
    return [rf"\multicolumn{{{count}}}{{c}}{{{escape_latex(kind)}}}" for kind, count in layout.kinds]


def _rules(layout: Layout) -> Iterator[str]:
    first = 4
    for kind, count in layout.kinds:
        if kind:
            yield rf"\cmidrule(lr){{{first}-{first + count - 1}}}"
        first += count


def _latex_rows(row: Row) -> Iterator[str]:
    """Yield the scores, and small beneath them their intervals."""
    yield _latex_row(
        [
            escape_latex(row.method),
            escape_latex(row.budget),
            text.cache_share(row.cache_share),
            *map(_latex_score, row.cells),
        ]
    )
    beneath = [_latex_ends(cell) for cell in row.cells]
    if any(beneath):
        yield _latex_row(["", "", "", *beneath])


def _latex_score(cell: Cell) -> str:
    shown = escape_latex(text.points(cell.value))
    return rf"\textbf{{{shown}}}" if cell.best else shown


def _latex_ends(cell: Cell) -> str:
    shown = escape_latex(text.points(cell.value, cell.interval).partition(" ")[2])
    return rf"{{\tiny {shown}}}" if shown else ""


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


MARKDOWN = "<!-- perturbkv quality -->\n"
"""The first line of such a page."""
CSV = ("config", "policy", "selection", "budget", "held")
"""The first columns of such a file."""


def markdown(layouts: Sequence[Layout], caption: str) -> str:
    """Return every table beneath its caption; the best of a budget is bold."""
    return "\n".join([f"{MARKDOWN}{_escape_markdown(caption)}\n", *map(_markdown_table, layouts)])


def _markdown_table(layout: Layout) -> str:
    heads = ["method", "b", "held / full", *map(_escape_markdown, _column_names(layout))]
    rule = ["---", *["---:"] * (len(heads) - 1)]
    rows = [_markdown_row(one) for one in layout.rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, rule, *rows))


def _column_names(layout: Layout) -> list[str]:
    """Return the name of each column with its kind."""
    kinds = [kind for kind, count in layout.kinds for _ in range(count)]
    return [f"{kind}: {name}" if kind else name for kind, name in zip(kinds, layout.columns, strict=True)]


def _markdown_row(row: Row) -> list[str]:
    return [
        _escape_markdown(row.method),
        row.budget,
        text.cache_share(row.cache_share),
        *map(_markdown_cell, row.cells),
    ]


def _markdown_cell(cell: Cell) -> str:
    score, space, ends = text.points(cell.value, cell.interval).partition(" ")
    return f"**{score}**{space}{ends}" if cell.best else f"{score}{space}{ends}"


def _escape_markdown(text: str) -> str:
    r"""Return the text with Markdown's characters escape_latex by backslashes."""
    return "".join(f"\\{sign}" if sign in r"\`*_{}[]<>#|~" else sign for sign in in_a_line(text))


def csv(layout: Layout, configs: Sequence[EvictionConfig]) -> str:
    """Return a row per method, a column per score × 100 and two for its interval's ends, empty where there is none."""
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
    """Return the texts and the numbers of a row of the CSV."""
    labels = {"config": FULL} if row.index is None else config_columns(configs[row.index])
    texts = [labels.get(name, "") for name in CSV[:-1]]
    return texts, [row.cache_share, *(number for cell in row.cells for number in _csv_numbers(cell))]


def _csv_numbers(cell: Cell) -> list[float | None]:
    low, high = (None, None) if cell.interval is None else (100 * cell.interval.low, 100 * cell.interval.high)
    return [100 * cell.value, low, high]
