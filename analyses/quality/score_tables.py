"""Tables of scores for 80 columns: data sets by kind, the kinds beside their average, and differences.

What tables of scores say in words: the conclusion, and what a number in them is.

Tables of scores as LaTeX, in the paper's layout, ruled by booktabs.

Tables of scores as Markdown and CSV.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import isnan

from perturbkv.analyses import measurements, text
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.pairing import APART, counted, folded, short_names
from perturbkv.analyses.quality.graded_tasks import departures, graded_by
from perturbkv.analyses.quality.score_columns import FULL, Cell, Column, Contest, Layout, Line, Mean, Sides, lines
from perturbkv.analyses.stats.intervals import LEAST
from perturbkv.analyses.text import Words, decided, sentence, tally_verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.escaping import line as in_a_line

_MOST_NAMED = 3
_ROUNDED = 0.005
"""What two shares differ by that are shown alike."""
BEST = "the highest mean of its budget, granularity and protection, by looking, for which no interval allows"
"""What a mark is."""


def points(mean: Mean) -> str:
    """'43.8 [40.1, 47.5]' of a score, or of a difference of two, in [−1, 1]: times 100, as papers show it."""
    return f"{value(mean)} {ends(mean)}".strip()


def value(mean: Mean) -> str:
    """'43.8'."""
    return text.fixed(100 * mean.value, 1)


def ends(mean: Mean, digits: int = 1) -> str:
    """'[40.1, 47.5]', of a range '(40.1 … 47.5)'; empty where there is none."""
    return text.ends(mean.interval, lambda end: text.fixed(100 * end, digits), "")


def quality_conclusion(
    average: Column, configs: Sequence[EvictionConfig], pairs: Sequence[Sides], sides: tuple[str, str]
) -> str:
    """Of each budget what scores best beside the full cache, and how often the treatment beats the baseline."""
    full, over = points(average.full), _over(average)
    if not average.full.value:
        return f"Even the full cache scores 0 ({over}): there is nothing that eviction can lose."
    best = "; ".join(_best_of_rivals(configs, lines(configs, [average])))
    told = f"the full cache scores {full} of 100 ({over}); {best}"
    said = _beaten(average, pairs, sides)
    return sentence(f"{told}; {said}" if said else told, *short_names(configs))


def _best_of_rivals(configs: Sequence[EvictionConfig], shown: Sequence[Line]) -> list[str]:
    """The highest score of each budget and granularity; of many those of the least and the largest budget."""
    names = [name or "evicted" for name in short_names(configs, "budget", *APART)]
    groups = [list(some) for _, some in groupby(shown[1:], key=lambda line: line.rivals)]
    ends = (shown[1].budget, shown[-1].budget)
    told = [some for some in groups if len(groups) <= _MOST_NAMED or some[0].budget in ends]
    return [f"at b={some[0].rivals} {_best(some, configs, names)}" for some in told]


def _best(some: Sequence[Line], configs: Sequence[EvictionConfig], names: Sequence[str]) -> str:
    """'two-stage scores best by looking, 45.1 [40.2, 50.0] (held / full 1.20)' of rivals, equal ones together."""
    first = max(some, key=lambda line: line.cells[0].mean.value)
    place = first.place or 0
    shown = f"{points(first.cells[0].mean)}{_held(first.held, configs[place])}"
    if len(some) == 1:
        return f"{names[place]} scores {shown}"
    best = [names[line.place or 0] for line in some if line.cells[0].best]
    if not best:
        return f"all {len(some)} methods score {shown}"
    return f"{' and '.join(best)} {'score alike and' if len(best) > 1 else 'scores'} best by looking, {shown}"


def _held(share: float, config: EvictionConfig) -> str:
    """' (held / full 1.20)' where that is not the budget, which in entries is no share; empty where it is unknown."""
    alike = isinstance(config.budget.value, float) and abs(share - config.budget.value) < _ROUNDED
    return "" if isnan(share) or alike else f" (held / full {text.held(share)})"


def _beaten(average: Column, pairs: Sequence[Sides], sides: tuple[str, str]) -> str:
    """'two-stage scores higher than attention in 2 of 6 cases, undecided in 4'; empty without such pairs."""
    baseline, treatment = sides
    if not pairs:
        return ""
    words: Words = {
        1: (f"{treatment} scores higher than {baseline}", "higher"),
        -1: (f"{treatment} scores lower than {baseline}", "lower"),
        0: (f"whether {treatment} scores higher than {baseline} is undecided", "undecided"),
    }
    said = tally_verdicts([decided(gain.difference.interval, 0) for gain in average.gains], words, "case")
    return f"{said} (difference {points(average.gains[0].difference)})" if len(pairs) == 1 else said


def _over(average: Column) -> str:
    """'the average of 3 data sets, 24 samples'."""
    samples = counted(average.samples, "sample")
    return samples if len(average.tasks) == 1 else f"the average of {len(average.tasks)} data sets, {samples}"


def about_scores(datasets: Sequence[Column]) -> str:
    """What a score is, what graded it, and of how many samples; what is not as the data sets have it."""
    named = [(one.name, one.tasks[0].terms) for one in datasets]
    sizes = sorted({one.samples for one in datasets})
    said = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    each = " of each data set" if len(datasets) > 1 else ""
    return " ".join([f"Scores × 100: means of {graded_by(named)}, n = {said}{each}.", *departures(named)])


def about_marks(datasets: Sequence[Column]) -> str:
    """What a table's caption says of its numbers: scores, brackets, bold ones."""
    return f"{about_scores(datasets)} {about_brackets(datasets)} Bold: {BEST}."


