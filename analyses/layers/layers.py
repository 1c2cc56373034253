"""Drift layer by layer over the budgets of each setting: the results that a notebook holds (paper, figures 3a, 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.layers import layers_told
from perturbkv.analyses.layers.drift import LayerDrift, summarise
from perturbkv.analyses.pairing import Sides, all_series, configs_of, pair_columns
from perturbkv.analyses.result import Result
from perturbkv.analyses.several import Sequenced, Several
from perturbkv.display import Table
from perturbkv.trace import Trace


@dataclass(frozen=True, repr=False)
class DriftSeries(Sequenced[LayerDrift], Result):
    """Drift of one treatment beside its baseline, a `LayerDrift` per budget, smallest first.

    Attributes:
        members: one per budget.
        identity: of the run, with the configurations shown.
    """

    members: tuple[LayerDrift, ...]
    identity: RunIdentity

    def conclusion(self) -> str:
        """Whether the treatment's stream drifts less by the last layer, with its interval and n."""
        return layers_told.drift_conclusion(self.members)

    def tables(self) -> Sequence[Table | str]:
        """Drift after the first, the middle and the last layer, two rows per budget."""
        return layers_told.drift_tables(self.members)

    def notes(self) -> str:
        """What intervals, drift, ties and columns mean, a line each."""
        return layers_told.drift_notes(self.members[0])

    def to_dict(self) -> dict[str, Any]:
        """`drifts`: one object per budget, as `docs/json.md` says."""
        return {"drifts": [drift.to_dict() for drift in self.members]}

    def records(self) -> list[dict[str, Any]]:
        """A row per budget × layer.

        Drifts and noise floor are in the distance's unit, means and medians over samples; `ratio` is that of the
        means, `verdict` 1 where the treatment drifts less, 0 tied, −1 more.
        """
        return [row for drift in self.members for row in _rows(drift)]


class LayerDrifts(Several[DriftSeries]):
    """Drift of every treatment and setting: a `DriftSeries` each."""

    def conclusion(self) -> str:
        """A sentence of each, on a line of its own, and before it what tells it from the others."""
        return layers_told.told_apart([one[0].treatment for one in self], [one.conclusion() for one in self])

    def to_dict(self) -> dict[str, Any]:
        """`drifts`: one object per series and budget, as `docs/json.md` says."""
        return {"drifts": [drift.to_dict() for one in self.members for drift in one]}


def layer_drift(
    trace: Trace,
    baseline: str = "attention",
    treatments: Sides = "two-stage",
    *,
    step: int = 0,
    distance: str = "l1",
) -> LayerDrifts:
    """How far does the residual stream drift from layer to layer, baseline against treatment? (Paper, figures 3a, 5.).

    Pairs that differ in budget alone are one series, which is one figure. Only complete samples that have the step
    count.

    Args:
        trace: from `measure` or `read_trace`.
        baseline: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`).
        treatments: likewise, one or several.
        step: which decode step, from 0.
        distance: `l1`, `l2` or `cosine`: between the residual streams of the full and of the evicted run after each
            decoder layer, d_model numbers each; L1 and L2 in the stream's own unit, cosine from 0 to 2.

    Returns a series of `DriftSeries`. Arrays of a `LayerDrift` are (layer,).

    Raises TraceError where the trace has no complete sample or no such pair, or lacks the distance; ConfigError for a
    step that it does not have, and for sides that are no names; UnknownNameError for an unknown distance.

    >>> import perturbkv as pk
    >>> found = pk.layer_drift(trace, "attention", "two-stage")
    >>> [str(drift.baseline.budget) for drift in found[0]], found[0][0].ratio.shape  # (layer,)
    (['64'], (2,))
    """
    found = []
    for pairs in all_series(trace, baseline, treatments):
        drifts = tuple(summarise(trace, *pair, distance, step) for pair in pairs)
        found.append(DriftSeries(drifts, identity(trace, configs_of(pairs), step)))
    shown = [config for one in found for config in one.identity.configs]
    return LayerDrifts(tuple(found), identity(trace, list(dict.fromkeys(shown)), step))


def _rows(drift: LayerDrift) -> Iterator[dict[str, Any]]:
    about = {**pair_columns(drift.baseline, drift.treatment), "distance": drift.distance, "step": drift.step}
    floor = None if drift.noise_floor is None else drift.noise_floor.tolist()
    for layer in range(len(drift.ratio)):
        yield {
            **about,
            "layer": drift.identity.layer(layer),
            "baseline_drift": float(drift.baseline_mean[layer]),
            "treatment_drift": float(drift.treatment_mean[layer]),
            "baseline_median_drift": float(drift.baseline_median[layer]),
            "treatment_median_drift": float(drift.treatment_median[layer]),
            "ratio": float(drift.ratio[layer]),
            "noise_floor": None if floor is None else floor[layer],
            "verdict": int(drift.verdict[layer]),
        }
