"""Each head's loss split into how much attention is evicted and how unlike the rest it is; what corrections gain."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any, ClassVar

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, column, record, table
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.pairing import Pair, common, matches, pairs, short_names, side_names
from perturbkv.analyses.questions.split.mass_and_distance import (
    ANALYSIS,
    Contest,
    LogFactors,
    Row,
    Setting,
    Spread,
    contest,
    log_factors,
    settings,
    spread,
)
from perturbkv.analyses.result import Result
from perturbkv.analyses.text import (
    FEW,
    LESS,
    MORE,
    UNDECIDED,
    Case,
    comparison,
    extremes,
    factor,
    interval_verdict,
    sample_note,
    sentence,
    tally,
)
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Part
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_WORDS = {
    MORE: ("how much goes makes heads differ more than what goes", "how much"),
    LESS: ("what goes makes heads differ more than how much goes", "what"),
    UNDECIDED: ("whether heads differ by how much or by what goes is undecided", "undecided"),
}
_CONTROL = "random"
_FIRST = "attention"
"""The selection that the other selections are compared with by default."""


@record
class Split(Result):
    """The uncorrected configurations of a trace, compared with each other and with their corrections.

    Attributes:
        log_factors: log L and log (1 − S) of each of the `spreads`, (sample, layer, head).
        step: decode step, from 0.
        identity: of the run, with every configuration that is shown.
    """

    SECTION: ClassVar[str] = "question split"
    SHOWN: ClassVar[tuple[str, ...]] = ("deviation", "mass", "difference", "both", "by_mass")

    spreads: tuple[Spread, ...] = column("one per uncorrected configuration")
    log_factors: tuple[LogFactors, ...]
    contests: tuple[Contest, ...] = column("each side against the first, at equal budgets")
    corrections: tuple[Setting, ...] = column("one per configuration that the trace holds corrected too")
    step: int
    identity: RunIdentity

    def conclusion(self) -> str:
        """Return the variance share of 1 − S over heads, and the effect of a correction or of the only treatment."""
        note = sample_note(self.identity.samples)
        if not any(spread.heads for spread in self.spreads):
            return sentence(f"no configuration loses anything in any head: nothing goes, or too little ({note})")
        corrected = [f"{clause} (propagated)" for clause in self._correction_clauses()[:1]]
        contests = self.contest_texts() if len(self.contests_by_sides()) == 1 and not corrected else []
        return sentence(f"{'; '.join([self._spread_clause(), *contests, *corrected])} ({note})")

    def title(self) -> str:
        """Return the equation, and the choices that all configurations share."""
        shared = common([spread.config for spread in self.spreads])
        return f"L = (1 − S) · D, isolated; shares of Var(log L) over the heads of a prompt: {shared}"

    def lines(self) -> Sequence[Line]:
        """Return a line per uncorrected configuration."""
        return [Line(name, (spread,)) for name, spread in zip(self._config_names(), self.spreads, strict=True)]

    def caveats(self) -> Sequence[str]:
        """Return the definitions of S and D, and the number of heads left out."""
        left = sum(spread.left_out for spread in self.spreads)
        every = left + sum(spread.heads for spread in self.spreads)
        return [
            "1 − S: attention that goes; D: how unlike the rest; by mass: Var log(1−S) + Cov.",
            f"Left out: {left:,} of {every:,} heads, of which nothing or too little goes.",
        ]

    def details(self) -> Sequence[Part]:
        """Return the tables of contests and of corrections, each with a sentence, and notes on reading them."""
        shown: list[Part] = [*self.contest_texts(), *self.correction_texts()]
        names = ("loss", "mass", "difference", "mass_falls", "difference_falls")
        for (baseline, treatment), contests in self.contests_by_sides().items():
            own = short_names([one.treatment for one in contests]) if len(contests) > 1 else [treatment]
            lines = [Line(name, (one,)) for name, one in zip(own, contests, strict=True)]
            shown.append(table(f"{treatment} over {baseline}: geometric mean of heads", lines, names))
        if self.contests:
            shown.append("Of a contest L's ratio is the product of the other two; below 1 less is lost.")
        for name, setting in zip(self._correction_names(), self.corrections, strict=True):
            shown += _correction_tables(name or setting.setting, setting)
        return [*shown, *([_CORRECTIONS_NOTE, text.TIES_NOTE] if self.corrections else [])]

    def interval_note(self) -> str:
        """Return the note on n and intervals, including those of shares and medians."""
        corrected = bool(self.corrections)
        return text.intervals_note(self.identity.samples, exact=corrected, medians=corrected)

    def records(self) -> list[dict[str, Any]]:
        """Return a row per uncorrected configuration, layer and head: geometric means over the samples with a number.

        `isolated` is L, `gone_mass` 1 − S and `gone_distance` ‖μ_gone − μ_kept‖₁; None where no sample has one.
        """
        return [
            row
            for one, own in zip(self.spreads, self.log_factors, strict=True)
            for row in _head_records(one.config, own, self.identity)
        ]

    def verdicts(self) -> list[str]:
        """Return a verdict per configuration: MORE where 1 − S explains over half of the variance of log L over heads.

        LESS where it explains under half, UNDECIDED where the interval contains a half, FEW where there is no interval;
        configurations that evict too little attention are left out.
        """
        verdicts = [interval_verdict(spread.by_mass_interval, 0.5) for _, spread in self._known_spreads()]
        return [FEW if verdict is None else (UNDECIDED, MORE, LESS)[verdict] for verdict in verdicts]

    def contests_by_sides(self) -> dict[tuple[str, str], list[Contest]]:
        """Return (baseline's name, treatment's name) -> contests, one per budget."""
        contests: dict[tuple[str, str], list[Contest]] = {}
        for one in self.contests:
            contests.setdefault(side_names(one.baseline, one.treatment), []).append(one)
        return contests

    def correction_cases(self) -> dict[str, list[Case]]:
        """Return name of a correction -> its propagated perturbation over the uncorrected one, per configuration."""
        return {
            name: [row.propagated.case(where) for where, row in rows]
            for name, rows in self._rows_by_correction().items()
        }

    def contest_texts(self) -> list[str]:
        """Return a clause per baseline and treatment: the geometric mean ratios of L and of its two factors."""
        return [_contest_text(*sides, contests) for sides, contests in self.contests_by_sides().items()]

    def correction_texts(self) -> list[str]:
        """Return a clause per correction: its effect on propagated perturbation, and how often it lowers KL."""
        return [
            f"{clause} (propagated), and lowers KL in {_lower_kl_shares(rows)}"
            for clause, rows in zip(self._correction_clauses(), self._rows_by_correction().values(), strict=True)
        ]

    def _correction_clauses(self) -> list[str]:
        """Return a clause per correction: its effect on propagated perturbation."""
        return [comparison(name, "no correction", cases) for name, cases in self.correction_cases().items()]

    def _spread_clause(self) -> str:
        """Return the clause on the variance share of 1 − S: 'how much goes explains 81 % … of what makes heads differ'.

        Where it is decided whether 1 − S or D explains more, the clause begins with that.
        """
        known, verdicts = self._known_spreads(), self.verdicts()
        if not known:
            return "what makes heads differ is unknown: too little goes"
        clause = "how much goes" if FEW in verdicts else f"{tally(verdicts, _WORDS, 'configuration')}: how much goes"
        controls = [(name, one) for name, one in known if one.config.selection.name == _CONTROL]
        methods = [pair for pair in known if pair not in controls]
        whole = f"{clause} explains {_mass_shares(methods or controls)} of what makes heads differ"
        return f"{whole}, {_mass_shares(controls)} with {_CONTROL} (control)" if methods and controls else whole

    def _known_spreads(self) -> list[tuple[str, Spread]]:
        """Return (configuration's name, spread) for the spreads that are not NaN."""
        named = zip(self._config_names(), self.spreads, strict=True)
        return [(name, spread) for name, spread in named if not isnan(spread.by_mass)]

    def _config_names(self) -> list[str]:
        """Return the short names of the uncorrected configurations; for a single one its selection."""
        names = short_names([spread.config for spread in self.spreads])
        return [name or one.config.selection.name for name, one in zip(names, self.spreads, strict=True)]

    def _correction_names(self) -> list[str]:
        """Return the short names of the configurations that are corrected; empty for a single one."""
        return short_names([setting.baseline for setting in self.corrections])

    def _rows_by_correction(self) -> dict[str, list[tuple[str, Row]]]:
        """Return name of a correction -> (name of the corrected configuration, row) for every configuration."""
        rows: dict[str, list[tuple[str, Row]]] = {}
        for where, setting in zip(self._correction_names(), self.corrections, strict=True):
            for row in setting.rows:
                rows.setdefault(row.name, []).append((where, row))
        return rows


def _mass_shares(spreads: Sequence[tuple[str, Spread]]) -> str:
    """Return the least and the largest share of the variance that 1 − S explains: '81 % … with h2o to 84 % …'."""
    return extremes(
        [(name, one.by_mass, text.percent(one.by_mass, one.by_mass_interval)) for name, one in spreads], "with"
    )


def _contest_text(baseline: str, treatment: str, contests: Sequence[Contest]) -> str:
    """Return the clause on the ratios of L, 1 − S and D, over the budgets at which both sides have a loss."""
    contests = [one for one in contests if one.heads]
    if not contests:
        return f"no head loses anything under both {treatment} and {baseline}"
    names = short_names([one.treatment for one in contests])
    loss = extremes(
        [(name, one.loss, factor(one.loss, one.loss_interval)) for name, one in zip(names, contests, strict=True)]
    )
    mass, difference = ([getattr(one, name) for one in contests] for name in ("mass", "difference"))
    return f"{treatment}'s L is {loss} that of {baseline}: 1 − S {_factor_range(mass)}, D {_factor_range(difference)}"


def _factor_range(ratios: Sequence[float]) -> str:
    """Return the range of ratios as text: '0.77 × to 0.82 ×', or '0.77 ×' if both ends print alike."""
    return " to ".join(dict.fromkeys(factor(end) for end in (min(ratios), max(ratios))))


def _lower_kl_shares(rows: Sequence[tuple[str, Row]]) -> str:
    """Return the least and largest share of prompts with lower KL, over the corrected configurations."""
    return extremes(
        [(name, row.kl_falls, f"{text.percent(row.kl_falls, row.kl_falls_interval)} of prompts") for name, row in rows]
    )


def _correction_tables(name: str, setting: Setting) -> list[Part]:
    """Return the tables of corrections: perturbation of heads, drift, and the next token."""
    heads = ("isolated_ratio", "propagated_ratio", "better_share", "isolated_cost", "propagated_cost")
    output = ("drift_ratio", "kl_median", "kl_ratio", "kl_falls")
    lines = setting.lines()
    return [
        table(f"{name}: L1 over uncorrected", lines[1:], heads, "correction"),
        table(f"{name}: last layer's drift and KL of the next token", lines, output, "correction"),
    ]


_CORRECTIONS_NOTE = (
    "corrected: one entry per query head stands in for what went, its value the mean of what went under the mean "
    "of the window's queries, its weight as predicted: stored at that query, or linear in the query at hand. "
    "corrected-oracle knows the true mass of what went: a control, which tells what the mean alone costs; with the "
    "true mean it would be 0. L1 is the sum over all heads; / oracle: what predicting the mass costs; less KL: by "
    "more than two noise floors."
)


def split(trace: Trace, compare: str | Sequence[str] | None = None, step: int = 0) -> Split:
    """Split each head's loss into how much attention is evicted and how unlike the rest it is; evaluate corrections.

    `L = (1 − S) ‖μ_gone − μ_kept‖₁` per head (METHOD, the split of an evicted output), from the stored S and the
    isolated perturbation: the parts of Var(log L) over the heads of a sample; both factors of each side's L over the
    first's; and L (isolated and propagated), drift and KL of `corrected` configurations over the same uncorrected.

    Args:
        trace: what was measured.
        compare: selections, policies or `policy:selection`, the first of which is the baseline. Left out:
            every uncorrected configuration, against selection `attention` where the trace holds it.
        step: decode step.

    Raises TraceError where a side has no configuration, all configurations are corrected or in few bits, or the trace
    lacks a complete sample or a variable; ConfigError where it has no such step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> contest = pk.split(trace).contests[0]
        >>> abs(contest.loss - contest.mass * contest.difference) < 1e-12
        True
    """
    measured = Measurements(trace, ANALYSIS, step)
    sides = _sides(trace.run) if compare is None else [compare] if isinstance(compare, str) else list(compare)
    shown = _configs_of_sides(trace.run, sides)
    each = tuple(log_factors(measured, config) for config in shown)
    contests = tuple(contest(measured, *pair) for pair in _pairs(trace.run, sides))
    corrections = settings(measured, shown, step)
    every = [*shown, *(config for setting in corrections for config in setting.identity.configs)]
    return Split(
        spreads=tuple(spread(config, own) for config, own in zip(shown, each, strict=True)),
        log_factors=each,
        contests=contests,
        corrections=corrections,
        step=step,
        identity=identity(trace, list(dict.fromkeys(every)), step),
    )


def _uncorrected(run: RunConfig) -> list[EvictionConfig]:
    """Return a run's uncorrected configurations. Raises TraceError for none."""
    alone = [config for config in run.configs if config.only_evicts]
    if not alone:
        raise TraceError(
            f"{ANALYSIS} needs an uncorrected configuration in full precision, as L = (1 − S) ‖μ_gone − μ_kept‖₁ is "
            f"of eviction alone; got {', '.join(run.labels())}"
        )
    return alone


def _sides(run: RunConfig) -> list[str]:
    """Return the names of the sides with an uncorrected configuration, that with selection `attention` first."""
    alone = _uncorrected(run)
    several = len({one.policy.name for one in alone}) > 1
    names = [
        one.policy.name
        if one.is_external
        else f"{one.policy.name}:{one.selection.name}"
        if several
        else one.selection.name
        for one in alone
    ]
    first = [name for name, one in zip(names, alone, strict=True) if one.selection.name == _FIRST]
    return list(dict.fromkeys([*first[:1], *names]))


def _configs_of_sides(run: RunConfig, sides: Sequence[str]) -> list[EvictionConfig]:
    """Return the sides' uncorrected configurations, in the run's order. Raises TraceError for a side without any."""
    alone = _uncorrected(run)
    for side in sides:
        if not any(matches(config, side) for config in alone):
            names = ", ".join(dict.fromkeys(f"{one.policy.name}:{one.selection.name}" for one in alone))
            raise TraceError(f"expected uncorrected configurations of '{side}', got a trace of {names}")
    return [config for config in alone if any(matches(config, side) for side in sides)]


def _pairs(run: RunConfig, sides: Sequence[str]) -> list[Pair]:
    """Return the uncorrected pairs of the first side (baseline) with each later side; empty for a single side."""
    baseline, *treatments = sides
    chosen = [pair for side in treatments for pair in pairs(run, baseline, side)]
    return [pair for pair in chosen if all(one.only_evicts for one in pair)]


def _head_records(config: EvictionConfig, factors: LogFactors, run: RunIdentity) -> list[dict[str, Any]]:
    """Return the rows of `Split.records` of one configuration."""
    numbers = {"isolated": factors.loss, "gone_mass": factors.mass, "gone_distance": factors.difference}
    samples = factors.known.sum(axis=0)
    means = {name: np.nansum(logs, axis=0) / np.maximum(samples, 1) for name, logs in numbers.items()}
    return [
        {
            **config_columns(config),
            "layer": run.layer(layer),
            "head": head,
            "samples": int(samples[layer, head]),
            **{
                name: float(np.exp(logs[layer, head])) if samples[layer, head] else None for name, logs in means.items()
            },
        }
        for layer, head in np.ndindex(samples.shape)
    ]
