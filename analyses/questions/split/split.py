"""Is a head hurt by how much goes or by what goes, and what would a stored mean of what went win back?.

The split in words and tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np

from perturbkv.analyses import pairing, text
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import at_step
from perturbkv.analyses.pairing import Pair, common, folded, matches, pairs, short_names
from perturbkv.analyses.questions.split.mass_and_distance import (
    ANALYSIS,
    Contest,
    Parts,
    Row,
    Setting,
    Spread,
    contest,
    parts,
    settings,
    spread,
)
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.text import Case, compared, decided, extremes, factor, over, sentence, tally_verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_SPREADS = ("", "#sd of\nlog L", "#Var\nlog(1−S)", "#Var\nlog D", "#2 Cov", "#by mass")
_CONTESTS = ("", "#L", "#1 − S", "#D", "#heads where\n1−S falls", "#heads where\nD falls")
_HEADS = ("", "#isolated", "#propagated", "#heads\nbetter", "#isolated\n/ oracle", "#propagated\n/ oracle")
_OUTPUT = ("", "#drift,\n× none", "#median KL,\nnat", "#mean KL,\n× none", "#prompts of\nless KL")
_APART = {
    1: ("how much goes tells heads apart more than what goes", "how much"),
    -1: ("what goes tells heads apart more than how much goes", "what"),
    0: ("whether heads differ by how much or by what goes is undecided", "undecided"),
}
_CONTROL = "random"


def conclusion(
    spreads: Sequence[Spread], contests: Sequence[Contest], corrections: Sequence[Setting], samples: int
) -> str:
    """A line per finding: what tells heads apart, each contest, each correction; or that nothing is lost at all."""
    if not any(one.heads for one in spreads):
        return sentence(f"no configuration loses anything in any head: nothing goes, or too little ({over(samples)})")
    said = [f"{_spreads(spreads)} ({over(samples)})"]
    said += [_contest(*sides, found) for sides, found in _contests(contests).items()]
    said += _corrections(corrections)
    names = [side for sides in _contests(contests) for side in sides]
    names += [row.name for setting in corrections for row in setting.rows]
    return "\n".join(sentence(one, *names) for one in said)


def _spreads(spreads: Sequence[Spread]) -> str:
    """'how much goes explains 81 % … with attention to 84 % … of what tells heads apart, 44 % … with random (control)'.

    Before it which of both it is that tells more, where that is decided.
    """
    known = [(name, one) for name, one in zip(_names(spreads), spreads, strict=True) if not isnan(one.by_mass)]
    if not known:
        return "what tells heads apart cannot be told: too little goes"
    verdicts = [decided(one.by_mass_interval, 0.5) for _, one in known]
    clause = (
        "how much goes" if None in verdicts else f"{tally_verdicts(verdicts, _APART, 'configuration')}: how much goes"
    )
    controls = [(name, one) for name, one in known if one.config.selection.name == _CONTROL]
    others = [pair for pair in known if pair not in controls]
    told = f"{clause} explains {_shares(others or controls)} of what tells heads apart"
    return f"{told}, {_shares(controls)} with {_CONTROL} (control)" if others and controls else told


def _shares(known: Sequence[tuple[str, Spread]]) -> str:
    return extremes(
        [(name, one.by_mass, text.percent(one.by_mass, one.by_mass_interval)) for name, one in known], "with"
    )


def _contests(contests: Sequence[Contest]) -> dict[tuple[str, str], list[Contest]]:
    """Contests of each two sides, by their names, baseline first."""
    found: dict[tuple[str, str], list[Contest]] = {}
    for one in contests:
        found.setdefault(pairing.side_names(one.baseline, one.treatment), []).append(one)
    return found


def _contest(baseline: str, treatment: str, found: Sequence[Contest]) -> str:
    """By how much the typical head's L differs, and by which factor; of budgets at which both lose something."""
    found = [one for one in found if one.heads]
    if not found:
        return f"no head loses anything under both {treatment} and {baseline}"
    names = short_names([one.treatment for one in found])
    loss = extremes(
        [(name, one.loss, factor(one.loss, one.loss_interval)) for name, one in zip(names, found, strict=True)]
    )
    mass, difference = ([getattr(one, part) for one in found] for part in ("mass", "difference"))
    return f"{treatment}'s L is {loss} that of {baseline}: 1 − S {_reach(mass)}, D {_reach(difference)}"


