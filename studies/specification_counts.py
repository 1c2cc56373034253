"""In how many settings each of the specification's comparisons holds: docs/results/eight_steps.md, four_models.md.

`python studies/specification_counts.py` reads the rows that `specification.py` left, draws the pictures and prints the
tables: of all steps, or with `--steps 1` of the first token; with `--confirm` of the confirming runs. The rules stand
in docs/results/rules.md, which was written first; `specification_claims.py` tells what single sentences say.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import common
import numpy as np
from specification import (
    COLOURS,
    COMPARISONS,
    CONFIRMING,
    FIGURES,
    OWN_WINDOW,
    SCENARIOS,
    SETTINGS,
    STEPS,
    UNCOUNTED,
    Comparison,
    read_rows,
    runs,
)

PANELS = {
    "propagated": ("heads by sample", "sum", "stages", "value norms", "un-pooling", "last layer, sum"),
    "isolated": ("heads by sample", "sum", "stages", "value norms", "un-pooling"),
}
"""Kind -> the first words of the comparisons in its picture's panels."""
FIRST = "paper"
"""Preset of the paper's first version, whose second stage reads scores that are not smoothed."""
WITHIN, MOST = 0.05, 0.5
"""An undecided setting is within so much of even; a run holds where more than this share of its settings does."""
_DECIDED = {"holds", "reversed"}
Rows = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Counts:
    """The settings of a comparison by its rule.

    Attributes:
        claimed: how many lie on the claimed side.
        holds, reversed: how many are decided.
        small: decided ones whose whole interval lies within 5 % of even.
        within: undecided ones of which that is true.
        median: value over settings.
        half_width: median over settings, of the intervals.
        runs: how many runs, each of a model and a data set, hold, are reversed and are mixed.
    """

    settings: int
    claimed: int
    holds: int
    reversed: int
    small: int
    within: int
    median: float
    half_width: float
    runs: tuple[int, int, int]

    @property
    def undecided(self) -> int:
        """Settings that neither hold nor are reversed."""
        return self.settings - self.holds - self.reversed

    def cells(self) -> list[str]:
        """Return the cells of its row."""
        if np.isnan(self.half_width):  # no interval, so no verdict
            return [str(self.settings), str(self.claimed), *"–" * 5, f"{self.median:.2f}", "–", "–"]
        numbers = self.settings, self.claimed, self.holds, self.reversed, self.small, self.within
        sizes = str(self.undecided - self.within), f"{self.median:.2f}", f"± {self.half_width:.2f}"
        return [*map(str, numbers), *sizes, " / ".join(map(str, self.runs))]


COUNT_HEADS = (
    *("settings", "claimed side", "hold", "reversed", "of these within 5 %", "undecided within 5 %", "open"),
    *("median", "interval"),
    "runs: hold / reversed / mixed",
)


def count(rows: Rows, comparison: Comparison) -> Counts:
    """Return the counts of a comparison's rows, one or more."""
    values, lows, highs = (np.array([float(row[name]) for row in rows]) for name in ("value", "low", "high"))
    verdicts = [comparison.verdict(*ends) for ends in zip(lows, highs, strict=True)]
    near = (lows >= comparison.even - WITHIN) & (highs <= comparison.even + WITHIN)
    by_run: dict[tuple[str, str], Counter[str]] = {}
    for row, verdict in zip(rows, verdicts, strict=True):
        by_run.setdefault((row["model"], row["dataset"]), Counter())[verdict] += 1
    told = Counter(map(_run_verdict, by_run.values()))
    half = (highs - lows) / 2
    return Counts(
        settings=len(rows),
        claimed=int((comparison.sign * (values - comparison.even) > 0).sum()),
        holds=verdicts.count("holds"),
        reversed=verdicts.count("reversed"),
        small=sum(bool(one) and verdict != "undecided" for one, verdict in zip(near, verdicts, strict=True)),
        within=sum(bool(one) and verdict == "undecided" for one, verdict in zip(near, verdicts, strict=True)),
        median=float(np.median(values)),
        half_width=float("nan") if np.isnan(half).all() else float(np.nanmedian(half)),
        runs=(told["holds"], told["reversed"], told["mixed"]),
    )


