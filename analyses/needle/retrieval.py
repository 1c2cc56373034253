"""Does perturbation tell whether the needle is still found? Rank correlation between the two. (No paper tested it.).

Only the first decode step counts, between the configurations of one prompt that share budget, granularity and
protection: a longer prompt or a smaller cache perturbs more and answers less for many reasons. KL, drift and propagated
perturbation on the answer's own teacher-forced tokens nearly are the score; they are told apart, as `circular` (METHOD:
the protocol, 7). Only samples that the full cache answers count: where it fails, eviction has nothing to lose.

What the full cache and each configuration find of the needles, by length and depth (paper, appendix E).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import measurements
from perturbkv.analyses.measurements import FIRST_STEP_MEASURES, Floats, held_shares, measured_steps, values
from perturbkv.analyses.pairing import LEAST_CONFIGS, ranked_together
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain, ratio
from perturbkv.analyses.stats.intervals import CORRELATION, Band, Interval, Scalar, share_of
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "needle"
OUTCOMES = ("score", "digits")
"""Exactly right, and the share of leading digits that are."""


@dataclass(frozen=True)
class Method:
    """One configuration, or the full cache.

    Attributes:
        config: the configuration; None for the full cache.
        found: outcome -> (sample,) what was found, in [0, 1].
        score: share of prompts whose number was found, in [0, 1]; its exact interval.
        digits: mean share of the number's leading digits that are right; its interval, over samples.
        by_depth: (depth,) the score over all lengths, with exact intervals; NaN where no prompt fell.
        digits_by_depth: (depth,) digits over all lengths.
        grid: (depth, length) score per cell; NaN where no prompt fell.
        digits_grid: (depth, length) digits per cell.
        held: entries that the cache holds over those of the full cache; NaN where the trace does not tell.
        kept_entries: mean entries kept per head and layer; the prompt's length for the full cache.
    """

    config: EvictionConfig | None
    found: dict[str, Floats]
    score: float
    score_interval: Scalar
    digits: float
    digits_interval: Scalar
    by_depth: Floats
    by_depth_interval: Band
    digits_by_depth: Floats
    grid: Floats
    digits_grid: Floats
    held: float
    kept_entries: float

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers; not what each sample found."""
        found: dict[str, Any] = plain({name: value for name, value in vars(self).items() if name != "found"})
        return found


def methods(trace: Trace) -> tuple[Method, ...]:
    """The full cache, then every configuration. Raises TraceError for a run that is not of needles with answers."""
    found = {name: _with_full(trace, name) for name in OUTCOMES}
    kept, tokens = values(trace, "kept_count", ANALYSIS), values(trace, "prompt_tokens", ANALYSIS)
    entries = [float(tokens.mean()), *kept.mean(axis=(0, 2, 3)).tolist()]
    shares = [1.0, *held_shares(trace, ANALYSIS).tolist()]
    return tuple(
        _method(trace, config, {name: array[:, place] for name, array in found.items()}, entries[place], shares[place])
        for place, config in enumerate([None, *trace.run.configs])
    )


def _with_full(trace: Trace, name: str) -> Floats:
    """(sample, 1 + config) an outcome, of the full cache first."""
    full, evicted = (values(trace, f"{name}{suffix}", ANALYSIS) for suffix in ("_full", ""))
    return np.concatenate([full[:, None], evicted], axis=1)


def _method(
    trace: Trace, config: EvictionConfig | None, found: dict[str, Floats], entries: float, held: float
) -> Method:
    lengths, depths = grid_of(trace)
    cells, shape = cells_of(trace), (len(depths), len(lengths))
    depth_alone = np.stack([cells[:, 0], np.zeros_like(cells[:, 0])], axis=1)
    return Method(
        config=config,
        found=found,
        score=float(found["score"].mean()),
        score_interval=intervals.of_samples(found["score"] > 0),
        digits=float(found["digits"].mean()),
        digits_interval=intervals.of_mean(found["digits"], share_of(0)),
        by_depth=_grid(found["score"], depth_alone, (len(depths), 1))[:, 0],
        by_depth_interval=_depth_intervals(found["score"], cells[:, 0], len(depths)),
        digits_by_depth=_grid(found["digits"], depth_alone, (len(depths), 1))[:, 0],
        grid=_grid(found["score"], cells, shape),
        digits_grid=_grid(found["digits"], cells, shape),
        held=held,
        kept_entries=entries,
    )


