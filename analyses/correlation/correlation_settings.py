"""The link at one budget, one granularity and one protection, and what else could make it.

What a link is looked for in: perturbation and scores of the prompts that the full cache answers, of several traces.

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
    standing,
    strengths,
    tables,
    within,
)
from perturbkv.analyses.measurements import EVIDENCE, Floats, at_step, held_shares, only_alike, scores, values
from perturbkv.analyses.multi_trace import check_together
from perturbkv.analyses.pairing import LEAST_CONFIGS, sweeps
from perturbkv.analyses.stats.arithmetic import median, ratio
from perturbkv.analyses.stats.intervals import CORRELATION, Estimate, mean_of, over_prompts
from perturbkv.analyses.stats.permutation import Chance, chances
from perturbkv.analyses.stats.rank_correlation import mean_ranks, spearman
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.trace import Trace

ANALYSIS = "link"


@dataclass(frozen=True)
class Part:
    """One trace.

    Attributes:
        dataset, trace, trace_digest: what it is of, its path, and a short digest of it.
        samples: complete ones.
        answered: those of them that the full cache answers.
        median_full: of the full cache's scores of the answered ones; NaN of none.
        alike: answered ones whose full answer has no token but one that all caches share, as `about_first_token` says.
    """

    dataset: str
    trace: str
    trace_digest: str
    samples: int
    answered: int
    median_full: float
    alike: int


@dataclass(frozen=True)
class Pooled:
    """The prompts that the full cache answers, those of one trace behind those of another.

    Attributes:
        parts: the traces.
        part: (prompt,) which of them a prompt is of.
        names: (prompt,) sample ids.
        run: the first trace's; its configurations are those of the axis `config`.
        held: (config,) entries that each cache holds over those of the full cache; NaN where a trace does not tell.
        kept: (prompt, config) share of a prompt's entries that is kept.
        measured: measure -> (prompt, config), as `first_step_measures` says.
        theta_hat, sigma: (prompt, config, layer, head); `norm` (prompt, layer, head), of the full run's outputs.
        full: (prompt,) scores in [0, 1]; `evicted` (prompt, config).
    """

    parts: tuple[Part, ...]
    part: NDArray[np.int64]
    names: tuple[str, ...]
    run: RunConfig
    held: Floats
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
    """The answered prompts of all traces. Raises TraceError where one has no graded answers, or they do not fit."""
    check_together(traces, ANALYSIS)
    run = traces[0].run
    each = [_answered(at_step(trace, ANALYSIS, 0), run.configs, rule) for trace in traces]
    joined = {name: np.concatenate([one[name] for _, one, _ in each]) for name in each[0][1]}
    parts = tuple(part for part, _, _ in each)
    measured = {name: joined.pop(name) for name in (*measurements.FIRST_STEP_MEASURES, *measurements.CIRCULAR_MEASURES)}
    return Pooled(
        parts=parts,
        part=np.repeat(np.arange(len(parts)), [part.answered for part in parts]),
        names=tuple(name for _, _, names in each for name in names),
        run=run,
        held=_held(traces, run.configs, parts),
        measured=measured,
        **joined,
    )


def _answered(trace: Trace, configs: Sequence[EvictionConfig], rule: Rule) -> tuple[Part, dict[str, Floats], list[str]]:
    """The arrays of the prompts that the full cache answers, configurations in the order asked for."""
    graded, order = scores(trace, ANALYSIS), _order(trace, configs)
    answered = graded.full > rule.right
    ids = [name for name, whole in zip(trace.sample_ids, trace.ok, strict=True) if whole]
    kept, tokens = values(trace, "kept_count", ANALYSIS), values(trace, "prompt_tokens", ANALYSIS)
    by_config = {
        **measurements.first_step_measures(trace, ANALYSIS),
        "kept": kept.mean(axis=(2, 3)) / tokens[:, None],
        "theta_hat": values(trace, "theta_hat", ANALYSIS, 0),
        "sigma": values(trace, "sigma_stage1", ANALYSIS, 0),
        "evicted": graded.evicted,
    }
    found = {name: array[answered][:, order] for name, array in by_config.items()}
    found |= {"norm": values(trace, "output_norm", ANALYSIS, 0)[answered], "full": graded.full[answered]}
    counts = (len(answered), int(answered.sum()))
    alike = int(only_alike(trace)[answered].sum())
    part = Part(trace.run.dataset, trace.source, trace.digest, *counts, median(graded.full[answered]), alike)
    return part, found, [name for name, right in zip(ids, answered, strict=True) if right]


def _held(traces: Sequence[Trace], configs: Sequence[EvictionConfig], parts: Sequence[Part]) -> Floats:
    """(config,) mean over the samples of all traces."""
    shares = np.stack([held_shares(trace, ANALYSIS)[_order(trace, configs)] for trace in traces])
    return np.asarray(np.average(shares, axis=0, weights=[part.samples for part in parts]))


def _order(trace: Trace, configs: Sequence[EvictionConfig]) -> list[int]:
    return [trace.run.configs.index(config) for config in configs]


@dataclass(frozen=True)
class Control:
    """What else could make one measure's link, beside the methods' names.

    Attributes:
        measure: a key of `NAMES`.
        rho, auc: what scores that are dealt out anew within each prompt show; `auc` is told as the area less 0.5. Any
            difference between methods sets real scores apart from these.
        between: the area over answers of different prompts, which hard and long prompts confound.
    """

    measure: str
    rho: Chance
    auc: Chance
    between: Estimate


@dataclass(frozen=True)
class Setting:
    """Configurations that are ranked together.

    Attributes:
        name: the budget as the user gave it, and what else tells it from other settings.
        configs: its configurations.
        held: (config,) entries that each cache holds over those of the full cache; NaN where the trace does not tell.
        measured: measure -> (prompt, config).
        full, evicted: (prompt,) and (prompt, config) scores; `lost` where an answer is lost.
        evidence: share of (prompt, head) that θ̂ is of: σ > 0.5 in every configuration.
        within: measure -> what each prompt says.
        strengths: one per measure, those that are circular last.
        contrasts: every two measures on the same prompts.
        tables: measure -> what every prompt's measure says of every prompt's answers.
        names: what of the link the methods' names make, one per measure.
        controls: what else could make it, one per measure.
        curves: measure -> calibration curve.
    """

    name: str
    configs: tuple[EvictionConfig, ...]
    held: Floats
    measured: dict[str, Floats]
    full: Floats
    evicted: Floats
    lost: NDArray[np.bool_]
    evidence: float
    within: dict[str, Within]
    strengths: tuple[Strength, ...]
    contrasts: tuple[Contrast, ...]
    tables: dict[str, Tables]
    names: tuple[Beyond, ...]
    controls: tuple[Control, ...]
    curves: dict[str, tuple[Bin, ...]]

    @property
    def held_ends(self) -> tuple[float, float]:
        """The least and the largest of `held`."""
        return float(self.held.min()), float(self.held.max())

    def strength(self, measure: str) -> Strength:
        """Of one measure."""
        return next(one for one in self.strengths if one.measure == measure)

    def named(self, measure: str) -> Beyond:
        """What the methods' names make of one measure's link."""
        return next(one for one in self.names if one.measure == measure)

    def control(self, measure: str) -> Control:
        """Of one measure."""
        return next(one for one in self.controls if one.measure == measure)

    @property
    def decides(self) -> bool:
        """Whether any prompt has ranks, or a lost answer beside a kept one."""
        return any(one.rho.prompts or one.auc.prompts for one in self.strengths)

    def silence(self) -> str:
        """Why no prompt has ranks, or a lost answer beside a kept one; empty where there are both."""
        if not len(self.full):
            return "the full cache answers no prompt"
        return "; ".join(filter(None, (self.no_areas(), self.no_ranks())))

    def no_areas(self) -> str:
        """Why no prompt has a lost answer beside a kept one; empty where one has."""
        if not self.lost.any():
            return "no answer is lost"
        if self.lost.all():
            return "every answer is lost"
        return "" if any(one.auc.prompts for one in self.strengths) else "no prompt has lost and kept answers"

    def no_ranks(self) -> str:
        """Why no prompt has ranks; empty where one has."""
        if any(one.rho.prompts for one in self.strengths):
            return ""
        differ = (np.ptp(self.evicted, axis=1) > 0).any()
        return f"no two methods of a prompt {'perturb' if differ else 'score'} differently"


def setting(found: Pooled, name: str, places: Sequence[int], rule: Rule, bins: int) -> Setting:
    """What the prompts say of these configurations."""
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
        held=found.held[list(places)],
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
    """The settings with what stands of all their tests together."""
    names = standing([one.names for one in settings], [one.strengths for one in settings])
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


@dataclass(frozen=True)
class AcrossBudgets:
    """ρ between a measure and the score over the budgets of one method, mean over methods, then over prompts.

    Attributes:
        measure: a key of `NAMES`, or `evicted`: the budget's own correlation.
        rho: over prompts.
    """

    measure: str
    rho: Estimate


def across_budgets(found: Pooled) -> tuple[AcrossBudgets, ...]:
    """One per measure, the budget itself first; nothing where no method has three budgets."""
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