def _run_verdict(verdicts: Counter[str]) -> str:
    """Return holds or reversed where most settings of a run are and none is the other, else mixed."""
    for verdict, other in (("holds", "reversed"), ("reversed", "holds")):
        if verdicts[verdict] > MOST * verdicts.total() and not verdicts[other]:
            return verdict
    return "mixed"


def counted_rows(found: Rows, title: str) -> list[dict[str, str]]:
    """Return the rows of one comparison that the rules count."""
    words = title.split(",")[0]
    return [row for row in found if row["comparison"] == title and (words, row["preset"]) not in UNCOUNTED]


def tally_table(name: str, found: Rows) -> common.Table:
    """Return the table of comparisons: settings, those on the claimed side, the verdicts and sizes."""
    shown = {title: own for title in COMPARISONS if (own := counted_rows(found, title))}
    rows = [[title, COMPARISONS[title].text, *count(own, COMPARISONS[title]).cells()] for title, own in shown.items()]
    prompts = " and ".join(dict.fromkeys(row["n"] for row in found))
    return f"{name}, n = {prompts}", ["comparison", "number", *COUNT_HEADS], rows


def level_table(found: Rows, kind: str = "propagated") -> common.Table:
    """Return the table of the settings' levels: of each of a picture's comparisons, hold / reversed, of how many."""
    rows = []
    for name in SETTINGS:
        for level in _levels(found, name):
            rows.append([_level_label(name, level)])
            for title in _titles(kind):
                own = [row for row in counted_rows(found, title) if row[name] == level]
                told = count(own, COMPARISONS[title]) if own else None
                rows[-1].append(f"{told.holds} / {told.reversed} of {told.settings}" if told else "–")
    return f"by level, {kind}", ["settings", *_titles(kind)], rows


def turned_table(first: Rows, every: Rows) -> common.Table:
    """Return the table of verdicts at the first token against those over all steps of the same settings, by preset."""
    rows = []
    for (title, comparison), preset in product(COMPARISONS.items(), dict.fromkeys(row["preset"] for row in every)):
        one, other = (
            {_setting_of(row): comparison.verdict(*_ends(row)) for row in counted_rows(found, title)
             if row["preset"] == preset}
            for found in (first, every)
        )  # fmt: skip
        if title.startswith("heads by means") or not other:  # without verdicts; not counted
            continue
        both = one.keys() & other
        pairs = [{one[setting], other[setting]} for setting in both]
        alike, turned = (sum(pair in wanted for pair in pairs) for wanted in (({"holds"}, {"reversed"}), (_DECIDED,)))
        gained, lost = (
            sum(before[setting] == "undecided" != after[setting] for setting in both)
            for before, after in ((one, other), (other, one))
        )
        rows.append([title, preset, *map(str, (len(pairs), alike, turned, gained, lost))])
    heads = ["comparison", "preset", "settings", "decided alike", "turned", "gained", "lost"]
    return "first token against all steps", heads, rows


def _ends(row: dict[str, str]) -> tuple[float, float]:
    """Return the ends of a row's interval."""
    return float(row["low"]), float(row["high"])


