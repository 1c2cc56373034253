"""Drift layer by layer over the budgets of each setting: the results that a notebook holds (paper, figures 3a, 5).

How drift is told, layer by layer and sample by sample: in a sentence, in tables, in the notes beneath them.

Drift after the last layer, sample by sample, over budgets: results that a notebook holds (paper, figs. 3b, 6).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.layers.drift import LastLayer, LayerDrift, summarise, summarise_last_layer
from perturbkv.analyses.pairing import (
    Sides,
    all_series,
    common,
    configs_of,
    counted,
    pair_columns,
    short_names,
    side_names,
)
from perturbkv.analyses.result import Result, Sequenced, Several
from perturbkv.analyses.text import ALIKE, FEW, LESS, MORE, UNDECIDED, Outcome, capital
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.trace import Trace

Compared = LayerDrift | LastLayer


def told_apart(treatments: Sequence[EvictionConfig], sentences: Sequence[str]) -> str:
    """What several series say, each with what tells its treatment from the others beside budget and selection."""
    named = zip(short_names(treatments, "budget", "selection"), sentences, strict=True)
    return "\n".join(f"{name}: {one}" if name else one for name, one in named)


def drift_conclusion(drifts: Sequence[LayerDrift]) -> str:
    """Whether the treatment's stream drifts less by the last layer, at one budget or at several."""
    first, (baseline, treatment) = drifts[0], side_names(drifts[0].baseline, drifts[0].treatment)
    outcomes = [_of_layer(drift, name) for drift, name in zip(drifts, _names(drifts), strict=True)]
    if len(drifts) > 1:
        words = {LESS: f"less than {baseline}", MORE: "more"}
        told = text.conclusion_of_many(outcomes, f"by the last layer {treatment} drifts", words, first.identity.samples)
        told = capital(told, treatment)
        ends = text.outcome_extremes(outcomes)
        return f"{told}{_looked_at(first)}: its mean drift over {baseline}'s goes {ends}."
    single = f"whether by the last layer {treatment} drifts less or more than {baseline}"
    opening = {
        LESS: f"by the last layer {treatment} drifts less than {baseline}",
        MORE: f"by the last layer {treatment} drifts more than {baseline}",
        ALIKE: f"by the last layer {treatment} and {baseline} drift alike, within rounding",
        UNDECIDED: f"it is not decided {single}",
        FEW: f"{text.too_few(first.identity.samples)} {single}",
    }[outcomes[0].verdict]
    less, more = (int((first.verdict == sign).sum()) for sign in (1, -1))
    counts = f"by the means, less after {less} of {counted(len(first.verdict), 'layer')}, more after {more}"
    told = f"{capital(opening, treatment)}: {outcomes[0].shown} of {baseline}'s mean drift"
    return f"{told} ({_where(first)}); {counts}."


def sample_conclusion(samples: Sequence[LastLayer]) -> str:
    """Whether most samples drift less under the treatment by the last layer, at one budget or at several."""
    first, (baseline, treatment) = samples[0], side_names(samples[0].baseline, samples[0].treatment)
    outcomes = [_of_samples(one, name) for one, name in zip(samples, _names(samples), strict=True)]
    who = f"{treatment} drifts less than {baseline}"
    if len(samples) > 1:
        words = {MORE: "in most samples", LESS: "in fewer than half of them"}
        told = text.conclusion_of_many(outcomes, who, words, first.identity.samples)
        told = capital(told, treatment)
        return f"{told}{_looked_at(first)}: {text.outcome_extremes(outcomes)}."
    opening = {
        LESS: f"{who} in fewer than half of the samples",
        MORE: f"{who} in most samples",
        UNDECIDED: f"it is not decided whether {who} in most samples",
        FEW: f"{text.too_few(first.identity.samples)} whether {who} in most",
    }[outcomes[0].verdict]
    return f"{capital(opening, treatment)}: in {outcomes[0].shown} ({_where(first)})."


def _of_layer(drift: LayerDrift, name: str) -> Outcome:
    ends = text.at(drift.ratio_interval, -1)
    return text.by_ratio(name, float(drift.ratio[-1]), ends, bool(drift.verdict[-1] == 0), drift.identity.samples)


def _of_samples(result: LastLayer, name: str) -> Outcome:
    return text.by_share(name, result.improved_share, result.improved_share_interval, result.identity.samples)


def _names(results: Sequence[Compared]) -> list[str]:
    return [f"at budget {result.baseline.budget}" for result in results]


def _where(result: Compared) -> str:
    samples = counted(result.identity.samples, "sample")
    return f"{samples}, budget {result.baseline.budget}{_looked_at(result)}"


def _looked_at(result: Compared) -> str:
    """The distance and the step, where they are not the usual ones."""
    distance = "" if result.distance == "l1" else f", {DISTANCES[result.distance]}"
    return distance + (f", step {result.step}" if result.step else "")


