"""How drift is told, layer by layer and sample by sample: in a sentence, in tables, in the notes beneath them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from perturbkv.analyses import conclusions, text
from perturbkv.analyses.conclusions import ALIKE, FEW, LESS, MORE, UNDECIDED, Outcome
from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.layers.drift import LayerDrift
from perturbkv.analyses.layers.last_layer import LastLayer
from perturbkv.analyses.naming import common, counted, short, sides
from perturbkv.analyses.sentences import capital
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table

Compared = LayerDrift | LastLayer


def told_apart(treatments: Sequence[EvictionConfig], sentences: Sequence[str]) -> str:
    """What several series say, each with what tells its treatment from the others beside budget and selection."""
    named = zip(short(treatments, "budget", "selection"), sentences, strict=True)
    return "\n".join(f"{name}: {one}" if name else one for name, one in named)


def drift_conclusion(drifts: Sequence[LayerDrift]) -> str:
    """Whether the treatment's stream drifts less by the last layer, at one budget or at several."""
    first, (baseline, treatment) = drifts[0], sides(drifts[0].baseline, drifts[0].treatment)
    outcomes = [_of_layer(drift, name) for drift, name in zip(drifts, _names(drifts), strict=True)]
    if len(drifts) > 1:
        words = {LESS: f"less than {baseline}", MORE: "more"}
        told = conclusions.of_many(outcomes, f"by the last layer {treatment} drifts", words, first.identity.samples)
        told = capital(told, treatment)
        return f"{told}{_looked_at(first)}: its mean drift over {baseline}'s goes {conclusions.ends(outcomes)}."
    single = f"whether by the last layer {treatment} drifts less or more than {baseline}"
    opening = {
        LESS: f"by the last layer {treatment} drifts less than {baseline}",
        MORE: f"by the last layer {treatment} drifts more than {baseline}",
        ALIKE: f"by the last layer {treatment} and {baseline} drift alike, within rounding",
        UNDECIDED: f"it is not decided {single}",
        FEW: f"{conclusions.too_few(first.identity.samples)} {single}",
    }[outcomes[0].verdict]
    less, more = (int((first.verdict == sign).sum()) for sign in (1, -1))
    counts = f"by the means, less after {less} of {counted(len(first.verdict), 'layer')}, more after {more}"
    told = f"{capital(opening, treatment)}: {outcomes[0].shown} of {baseline}'s mean drift"
    return f"{told} ({_where(first)}); {counts}."


def sample_conclusion(samples: Sequence[LastLayer]) -> str:
    """Whether most samples drift less under the treatment by the last layer, at one budget or at several."""
    first, (baseline, treatment) = samples[0], sides(samples[0].baseline, samples[0].treatment)
    outcomes = [_of_samples(one, name) for one, name in zip(samples, _names(samples), strict=True)]
    who = f"{treatment} drifts less than {baseline}"
    if len(samples) > 1:
        words = {MORE: "in most samples", LESS: "in fewer than half of them"}
        told = conclusions.of_many(outcomes, who, words, first.identity.samples)
        told = capital(told, treatment)
        return f"{told}{_looked_at(first)}: {conclusions.ends(outcomes)}."
    opening = {
        LESS: f"{who} in fewer than half of the samples",
        MORE: f"{who} in most samples",
        UNDECIDED: f"it is not decided whether {who} in most samples",
        FEW: f"{conclusions.too_few(first.identity.samples)} whether {who} in most",
    }[outcomes[0].verdict]
    return f"{capital(opening, treatment)}: in {outcomes[0].shown} ({_where(first)})."


def _of_layer(drift: LayerDrift, name: str) -> Outcome:
    ends = text.at(drift.ratio_interval, -1)
    return conclusions.by_ratio(
        name, float(drift.ratio[-1]), ends, bool(drift.verdict[-1] == 0), drift.identity.samples
    )


def _of_samples(result: LastLayer, name: str) -> Outcome:
    return conclusions.by_share(name, result.improved_share, result.improved_share_interval, result.identity.samples)


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
    return f"{' → '.join(sides(*both))}, {common(both, 'budget')}"


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