def kinds_table(found: Rows, kinds: Rows) -> common.Table:
    """Return the table of kinds of tokens by data set: where each makes the decided sign of the propagated sum.

    It does where the sign without it is another, or none. `found` are the rows of comparisons over all steps.
    """
    comparison = COMPARISONS["sum, propagated"]
    whole = {_setting_of(row): comparison.verdict(*_ends(row)) for row in counted_rows(found, "sum, propagated")}
    rows = []
    for dataset, kind in dict.fromkeys((row["dataset"], row["kind"]) for row in kinds):
        own = [row for row in kinds if (row["dataset"], row["kind"]) == (dataset, kind)]
        signs = Counter(
            (whole[_setting_of(row)], comparison.verdict(float(row["rest_ratio_low"]), float(row["rest_ratio_high"])))
            for row in own
        )
        decided = sum(count for (one, _), count in signs.items() if one in _DECIDED)
        made = [sum(signs[one, other] for one in _DECIDED if one != other) for other in ("undecided", *_DECIDED)]
        tokens, ratio, rest = (np.nanmedian([float(row[name]) for row in own] or [np.nan])
                               for name in ("tokens", "propagated_ratio", "rest_ratio"))  # fmt: skip
        sizes = f"{tokens:.0f}", f"{ratio:.2f}", "–" if np.isnan(rest) else f"{rest:.2f}"
        rows.append([dataset, kind, str(len(own)), *sizes, str(decided), str(made[0]), str(sum(made[1:]))])
    heads = ["data set", "kind", "settings", "tokens", "×, at it", "×, without it", "decided", "without it none",
             "without it the opposite"]  # fmt: skip
    return "kinds of tokens", heads, rows


def _titles(kind: str) -> list[str]:
    """Return the titles of the comparisons in the panels of one kind's picture."""
    return [words if words.startswith("last") else f"{words}, {kind}" for words in PANELS[kind]]


def draw(found: Sequence[dict[str, str]], kind: str, path: Path) -> None:
    """Draw every setting's numbers of one kind with their intervals, sorted by the sum, over a matrix of the settings.

    Hollow points in the first panel are the shares of heads by their means, which have no interval.
    """
    sums = counted_rows(found, f"sum, {kind}")
    key = {_setting_of(row): float(row["value"]) for row in sums}
    order = {setting: place for place, setting in enumerate(sorted(key, key=key.__getitem__))}
    levels = [(name, level) for name in SETTINGS for level in _levels(sums, name)]
    titles = _titles(kind)
    figure = common.page_figure(27 * len(titles) + 64)
    axes = figure.subplots(len(titles) + 1, 1, sharex=True, height_ratios=[1] * len(titles) + [2.8])
    for axis, title in zip(axes, titles, strict=False):
        _draw_panel(axis, counted_rows(found, title), COMPARISONS[title], order)
        comparison = COMPARISONS[title]
        better = "above" if comparison.sign > 0 else "below"
        words = title.removesuffix(f", {kind}")
        axis.set_title(f"{words}: {comparison.text}; {better} {comparison.even:g} is better", loc="left")
    for row in counted_rows(found, f"heads by means, {kind}"):
        axes[0].plot(order[_setting_of(row)], float(row["value"]), "o", color="0.3", fillstyle="none", markersize=1.8,
                     markeredgewidth=0.4)  # fmt: skip
    for place, (name, level) in enumerate(levels):
        on = [order[setting] for setting in order if setting[SETTINGS.index(name)] == level]
        axes[-1].plot(on, [place] * len(on), "|", color="0.2", markersize=3)
    for verdict, colour in COLOURS.items():
        label = verdict if verdict == "undecided" else f"{verdict}, 95 %"
        axes[0].plot([], [], ".-", color=colour, markersize=2.5, linewidth=0.6, label=label)
    axes[0].plot([], [], "o", color="0.3", fillstyle="none", markersize=1.8, label="by means over prompts")
    figure.legend(loc="outside upper center", ncols=4)
    axes[-1].set_yticks(range(len(levels)), [_level_label(*one) for one in levels])
    axes[-1].invert_yaxis()
    axes[-1].set_xlabel(f"{len(order)} settings, {kind}, sorted by the second panel")
    figure.savefig(path, dpi=200)


def _levels(rows: Rows, name: str) -> list[str]:
    """Return the levels of a part of the settings; none where all settings share it."""
    found = list(dict.fromkeys(row[name] for row in rows))
    return found if len(found) > 1 else []


