"""Settings of a score correlation: one budget, granularity and protection each, over prompts of several traces.

Only prompts that the full cache answers count.

θ̂ is evidence only where σ > 0.5. So that configurations are ranked by the same heads, a head counts in a prompt where
σ > 0.5 under every configuration that is ranked there; others, those with an infinite θ̂ among them, are left out of
all configurations' sums, and a prompt without such a head has no θ̂.

Across the budgets of one method: a smaller cache perturbs more and answers worse for many reasons.

Shown apart, beside the budget's own correlation: where perturbation correlates no more than that, it tells nothing that
the budget did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import measurements
from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.correlation import lost_answers
from perturbkv.analyses.correlation.lost_answers import Bin, Rule, curve
from perturbkv.analyses.correlation.method_identity import (
    NAMES,
    Beyond,
    Contrast,
    Strength,
    Tables,
    Within,
    beyond,
    contrasts,
    known,
    strengths,
    tables,
    with_significance,
    within,
)
from perturbkv.analyses.measurements import EVIDENCE, Floats, Measurements, has_only_first_token, scores
from perturbkv.analyses.multi_trace import check_together
from perturbkv.analyses.pairing import LEAST_CONFIGS, sweeps
from perturbkv.analyses.stats.arithmetic import median, ratio
from perturbkv.analyses.stats.intervals import CORRELATION, Estimate, mean_of, over_prompts
from perturbkv.analyses.stats.permutation import Chance, chances
from perturbkv.analyses.stats.rank_correlation import mean_ranks, spearman
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.trace import Trace

ANALYSIS = "correlation"


@record
class Part(Record):
    """One trace."""

    SECTION = "graded trace"

    dataset: str = column("the data set")
    trace: str = column("path")
    trace_digest: str = column("short digest of the file")
    samples: int = column("complete samples")
    answered: int = column("those that the full cache answers: all else is of these")
    median_full: float = column("median of the full cache's scores of these")
    alike: int = column(
        "those of these whose full answer is one token or none, alike for all caches (regular scenario)"
    )


@dataclass(frozen=True)
class Pooled:
    """The prompts that the full cache answers, those of one trace behind those of another.

    Attributes:
        parts: the traces.
        part: (prompt,) which of them a prompt is of.
        names: (prompt,) sample ids.
        run: the first trace's; its configurations are those of the axis `config`.
        cache_shares: (config,) entries of each cache over those of the full cache; NaN where a trace lacks them.
        kept: (prompt, config) share of a prompt's entries that is kept.
        measured: measure -> (prompt, config), as `first_step_measures` says.
        theta_hat, sigma: (prompt, config, layer, head); `norm` (prompt, layer, head), of the full run's outputs.
        full: (prompt,) scores in [0, 1]; `evicted` (prompt, config).
    """

    parts: tuple[Part, ...]
    part: NDArray[np.int64]
    names: tuple[str, ...]
    run: RunConfig
    cache_shares: Floats
    kept: Floats
    measured: dict[str, Floats]
    theta_hat: Floats
    sigma: Floats
    norm: Floats
    full: Floats
    evicted: Floats

    @property
    def alike(self) -> NDArray[np.bool_]:
        """(prompt, prompt) True where two are of one data set."""
        datasets = np.array([self.parts[part].dataset for part in self.part], dtype=str)
        return np.asarray(datasets[:, None] == datasets)

    @property
    def configs(self) -> tuple[EvictionConfig, ...]:
        """Those that all traces measured."""
        return self.run.configs

    def bound(self, places: Sequence[int]) -> tuple[Floats, float]:
        """(prompt, place) θ̂ over ‖o_h‖ of the heads with σ > 0.5 in all of these configurations, and their share."""
        counted = np.asarray((self.sigma[:, places] > EVIDENCE).all(axis=1))
        top = np.where(counted[:, None], self.theta_hat[:, places], 0).sum(axis=(2, 3))
        found = ratio(top, np.where(counted, self.norm, 0).sum(axis=(1, 2))[:, None])
        return np.asarray(found), float(ratio(counted.sum(), counted.size))


def pooled(traces: Sequence[Trace], rule: Rule) -> Pooled:
    """Return the answered prompts of all traces. Raises TraceError where one is not graded, or they do not fit."""
    check_together(traces, ANALYSIS)
    run = traces[0].run
    whole = [Measurements(trace, ANALYSIS, 0) for trace in traces]
    each = [_answered(one, run.configs, rule) for one in whole]
    joined = {name: np.concatenate([one[name] for _, one, _ in each]) for name in each[0][1]}
    shares = np.stack([one.cache_shares[_order(one.trace, run.configs)] for one in whole])
    parts = tuple(part for part, _, _ in each)
    measured = {name: joined.pop(name) for name in (*measurements.FIRST_STEP_MEASURES, *measurements.CIRCULAR_MEASURES)}
    return Pooled(
        parts=parts,
        part=np.repeat(np.arange(len(parts)), [part.answered for part in parts]),
        names=tuple(name for _, _, names in each for name in names),
        run=run,
        cache_shares=np.asarray(np.average(shares, axis=0, weights=[part.samples for part in parts])),
        measured=measured,
        **joined,
    )


def _answered(
    own: Measurements, configs: Sequence[EvictionConfig], rule: Rule
) -> tuple[Part, dict[str, Floats], list[str]]:
    """Return the arrays of the prompts that the full cache answers, configurations in the given order."""
    trace = own.trace
    graded, order = scores(trace, ANALYSIS), _order(trace, configs)
    answered = graded.full > rule.right
    ids = [name for name, whole in zip(trace.sample_ids, trace.ok, strict=True) if whole]
    kept, tokens = own["kept_count"], own["prompt_tokens"]
    by_config = {
        **measurements.first_step_measures(trace, ANALYSIS),
        "kept": kept.mean(axis=(2, 3)) / tokens[:, None],
        "theta_hat": own["theta_hat"],
        "sigma": own["sigma_stage1"],
        "evicted": graded.evicted,
    }
    found = {name: array[answered][:, order] for name, array in by_config.items()}
    found |= {"norm": own["output_norm"][answered], "full": graded.full[answered]}
    counts = (len(answered), int(answered.sum()))
    alike = int(has_only_first_token(trace)[answered].sum())
    part = Part(trace.run.dataset, trace.source, trace.digest, *counts, median(graded.full[answered]), alike)
    return part, found, [name for name, right in zip(ids, answered, strict=True) if right]


def _order(trace: Trace, configs: Sequence[EvictionConfig]) -> list[int]:
    return [trace.run.configs.index(config) for config in configs]


@record
class Control(Record):
    """Other causes of one measure's correlation, beside the methods' names."""

    SECTION = "control"

    measure: str = column("the measure")
    rho: Chance = column("ρ of scores permuted within each prompt: any difference of methods sets real ones apart")
    auc: Chance = column("the same of the area less 0.5")
    between: Estimate = column(
        "the area over answers of different prompts, which hard prompts confound; n: its scarcer side"
    )


@record
class Setting(Record):
    """Configurations that are ranked together.

    Attributes:
        measured: measure -> (prompt, config).
        full, evicted: (prompt,) and (prompt, config) scores; `lost` where an answer is lost.
        within: measure -> ranks and areas of each prompt.
        tables: measure -> ranks and areas of every prompt's measure with every prompt's answers.
    """

    SECTION = "correlation setting"

    name: str = column("budget, and what else distinguishes it from other settings")
    configs: tuple[EvictionConfig, ...] = column("which are ranked")
    cache_shares: Floats = column("(configuration) entries over those of the full cache", key="held", dims=("config",))
    measured: dict[str, Floats]
    full: Floats
    evicted: Floats
    lost: NDArray[np.bool_]
    evidence: float = column("share of (prompt, head) with σ > 0.5 in every configuration: θ̂ is of these")
    within: dict[str, Within]
    strengths: tuple[Strength, ...] = column("one per measure, those that are circular last")
    contrasts: tuple[Contrast, ...] = column("every two measures that are not circular, on the same prompts")
    tables: dict[str, Tables]
    names: tuple[Beyond, ...] = column("method identity baseline, one per measure")
    controls: tuple[Control, ...] = column("other causes, one per measure")
    curves: dict[str, tuple[Bin, ...]] = column("measure → bins, least perturbed first")

    @derived()
    def answers(self) -> int:
        """Prompts × configurations."""
        return int(self.lost.size)

    @derived(key="lost")
    def lost_count(self) -> int:
        """Answers that are lost."""
        return int(self.lost.sum())

    @property
    def cache_share_ends(self) -> tuple[float, float]:
        """The least and the largest cache share."""
        return float(self.cache_shares.min()), float(self.cache_shares.max())

    def strength(self, measure: str) -> Strength:
        """Return a measure's strength."""
        return next(one for one in self.strengths if one.measure == measure)

    def named(self, measure: str) -> Beyond:
        """Return a measure's method identity baseline."""
        return next(one for one in self.names if one.measure == measure)

    def control(self, measure: str) -> Control:
        """Return a measure's controls."""
        return next(one for one in self.controls if one.measure == measure)

    @property
    def decides(self) -> bool:
        """Whether any prompt has ranks, or a lost answer beside a kept one."""
        return any(one.rho.prompts or one.auc.prompts for one in self.strengths)

    @derived()
    def silence(self) -> str:
        """Why there are no ranks, or no lost answers beside kept ones; empty where there are."""
        if not len(self.full):
            return "the full cache answers no prompt"
        return "; ".join(filter(None, (self.no_areas(), self.no_ranks())))

    def no_areas(self) -> str:
        """Return why no prompt has a lost answer beside a kept one; empty where one has."""
        if not self.lost.any():
            return "no answer is lost"
        if self.lost.all():
            return "every answer is lost"
        return "" if any(one.auc.prompts for one in self.strengths) else "no prompt has lost and kept answers"

    def no_ranks(self) -> str:
        """Return why no prompt has ranks; empty where one has."""
        if any(one.rho.prompts for one in self.strengths):
            return ""
        differ = (np.ptp(self.evicted, axis=1) > 0).any()
        return f"no two methods of a prompt {'perturb' if differ else 'score'} differently"