def _reach(ratios: Sequence[float]) -> str:
    """'0.77 × to 0.82 ×', or '0.77 ×' where both ends read alike."""
    return " to ".join(dict.fromkeys(factor(end) for end in (min(ratios), max(ratios))))


def _corrections(corrections: Sequence[Setting]) -> list[str]:
    """What each correction does to what is propagated, and to KL."""
    names = _names_of(corrections)
    found: dict[str, list[tuple[str, Row]]] = {}
    for words, setting in zip(names, corrections, strict=True):
        for row in setting.rows:
            found.setdefault(row.name, []).append((words, row))
    return [_correction(name, rows) for name, rows in found.items()]


def _correction(name: str, rows: Sequence[tuple[str, Row]]) -> str:
    cases: list[Case] = [
        (words, row.compared.propagated.sum_ratio, row.compared.propagated.sum_ratio_interval) for words, row in rows
    ]
    kl = extremes(
        [
            (words, row.kl_falls, f"{text.percent(row.kl_falls, row.kl_falls_interval)} of prompts")
            for words, row in rows
        ]
    )
    return f"{compared(name, 'no correction', cases)} (propagated), and lowers KL in {kl}"


def tables(spreads: Sequence[Spread], contests: Sequence[Contest], corrections: Sequence[Setting]) -> list[Table | str]:
    """What tells heads apart, what makes a method win, what corrections do."""
    configs = [one.config for one in spreads]
    made: list[Table | str] = [
        f"L = (1 − S) · D, isolated · {common(configs)}",
        Table(
            "what tells the heads of a prompt apart: shares of Var(log L)",
            _SPREADS,
            [_spread_row(name, one) for name, one in zip(_names(spreads), spreads, strict=True)],
        ),
    ]
    for (baseline, treatment), found in _contests(contests).items():
        names = short_names([one.treatment for one in found]) if len(found) > 1 else [treatment]
        rows = [_contest_row(name, one) for name, one in zip(names, found, strict=True)]
        made.append(Table(f"{treatment} over {baseline}: geometric mean of heads", _CONTESTS, rows))
    for words, setting in zip(_names_of(corrections), corrections, strict=True):
        about = words or setting.setting
        made.append(Table(f"{about}: L1 over uncorrected", _HEADS, [_heads_row(row) for row in setting.rows]))
        made.append(
            Table(
                f"{about}: what comes out, the last layer's drift and KL of the next token",
                _OUTPUT,
                _output_rows(setting),
            )
        )
    return made


def _names(spreads: Sequence[Spread]) -> list[str]:
    """What tells the configurations apart; of a single one its selection."""
    told = short_names([one.config for one in spreads])
    return [name or one.config.selection.name for name, one in zip(told, spreads, strict=True)]


def _names_of(corrections: Sequence[Setting]) -> list[str]:
    return short_names([setting.baseline for setting in corrections])


def _spread_row(name: str, one: Spread) -> list[str]:
    shown = [text.decimal(one.deviation, one.deviation_interval, apart="\n")]
    for part in ("mass", "difference", "both", "by_mass"):
        shown.append(text.percent(getattr(one, part), getattr(one, f"{part}_interval"), apart="\n"))
    return [folded(name), *shown]


def _contest_row(name: str, one: Contest) -> list[str]:
    shown = [
        text.decimal(getattr(one, part), getattr(one, f"{part}_interval"), apart="\n")
        for part in ("loss", "mass", "difference")
    ]
    for part in ("mass_falls", "difference_falls"):
        shown.append(text.percent(getattr(one, part), getattr(one, f"{part}_interval"), apart="\n"))
    return [folded(name), *shown]


def _heads_row(row: Row) -> list[str]:
    isolated, propagated, told = row.compared.isolated, row.compared.propagated, row.prediction
    return [
        folded(row.name),
        text.decimal(isolated.sum_ratio, isolated.sum_ratio_interval, apart="\n"),
        text.decimal(propagated.sum_ratio, propagated.sum_ratio_interval, apart="\n"),
        text.percent(propagated.better_share, propagated.better_share_interval, apart="\n"),
        "" if told is None else text.decimal(told.isolated, told.isolated_interval, apart="\n"),
        "" if told is None else text.decimal(told.propagated, told.propagated_interval, apart="\n"),
    ]


