"""How cliffs are told: in a sentence per threshold, in tables, in the notes beneath."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, isnan
from typing import TYPE_CHECKING

from perturbkv.analyses import text
from perturbkv.analyses.naming import folded
from perturbkv.analyses.sentences import over, sentence
from perturbkv.analyses.stats.crossings import Contest, Crossing
from perturbkv.display import Table

if TYPE_CHECKING:
    from perturbkv.analyses.budget.method_cliff import Cliff

_MB = 1e6
_HOW = (
    "Passes: the budget from which on the median over samples of KL(full ‖ evicted) stays below the threshold; lines "
    "join the budgets measured, on both logarithms, and beyond them nothing is told but < and >. Its interval: the "
    "budgets at which the median's own cannot tell the side.",
    "By the mean: the same of the mean over samples, which one prompt can make: it has no interval worth reading.",
    "Over {baseline}'s: each prompt's own budget over its own with {baseline}, the median over prompts; below 1 it "
    "needs less. A prompt that passes beyond the budgets counts with all that its ratio can be, so that of the median "
    "one end may be all that is known; … is an end that the budgets do not show.",
)


def conclusion(members: Sequence[Cliff], thresholds: Sequence[float], samples: int) -> str:
    """Per threshold where the methods pass it, and what each needs of the first one's budget."""
    return "\n".join(_concluded(members, place, threshold, samples) for place, threshold in enumerate(thresholds))


def _concluded(members: Sequence[Cliff], place: int, threshold: float, samples: int) -> str:
    where = ", ".join(f"{_at(one, one.crossings[place])} with {one.name}" for one in members)
    said = f"the budget from which on median KL stays below {threshold:g} nat is {where}"
    known = [(one.name, one.contests[place]) for one in members[1:] if not isnan(one.contests[place].ratio)]
    needs = ", ".join(f"{name} {_ratio(found)}" for name, found in known)
    of = f"; of {members[0].name}'s budget the median prompt needs with {needs}" if known else ""
    return sentence(f"{said}{of} ({over(samples)})")


def _at(one: Cliff, passed: Crossing, apart: str = " ") -> str:
    """'0.12 [0.06, 0.2]'; '> 0.4 [0.2, >0.4]' where the largest budget measured does not do."""
    beyond = {inf: one.budgets[-1], 0.0: one.budgets[0]}
    sign = {inf: "> ", 0.0: "< "}.get(passed.value, "")
    value = sign + _budget(one, beyond.get(passed.value, passed.value))
    return value + text.ends(passed.interval, lambda end: _end(one, end), apart)


def _budget(one: Cliff, value: float) -> str:
    return f"{value:,.0f}" if isinstance(one.configs[0].budget.value, int) else f"{value:.2g}"


def _end(one: Cliff, end: float) -> str:
    """A budget; beyond those measured '<0.005' or '>0.4'."""
    beyond = {inf: f">{_budget(one, one.budgets[-1])}", 0.0: f"<{_budget(one, one.budgets[0])}"}
    return beyond.get(end) or _budget(one, end)


def _ratio(found: Contest, apart: str = " ") -> str:
    """'0.62 × [0.5, 0.8]'; between two ends where the budgets measured do not show the median."""
    least, most = found.limits
    shown = text.ends(found.interval, lambda end: f"{end:.2f}" if 0 < end < inf else "…", apart)
    if not isnan(found.ratio):
        return f"{found.ratio:.2f} ×{shown}"
    between = {(True, True): f"{least:.2f} to {most:.2f}", (True, False): f"≥ {least:.2f}",
               (False, True): f"≤ {most:.2f}", (False, False): "not told"}[least > 0, most < inf]  # fmt: skip
    return between + (shown if between != "not told" else "")


def tables(members: Sequence[Cliff], thresholds: Sequence[float]) -> list[Table | str]:
    """A table per threshold, and one of all curves."""
    return [*(_crossings(members, place, threshold) for place, threshold in enumerate(thresholds)), _curves(members)]


def _crossings(members: Sequence[Cliff], place: int, threshold: float) -> Table:
    columns = ["", "#passes at\nbudget", "#by the\nmean", "#held /\nfull", "#MB",
               f"#over\n{folded(members[0].name, 14)}'s", "#told by\nprompts"]  # fmt: skip
    rows = [[folded(one.name), *_passed(one, one.crossings[place]), *_compared(one, place)] for one in members]
    return Table(f"KL of the next token stays below {threshold:g} nat from this budget on", columns, rows)


def _passed(one: Cliff, passed: Crossing) -> list[str]:
    held, size = (one.at(passed.value, quantity) for quantity in (one.held, one.held_bytes))
    by_mean = Crossing(passed.threshold, passed.mean, None, passed.mean, 1)
    mark = "*" if passed.passes > 1 else ""
    return [mark + _at(one, passed, "\n"), _at(one, by_mean), f"{held:.2g}" if held == held else "–",
            "–" if isnan(size) else f"{size / _MB:.3g}"]  # fmt: skip


def _compared(one: Cliff, place: int) -> list[str]:
    if not one.contests:
        return ["1", ""]
    found = one.contests[place]
    return [_ratio(found, "\n"), f"{found.told} of {found.prompts}"]


def _curves(members: Sequence[Cliff]) -> Table:
    columns = ["", "#b", "#held /\nfull", "#KL, nat,\nmedian", "#mean"]
    return Table("KL of the next token by budget", columns, [row for one in members for row in _rows(one)])


def _rows(one: Cliff) -> Iterator[list[str]]:
    for place, config in enumerate(one.configs):
        median = text.significant(float(one.median[place]), text.at(one.median_interval, place))
        held = "–" if isnan(one.held[place]) else f"{one.held[place]:.2g}"
        name = folded(one.name) if place == 0 else ""
        yield [name, str(config.budget), held, median.replace("\n", " "), text.significant(float(one.mean[place]))]


def notes(members: Sequence[Cliff], samples: int, steps: int, floor: float) -> str:
    """A line each on intervals, crossings, means, comparisons, curves that pass twice, and caches."""
    again = any(one.passes > 1 for member in members for one in member.crossings)
    lines = [
        text.about_intervals(samples, medians=True),
        _HOW[0],
        _HOW[1],
        *([_HOW[2].format(baseline=members[0].name)] if len(members) > 1 else []),
        *(["* The curve passes more than once: the largest budget counts."] if again else []),
        *([f"KL is each sample's mean over its steps, at most {steps}."] if steps > 1 else []),
        *_unstaged(members, samples),
        f"With everything kept KL is {floor:.0e} nat (median).",
        text.about_held(share for one in members for share in one.held),
    ]
    return "\n".join(lines)


def _unstaged(members: Sequence[Cliff], samples: int) -> Iterator[str]:
    """Where the share α of so few entries is none, so that two stages are the second alone."""
    for one in members:
        empty = [(config.budget, int(count)) for config, count in zip(one.configs, one.unstaged, strict=True) if count]
        if empty:
            where = ", ".join(f"{budget} ({count} of {samples} prompts)" for budget, count in empty)
            yield f"Stage 1 of {one.name} takes no entry, as α of so few is none, at b = {where}: stage 2 alone."
