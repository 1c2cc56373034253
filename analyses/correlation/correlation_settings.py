"""Settings of a score correlation: one budget, granularity and protection each, over prompts of several traces.

Only prompts that the full cache answers count.

θ̂ is evidence only where σ > 0.5. So that configurations are ranked by the same heads, a head counts in a prompt where
σ > 0.5 under every configuration that is ranked there; others, those with an infinite θ̂ among them, are left out of
all configurations' sums, and a prompt without such a head has no θ̂.

The correlation across the budgets of one method is shown separately, beside that of the budget itself: a smaller cache
perturbs more and answers worse for many reasons, and a measure that correlates no more than the budget adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.correlation import lost_answers
from perturbkv.analyses.correlation.lost_answers import Bin, Rule, calibration_curve
from perturbkv.analyses.correlation.method_identity import (
    Contrast,
    CrossPromptTables,
    IdentityBaselines,
    PromptStatistics,
    Strength,
    apply_to_measured,
    contrasts,
    correlate_within_prompts,
    cross_prompt_tables,
    identity_baselines,
    mark_significant,
    strengths,
)
from perturbkv.analyses.measurements import EVIDENCE, Floats, Measurements, has_only_first_token, is_cut_off, scores
from perturbkv.analyses.measures import Measures, common_measures, measure_values
from perturbkv.analyses.multi_trace import check_combinable
from perturbkv.analyses.sides import LEAST_CONFIGS, sweeps
from perturbkv.analyses.stats.arithmetic import median, ratio
from perturbkv.analyses.stats.intervals import CORRELATION, Estimate, estimate_mean, mean_where_known
from perturbkv.analyses.stats.permutation import PermutationNull, score_permutation_nulls
from perturbkv.analyses.stats.rank_correlation import mean_ranks, spearman
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.trace import Trace

ANALYSIS = "correlation"


@record
class GradedTrace(Record):
    """A trace of graded answers."""

    dataset: str = column("the data set")
    trace: str = column("path")
    trace_digest: str = column("short digest of the file")
    samples: int = column("complete samples")
    answered: int = column("those that the full cache answers: all else is of these")
    median_full: float = column("median of the full cache's scores of these")
    alike: int = column(
        "those of these whose full answer is one token or none, alike for all caches (regular scenario)"
    )
    answer_tokens: int = column("largest number of tokens of an answer")
    cut_off: int = column("complete samples whose full answer was cut off there, without an end token")


@dataclass(frozen=True)
class PooledPrompts:
    """The prompts that the full cache answers, of all traces one after the other.

    Attributes:
        parts: the traces.
        part: (prompt,) index of the prompt's trace in `parts`.
        names: (prompt,) sample ids.
        run: of the first trace; its configurations are the axis `config`.
        cache_shares: (config,) entries of each cache over those of the full cache; NaN where a trace lacks them.
        kept: (prompt, config) share of a prompt's entries that is kept.
        measures: those of the text that was measured.
        measured: measure -> (prompt, config), without θ̂.
        theta_hat: (prompt, config, layer, head).
        sigma: the same of σ, its least over the steps.
        norm: (prompt, layer, head) norm of the full run's outputs.
        full: (prompt,) score of the full cache's answer, in [0, 1].
        evicted: (prompt, config) scores of the evicted caches' answers.
    """

    parts: tuple[GradedTrace, ...]
    part: NDArray[np.int64]
    names: tuple[str, ...]
    run: RunConfig
    cache_shares: Floats
    kept: Floats
    measures: Measures
    measured: dict[str, Floats]
    theta_hat: Floats
    sigma: Floats
    norm: Floats
    full: Floats
    evicted: Floats

    @property
    def same_dataset(self) -> NDArray[np.bool_]:
        """(prompt, prompt) True where both prompts are of one data set."""
        datasets = np.array([self.parts[part].dataset for part in self.part], dtype=str)
        return np.asarray(datasets[:, None] == datasets)

    @property
    def configs(self) -> tuple[EvictionConfig, ...]:
        """The configurations, which all traces have measured."""
        return self.run.configs

    def relative_theta_hat(self, indices: Sequence[int]) -> tuple[Floats, float]:
        """Return (prompt, config) Σ θ̂ over Σ ‖o_h‖ of the counted heads, and their share of all heads.

        A head counts where σ > 0.5 in all of the configurations at these indices. NaN for a prompt without such a head.
        """
        counted = np.asarray((self.sigma[:, indices] > EVIDENCE).all(axis=1))
        sums = np.where(counted[:, None], self.theta_hat[:, indices], 0).sum(axis=(2, 3))
        relative = ratio(sums, np.where(counted, self.norm, 0).sum(axis=(1, 2))[:, None])
        return np.asarray(relative), float(ratio(counted.sum(), counted.size))


def pool_prompts(traces: Sequence[Trace], rule: Rule) -> PooledPrompts:
    """Pool the answered prompts of all traces. Raises TraceError where one is not graded, or they do not match."""
    check_combinable(traces, ANALYSIS)
    measures = common_measures(traces, ANALYSIS)
    run = traces[0].run
    whole = [Measurements(trace, ANALYSIS, measures.step) for trace in traces]
    parts, arrays_of_parts, names_of_parts = zip(
        *(_answered_prompts(one, measures, run.configs, rule) for one in whole), strict=True
    )
    arrays = {name: np.concatenate([own[name] for own in arrays_of_parts]) for name in arrays_of_parts[0]}
    shares = np.stack([one.cache_shares[_config_indices(one.trace, run.configs)] for one in whole])
    measured = {name: arrays.pop(name) for name in measures.names if name != "theta_hat"}
    return PooledPrompts(
        parts=parts,
        part=np.repeat(np.arange(len(parts)), [part.answered for part in parts]),
        names=tuple(name for names in names_of_parts for name in names),
        run=run,
        cache_shares=np.asarray(np.average(shares, axis=0, weights=[part.samples for part in parts])),
        measures=measures,
        measured=measured,
        **arrays,
    )


def _answered_prompts(
    measured: Measurements, measures: Measures, configs: Sequence[EvictionConfig], rule: Rule
) -> tuple[GradedTrace, dict[str, Floats], list[str]]:
    """Return one trace's part of the pool: its summary, arrays of answered prompts, and their sample ids.

    The axis `config` of the arrays is in the order of `configs`.
    """
    trace = measured.trace
    graded, order = scores(trace, ANALYSIS), _config_indices(trace, configs)
    answered = graded.full > rule.right
    kept, tokens = measured["kept_count"], measured["prompt_tokens"]
    by_config = {
        **measure_values(trace, measures, ANALYSIS),
        "kept": kept.mean(axis=(2, 3)) / tokens[:, None],
        "theta_hat": measured["theta_hat"],
        "sigma": measured.least("sigma_stage1"),
        "evicted": graded.evicted,
    }
    arrays = {name: array[answered][:, order] for name, array in by_config.items()}
    arrays |= {"norm": measured["output_norm"][answered], "full": graded.full[answered]}
    part = GradedTrace(
        dataset=trace.run.dataset,
        trace=trace.source,
        trace_digest=trace.digest,
        samples=len(answered),
        answered=int(answered.sum()),
        median_full=median(graded.full[answered]),
        alike=int(has_only_first_token(trace)[answered].sum()),
        answer_tokens=trace.run.generate,
        cut_off=int(is_cut_off(trace).sum()),
    )
    return part, arrays, [name for name, counts in zip(measured.sample_ids, answered, strict=True) if counts]


def _config_indices(trace: Trace, configs: Sequence[EvictionConfig]) -> list[int]:
    """Return the trace's indices of the given configurations, in the given order."""
    return [trace.run.configs.index(config) for config in configs]


