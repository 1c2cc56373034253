"""Drift after the last layer, sample by sample, over budgets: results that a notebook holds (paper, figs. 3b, 6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.layers import layers_told
from perturbkv.analyses.layers.last_layer import LastLayer, summarise
from perturbkv.analyses.pairing import Sides, all_series, configs_of, pair_columns
from perturbkv.analyses.result import Result
from perturbkv.analyses.several import Sequenced, Several
from perturbkv.display import Table
from perturbkv.trace import Trace


@dataclass(frozen=True, repr=False)
class SampleSeries(Sequenced[LastLayer], Result):
    """The last layer's drift of each sample under one treatment and its baseline, a `LastLayer` per budget.

    Attributes:
        members: one per budget, smallest first.
        identity: of the run, with the configurations shown.
    """

    members: tuple[LastLayer, ...]
    identity: RunIdentity

    def conclusion(self) -> str:
        """Whether most samples drift less under the treatment, with the exact interval of their share and n."""
        return layers_told.sample_conclusion(self.members)

    def tables(self) -> Sequence[Table | str]:
        """The share of samples that drift less, a row per budget."""
        return layers_told.sample_tables(self.members)

    def notes(self) -> str:
        """What intervals and columns mean, a line each."""
        return layers_told.sample_notes(self.members[0])

    def to_dict(self) -> dict[str, Any]:
        """`per_sample`: one object per budget, as `docs/json.md` says."""
        return {"per_sample": [one.to_dict() for one in self.members]}

    def records(self) -> list[dict[str, Any]]:
        """A row per budget × sample, largest drift of the baseline first; drifts in the distance's unit.

        `verdict`: 1 where the treatment drifts less, 0 tied, −1 more.
        """
        return [row for one in self.members for row in _rows(one)]


class SampleDrifts(Several[SampleSeries]):
    """The last layer's drift of each sample, of every treatment and setting: a `SampleSeries` each."""

    def conclusion(self) -> str:
        """A sentence of each, on a line of its own, and before it what tells it from the others."""
        return layers_told.told_apart([one[0].treatment for one in self], [one.conclusion() for one in self])

    def to_dict(self) -> dict[str, Any]:
        """`per_sample`: one object per series and budget, as `docs/json.md` says."""
        return {"per_sample": [budget.to_dict() for one in self.members for budget in one]}


def last_layer(
    trace: Trace,
    baseline: str = "attention",
    treatments: Sides = "two-stage",
    *,
    step: int = 0,
    distance: str = "l1",
) -> SampleDrifts:
    """In how many samples does the residual stream drift less by the last layer? (Paper, figures 3b and 6.).

    Arguments and errors are those of `layer_drift`; drift is that after the last decoder layer, before the final norm.

    Returns a series of `SampleSeries`. Arrays of a `LastLayer` are (sample,), in the distance's unit.

    >>> import perturbkv as pk
    >>> found = pk.last_layer(trace, "attention", "two-stage")
    >>> len(found[0][0].sample_ids) == len(found[0][0].verdict) == int(trace.ok.sum())
    True
    """
    found = []
    for pairs in all_series(trace, baseline, treatments):
        budgets = tuple(summarise(trace, *pair, distance, step) for pair in pairs)
        found.append(SampleSeries(budgets, identity(trace, configs_of(pairs), step)))
    shown = [config for one in found for config in one.identity.configs]
    return SampleDrifts(tuple(found), identity(trace, list(dict.fromkeys(shown)), step))


def _rows(result: LastLayer) -> Iterator[dict[str, Any]]:
    about = {**pair_columns(result.baseline, result.treatment), "distance": result.distance, "step": result.step}
    for place, name in enumerate(result.sample_ids):
        yield {
            **about,
            "sample": name,
            "baseline_drift": float(result.baseline_drift[place]),
            "treatment_drift": float(result.treatment_drift[place]),
            "verdict": int(result.verdict[place]),
        }