def drift_tables(drifts: Sequence[LayerDrift]) -> list[Table | str]:
    """The first, the middle and the last layer; and in how many layers the treatment is better, tied, worse."""
    last = len(drifts[0].ratio) - 1
    shown = list(dict.fromkeys([0, last // 2, last]))
    rows = []
    for drift in drifts:
        counts = text.verdicts(drift.verdict)
        rows.append([str(drift.baseline.budget), *(_sides(drift, layer) for layer in shown), counts])
        rows.append([_held(drift), *(_reduced(drift, layer) for layer in shown), ""])
    columns = ["budget, held / full", *(f"#layer {layer}" for layer in shown), "#layers\n+ / = / −"]
    title = f"{drifts[0].distance} drift after a layer, and by how much it is reduced"
    return [_compared(drifts[0]), Table(title, columns, rows)]


def sample_tables(samples: Sequence[LastLayer]) -> list[Table | str]:
    """At each budget the share of samples that drift less, and how many do."""
    rows = [
        [
            str(one.baseline.budget),
            _held(one),
            text.percent(one.improved_share, one.improved_share_interval),
            text.verdicts(one.verdict),
        ]
        for one in samples
    ]
    columns = ["budget", "#held / full", "#share", "#+ / = / −"]
    return [_compared(samples[0]), Table("samples that drift less by the last layer", columns, rows)]


def drift_notes(drift: LayerDrift) -> str:
    """A line each on intervals, what is compared, ties and caches."""
    return "\n".join([
        text.about_intervals(drift.identity.samples, medians=True),
        text.ABOUT_DRIFT,
        "Reduced: by the means over samples. Layers + / = / −: that drift less, tied, more than the baseline; the "
        "means over samples are compared, without a test.",
        _about_ties(drift),
        text.ABOUT_HELD,
    ])  # fmt: skip


def sample_notes(result: LastLayer) -> str:
    """A line each on intervals, columns and caches."""
    return "\n".join([
        text.about_shares(result.identity.samples),
        "Samples + / = / −: that drift less, tied, more than the baseline.",
        text.ABOUT_HELD,
    ])  # fmt: skip


def _about_ties(drift: LayerDrift) -> str:
    """What rounding alone brings, and what a tie is."""
    if drift.noise_floor is None:
        return "This trace holds no noise floor of the distance: only equal is tied."
    return f"{text.ABOUT_TIES} Noise floor: {drift.noise_floor[-1]:.1e} after the last layer (mean)."


def _compared(result: Compared) -> str:
    both = result.baseline, result.treatment
    return f"{' → '.join(side_names(*both))}, {common(both, 'budget')}"


def _held(result: Compared) -> str:
    """What both caches hold; once where it is the same."""
    return " → ".join(dict.fromkeys(text.held(share) for share in result.held))


def _sides(drift: LayerDrift, layer: int) -> str:
    medians = (float(side[layer]) for side in (drift.baseline_median, drift.treatment_median))
    return " → ".join(text.significant(median) for median in medians)


def _reduced(drift: LayerDrift, layer: int) -> str:
    ends = text.at(drift.ratio_interval, layer)
    reduced = None if ends is None else replace(ends, low=1 - ends.high, high=1 - ends.low)
    return text.percent(1 - float(drift.ratio[layer]), reduced)


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
        return drift_conclusion(self.members)

    def tables(self) -> Sequence[Table | str]:
        """Drift after the first, the middle and the last layer, two rows per budget."""
        return drift_tables(self.members)

    def notes(self) -> str:
        """What intervals, drift, ties and columns mean, a line each."""
        return drift_notes(self.members[0])

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
        return told_apart([one[0].treatment for one in self], [one.conclusion() for one in self])

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
        return sample_conclusion(self.members)

    def tables(self) -> Sequence[Table | str]:
        """The share of samples that drift less, a row per budget."""
        return sample_tables(self.members)

    def notes(self) -> str:
        """What intervals and columns mean, a line each."""
        return sample_notes(self.members[0])

    def to_dict(self) -> dict[str, Any]:
        """`per_sample`: one object per budget, as `docs/json.md` says."""
        return {"per_sample": [one.to_dict() for one in self.members]}

    def records(self) -> list[dict[str, Any]]:
        """A row per budget × sample, largest drift of the baseline first; drifts in the distance's unit.

        `verdict`: 1 where the treatment drifts less, 0 tied, −1 more.
        """
        return [row for one in self.members for row in _sample_drifts_rows(one)]


class SampleDrifts(Several[SampleSeries]):
    """The last layer's drift of each sample, of every treatment and setting: a `SampleSeries` each."""

    def conclusion(self) -> str:
        """A sentence of each, on a line of its own, and before it what tells it from the others."""
        return told_apart([one[0].treatment for one in self], [one.conclusion() for one in self])

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
        budgets = tuple(summarise_last_layer(trace, *pair, distance, step) for pair in pairs)
        found.append(SampleSeries(budgets, identity(trace, configs_of(pairs), step)))
    shown = [config for one in found for config in one.identity.configs]
    return SampleDrifts(tuple(found), identity(trace, list(dict.fromkeys(shown)), step))


def _sample_drifts_rows(result: LastLayer) -> Iterator[dict[str, Any]]:
    about = {**pair_columns(result.baseline, result.treatment), "distance": result.distance, "step": result.step}
    for place, name in enumerate(result.sample_ids):
        yield {
            **about,
            "sample": name,
            "baseline_drift": float(result.baseline_drift[place]),
            "treatment_drift": float(result.treatment_drift[place]),
            "verdict": int(result.verdict[place]),
        }