def _level_label(name: str, level: str) -> str:
    """Return a level's label."""
    if name == "template":
        return "with chat template" if level == "True" else "no chat template"
    return level if name in ("model", "dataset") else f"{name} {level}"


def _draw_panel(axis: Any, rows: Sequence[dict[str, str]], comparison: Comparison, order: dict[Any, int]) -> None:
    """Draw a comparison's numbers and intervals, coloured by verdict; ratios on a logarithmic axis."""
    for row in rows:
        place = order[_setting_of(row)]
        value, low, high = (float(row[name]) for name in ("value", "low", "high"))
        colour = COLOURS[comparison.verdict(low, high)]
        axis.plot([place, place], [low, high], color=colour, linewidth=0.6)
        axis.plot(place, value, ".", color=colour, markersize=2.5)
    if comparison.even == 1:
        common.plain_log(axis, "y")
    axis.axhline(comparison.even, color="0.3", linewidth=0.6, linestyle=":")


def _setting_of(row: dict[str, str]) -> tuple[str, ...]:
    """Return a row's setting."""
    return tuple(row[name] for name in SETTINGS)


def is_counted(row: dict[str, str]) -> bool:
    """Return whether a row's setting is counted: regular, and no preset that only stands beside the others."""
    return row["scenario"] == "regular" and row["preset"] not in OWN_WINDOW


def _by_preset(name: str, rows: Rows) -> Iterable[common.Table]:
    """Yield the table of comparisons of the first version's preset, and of the later ones, where there are rows."""
    first = [row for row in rows if row["preset"] == FIRST]
    later = [row for row in rows if row["preset"] != FIRST]
    for what, own in ((f"preset {FIRST}", first), ("later presets", later)):
        if own:
            yield tally_table(f"{name}, {what}", own)


def tables(steps: int, confirm: str) -> Iterable[common.Table]:
    """Yield the tables of the rows over so many steps, and those that stand beside them."""
    measured = runs(confirm)
    every = read_rows(run.rows for run in measured)
    found = [row for row in every if int(row["steps"]) == steps]
    own = [row for row in found if is_counted(row)]
    yield from _by_preset("comparisons", own)
    for kind in PANELS:
        yield level_table(own, kind)
    beside = [row for row in found if row["preset"] in OWN_WINDOW]
    for scenario in SCENARIOS:
        if rows := [row for row in beside if row["scenario"] == scenario]:
            yield tally_table(f"kvpress, {scenario}", rows)
    others = [row for row in found if row["scenario"] != SCENARIOS[0] and row["preset"] not in OWN_WINDOW]
    yield from _by_preset(SCENARIOS[1], others)
    if steps > 1:
        settings = {_setting_of(row) for row in own}
        yield turned_table([row for row in every if int(row["steps"]) == 1 and _setting_of(row) in settings], own)
        yield kinds_table(own, [row for row in read_rows(run.kinds for run in measured) if is_counted(row)])


def study(asked: argparse.Namespace) -> None:
    """Draw and tell what was measured."""
    made = list(tables(asked.steps, asked.confirm))
    rows = [row for row in read_rows(run.rows for run in runs(asked.confirm)) if int(row["steps"]) == asked.steps]
    name = "-".join((asked.confirm or "specification", *(("first",) if asked.steps == 1 else ())))
    for kind in PANELS:
        asked.written.append(asked.figures / f"{name}-{kind}.png")
        draw([row for row in rows if is_counted(row)], kind, asked.written[-1])
    common.write_tables(asked, made)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, choices=(1, STEPS), default=STEPS, help="of the first token, or all")
    parser.add_argument("--confirm", choices=CONFIRMING, default="", help="the confirming runs of this folder")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder of the pictures")
    parser.add_argument("--output", "-o", type=Path, help="folder of the JSON document")
    common.main(study, parser)