def _output_rows(setting: Setting) -> list[list[str]]:
    uncorrected = ["none", "1", text.significant(setting.kl.median, setting.kl.interval), "1", ""]
    return [uncorrected, *map(_output_row, setting.rows)]


def _output_row(row: Row) -> list[str]:
    return [
        folded(row.name),
        text.decimal(row.drift_ratio, row.drift_ratio_interval, apart="\n"),
        text.significant(row.kl.median, row.kl.interval),
        text.decimal(row.kl_ratio, row.kl_ratio_interval, apart="\n"),
        text.percent(row.kl_falls, row.kl_falls_interval, apart="\n"),
    ]


def notes(spreads: Sequence[Spread], contests: Sequence[Contest], corrections: Sequence[Setting], samples: int) -> str:
    """What the columns mean, and which heads are left out."""
    left, every = sum(one.left_out for one in spreads), sum(one.left_out + one.heads for one in spreads)
    said = [
        text.about_intervals(samples, exact=bool(corrections), medians=bool(corrections)),
        "1 − S: attention that goes; D = ‖μ_gone − μ_kept‖₁: how unlike what stays it is. Var(log L) over the heads of "
        "a prompt = Var(log(1 − S)) + Var(log D) + 2 Cov; by mass: what how much goes "
        "explains, the first and half of 2 Cov.",
        f"Left out: {left:,} of {every:,} heads (of all prompts and configurations), of which nothing goes, or too "
        "little to tell from rounding.",
    ]
    if contests:
        said.append("Of a contest L's ratio is the product of the other two; below 1 less is lost.")
    if corrections:
        said += [_about_corrections(), text.ABOUT_TIES]
    return " ".join(said)


def _about_corrections() -> str:
    return (
        "corrected: one entry per query head stands in for what went, its value the mean of what went under the mean "
        "of the window's queries, its weight as predicted: stored at that query, or linear in the query at hand. "
        "corrected-oracle knows the true mass of what went: a control, which tells what the mean alone costs; with the "
        "true mean it would be 0. L1 is Σ over all heads; it, drift and mean KL are over those of the same kept "
        "sets uncorrected; heads better: propagated; / oracle: what predicting the mass costs; "
        "less KL: by more than two noise floors."
    )


_FIRST = "attention"
"""The selection that others are held against where nobody says otherwise."""