def grid_of(trace: Trace) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Lengths and depths of a needle run. Raises TraceError for a run of another dataset."""
    options = trace.run.dataset_options
    if trace.run.dataset != "needle" or "lengths" not in options or not trace.run.generate:
        msg = (
            f"{ANALYSIS} needs a trace of needle prompts with generated answers, got one of '{trace.run.dataset}'"
            f"{'' if trace.run.generate else ' without answers'}; make one: perturbkv needle --model {trace.run.model}"
        )
        raise TraceError(msg)
    return tuple(options["lengths"]), tuple(options["depths"])


def cells_of(trace: Trace) -> NDArray[np.int64]:
    """(sample, 2) depth and length of each complete sample, as places in the grid: samples go through it in turns."""
    lengths, depths = grid_of(trace)
    places = np.flatnonzero(trace.ok) % (len(lengths) * len(depths))
    return np.stack([places % len(depths), places // len(depths)], axis=1)


def _depth_intervals(found: Floats, depth: NDArray[np.int64], depths: int) -> Band:
    """Exact intervals of each depth's share; NaN where fewer than two prompts fell, None where nowhere more did."""
    each = [intervals.of_samples(found[depth == place] > 0) for place in range(depths)]
    if not any(each):
        return None
    low, high = ([np.nan if one is None else getattr(one, end) for one in each] for end in ("low", "high"))
    return Interval(np.array(low), np.array(high))


def _grid(found: Floats, cells: NDArray[np.int64], shape: tuple[int, int]) -> Floats:
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, tuple(cells.T), found)
    np.add.at(count, tuple(cells.T), 1)
    return np.asarray(ratio(total, count))


CIRCULAR = {
    **measurements.CIRCULAR_MEASURES,
    "kl_all": "KL, nat, all steps",
    "drift_all": "drift, all steps",
    "propagated_all": "propagated L1, all steps",
}
"""Of the answer's own tokens: nearly the score itself. The first two are of the first step, which gives the first."""


@dataclass(frozen=True)
class Correlation:
    """Spearman's ρ between a measure and an outcome across the configurations of one prompt and one `BudgetLink`.

    Negative: the more perturbed a configuration, the less of the number it finds.

    Attributes:
        measure: a key of `MEASURES` or `CIRCULAR`.
        outcome: `score` (exactly right) or `digits` (share of leading digits).
        rho: mean over prompts; NaN where no prompt decides.
        interval: of that mean.
        deciding: prompts in which configurations differ in outcome and in the measure; only these have ranks.
    """

    measure: str
    outcome: str
    rho: float
    interval: Scalar
    deciding: int


@dataclass(frozen=True)
class BudgetLink:
    """Configurations of one budget, one granularity and one protection.

    Attributes:
        name: the budget as the user gave it, and behind it the granularity and the protection where the run has
            several.
        configs: its configurations.
        held: (config,) entries that each cache holds over those of the full cache; NaN where the trace does not tell.
        correlations: one per measure and outcome; `circular` those that nearly are the score.
        score, digits: (sample, config) the outcomes.
        measured: measure -> (sample, config), relative to the full run's own norms (KL in nat, 1 − S as it is).
    """

    name: str
    configs: tuple[EvictionConfig, ...]
    held: Floats
    correlations: tuple[Correlation, ...]
    circular: tuple[Correlation, ...]
    score: Floats
    digits: Floats
    measured: dict[str, Floats]

    @property
    def held_ends(self) -> tuple[float, float]:
        """The least and the largest of `held`."""
        return float(self.held.min()), float(self.held.max())

    def of(self, outcome: str) -> list[Correlation]:
        """The correlations with one outcome, those that nearly are the score behind the others."""
        return [one for one in (*self.correlations, *self.circular) if one.outcome == outcome]