def setting(found: Pooled, name: str, places: Sequence[int], rule: Rule, bins: int) -> Setting:
    """Return the correlations between some configurations."""
    bound, evidence = found.bound(places)
    measured = {**{one: array[:, places] for one, array in found.measured.items()}, "theta_hat": bound}
    measured = {one: measured[one] for one in NAMES}
    scored = found.evicted[:, places]
    lost, drop = rule.lost_of(found.full, scored), found.full[:, None] - scored
    each = {one: within(array, scored, lost) for one, array in measured.items()}
    crossed = tables(measured, scored, lost)
    return Setting(
        name=name,
        configs=tuple(found.configs[place] for place in places),
        cache_shares=found.cache_shares[list(places)],
        measured=measured,
        full=found.full,
        evicted=scored,
        lost=lost,
        evidence=evidence,
        within=each,
        strengths=strengths(each),
        contrasts=contrasts(each),
        tables=crossed,
        names=beyond([crossed], found.alike),
        controls=_controls(measured, scored, lost),
        curves={one: curve(array, lost, drop, bins) for one, array in measured.items()},
    )


def marked(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """Return the settings with what is significant of all their tests together."""
    names = with_significance([one.names for one in settings], [one.strengths for one in settings])
    return tuple(replace(one, names=marks) for one, marks in zip(settings, names, strict=True))


def _controls(measured: dict[str, Floats], scored: Floats, lost: NDArray[np.bool_]) -> tuple[Control, ...]:
    dealt = chances(np.stack([_rho_weights(array, scored) for array in measured.values()]), _centred(scored))
    areas = chances(np.stack([_area_weights(array, lost) for array in measured.values()]), lost.astype(np.float64))
    found = []
    for place, (name, array) in enumerate(measured.items()):
        rows = ~np.isnan(array).any(axis=1)
        found.append(Control(name, dealt[place], areas[place], lost_answers.between(array[rows], lost[rows])))
    return tuple(found)


def _centred(values: Floats) -> Floats:
    """(prompt, config) ranks within each prompt, less their mean."""
    ranks = mean_ranks(values.T).T
    return np.asarray(ranks - ranks.mean(axis=1, keepdims=True))


def _rho_weights(measured: Floats, scored: Floats) -> Floats:
    """(prompt, config) whose sum with the scores' centred ranks is Spearman's ρ; NaN where the prompt has none."""
    ranks, others = _centred(measured), _centred(scored)
    size = np.sqrt((ranks**2).sum(axis=1) * (others**2).sum(axis=1))
    return _without(measured, np.asarray(ratio(ranks, size[:, None])))


def _area_weights(measured: Floats, lost: NDArray[np.bool_]) -> Floats:
    """(prompt, config) whose sum over the lost answers is the area less 0.5; NaN where the prompt has none."""
    pairs = lost.sum(axis=1) * (~lost).sum(axis=1)
    return _without(measured, np.asarray(ratio(_centred(measured), pairs[:, None])))


def _without(measured: Floats, weights: Floats) -> Floats:
    """The weights, NaN where a prompt lacks the measure."""
    return np.where(np.isnan(measured).any(axis=1, keepdims=True), np.nan, weights)


EVICTED = "evicted"
"""What the budget itself is called among the measures: the share of the prompt's entries that go."""


@record
class AcrossBudgets(Record):
    """ρ between a measure and the score over the budgets of one method, mean over methods, then over prompts."""

    SECTION = "correlation across budgets"

    measure: str = column("a measure, or evicted: the budget itself")
    rho: Estimate = column("Spearman's ρ with the score over the budgets of one method, mean over methods")


def across_budgets(found: Pooled) -> tuple[AcrossBudgets, ...]:
    """Return one per measure, the budget itself first; nothing where no method has three budgets."""
    ranked = [places for places in sweeps(found.run, None) if len(places) >= LEAST_CONFIGS]
    if not ranked:
        return ()
    return tuple(
        AcrossBudgets(name, over_prompts(mean_of([_rho(found, name, places) for places in ranked]), CORRELATION))
        for name in (EVICTED, *NAMES)
    )


def _rho(found: Pooled, measure: str, places: list[int]) -> Floats:
    measured = _measured(found, measure, places)
    return known(measured, lambda held, rows: spearman(held.T, found.evicted[rows][:, places].T))


def _measured(found: Pooled, measure: str, places: list[int]) -> Floats:
    if measure == EVICTED:
        return 1 - found.kept[:, places]
    return found.bound(places)[0] if measure == "theta_hat" else found.measured[measure][:, places]