@dataclass(frozen=True, repr=False)
class Split(Result):
    """The uncorrected configurations of a trace, against each other and against what corrects them.

    Attributes:
        spreads: of each what tells its heads apart.
        parts: likewise its log L and log (1 − S), (sample, layer, head).
        contests: each later side against the first, at equal budgets.
        corrections: each configuration that the trace holds corrected too.
        step: decode step looked at.
        identity: of the run, with every configuration that is told of.
    """

    spreads: tuple[Spread, ...]
    parts: tuple[Parts, ...]
    contests: tuple[Contest, ...]
    corrections: tuple[Setting, ...]
    step: int
    identity: RunIdentity

    def conclusion(self) -> str:
        """What tells heads apart, by which of both each method wins, and what corrections win."""
        return conclusion(self.spreads, self.contests, self.corrections, self.identity.samples)

    def tables(self) -> list[Table | str]:
        """The parts of the variance, each contest's two factors, and every correction."""
        return tables(self.spreads, self.contests, self.corrections)

    def notes(self) -> str:
        """What the columns mean, which heads are left out, and what the oracle is."""
        return notes(self.spreads, self.contests, self.corrections, self.identity.samples)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "spreads": list(self.spreads),
                "contests": list(self.contests),
                "corrections": [setting.to_dict() for setting in self.corrections],
            }
        )
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per uncorrected configuration, layer and head: geometric means over the samples that have a number.

        `isolated` is L, `gone_mass` 1 − S and `gone_distance` ‖μ_gone − μ_kept‖₁; None where no sample has one.
        """
        return [
            row
            for one, found in zip(self.spreads, self.parts, strict=True)
            for row in _by_head(one.config, found, self.identity)
        ]


def split(trace: Trace, compare: str | Sequence[str] | None = None, step: int = 0) -> Split:
    """Whether heads lose by how much attention goes or by what goes, and what a correction of the output wins.

    `L = (1 − S) ‖μ_gone − μ_kept‖₁` per head (METHOD, the split of an evicted output), from the stored S and the
    isolated perturbation: the parts of Var(log L) over the heads of a sample; both factors of each side's L over the
    first's; and L (isolated and propagated), drift and KL of `corrected` configurations over the same uncorrected.

    Args:
        trace: what was measured.
        compare: selections, policies or `policy:selection`, the first of which the others are held against. Left out:
            every uncorrected configuration, against selection `attention` where the trace holds it.
        step: decode step.

    Raises TraceError where a side is not there, all configurations are corrected or in few bits, or the trace has no
    complete sample or not what is needed; ConfigError where it has no such step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> found = pk.split(trace).contests[0]
        >>> abs(found.loss - found.mass * found.difference) < 1e-12
        True
    """
    held = at_step(trace, ANALYSIS, step)
    sides = _sides(trace.run) if compare is None else [compare] if isinstance(compare, str) else list(compare)
    shown = _shown(trace.run, sides)
    found = tuple(parts(held, config, step) for config in shown)
    contests = tuple(contest(held, *pair, step) for pair in _pairs(trace.run, sides))
    corrections = settings(trace, shown, step)
    every = [*shown, *(config for one in corrections for config in one.identity.configs)]
    return Split(
        spreads=tuple(spread(config, one) for config, one in zip(shown, found, strict=True)),
        parts=found,
        contests=contests,
        corrections=corrections,
        step=step,
        identity=identity(trace, list(dict.fromkeys(every)), step),
    )


def _alone(run: RunConfig) -> list[EvictionConfig]:
    """Configurations of which the split is exact. Raises TraceError where there is none."""
    found = [config for config in run.configs if config.evicts_alone]
    if not found:
        msg = (
            f"{ANALYSIS} needs an uncorrected configuration in full precision, as L = (1 − S) ‖μ_gone − μ_kept‖₁ is "
            f"of eviction alone; got {', '.join(run.labels())}"
        )
        raise TraceError(msg)
    return found


def _sides(run: RunConfig) -> list[str]:
    """Every policy and selection that evicts alone, one that takes attention first where there is one."""
    alone = _alone(run)
    several = len({one.policy.name for one in alone}) > 1
    named = [
        one.policy.name if one.given else f"{one.policy.name}:{one.selection.name}" if several else one.selection.name
        for one in alone
    ]
    first = [name for name, one in zip(named, alone, strict=True) if one.selection.name == _FIRST]
    return list(dict.fromkeys([*first[:1], *named]))


def _shown(run: RunConfig, sides: Sequence[str]) -> list[EvictionConfig]:
    """What evicts alone of these sides, in the run's order. Raises TraceError for a side that is not there."""
    alone = _alone(run)
    for side in sides:
        if not any(matches(config, side) for config in alone):
            held = ", ".join(dict.fromkeys(f"{one.policy.name}:{one.selection.name}" for one in alone))
            msg = f"expected uncorrected configurations of '{side}', got a trace of {held}"
            raise TraceError(msg)
    return [config for config in alone if any(matches(config, side) for side in sides)]


def _pairs(run: RunConfig, sides: Sequence[str]) -> list[Pair]:
    """Each later side against the first, wherever the run holds both alike; none where nothing is attention's."""
    baseline, *others = sides
    found = [pair for side in others for pair in pairs(run, baseline, side)]
    return [pair for pair in found if all(one.evicts_alone for one in pair)]


def _by_head(config: EvictionConfig, found: Parts, run: RunIdentity) -> list[dict[str, Any]]:
    numbers = {"isolated": found.loss, "gone_mass": found.mass, "gone_distance": found.difference}
    held = found.held.sum(axis=0)
    means = {name: np.nansum(logs, axis=0) / np.maximum(held, 1) for name, logs in numbers.items()}
    return [
        {
            **columns_of(config),
            "layer": run.layer(layer),
            "head": head,
            "samples": int(held[layer, head]),
            **{name: float(np.exp(logs[layer, head])) if held[layer, head] else None for name, logs in means.items()},
        }
        for layer, head in np.ndindex(held.shape)
    ]
