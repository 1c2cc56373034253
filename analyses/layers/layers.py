"""Drift of the residual stream compared between selections, by layer and by sample, at each budget.

Paper, figures 3a, 3b, 5 and 6.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, Generic, TypeVar

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, column, derived, long_form, record, table
from perturbkv.analyses.conclusions import Case, Claim, compare_sides
from perturbkv.analyses.identity import RunIdentity, identity_at
from perturbkv.analyses.layers.drift import (
    ANALYSIS,
    LAST_LAYER_ANALYSIS,
    LAYER,
    SAMPLE,
    DriftPair,
    LastLayer,
    LayerDrift,
    compare_layers,
    compare_samples,
)
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.names import pair_columns, pair_names, pairs_title
from perturbkv.analyses.result import MemberSequence, Result, ResultGroup, add_first_step
from perturbkv.analyses.sides import Sides, all_series, configs_of
from perturbkv.analyses.verdicts import DISTANCES, LESS, MORE, distance_terms
from perturbkv.display import Part
from perturbkv.trace import Trace

Drift = TypeVar("Drift", bound=DriftPair)


class _DriftTable(Generic[Drift], Result):
    """A table of drift, by layer or by sample, of one series or of several."""

    members: tuple[Any, ...]

    @cached_property
    def pairs(self) -> list[Drift]:
        """The drifts, one per pair of configurations."""
        return [pair for one in self.members for pair in (one if isinstance(one, MemberSequence) else [one])]

    @cached_property
    def _named(self) -> list[tuple[str, Drift]]:
        """The drifts with their distinct names."""
        return list(zip(pair_names(self.pairs), self.pairs, strict=True))

    def scope(self) -> Sequence[str]:
        """Return what the claims are of."""
        return [*distance_terms(self.pairs[0].distance), *super().scope()]

    def title(self) -> str:
        """Return the table's title: distance, baseline, treatments and shared choices."""
        distance = DISTANCES[self.pairs[0].distance]
        return f"{distance} drift after the last layer, {pairs_title(self.pairs, self.identity.shared)}"


