"""Tables of scores as LaTeX, in the paper's layout, ruled by booktabs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perturbkv.analyses import text as numbers
from perturbkv.analyses.quality.quality_layout import Cell, Layout, Line
from perturbkv.analyses.quality.quality_told import ends, value
from perturbkv.visible import line as in_a_line

COMMENT = "% perturbkv quality: needs \\usepackage{booktabs} and \\usepackage{graphicx}\n"
"""The first line of a file of ours."""
_SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "−": "$-$", "–": "--", "…": r"\dots{}", "α": r"$\alpha$", "×": r"$\times$",
    "·": r"$\cdot$", "‖": r"$\Vert$", "→": r"$\rightarrow$",
}  # fmt: skip
"""What TeX would read otherwise, or has no letter for in every engine."""


def document(layouts: Sequence[Layout], caption: str) -> str:
    """Every table as a float of both columns' width, its caption above it."""
    return COMMENT + "\n".join("\n".join(_float(layout, caption)) + "\n" for layout in layouts)


def escaped(text: str) -> str:
    """The text as TeX sets it; nothing in it is a command."""
    return "".join(_SIGNS.get(sign, sign) for sign in in_a_line(text))


def _float(layout: Layout, caption: str) -> Iterator[str]:
    yield r"\begin{table*}"
    yield r"\centering"
    yield rf"\caption{{{escaped(caption)}}}"
    yield r"\resizebox{\textwidth}{!}{%"
    yield from _tabular(layout)
    yield "}"
    yield r"\end{table*}"


def _tabular(layout: Layout) -> Iterator[str]:
    yield rf"\begin{{tabular}}{{lrr{'r' * len(layout.columns)}}}"
    yield r"\toprule"
    if any(kind for kind, _ in layout.groups):
        yield _row(["", "", "", *_spanning(layout)])
        yield "".join(_rules(layout))
    yield _row(["method", "$b$", "held / full", *map(escaped, layout.columns)])
    yield r"\midrule"
    for line in layout.lines:
        if layout.starts_rivals(line):
            yield r"\midrule"
        yield from _lines(line)
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _spanning(layout: Layout) -> list[str]:
    return [rf"\multicolumn{{{count}}}{{c}}{{{escaped(kind)}}}" for kind, count in layout.groups]


def _rules(layout: Layout) -> Iterator[str]:
    first = 4
    for kind, count in layout.groups:
        if kind:
            yield rf"\cmidrule(lr){{{first}-{first + count - 1}}}"
        first += count


def _lines(line: Line) -> Iterator[str]:
    """The scores, and small beneath them their intervals."""
    yield _row([escaped(line.method), escaped(line.budget), numbers.held(line.held), *map(_score, line.cells)])
    beneath = [_ends(cell) for cell in line.cells]
    if any(beneath):
        yield _row(["", "", "", *beneath])


def _score(cell: Cell) -> str:
    shown = escaped(value(cell.mean))
    return rf"\textbf{{{shown}}}" if cell.best else shown


def _ends(cell: Cell) -> str:
    shown = escaped(ends(cell.mean))
    return rf"{{\tiny {shown}}}" if shown else ""


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