@record
class Control(Record, section="control"):
    """Controls of one measure's correlation: permuted scores, and pairs of answers to different prompts."""

    measure: str = column("the measure")
    rho: PermutationNull = column(
        "ρ of scores permuted within each prompt: any difference of methods sets real ones apart"
    )
    auc: PermutationNull = column("the same of the area less 0.5")
    between: Estimate = column(
        "the area over answers of different prompts, which hard prompts confound; n: its scarcer side"
    )


class MeasureLookup:
    """A result with statistics per measure, which are looked up by the measure's name."""

    measures: Measures
    strengths: tuple[Strength, ...]
    baselines: tuple[IdentityBaselines, ...]

    def strength(self, measure: str) -> Strength:
        """Return the correlation of one measure with the score."""
        return next(one for one in self.strengths if one.measure == measure)

    def identity_baselines(self, measure: str) -> IdentityBaselines:
        """Return a measure's method identity baselines."""
        return next(one for one in self.baselines if one.measure == measure)


@record
class Setting(MeasureLookup, Record, section="correlation setting"):
    """The correlations between the configurations of one budget, granularity and protection.

    Attributes:
        measures: those of the text that was measured.
        measured: measure -> (prompt, config).
        full, evicted: (prompt,) and (prompt, config) scores.
        lost: (prompt, config) True where an answer is lost.
        within: measure -> its statistics in each prompt.
        tables: measure -> its statistics with every prompt's measure and every prompt's answers.
    """

    name: str = column("budget, and what else distinguishes it from other settings")
    configs: tuple[EvictionConfig, ...] = column("which are ranked")
    cache_shares: Floats = column("(configuration) entries over those of the full cache", key="held", dims=("config",))
    measures: Measures
    measured: dict[str, Floats]
    full: Floats
    evicted: Floats
    lost: NDArray[np.bool_]
    evidence: float = column("share of (prompt, head) with σ > 0.5 in every configuration: θ̂ is of these")
    within: dict[str, PromptStatistics]
    strengths: tuple[Strength, ...] = column("one per measure, those that are circular last")
    contrasts: tuple[Contrast, ...] = column("every two measures that are not circular, on the same prompts")
    tables: dict[str, CrossPromptTables]
    baselines: tuple[IdentityBaselines, ...] = column("method identity baseline, one per measure", key="names")
    controls: tuple[Control, ...] = column("other causes, one per measure")
    curves: dict[str, tuple[Bin, ...]] = column("measure → bins, least perturbed first")

    @derived()
    def answers(self) -> int:
        """Prompts × configurations."""
        return int(self.lost.size)

    @derived(key="lost")
    def lost_count(self) -> int:
        """Number of lost answers."""
        return int(self.lost.sum())

    @property
    def cache_share_ends(self) -> tuple[float, float]:
        """The least and the largest cache share."""
        return float(self.cache_shares.min()), float(self.cache_shares.max())

    def control(self, measure: str) -> Control:
        """Return the permutation and between-prompt controls of a measure's correlation."""
        return next(one for one in self.controls if one.measure == measure)

    @property
    def decides(self) -> bool:
        """True where any prompt has a rank correlation, or both lost and kept answers."""
        return any(one.rho.prompts or one.auc.prompts for one in self.strengths)

    @derived(key="silence")
    def undecided_reason(self) -> str:
        """Reason why no prompt has ranks, or lost and kept answers; empty where one has."""
        if not len(self.full):
            return "the full cache answers no prompt"
        return "; ".join(filter(None, (self.no_areas_reason(), self.no_ranks_reason())))

    def no_areas_reason(self) -> str:
        """Return the reason why no prompt has both lost and kept answers; empty where one has."""
        if not self.lost.any():
            return "no answer is lost"
        if self.lost.all():
            return "every answer is lost"
        return "" if any(one.auc.prompts for one in self.strengths) else "no prompt has lost and kept answers"

    def no_ranks_reason(self) -> str:
        """Return the reason why no prompt has ranks; empty where one has."""
        if any(one.rho.prompts for one in self.strengths):
            return ""
        differ = (np.ptp(self.evicted, axis=1) > 0).any()
        return f"no two methods of a prompt {'perturb' if differ else 'score'} differently"


