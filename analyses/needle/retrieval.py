"""Retrieval by configuration, length and depth, and its rank correlation with perturbation (paper, appendix E).

Ranks compare the configurations of one prompt that share budget, granularity and protection, by measures of the first
decode step: a longer prompt or a smaller cache perturbs more and answers less for many reasons. KL, drift and
propagated perturbation on the answer's own teacher-forced tokens nearly are the score; they are separate, as
`circular` (METHOD: the protocol, 7). Only samples that the full cache answers count: where it fails, eviction has
nothing to lose. No paper tested this correlation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, derived, interval, record
from perturbkv.analyses.measurements import Floats, Measurements, measured_steps
from perturbkv.analyses.measures import OWN_TEXT, equalise_identical_runs, measure_values
from perturbkv.analyses.sides import LEAST_CONFIGS, comparable_groups
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import CORRELATION, Band, Interval, OptionalInterval, share_kind
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import ANSWER, OWN
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "needle"
OUTCOMES = {"score": "whole number", "digits": "leading digits"}
"""Outcomes of an answer: the exact number, and the share of its leading digits that are right."""
FIRST_STEP_MEASURES = {name: OWN_TEXT.predictors[name] for name in ("isolated", "theta", "propagated", "lost")}
CIRCULAR = {
    **OWN_TEXT.circular,
    "kl_all": "KL, nat, all steps",
    "drift_all": "drift, all steps",
    "propagated_all": "propagated L1, all steps",
}
"""Measures of the answer's own tokens: nearly the score itself. The first two are of the step that gives its first."""
_BY_DEPTH, _GRID = ("depth",), ("depth", "length")
_RANKED = ("sample", "config")


@record
class Retrieval(Record):
    """The hidden numbers in the answers from one configuration's cache, or from the full one.

    Attributes:
        answers: outcome -> (sample,) in [0, 1].
        grid, digits_grid: NaN where no prompt fell.
    """

    config: EvictionConfig | None = column("whose answers these are; null: the full cache's")
    answers: dict[str, Floats]
    score: float = column("share of the prompts whose number is found", unit="share", heading="#number\nfound")
    score_interval: OptionalInterval = column("exact, over samples")
    digits: float = column(
        "mean share of the number's leading digits that are right", unit="share", heading="#leading\ndigits"
    )
    digits_interval: OptionalInterval = interval()
    by_depth: Floats = column("(depth) score over all lengths", dims=_BY_DEPTH)
    by_depth_interval: Band = column("exact, over samples")
    digits_by_depth: Floats = column("(depth) digits over all lengths", dims=_BY_DEPTH)
    grid: Floats = column("(depth, length) score", dims=_GRID)
    digits_grid: Floats = column("(depth, length) digits", dims=_GRID)
    cache_share: float = column(
        "entries that the cache holds over those of the full cache; null where the trace does not tell",
        key="held",
        heading="#cache\nshare",
    )
    kept_entries: float = column("mean entries per head and layer; of the full cache the prompt's length")

    def by_length(self) -> list[float]:
        """Return the mean score of each prompt length, over the depths that have prompts; NaN where none has."""
        columns = [values[~np.isnan(values)] for values in self.grid.T]
        return [float(values.mean()) if len(values) else float("nan") for values in columns]


@record
class RetrievalCorrelation(Record, section="correlation with retrieval"):
    """Spearman's ρ between a measure and an outcome, across the configurations of one prompt and one `RankedBudget`.

    Negative: the more perturbed a configuration, the less of the number it finds.
    """

    measure: str = column(
        "a key of `measured`",
        heading="measure",
        text=lambda name: {**FIRST_STEP_MEASURES, **CIRCULAR}[name],
    )
    outcome: str = column("score or digits", heading="outcome", text=lambda name: OUTCOMES[name])
    rho: float = column("Spearman's ρ, mean over prompts; null where no prompt decides", heading="#ρ")
    rho_interval: OptionalInterval = column("over prompts", key="interval")
    deciding: int = column(
        "prompts in which configurations differ in outcome and in the measure; only these have ranks", heading="#n"
    )


@record
class RankedBudget(Record):
    """Configurations of one budget, one granularity and one protection, ranked within each prompt."""

    name: str = column("the budget, and behind it what else distinguishes these configurations from others")
    configs: tuple[EvictionConfig, ...] = column("the configurations that are ranked")
    cache_shares: Floats = column(
        "(configuration) entries of the cache over those of the full cache", key="held", dims=("config",)
    )
    correlations: tuple[RetrievalCorrelation, ...] = column("one per measure of the first decode step and outcome")
    circular: tuple[RetrievalCorrelation, ...] = column(
        "one per measure of the answer's own tokens, nearly the score itself, and outcome"
    )
    score: Floats = column("(sample, configuration) 1 where the number is found", dims=_RANKED)
    digits: Floats = column("(sample, configuration) share of its leading digits", dims=_RANKED)
    measured: dict[str, Floats] = column(
        "measure -> (sample, configuration). Of the first step: `isolated` and `propagated` L1 and `theta` over "
        "Σ ‖o_h‖₁, `lost` 1 − S, `kl` in nat, `drift` of the last layer over its norm; `…_all`: mean over steps",
        dims=_RANKED,
    )

    @derived()
    def budget(self) -> Budget:
        """The budget: an integer is entries, another number a share of the prompt."""
        return self.configs[0].budget

    @property
    def cache_share_range(self) -> tuple[float, float]:
        """The least and the largest cache share of the configurations."""
        return float(self.cache_shares.min()), float(self.cache_shares.max())

    def by_outcome(self, outcome: str) -> list[RetrievalCorrelation]:
        """Return the correlations with one outcome, `score` or `digits`; circular ones last."""
        return [each for each in (*self.correlations, *self.circular) if each.outcome == outcome]

    def principal(self) -> RetrievalCorrelation:
        """Return the correlation between propagated perturbation and the share of leading digits found."""
        (only,) = [each for each in self.by_outcome("digits") if each.measure == "propagated"]
        return only