def about_brackets(datasets: Sequence[Column]) -> str:
    """What brackets and parentheses are, as far as there are any."""
    several = "; over several data sets each one's interval counts by itself" if len(datasets) > 1 else ""
    found = {one.full.interval.kind for one in datasets if one.full.interval is not None}
    said = [f"In brackets: 95 % intervals over samples{several}."] if "interval" in found else []
    if few := [one.name for one in datasets if one.samples < LEAST]:
        range_ = "; in parentheses the range of single samples" if "range" in found else ""
        said.append(f"Too few samples for intervals: {', '.join(few)}{range_}.")
    return " ".join(said)


def quality_notes(datasets: Sequence[Column], left_out: Sequence[EvictionConfig], lacking: Sequence[str]) -> str:
    """What a score and its brackets are, what is few, and what was left out."""
    said = [
        f"{about_scores(datasets)} {about_brackets(datasets)} *: {BEST}; whether that is decided, differences tell. "
        f"Better/equal/worse: samples. {text.about_held([share for one in datasets for share in one.held])}"
    ]
    if len(datasets) > 1:
        said.append("Every data set counts the same in a kind's mean and in the average.")
    if alike := sum(task.alike for one in datasets for task in one.tasks):
        said.append(measurements.about_first_token(alike, sum(one.samples for one in datasets)))
    if left_out:
        labels = ", ".join(one.label() for one in left_out)
        said.append(f"Left out, as not all data sets have them ({', '.join(lacking)}): {labels}.")
    return "\n".join(said)


_ROOM = 55
"""Letters of 80 for columns of scores, behind a method and what it holds."""
_LEAST = len("(10 … 26)")


def tables(
    configs: Sequence[EvictionConfig],
    datasets: Sequence[Column],
    kinds: Sequence[Column],
    average: Column,
    pairs: Sequence[Sides],
    sides: tuple[str, str],
) -> list[Table]:
    """Every table, one after the other."""
    shown = [part for some in _groups(datasets, kinds, average) for part in _parts(some)]
    return [*(_scores(configs, part, average) for part in shown), _differences(configs, average, pairs, sides)]


def _groups(datasets: Sequence[Column], kinds: Sequence[Column], average: Column) -> list[Sequence[Column]]:
    """The data sets of each kind with that kind's mean, then all kinds beside the average."""
    wide: list[Sequence[Column]] = [(*_of_kind(kind, datasets), kind) for kind in kinds if len(kind.tasks) > 1]
    if len(kinds) == 1:  # whose mean is the average
        return wide or [datasets]
    named = [kind if len(kind.tasks) > 1 else _of_kind(kind, datasets)[0] for kind in kinds]
    return [*wide, (*named, average)]


def _of_kind(kind: Column, datasets: Sequence[Column]) -> tuple[Column, ...]:
    return tuple(one for one in datasets if one.kind == kind.name)


def _parts(columns: Sequence[Column]) -> Iterator[list[Column]]:
    """As many columns as have room beside each other."""
    part: list[Column] = []
    for one in columns:
        if part and sum(map(_width, (*part, one))) > _ROOM:
            yield part
            part = []
        part.append(one)
    yield part


def _width(column: Column) -> int:
    """Letters that a column takes, and the gap before it."""
    return max(_LEAST, *map(len, _head(column).splitlines())) + 1


def _scores(configs: Sequence[EvictionConfig], columns: Sequence[Column], average: Column) -> Table:
    kinds = list(dict.fromkeys(one.kind for one in columns if one is not average))
    title = f"{', '.join(kinds) or average.name}: scores × 100"
    heads = ("method", "#held /\nfull", *(f"#{_head(one)}" for one in columns))
    return Table(title, heads, [_row(line) for line in lines(configs, columns)])


def _head(column: Column) -> str:
    """A name that may break behind its signs, and n."""
    apart = column.name.replace("_", "_ ").replace("-", "- ")
    return f"{folded(apart, 12).replace('_ ', '_').replace('- ', '-')}\nn = {column.samples}"


def _row(line: Line) -> list[str]:
    return [_name(line), text.held(line.held), *map(_cell, line.cells)]


def _name(line: Line) -> str:
    return "\n".join(filter(None, (folded(line.method), f"b={line.budget}" if line.budget else "")))


def _cell(cell: Cell) -> str:
    return f"{'*' if cell.best else ''}{value(cell.mean)}\n{ends(cell.mean, digits=0)}"