def correlate_setting(prompts: PooledPrompts, name: str, indices: Sequence[int], rule: Rule, bins: int) -> Setting:
    """Correlate every measure with the score, within each prompt, between the configurations at `indices`."""
    theta_hat, evidence = prompts.relative_theta_hat(indices)
    measured = {**{measure: array[:, indices] for measure, array in prompts.measured.items()}, "theta_hat": theta_hat}
    measured = {measure: measured[measure] for measure in prompts.measures.names}  # in the order of tables
    scored = prompts.evicted[:, indices]
    lost, drop = rule.lost_of(prompts.full, scored), prompts.full[:, None] - scored
    each = {measure: correlate_within_prompts(array, scored, lost) for measure, array in measured.items()}
    crossed = cross_prompt_tables(measured, scored, lost)
    return Setting(
        name=name,
        configs=tuple(prompts.configs[index] for index in indices),
        cache_shares=prompts.cache_shares[list(indices)],
        measures=prompts.measures,
        measured=measured,
        full=prompts.full,
        evicted=scored,
        lost=lost,
        evidence=evidence,
        within=each,
        strengths=strengths(each),
        contrasts=contrasts(each, prompts.measures.predictors),
        tables=crossed,
        baselines=identity_baselines([crossed], prompts.same_dataset),
        controls=_controls(measured, scored, lost),
        curves={measure: calibration_curve(array, lost, drop, bins) for measure, array in measured.items()},
    )