@record
class RetrievalCorrelations(Record, section="correlations with retrieval"):
    """The rank correlations between perturbation and retrieval, by budget."""

    samples: int = column("prompts that the full cache answers; only these count")
    left_out: int = column("prompts that it does not answer")
    steps: int = column("decode steps that the circular measures are the mean of")
    budgets: tuple[RankedBudget, ...] = column("one per budget, granularity and protection")
    too_few: tuple[str, ...] = column("names of those with fewer than three configurations, which have no ranks")


def retrieval(measured: Measurements) -> tuple[Retrieval, ...]:
    """Return the retrieval of the full cache, then of every configuration.

    Raises TraceError for a run that is not of needles with answers.
    """
    answers = {name: np.concatenate([measured[f"{name}_full"][:, None], measured[name]], axis=1) for name in OUTCOMES}
    kept, tokens = measured["kept_count"], measured["prompt_tokens"]
    entries = [float(tokens.mean()), *kept.mean(axis=(0, 2, 3)).tolist()]
    shares = [1.0, *measured.cache_shares.tolist()]
    return tuple(
        _retrieval(
            measured.trace, config, {name: array[:, index] for name, array in answers.items()}, entries[index],
            shares[index],
        )
        for index, config in enumerate([None, *measured.trace.run.configs])
    )  # fmt: skip


def _retrieval(
    trace: Trace, config: EvictionConfig | None, answers: dict[str, Floats], entries: float, cache_share: float
) -> Retrieval:
    """Return the retrieval of one configuration, or of the full cache (None), from its answers: outcome -> (sample,).

    `entries` are its mean entries per head and layer.
    """
    lengths, depths = grid_of(trace)
    cells, shape = cells_of(trace), (len(depths), len(lengths))
    depth_alone = np.stack([cells[:, 0], np.zeros_like(cells[:, 0])], axis=1)
    return Retrieval(
        config=config,
        answers=answers,
        score=float(answers["score"].mean()),
        score_interval=intervals.of_share(answers["score"] > 0),
        digits=float(answers["digits"].mean()),
        digits_interval=intervals.of_mean(answers["digits"], share_kind(0)),
        by_depth=_cell_means(answers["score"], depth_alone, (len(depths), 1))[:, 0],
        by_depth_interval=_depth_intervals(answers["score"], cells[:, 0], len(depths)),
        digits_by_depth=_cell_means(answers["digits"], depth_alone, (len(depths), 1))[:, 0],
        grid=_cell_means(answers["score"], cells, shape),
        digits_grid=_cell_means(answers["digits"], cells, shape),
        cache_share=cache_share,
        kept_entries=entries,
    )