class _LayerTable(
    _DriftTable[LayerDrift],
    rows="layers",
    shown=(
        "cache_share",
        "baseline_median",
        "treatment_median",
        "mean_ratio",
        "layer_counts",
    ),
    scope="mean over samples",
    has_medians=True,
):
    """The claims and table lines on drift by layer."""

    def claims(self) -> Sequence[Claim]:
        """Return whether the treatments' streams drift less after the last layer, by the means over samples."""
        cases = [drift.case(name) for name, drift in self._named]
        return compare_sides(self.pairs, cases, "drifts", " by the last layer")

    def lines(self) -> Sequence[Line]:
        """Return a line per pair, with its last layer and the number of layers in which the treatment drifts less."""
        return [Line(name, (drift, drift.after(-1))) for name, drift in self._named]

    def details(self) -> Sequence[Part]:
        """Return a table of the first, the middle and the last layer, and the definitions of drift and tie."""
        drifts = self.pairs
        last = len(drifts[0].ratio) - 1
        lines = [
            Line(f"{name}, layer {layer}", (drift.after(layer),))
            for name, drift in self._named
            for layer in dict.fromkeys((0, last // 2, last))
        ]
        return [
            table(f"{self.title().partition(':')[0]}, by layer", lines,
                  ("baseline_median", "treatment_median", "mean_ratio"), "configuration"),
            f"Drift: {text.DRIFT_NOTE.partition(': ')[2]}",
            text.TIES_NOTE,
            *(f"Noise floor: {drift.noise_floor[-1]:.1e} after the last layer (mean)."
              for drift in drifts[:1] if drift.noise_floor is not None),
        ]  # fmt: skip


@record
class DriftSeries(_LayerTable, MemberSequence[LayerDrift], Result):
    """Drift of one treatment and its baseline, a `LayerDrift` per budget, smallest first.

    Attributes:
        members: one per budget.
        identity: of the run, with the configurations shown.
    """

    members: tuple[LayerDrift, ...] = column("one per budget", key="drifts")
    identity: RunIdentity

    def caveats(self) -> Sequence[str]:
        """Return the note that only equal drifts tie, where the trace holds no noise floor."""
        known = self.members[0].noise_floor_known
        return [] if known else ["The trace holds no noise floor of this distance: only equal drifts are ties."]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per budget × layer.

        Drifts and noise floor are in the distance's unit, means and medians over samples; `ratio` is that of the
        means, `verdict` 1 where the treatment drifts less, 0 tied, −1 more.
        """
        return [row for drift in self.members for row in _layer_rows(drift)]


class LayerDrifts(_LayerTable, ResultGroup[DriftSeries], section="layers"):
    """Drift of all treatments and settings, a `DriftSeries` each."""

    @derived()
    def drifts(self) -> tuple[LayerDrift, ...]:
        """One per pair of configurations."""
        return tuple(self.pairs)


def _layer_rows(drift: LayerDrift) -> list[dict[str, Any]]:
    """Return the data frame rows of a drift, one per layer."""
    labels = {**pair_columns(drift.baseline, drift.treatment), "distance": drift.distance, "step": drift.step}
    arrays = drift.arrays(*LAYER)
    axes = {"layer": list(range(len(drift.ratio)))}
    return list(
        long_form(
            labels,
            axes,
            {
                name: arrays[name]
                for name in (
                    "baseline_drift",
                    "treatment_drift",
                    "baseline_median_drift",
                    "treatment_median_drift",
                    "ratio",
                    "noise_floor",
                    "verdict",
                )
            },
        )
    )


def layer_drift(
    trace: Trace,
    baseline: str | None = None,
    treatments: Sides | None = None,
    *,
    step: int | None = None,
    distance: str = "l1",
) -> LayerDrifts:
    """Compare how far the residual stream drifts after each layer, baseline against treatments (figures 3a and 5).

    Pairs that differ in budget alone are one series, which is one figure. Only complete samples that have the step
    count.

    Args:
        trace: from `measure` or `read_trace`.
        baseline: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`); None: attention, or the
            trace's own where it has no two-stage.
        treatments: likewise, one or several; None: two-stage, or all that the trace has.
        step: which decode step, from 0; None: the mean over the steps of each sample.
        distance: `l1`, `l2` or `cosine`: between the residual streams of the full and of the evicted run after each
            decoder layer, d_model numbers each; L1 and L2 in the stream's own unit, cosine from 0 to 2.

    Returns a series of `DriftSeries`. Arrays of a `LayerDrift` are (layer,).

    Raises TraceError where the trace has no complete sample or no such pair, or lacks the distance; ConfigError for a
    step that it does not have, and for sides that are no names; UnknownNameError for an unknown distance.

    >>> import perturbkv as pk
    >>> result = pk.layer_drift(trace, "attention", "two-stage")
    >>> [str(drift.baseline.budget) for drift in result[0]], result[0][0].ratio.shape  # (layer,)
    (['64'], (2,))
    """
    series, measured = all_series(trace, baseline, treatments), Measurements(trace, ANALYSIS, step)
    members = []
    for pairs in series:
        drifts = tuple(compare_layers(measured, identity_at(trace, pair, step), distance) for pair in pairs)
        members.append(DriftSeries(drifts, identity_at(trace, configs_of(pairs), step)))
    result = LayerDrifts(tuple(members), identity_at(trace, configs_of(chain(*series)), step))
    return add_first_step(
        result, measured.step, partial(layer_drift, trace, baseline, treatments, step=0, distance=distance)
    )


class _SampleTable(
    _DriftTable[LastLayer],
    rows="samples",
    shown=("cache_share", "improved_share", "sample_counts", "mean_ratio"),
    scope="after the last layer",
    has_shares=True,
):
    """The claims and table lines on single samples' drift."""

    def claims(self) -> Sequence[Claim]:
        """Return whether the treatments drift less than their baselines in most samples, by exact intervals."""
        sides = {one.sides for one in self.pairs}
        is_name = len(sides) == 1
        baseline, treatment = sides.pop() if is_name else ("its baseline", "the treatment")
        cases = [
            Case.number(name, one.improved_share, one.improved_share_interval, text.percent, 0.5, one.identity.samples)
            for name, one in self._named
        ]
        return [
            Claim(
                treatment,
                f"drifts less than {baseline}",
                cases,
                {MORE: "in most samples", LESS: "in fewer than half of the samples"},
                is_name=is_name,
            )
        ]

    def lines(self) -> Sequence[Line]:
        """Return a line per pair."""
        return [Line(name, (drift,)) for name, drift in self._named]


@record
class SampleSeries(_SampleTable, MemberSequence[LastLayer], Result):
    """Drift of each sample after the last layer under one treatment and its baseline, a `LastLayer` per budget.

    Attributes:
        members: one per budget, smallest first.
        identity: of the run, with the configurations shown.
    """

    members: tuple[LastLayer, ...] = column("one per budget", key="per_sample")
    identity: RunIdentity

    def records(self) -> list[dict[str, Any]]:
        """Return a row per budget × sample, largest drift of the baseline first; drifts in the distance's unit.

        `verdict`: 1 where the treatment drifts less, 0 tied, −1 more.
        """
        return [row for drift in self.members for row in _sample_rows(drift)]


class SampleDrifts(_SampleTable, ResultGroup[SampleSeries], section="layers"):
    """Drift of each sample after the last layer, of all treatments and settings, a `SampleSeries` each."""

    @derived()
    def per_sample(self) -> tuple[LastLayer, ...]:
        """With `--per-sample`: the last layer sample by sample, one per pair of configurations."""
        return tuple(self.pairs)


def _sample_rows(drift: LastLayer) -> list[dict[str, Any]]:
    """Return the data frame rows of a drift, one per sample."""
    labels = {**pair_columns(drift.baseline, drift.treatment), "distance": drift.distance, "step": drift.step}
    return list(long_form(labels, {"sample": drift.sample_ids}, drift.arrays(*SAMPLE)))


def last_layer(
    trace: Trace,
    baseline: str | None = None,
    treatments: Sides | None = None,
    *,
    step: int | None = None,
    distance: str = "l1",
) -> SampleDrifts:
    """Count the samples whose residual stream drifts less after the last layer (paper, figures 3b and 6).

    Arguments and errors are those of `layer_drift`; drift is that after the last decoder layer, before the final norm.

    Returns a series of `SampleSeries`. Arrays of a `LastLayer` are (sample,), in the distance's unit.

    >>> import perturbkv as pk
    >>> result = pk.last_layer(trace, "attention", "two-stage")
    >>> len(result[0][0].sample_ids) == len(result[0][0].verdict) == int(trace.ok.sum())
    True
    """
    series, measured = all_series(trace, baseline, treatments), Measurements(trace, LAST_LAYER_ANALYSIS, step)
    members = []
    for pairs in series:
        drifts = tuple(compare_samples(measured, identity_at(trace, pair, step), distance) for pair in pairs)
        members.append(SampleSeries(drifts, identity_at(trace, configs_of(pairs), step)))
    result = SampleDrifts(tuple(members), identity_at(trace, configs_of(chain(*series)), step))
    return add_first_step(
        result, measured.step, partial(last_layer, trace, baseline, treatments, step=0, distance=distance)
    )