def mark_significant_settings(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """Return the settings with `significant` set, the tests of all settings corrected together."""
    predictors = settings[0].measures.predictors if settings else ()
    marked = mark_significant([one.baselines for one in settings], [one.strengths for one in settings], predictors)
    return tuple(replace(one, baselines=own) for one, own in zip(settings, marked, strict=True))


def _controls(measured: dict[str, Floats], scored: Floats, lost: NDArray[np.bool_]) -> tuple[Control, ...]:
    """Return the controls of every measure, from (prompt, config) arrays."""
    rho_weights = np.stack([_rho_weights(array, scored) for array in measured.values()])
    area_weights = np.stack([_area_weights(array, lost) for array in measured.values()])
    rho = score_permutation_nulls(rho_weights, _centred_ranks(scored))
    areas = score_permutation_nulls(area_weights, lost.astype(np.float64))
    controls = []
    for index, (name, array) in enumerate(measured.items()):
        rows = ~np.isnan(array).any(axis=1)
        between = lost_answers.area_between_prompts(array[rows], lost[rows])
        controls.append(Control(name, rho[index], areas[index], between))
    return tuple(controls)


def _centred_ranks(values: Floats) -> Floats:
    """Return (prompt, config) ranks of values within each prompt, less their mean."""
    ranks = mean_ranks(values.T).T
    return np.asarray(ranks - ranks.mean(axis=1, keepdims=True))


def _rho_weights(measured: Floats, scored: Floats) -> Floats:
    """Return (prompt, config) weights; Σ weights × centred ranks of the scores is Spearman's ρ. NaN without a ρ."""
    ranks, score_ranks = _centred_ranks(measured), _centred_ranks(scored)
    size = np.sqrt((ranks**2).sum(axis=1) * (score_ranks**2).sum(axis=1))
    return _nan_where_unmeasured(measured, np.asarray(ratio(ranks, size[:, None])))


def _area_weights(measured: Floats, lost: NDArray[np.bool_]) -> Floats:
    """Return (prompt, config) weights; their sum over lost answers is the ROC area − 0.5. NaN without an area."""
    pairs = lost.sum(axis=1) * (~lost).sum(axis=1)
    return _nan_where_unmeasured(measured, np.asarray(ratio(_centred_ranks(measured), pairs[:, None])))


def _nan_where_unmeasured(measured: Floats, weights: Floats) -> Floats:
    """Return the weights, NaN where a prompt lacks the measure."""
    return np.where(np.isnan(measured).any(axis=1, keepdims=True), np.nan, weights)


EVICTED = "evicted"
"""Name of the budget itself among the measures: the share of the prompt's entries that are evicted."""


@record
class AcrossBudgets(Record, section="correlation across budgets"):
    """The correlation of a measure with the score over the budgets of one method, mean over methods, then prompts."""

    measure: str = column("a measure, or evicted: the budget itself")
    rho: Estimate = column("Spearman's ρ with the score over the budgets of one method, mean over methods")


def across_budgets(prompts: PooledPrompts) -> tuple[AcrossBudgets, ...]:
    """Return each measure's correlation over budgets, after that of the evicted share, which is the budget itself.

    Empty where no method has three budgets.
    """
    curves = [indices for indices in sweeps(prompts.run, None) if len(indices) >= LEAST_CONFIGS]
    if not curves:
        return ()
    return tuple(
        AcrossBudgets(
            name,
            estimate_mean(
                mean_where_known([_rho_in_prompts(prompts, name, indices) for indices in curves]), CORRELATION
            ),
        )
        for name in (EVICTED, *prompts.measures.names)
    )


def _rho_in_prompts(prompts: PooledPrompts, measure: str, indices: list[int]) -> Floats:
    """Return (prompt,) Spearman's ρ between a measure and the score, over the configurations at `indices`."""
    if measure == EVICTED:
        measured = 1 - prompts.kept[:, indices]
    elif measure == "theta_hat":
        measured, _ = prompts.relative_theta_hat(indices)
    else:
        measured = prompts.measured[measure][:, indices]
    return apply_to_measured(measured, lambda known, rows: spearman(known.T, prompts.evicted[rows][:, indices].T))