def grid_of(trace: Trace) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the lengths and depths of a needle run. Raises TraceError for a run of another dataset."""
    options = trace.run.dataset_options
    if trace.run.dataset != "needle" or "lengths" not in options or not trace.run.generate:
        raise TraceError(
            f"{ANALYSIS} needs a trace of needle prompts with generated answers, got one of '{trace.run.dataset}'"
            f"{'' if trace.run.generate else ' without answers'}; make one: perturbkv needle --model {trace.run.model}"
        )
    return tuple(options["lengths"]), tuple(options["depths"])


def cells_of(trace: Trace) -> NDArray[np.int64]:
    """Return the grid indices (depth, length) of each complete sample, (sample, 2)."""
    lengths, depths = grid_of(trace)
    cells = np.flatnonzero(trace.ok) % (len(lengths) * len(depths))
    return np.stack([cells % len(depths), cells // len(depths)], axis=1)


def _depth_intervals(score: Floats, depth: NDArray[np.int64], depths: int) -> Band:
    """Return the exact interval of each depth's share of (sample,) scores above 0, (depth,).

    NaN for fewer than two prompts, None where all are NaN. `depth` is (sample,) indices of `depths` depths.
    """
    each = [intervals.of_share(score[depth == index] > 0) for index in range(depths)]
    if not any(each):
        return None
    low, high = ([np.nan if one is None else getattr(one, end) for one in each] for end in ("low", "high"))
    return Interval(np.array(low), np.array(high))


def _cell_means(values: Floats, cells: NDArray[np.int64], shape: tuple[int, int]) -> Floats:
    """Return the mean of (sample,) values in each cell of a grid, NaN in empty ones; `cells`: (sample, 2) indices."""
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, tuple(cells.T), values)
    np.add.at(count, tuple(cells.T), 1)
    return np.asarray(ratio(total, count))


def check_scored(trace: Trace) -> None:
    """Raise TraceError unless all expected answers are numbers, with scores of 0 or 1."""
    names = ("score_full", "score", "digits_full")
    full, evicted, digits = (np.asarray(trace.get(name, ANALYSIS), dtype=np.float64) for name in names)
    unscored = np.isnan(full) | np.isnan(digits)
    if unscored.any():
        raise TraceError(
            f"{ANALYSIS} needs answers that are numbers, got others or none in {unscored.sum()} of {len(unscored)} "
            f"samples of {trace.source or 'this trace'}; give prompts whose accepted answers are numbers"
        )
    partly = [score for score in (*full, *evicted.ravel()) if score not in (0, 1)]
    if partly:
        raise TraceError(
            f"{ANALYSIS} needs scores of 0 or 1, a number found or not, got {partly[0]:.3f} in "
            f"{trace.source or 'this trace'}; grade answers by exact-number, which the data set needle does by itself"
        )


def measures(measured: Measurements) -> dict[str, Floats]:
    """Return measure -> (sample, config), of the first step and over all; identical runs get equal values.

    Raises TraceError for a trace along another text than the model's own.
    """
    trace = measured.trace
    if trace.run.text != OWN:
        raise TraceError(
            f"{ANALYSIS} ranks methods by the first step of the model's own text, and {trace.source or 'this trace'} "
            f"was measured along another (--text {trace.run.text}); measure along --text {OWN}"
            f"{', or ask perturbkv correlation' * (trace.run.text == ANSWER)}"
        )
    steps = np.arange(trace.run.steps) < measured_steps(trace)[:, None]
    norms = measured["output_norm"].sum(axis=(2, 3))[:, None]
    propagated = measured["perturbation_propagated"].sum(axis=(3, 4)) / norms
    drift = measured["hidden_drift_l1"][..., -1] / measured["hidden_norm"][:, None, :, -1]
    later = {
        "kl_all": _mean_over_steps(measured["logit_kl"], steps),
        "drift_all": _mean_over_steps(drift, steps),
        "propagated_all": _mean_over_steps(propagated, steps),
    }
    return {**measure_values(trace, OWN_TEXT, ANALYSIS), **equalise_identical_runs(trace, later)}


def _mean_over_steps(array: Floats, steps: NDArray[np.bool_]) -> Floats:
    """Return the mean of (sample, config, step) values over the steps that each sample has, (sample, config)."""
    known = steps[:, None]
    return np.asarray(np.where(known, array, 0).sum(axis=-1) / known.sum(axis=-1))


def correlate(measured: Measurements, by_measure: Mapping[str, Floats]) -> RetrievalCorrelations:
    """Return the rank correlations of a run's `measures` with its answers. Raises TraceError without answers."""
    answered = measured["score_full"] == 1
    outcomes = {name: measured[name][answered] for name in OUTCOMES}
    answered_measures = {name: array[answered] for name, array in by_measure.items()}
    run, budgets = measured.trace.run, comparable_groups(measured.trace.run.configs)
    return RetrievalCorrelations(
        samples=int(answered.sum()),
        left_out=int((~answered).sum()),
        steps=run.steps,
        budgets=tuple(
            _ranked_budget(measured, name, indices, answered_measures, outcomes)
            for name, indices in budgets.items()
            if len(indices) >= LEAST_CONFIGS
        ),
        too_few=tuple(name for name, indices in budgets.items() if len(indices) < LEAST_CONFIGS),
    )


def _ranked_budget(
    measured: Measurements,
    name: str,
    indices: Sequence[int],
    by_measure: Mapping[str, Floats],
    outcomes: Mapping[str, Floats],
) -> RankedBudget:
    """Return the rank correlations between the configurations at `indices`, which share a budget."""
    own = {measure: array[:, indices] for measure, array in by_measure.items()}
    scored = {outcome: array[:, indices] for outcome, array in outcomes.items()}
    first, circular = (
        tuple(_correlation(name, outcome, own[name], scored[outcome]) for outcome in OUTCOMES for name in names)
        for names in (FIRST_STEP_MEASURES, CIRCULAR)
    )
    return RankedBudget(
        name=name,
        configs=tuple(measured.trace.run.configs[index] for index in indices),
        cache_shares=measured.cache_shares[indices],
        correlations=first,
        circular=circular,
        score=scored["score"],
        digits=scored["digits"],
        measured=own,
    )


def _correlation(measure: str, outcome: str, measured: Floats, answers: Floats) -> RetrievalCorrelation:
    """Return Spearman's ρ of a measure with an outcome, (sample, config) each: within each sample, then the mean."""
    within = spearman(measured.T, answers.T) if len(answers) else np.empty(0)
    mean = intervals.estimate_mean(within, CORRELATION)
    return RetrievalCorrelation(measure, outcome, mean.value, mean.interval, mean.prompts)
