"""The stability of heads' ranks by perturbation: over prompts, data sets, lengths, seeds, decode steps and models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, repeat
from typing import Any, ClassVar

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, column, record, table
from perturbkv.analyses.identity import RunIdentity, identity, joint_identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.multi_trace import as_traces
from perturbkv.analyses.pairing import common, short_names, side_indices
from perturbkv.analyses.questions.stability.head_profiles import (
    RankedTrace,
    StableTrace,
    TracePair,
    check_distinct,
    choose_configs,
    compare_pair,
    relative_perturbation,
    resolve,
    stable_trace,
)
from perturbkv.analyses.questions.stability.rank_reliability import RankEstimate, format_estimate
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.intervals import MIN_SAMPLES
from perturbkv.analyses.text import extremes, sample_note, sentence
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_KINDS = ("isolated", "propagated")
_TRACES = ("model", "dataset", "tokens", "seed", "samples", "budget")
_STEPS = ("isolated_steps", "propagated_steps", "long_samples")
_RANKS_NOTE = (
    "Heads are ranked in every sample by L / ‖o_h‖₁, L1, at step 0; a trace's profile is the mean of its samples' "
    "ranks. Reliability: Spearman's ρ between the profiles of two halves of the samples, mean over splits, for all "
    "samples by Spearman–Brown. Two samples: mean ρ of two single ones. ρ of two traces: of their profiles."
)
_GAIN_NOTE = (
    "Gain: the baseline's relative L1 less the selection's, head by head; its ranks are as reliable as they are large."
)
_DEPTH_NOTE = (
    "Shares of the sum over all heads, of the layers measured. First tenth: of the layers, rounded up; half: the share "
    "of the heads that carries half of the sum. Heads of two models cannot be matched: the mean over samples of the "
    "layers' profile is compared at those of 20 points of relative depth, layer / (layers − 1), that both have "
    "measured, a coarse likeness."
)


@record
class Stability(Result):
    """The agreement of heads' ranks by perturbation within each trace and between traces.

    Attributes:
        identity: of the runs of all traces.
    """

    SECTION: ClassVar[str] = "question stability"
    DOCUMENT: ClassVar[str] = "of several traces"
    SHOWN: ClassVar[tuple[str, ...]] = ("isolated", "propagated", "corrected", "shared")
    FIRST: ClassVar[str] = "trace"

    traces: tuple[StableTrace, ...] = column("one per trace, in the order given", key="members")
    pairs: tuple[TracePair, ...] = column("every two of them")
    baseline: EvictionConfig | None = column("the configuration that the gain is over; null where a trace has none")
    identity: RunIdentity

    def conclusion(self) -> str:
        """Return how reliable ranks by propagated L1 are within traces, and how well they agree between traces."""
        single = len(self.traces) == 1
        within = extremes([_named_estimate(f"trace {trace.number}", trace.propagated) for trace in self.traces])
        own = f" ({sample_note(self.traces[0].samples)})" if single else ""
        clauses = [f"samples of a trace rank the heads by propagated L1 with a reliability of {within}{own}"]
        same = [_named_estimate(pair.name.removesuffix("*"), pair.propagated) for pair in self._one_model_pairs()]
        if same:
            clauses.append(f"mean ranks of two traces of one model correlate with ρ = {extremes(same)}")
        fewest, most = (pick(trace.samples for trace in self.traces) for pick in (min, max))
        counts = sample_note(most) if fewest == most else f"n = {fewest} to {most} samples a trace"
        return sentence("; ".join(clauses) + ("" if single else f" ({len(self.traces)} traces, {counts})"))

    def title(self) -> str:
        """Return the quantity of the table, and the choices that all configurations share."""
        return f"ranks of heads by relative L1: {common([trace.config for trace in self.traces])}"

    def lines(self) -> Sequence[Line]:
        """Return a line per trace with its reliability, then a line per pair of traces with its correlation."""
        models = [pair for pair in self.pairs if pair.depth]
        return [
            *_group_lines("reliability within", self.traces),
            *_group_lines("ρ between", self._one_model_pairs()),
            *_group_lines("ρ over depth between", models),
        ]

    def shown_columns(self) -> Sequence[str]:
        """Return the table's columns; only both kinds of perturbation unless two traces are of one model."""
        return self.SHOWN if self._one_model_pairs() else _KINDS

    def interval_note(self) -> str:
        """Return the line on n and intervals, of all traces."""
        counts = list(dict.fromkeys(trace.samples for trace in self.traces))
        if len(counts) == 1:
            return text.intervals_note(counts[0])
        listed = ", ".join(str(trace.samples) for trace in self.traces)
        few = "; in parentheses, of fewer than five: ranges of single splits, pairs or samples"
        return (
            f"n = {listed} samples; in brackets: 95 % intervals over samples{few if min(counts) < MIN_SAMPLES else ''}."
        )

    def caveats(self) -> Sequence[str]:
        """Return notes on the overlap expected by chance, and on starred pairs, whose prompts may be the same."""
        known = [pair.perturbation["propagated"] for pair in self._one_model_pairs()]
        chance = [
            f"Worst 10 %: random orders share {text.percent(one.chance)}, at most {text.percent(one.chance_most)}."
            for one in known[:1]
        ]
        same = ["* One data set and seed: what is alike may be the prompts."]
        return [*chance, *(same if any(one.paired for one in known) else [])]

    def details(self) -> Sequence[Part]:
        """Return tables of the traces, of ranks by perturbation and by gain, of decode steps and depth."""
        traces = [Line(str(trace.number), (trace,)) for trace in self.traces]
        long = [line for line, trace in zip(traces, self.traces, strict=True) if trace.over_steps]
        steps = [table("ρ of step 0 with the last third of the steps", long, _STEPS, self.FIRST)] if long else []
        depth = [
            Line(name, (trace.depth[kind],)) for trace in self.traces for name, kind in _named_kinds(str(trace.number))
        ]
        return [
            table("the traces", traces, _TRACES, ""),
            *self._rank_tables("perturbation", "is perturbed"),
            _RANKS_NOTE,
            *self._gain_tables(),
            *steps,
            table("where in depth it lies", depth, ("first_layer", "first_tenth", "half"), self.FIRST),
            _DEPTH_NOTE,
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per trace, quantity ranked by and kind: reliability, and mean ρ between two samples."""
        return [
            {"trace": trace.number, "dataset": trace.dataset, **config_columns(trace.config), "ranked_by": name,
             "kind": kind, "samples": trace.samples, "split_half": each.split_half.value,
             "pairwise": each.pairwise.value}
            for trace in self.traces for name in ("perturbation", "gain") for kind, each in getattr(trace, name).items()
        ]  # fmt: skip

    def _one_model_pairs(self) -> list[TracePair]:
        """Return the pairs of traces of one model, whose heads can be matched."""
        return [pair for pair in self.pairs if pair.perturbation]

    def _rank_tables(self, name: str, verb: str) -> list[Part]:
        """Return the tables of ranks by `perturbation` or `gain`, within traces and between traces of one model."""
        within, between = (
            [Line(label, (getattr(one, name)[kind],)) for one in members for label, kind in _named_kinds(one_name(one))]
            for members, one_name in (
                (self.traces, lambda trace: str(trace.number)),
                (self._one_model_pairs(), lambda pair: pair.name),
            )
        )
        names = ("rho", "corrected", "shared")
        return [
            table(f"within a trace: is it the same head that {verb}?", within, ("split_half", "pairwise"), self.FIRST),
            *([table("between traces of one model: the same?", between, names, "traces")] if between else []),
        ]

    def _gain_tables(self) -> list[Part]:
        """Return the tables of ranks by gain with their note; nothing without a baseline."""
        if self.baseline is None:
            return []
        name = short_names([self.traces[0].config, self.baseline])[1]
        return [*self._rank_tables("gain", f"gains over {name}"), _GAIN_NOTE]


def stability(
    traces: Trace | Sequence[Trace],
    *,
    selection: str = "two-stage",
    baseline: str = "attention",
    budget: str | float | None = None,
) -> Stability:
    """Compare the ranks of heads by perturbation over prompts, data sets, lengths, seeds, decode steps and models.

    Heads are ranked by relative L1 (METHOD: the quantities; L / ‖o_h‖₁), isolated and propagated, at step 0, in every
    sample; and by what the selection gains, the baseline's less its own. Within a trace the ranks have a split-half
    reliability, two traces of one model Spearman's ρ of mean ranks, as measured and corrected for both reliabilities.
    Two models are compared over depth alone.

    Args:
        traces: from `measure` or `read_trace`, one or several.
        selection: a selection, a policy, or policy:selection, of which every trace has one configuration, alike in all
            but the budget; of several, the one without a correction or options that the name does not give.
        baseline: the side that the selection's gain is over; where a trace lacks it, there is no gain.
        budget: as the runs have it, 128 or 0.05; by default the one that all traces have.

    Raises TraceError for no trace, one that is given twice, one without a complete sample, and configurations that are
    not alike; ConfigError where several budgets, or configurations of one, are there to choose from.

    Example, of a `trace` of 5 samples:
        >>> import perturbkv as pk
        >>> result = pk.stability(trace, budget=0.2)
        >>> result.traces[0].perturbation["propagated"].splits
        10
    """
    members = as_traces(traces)
    check_distinct(members)
    configs = choose_configs(members, selection, None if budget is None else str(budget))
    baselines = _baselines(members, configs, baseline)
    sides = zip(members, configs, baselines or repeat(None, len(members)), strict=True)
    ranked = [RankedTrace.from_values(number, relative_perturbation(*side)) for number, side in enumerate(sides, 1)]
    return Stability(
        traces=tuple(map(stable_trace, ranked)),
        pairs=tuple(compare_pair(*pair) for pair in combinations(ranked, 2)),
        baseline=baselines[0] if baselines else None,
        identity=joint_identity([identity(one.trace, [one.values.config]) for one in ranked]),
    )


def _baselines(traces: Sequence[Trace], configs: Sequence[EvictionConfig], side: str) -> list[EvictionConfig]:
    """Return each trace's baseline at the budget of its configuration.

    Empty where a trace has none, or its baseline is the configuration itself.
    """
    try:
        indices = [side_indices(trace.run, side) for trace in traces]
    except TraceError:
        return []
    resolved = [
        resolve([one for index in own if (one := trace.run.configs[index]).budget == config.budget], side)
        for trace, own, config in zip(traces, indices, configs, strict=True)
    ]
    known = [one for one, config in zip(resolved, configs, strict=True) if one is not None and one != config]
    return known if len(known) == len(traces) else []


def _group_lines(name: str, members: Sequence[StableTrace] | Sequence[TracePair]) -> list[Line]:
    """Return a heading line, then a line per member; empty without members."""
    return [Line(name, ()), *(Line(one.name, (one,)) for one in members)] if members else []


def _named_kinds(name: str) -> list[tuple[str, str]]:
    """Return (line's name, kind) for isolated and propagated perturbation."""
    return [(f"{name}, {kind}", kind) for kind in _KINDS]


def _named_estimate(name: str, estimate: RankEstimate) -> tuple[str, float, str]:
    """Return (name, value, text) of an estimate, the input of `text.extremes`."""
    return name, estimate.value, format_estimate(estimate)