@dataclass(frozen=True)
class Retrieval:
    """The link between perturbation and retrieval.

    Attributes:
        samples: that the full cache answers; `left_out`: the others.
        steps: decode steps that the circular measures are the mean of.
        budgets: one entry per budget, granularity and protection of three configurations or more; `too_few`: the
            names of the others.
    """

    samples: int
    left_out: int
    steps: int
    budgets: tuple[BudgetLink, ...]
    too_few: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers; the measures beside each score."""
        links = [{"budget": link.configs[0].budget, **vars(link)} for link in self.budgets]
        found: dict[str, Any] = plain({**vars(self), "budgets": links})
        return found


def correlate(trace: Trace, measured: dict[str, Floats]) -> Retrieval:
    """Correlations of the `measures` of a run that generated answers. Raises TraceError where it lacks these."""
    answered = values(trace, "score_full", ANALYSIS) == 1
    outcomes = {name: values(trace, name, ANALYSIS)[answered] for name in OUTCOMES}
    measured = {name: array[answered] for name, array in measured.items()}
    budgets = ranked_together(trace.run.configs)
    return Retrieval(
        samples=int(answered.sum()),
        left_out=int((~answered).sum()),
        steps=trace.run.steps,
        budgets=tuple(
            _link(trace, name, places, measured, outcomes)
            for name, places in budgets.items()
            if len(places) >= LEAST_CONFIGS
        ),
        too_few=tuple(name for name, places in budgets.items() if len(places) < LEAST_CONFIGS),
    )


def check_scored(trace: Trace) -> None:
    """Raise TraceError unless numbers were expected, each of which was found or was not: scores of 0 and 1."""
    names = ("score_full", "score", "digits_full")
    full, evicted, digits = (np.asarray(trace.get(name, ANALYSIS), dtype=np.float64) for name in names)
    unscored = np.isnan(full) | np.isnan(digits)
    if unscored.any():
        msg = (
            f"{ANALYSIS} needs answers that are numbers, got others or none in {unscored.sum()} of {len(unscored)} "
            f"samples of {trace.source or 'this trace'}; give prompts whose accepted answers are numbers"
        )
        raise TraceError(msg)
    partly = [score for score in (*full, *evicted.ravel()) if score not in (0, 1)]
    if partly:
        msg = (
            f"{ANALYSIS} needs scores of 0 or 1, a number found or not, got {partly[0]:.3f} in "
            f"{trace.source or 'this trace'}; grade answers by exact-number, which the data set needle does by itself"
        )
        raise TraceError(msg)


def measures(trace: Trace) -> dict[str, Floats]:
    """(sample, config) of each measure, equal where all kept sets are, relative to the full run's norms."""
    steps = np.arange(trace.run.steps) < measured_steps(trace)[:, None]
    heads = values(trace, "output_norm", ANALYSIS).sum(axis=(2, 3))[:, None]
    moved = values(trace, "perturbation_propagated", ANALYSIS).sum(axis=(3, 4)) / heads
    drift = values(trace, "hidden_drift_l1", ANALYSIS)[..., -1] / values(trace, "hidden_norm", ANALYSIS)[:, None, :, -1]
    later = {
        "kl_all": _mean(values(trace, "logit_kl", ANALYSIS), steps),
        "drift_all": _mean(drift, steps),
        "propagated_all": _mean(moved, steps),
    }
    return {**measurements.first_step_measures(trace, ANALYSIS), **measurements.alike_first_steps(trace, later)}


def _mean(array: Floats, steps: np.ndarray) -> Floats:
    """(sample, config) mean over the steps that each sample has."""
    held = steps[:, None]
    return np.asarray(np.where(held, array, 0).sum(axis=-1) / held.sum(axis=-1))


def _link(
    trace: Trace, name: str, places: list[int], measured: dict[str, Floats], outcomes: dict[str, Floats]
) -> BudgetLink:
    here = {name: array[:, places] for name, array in measured.items()}
    scored = {name: array[:, places] for name, array in outcomes.items()}
    first, circular = (
        tuple(_correlation(one, outcome, here[one], scored[outcome]) for outcome in OUTCOMES for one in names)
        for names in (FIRST_STEP_MEASURES, CIRCULAR)
    )
    return BudgetLink(
        name=name,
        configs=tuple(trace.run.configs[place] for place in places),
        held=held_shares(trace, ANALYSIS)[places],
        correlations=first,
        circular=circular,
        score=scored["score"],
        digits=scored["digits"],
        measured=here,
    )


def _correlation(measure: str, outcome: str, measured: Floats, found: Floats) -> Correlation:
    within = spearman(measured.T, found.T) if len(found) else np.empty(0)
    held = within[~np.isnan(within)]
    return Correlation(
        measure=measure,
        outcome=outcome,
        rho=float(ratio(held.sum(), len(held))),
        interval=intervals.of_mean(held, CORRELATION),
        deciding=len(held),
    )
