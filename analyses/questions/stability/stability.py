"""Are the heads that suffer the same ones? Over prompts, data sets, lengths, seeds, decode steps and models.

How the stability of heads is told: in a sentence, in tables, in the notes beneath.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, repeat
from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.identity import RunIdentity, identity, together
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.multi_trace import as_traces
from perturbkv.analyses.pairing import folded, of_selection, short_names
from perturbkv.analyses.questions.stability.head_profiles import (
    Between,
    OfTrace,
    TraceRanks,
    between,
    check_apart,
    chosen,
    meant,
    of_trace,
    suffering,
)
from perturbkv.analyses.questions.stability.rank_reliability import Agreement, Ranked, Reliability
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import Estimate
from perturbkv.analyses.text import extremes, over, sentence
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_ORDER = ("isolated", "propagated")
_HOW = (
    "A head suffers L / ‖o_h‖₁, L1, at step 0; heads are ranked in every sample, and a trace's profile is the mean of "
    "its samples' ranks. Reliability: Spearman's ρ between the profiles of two halves of the samples, mean over "
    "splits, for all samples by Spearman–Brown. Two samples: mean ρ of two single ones.",
    "ρ: Spearman's, of two traces' profiles, as measured; its interval is over the samples of both. Corrected: ρ over "
    "the root of both reliabilities, what it were without noise; by chance it exceeds 1. Worst: of the tenth of the "
    "heads that suffers most in one trace, the share that does so in the other; two random orders share {chance} in "
    "the mean and {most} at most (97.5 %).",
    "* One data set and seed: prompts are left out of both traces at once, and what is alike may be the prompts.",
    "Gain: the baseline's relative L1 less the selection's, head by head; its ranks are as reliable as they are large.",
    "Steps: mean over samples of ρ between their heads at step 0 and in the last third of their steps.",
    "Depth: shares of the sum over all heads. First tenth: of the layers, rounded up; half: the share of the heads "
    "that carries half of the sum; all of the layers measured. Heads of two models cannot be matched: the mean over "
    "samples of the layers' profile is compared at those of 20 points of relative depth, layer / (layers − 1), "
    "that both have measured, a coarse likeness.",
)


def conclusion(traces: Sequence[OfTrace], pairs: Sequence[Between]) -> str:
    """Of propagated L1: how reliable the ranks are within traces, and how alike between them."""
    within = [(f"trace {one.place}", *_said(one.suffering["propagated"].split_half)) for one in traces]
    said = [f"samples of a trace rank the heads by propagated L1 with a reliability of {extremes(within)}"]
    if len(traces) == 1:
        said[0] += f" ({over(traces[0].samples)})"
    between = [(f"{one.first}–{one.second}", *_said(one.suffering["propagated"].rho)) for one in pairs if one.suffering]
    if between:
        said.append(f"mean ranks of two traces of one model correlate with ρ = {extremes(between)}")
    told = "; ".join(said)
    fewest, most = (pick(one.samples for one in traces) for pick in (min, max))
    counts = over(most) if fewest == most else f"n = {fewest} to {most} samples a trace"
    return sentence(told if len(traces) == 1 else f"{told} ({len(traces)} traces, {counts})")


def _said(found: Ranked) -> tuple[float, str]:
    return found.value, text.decimal(found.value, found.interval)


def tables(traces: Sequence[OfTrace], pairs: Sequence[Between], baseline: EvictionConfig | None) -> list[Table | str]:
    """Traces, then every two of one model, then steps and depth; what is not there is left out."""
    matched = [one for one in pairs if one.suffering]
    found: list[Table | str] = [_listed(traces), _within(traces, "suffers", lambda one: one.suffering)]
    found += [_between(matched, "suffers", lambda one: one.suffering)] if matched else []
    if baseline is not None:
        what = f"gains over {_name(traces[0].config, baseline)}"
        found.append(_within(traces, what, lambda one: one.gain))
        found += [_between(matched, what, lambda one: one.gain)] if matched else []
    found += [_steps(traces)] if any(one.over_steps for one in traces) else []
    found.append(_depth(traces))
    apart = [one for one in pairs if one.depth]
    return [*found, *([_models(apart)] if apart else [])]


def _name(config: EvictionConfig, baseline: EvictionConfig) -> str:
    return short_names([config, baseline])[1]


def _listed(traces: Sequence[OfTrace]) -> Table:
    columns = ["", "model", "data set", "#tokens", "#seed", "#n", "b"]
    rows = [[str(one.place), folded(one.model, 22), folded(one.dataset), f"{one.tokens:,.0f}", str(one.seed),
             str(one.samples), str(one.config.budget)] for one in traces]  # fmt: skip
    return Table("The traces", columns, rows)


def _within(traces: Sequence[OfTrace], what: str, of: Callable[[OfTrace], dict[str, Reliability]]) -> Table:
    heads = [f"#{kind}:\n{word}" for kind in _ORDER for word in ("reliability", "two samples")]
    rows = [[str(one.place), *(_ranked(number) for kind in _ORDER
                               for number in (of(one)[kind].split_half, of(one)[kind].pairwise))]
            for one in traces]  # fmt: skip
    return Table(f"Within a trace: is it the same head that {what}, sample by sample?", ["", *heads], rows)


def _ranked(found: Ranked) -> str:
    return text.decimal(found.value, found.interval)


def _between(pairs: Sequence[Between], what: str, of: Callable[[Between], dict[str, Agreement]]) -> Table:
    heads = [f"#{word}" for kind in _ORDER for word in (f"{kind}:\nρ", "cor-\nrected", "worst\n10 %")]
    rows = [[_pair(one, of(one)["propagated"].paired),
             *(cell for kind in _ORDER for cell in _agreed(of(one)[kind]))] for one in pairs]  # fmt: skip
    return Table(f"Between traces of one model: is it the same head that {what}?", ["", *heads], rows)


def _pair(one: Between, paired: bool = False) -> str:
    return f"{one.first}–{one.second}{'*' if paired else ''}"


def _agreed(found: Agreement) -> list[str]:
    return [_ranked(found.rho), text.decimal(found.corrected.value), text.percent(found.shared)]


def _steps(traces: Sequence[OfTrace]) -> Table:
    rows = [[str(one.place), *(_estimate(one.over_steps[kind]) for kind in _ORDER),
             str(one.over_steps[_ORDER[0]].prompts)] for one in traces if one.over_steps]  # fmt: skip
    return Table("Step 0 against the last third of the steps, ρ", ["", *(f"#{kind}" for kind in _ORDER), "#n"], rows)


def _estimate(found: Estimate) -> str:
    return text.decimal(found.value, found.interval)


def _depth(traces: Sequence[OfTrace]) -> Table:
    names = ("first\nlayer", "first\ntenth", "half in\nheads")
    rows = [[str(one.place), *(_share(part) for kind in _ORDER for part in
                               (one.depth[kind].first_layer, one.depth[kind].first_tenth, one.depth[kind].half))]
            for one in traces]  # fmt: skip
    return Table("Where in depth it lies: isolated, then propagated", ["", *(f"#{name}" for name in names * 2)], rows)


def _share(found: Estimate) -> str:
    return text.percent(found.value, found.interval, "\n")


def _models(pairs: Sequence[Between]) -> Table:
    rows = [[_pair(one), *(_ranked(one.depth[kind]) for kind in _ORDER)] for one in pairs]
    return Table("Between models: ρ of the profiles over relative depth", ["", *(f"#{kind}" for kind in _ORDER)], rows)


def notes(traces: Sequence[OfTrace], pairs: Sequence[Between]) -> str:
    """A line each on samples, ranks, pairs, gains, steps and depth, as far as they are shown."""
    few = min(one.samples for one in traces)
    lines = [text.about_intervals(few) if len({one.samples for one in traces}) == 1 else _mixed(traces), _HOW[0]]
    known = [one.suffering["propagated"] for one in pairs if one.suffering]
    if known:
        lines.append(_HOW[1].format(chance=text.percent(known[0].chance), most=text.percent(known[0].chance_most)))
    lines += [_HOW[2]] if any(one.paired for one in known) else []
    lines += [_HOW[3]] if traces[0].gain else []
    lines += [_HOW[4]] if any(one.over_steps for one in traces) else []
    return "\n".join([*lines, _HOW[5]])


def _mixed(traces: Sequence[OfTrace]) -> str:
    counts = ", ".join(str(one.samples) for one in traces)
    return (
        f"n = {counts} samples; in brackets: 95 % intervals over samples; in parentheses, where a trace has fewer than "
        "five: ranges of single splits, pairs or samples, which are noisier than the mean of all."
    )


@dataclass(frozen=True, repr=False)
class Stability(Result):
    """How alike heads rank within and between traces.

    Attributes:
        traces: in the order given.
        pairs: every two of them.
        baseline: what the gain is over; None where a trace has no such configuration.
        identity: of all together.
    """

    traces: tuple[OfTrace, ...]
    pairs: tuple[Between, ...]
    baseline: EvictionConfig | None
    identity: RunIdentity

    def conclusion(self) -> str:
        """How reliable the ranking of heads is within traces, and how alike between them."""
        return conclusion(self.traces, self.pairs)

    def tables(self) -> Sequence[Table | str]:
        """The traces, every two of one model, decode steps, depth."""
        return tables(self.traces, self.pairs, self.baseline)

    def notes(self) -> str:
        """What the numbers are, and what they cannot be."""
        return notes(self.traces, self.pairs)

    def records(self) -> list[dict[str, Any]]:
        """A row per trace, kind, and what is ranked: reliability and mean ρ between two samples."""
        return [
            {"trace": one.place, "dataset": one.dataset, **columns_of(one.config), "of": of, "kind": kind,
             "samples": one.samples, "split_half": found.split_half.value, "pairwise": found.pairwise.value}
            for one in self.traces for of in ("suffering", "gain") for kind, found in getattr(one, of).items()
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = plain(
            {"baseline": self.baseline, "members": [vars(one) for one in self.traces],
             "pairs": [vars(one) for one in self.pairs]}
        )  # fmt: skip
        return document


def stability(
    traces: Trace | Sequence[Trace],
    *,
    selection: str = "two-stage",
    baseline: str = "attention",
    budget: str | float | None = None,
) -> Stability:
    """Are the heads that suffer the same ones? Over prompts, data sets, lengths, seeds, decode steps and models.

    A head suffers its relative L1 (METHOD: the quantities; L / ‖o_h‖₁), isolated and propagated, at step 0; what the
    selection gains is the baseline's less its own. Heads are ranked in every sample; within a trace the ranks'
    split-half reliability is told, between traces of one model Spearman's ρ of mean ranks, as measured and corrected
    for both reliabilities. Between models only depth is compared.

    Args:
        traces: from `measure` or `read_trace`, one or several.
        selection: a selection, a policy, or policy:selection, of which every trace has one configuration, alike in all
            but the budget; of several the one without options that the name leaves unsaid, nor a correction.
        baseline: what its gain is over; where a trace lacks it, no gain is told.
        budget: as the runs have it, 128 or 0.05; by default the one that all traces hold.

    Raises TraceError for no trace, one that is given twice, one without a complete sample, and configurations that are
    not alike; ConfigError where several budgets, or configurations of one, are there to choose from.

    Example, of a `trace` of 5 samples:
        >>> import perturbkv as pk
        >>> found = pk.stability(trace, budget=0.2)
        >>> found.traces[0].suffering["propagated"].splits
        10
    """
    held = as_traces(traces)
    check_apart(held)
    wanted = None if budget is None else str(budget)
    configs = chosen(held, selection, wanted)
    baselines = _baselines(held, configs, baseline)
    sides = zip(held, configs, baselines or repeat(None, len(held)), strict=True)
    found = [TraceRanks.numbered(place, suffering(*one)) for place, one in enumerate(sides, 1)]
    return Stability(
        traces=tuple(map(of_trace, found)),
        pairs=tuple(between(*pair) for pair in combinations(found, 2)),
        baseline=baselines[0] if baselines else None,
        identity=together([identity(one.of.trace, [one.of.config]) for one in found]),
    )


def _baselines(traces: Sequence[Trace], configs: Sequence[EvictionConfig], side: str) -> list[EvictionConfig]:
    """Of each trace what the side means at the same budget; empty where one has no such, or the sides are one."""
    try:
        places = [of_selection(trace.run, side) for trace in traces]
    except TraceError:
        return []
    found = [
        meant([one for place in held if (one := trace.run.configs[place]).budget == config.budget], side)
        for trace, held, config in zip(traces, places, configs, strict=True)
    ]
    known = [one for one, config in zip(found, configs, strict=True) if one is not None and one != config]
    return known if len(known) == len(traces) else []