def _differences(
    configs: Sequence[EvictionConfig], average: Column, pairs: Sequence[Sides], sides: tuple[str, str]
) -> Table:
    """Each configuration minus the full cache, and each treatment minus its baseline."""
    over = "average" if len(average.tasks) > 1 else average.tasks[0].name
    heads = ["method", "#− full cache", "#better/equal/\nworse"]
    heads += [f"#− {folded(sides[0])}", "#better/equal/\nworse"] if pairs else []
    gains = {second: gain for (_, second), gain in reversed([*zip(pairs, average.gains, strict=True)])}  # the first
    rows = []
    for line in lines(configs, [average]):
        if line.place is not None:
            shown = [average.lost[line.place], *([gains.get(line.place)] if pairs else [])]
            rows.append([_name(line), *(part for one in shown for part in _contest(one))])
    return Table(f"{over}: differences of scores × 100", heads, rows)


def _contest(one: Contest | None) -> list[str]:
    """Difference and samples; blank where a configuration is no treatment."""
    return [f"{value(one.difference)}\n{ends(one.difference)}", one.samples] if one else ["", ""]


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
        yield _quality_latex_row(["", "", "", *_spanning(layout)])
        yield "".join(_rules(layout))
    yield _quality_latex_row(["method", "$b$", "held / full", *map(escaped, layout.columns)])
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
    yield _quality_latex_row(
        [escaped(line.method), escaped(line.budget), text.held(line.held), *map(_score, line.cells)]
    )
    beneath = [_ends(cell) for cell in line.cells]
    if any(beneath):
        yield _quality_latex_row(["", "", "", *beneath])


def _score(cell: Cell) -> str:
    shown = escaped(value(cell.mean))
    return rf"\textbf{{{shown}}}" if cell.best else shown


def _ends(cell: Cell) -> str:
    shown = escaped(ends(cell.mean))
    return rf"{{\tiny {shown}}}" if shown else ""


def _quality_latex_row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


MARKDOWN = "<!-- perturbkv quality -->\n"
"""The first line of a page of ours."""
CSV = ("config", "policy", "selection", "budget", "held")
"""The first columns of a file of ours."""


def markdown(layouts: Sequence[Layout], caption: str) -> str:
    """Every table beneath its caption; the best of a budget is bold."""
    return "\n".join([f"{MARKDOWN}{_escaped(caption)}\n", *map(_table, layouts)])


def _table(layout: Layout) -> str:
    heads = ["method", "b", "held / full", *map(_escaped, _named(layout))]
    rule = ["---", *["---:"] * (len(heads) - 1)]
    rows = [_quality_text_row(one) for one in layout.lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, rule, *rows))


def _named(layout: Layout) -> list[str]:
    """Each column's name behind its kind."""
    kinds = [kind for kind, count in layout.groups for _ in range(count)]
    return [f"{kind}: {name}" if kind else name for kind, name in zip(kinds, layout.columns, strict=True)]


def _quality_text_row(one: Line) -> list[str]:
    return [_escaped(one.method), one.budget, text.held(one.held), *map(_quality_text_cell, one.cells)]


def _quality_text_cell(cell: Cell) -> str:
    shown = f"**{value(cell.mean)}**" if cell.best else value(cell.mean)
    return f"{shown} {ends(cell.mean)}".strip()


def _escaped(text: str) -> str:
    r"""As text that Markdown shows as it is: what it would read has a backslash before it."""
    return "".join(f"\\{sign}" if sign in r"\`*_{}[]<>#|~" else sign for sign in in_a_line(text))


def csv(layout: Layout, configs: Sequence[EvictionConfig]) -> str:
    """A row per method, a column per score × 100 and two for the ends of its interval, empty where there is none."""
    import pyarrow as pa
    import pyarrow.csv

    from perturbkv.storage.trace.export import guarded

    names = [*CSV, *(f"{name}{end}" for name in layout.columns for end in ("", " low", " high"))]
    heads = guarded(pa.RecordBatch.from_pydict({"name": names})).column(0).to_pylist()
    told, measured = zip(*(_values(one, configs) for one in layout.lines), strict=True)
    texts = [pa.array(column, pa.string()) for column in zip(*told, strict=True)]
    values = [pa.array(column, pa.float64()) for column in zip(*measured, strict=True)]
    held = io.BytesIO()
    pyarrow.csv.write_csv(guarded(pa.RecordBatch.from_arrays([*texts, *values], names=heads)), held)
    return held.getvalue().decode()


def _values(one: Line, configs: Sequence[EvictionConfig]) -> tuple[list[str], list[float | None]]:
    """The texts and the numbers of a row."""
    about = {"config": FULL} if one.place is None else columns_of(configs[one.place])
    texts = [about.get(name, "") for name in CSV[:-1]]
    return texts, [one.held, *(number for cell in one.cells for number in _quality_text_ends(cell.mean))]


def _quality_text_ends(mean: Mean) -> list[float | None]:
    low, high = (None, None) if mean.interval is None else (100 * mean.interval.low, 100 * mean.interval.high)
    return [100 * mean.value, low, high]
