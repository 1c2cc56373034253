"""Are the heads that suffer the same ones? Over prompts, data sets, lengths, seeds, decode steps and models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, repeat
from typing import Any

from perturbkv.analyses.identity import RunIdentity, identity, together
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.multi_trace import as_traces
from perturbkv.analyses.pairing import of_selection
from perturbkv.analyses.questions.stability import stability_told
from perturbkv.analyses.questions.stability.head_profiles import check_apart, chosen, suffering
from perturbkv.analyses.questions.stability.name_meant import meant
from perturbkv.analyses.questions.stability.stable_traces import Between, OfTrace, TraceRanks, between, of_trace
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace


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
        return stability_told.conclusion(self.traces, self.pairs)

    def tables(self) -> Sequence[Table | str]:
        """The traces, every two of one model, decode steps, depth."""
        return stability_told.tables(self.traces, self.pairs, self.baseline)

    def notes(self) -> str:
        """What the numbers are, and what they cannot be."""
        return stability_told.notes(self.traces, self.pairs)

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
