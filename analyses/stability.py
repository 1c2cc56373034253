"""Are the heads that suffer the same ones over prompts, data sets, lengths, seeds, decode steps and models?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from perturbkv.analyses import intervals, stability_told
from perturbkv.analyses.arithmetic import plain
from perturbkv.analyses.depths import Depth, alike, depth, profiles
from perturbkv.analyses.estimates import Estimate
from perturbkv.analyses.head_ranks import Agreement, Heads, Ranked, Reliability, agreement, reliability
from perturbkv.analyses.identity import RunIdentity, identity, together
from perturbkv.analyses.intervals import CORRELATION
from perturbkv.analyses.objects import columns_of
from perturbkv.analyses.pairing import of_selection
from perturbkv.analyses.ranks import spearman
from perturbkv.analyses.reading import Floats, values
from perturbkv.analyses.result import Result
from perturbkv.analyses.suffering import ANALYSIS, Suffering, check_apart, chosen, suffering
from perturbkv.analyses.together import as_traces
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class OfTrace:
    """One trace.

    Attributes:
        place: its number, from 1.
        model, dataset, seed, source: of its run.
        tokens: mean entries of its prompts.
        samples: complete ones.
        layers, heads: of its model.
        config: what was evicted.
        suffering: kind → how alike its samples rank the heads by relative L1.
        gain: the same by what the treatment gains; empty without a baseline.
        over_steps: kind → mean over samples of Spearman's ρ between the heads at step 0 and in the last third of the
            steps; empty where no text has three.
        depth: kind → where in depth it lies.
    """

    place: int
    model: str
    dataset: str
    seed: int
    source: str
    tokens: float
    samples: int
    layers: int
    heads: int
    config: EvictionConfig
    suffering: dict[str, Reliability]
    gain: dict[str, Reliability]
    over_steps: dict[str, Estimate]
    depth: dict[str, Depth]


@dataclass(frozen=True)
class Between:
    """Two traces, by their numbers: `suffering` and `gain` of one model, kind → agreement; `depth` of two models."""

    first: int
    second: int
    suffering: dict[str, Agreement]
    gain: dict[str, Agreement]
    depth: dict[str, Ranked]


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

    def plot(self, width_mm: float = 174) -> Figure:
        """Rank correlations between traces, reliability on the diagonal, and the profiles over depth."""
        from perturbkv.figures import stability as drawing

        return drawing.draw(self, width_mm)


def stability(
    traces: Trace | Sequence[Trace],
    *,
    selection: str = "two-stage",
    baseline: str = "attention",
    budget: str | float | None = None,
) -> Stability:
    """Are the heads that suffer the same ones over prompts, data sets, lengths, seeds, decode steps and models?

    A head suffers its relative L1 (METHOD: the quantities; L / ‖o_h‖₁), isolated and propagated, at step 0; what the
    selection gains is the baseline's less its own. Heads are ranked in every sample; within a trace the ranks' split-half
    reliability is told, between traces of one model Spearman's ρ of mean ranks, as measured and corrected for both
    reliabilities. Between models only depth is compared.

    Args:
        traces: from `measure` or `read_trace`, one or several.
        selection: a selection, a policy, or policy:selection, of which every trace has one configuration, alike in all
            but the budget.
        baseline: what its gain is over; where a trace lacks it, no gain is told.
        budget: as the runs have it, 128 or 0.05; by default the one that all traces hold.

    Raises TraceError for no trace, one that is given twice, one without a complete sample, and configurations that are not alike; ConfigError
    where several budgets, or configurations of one, are there to choose from.

    Example, of a `trace` of 5 samples at one budget:
        >>> import perturbkv as pk
        >>> found = pk.stability(trace)
        >>> found.traces[0].suffering["propagated"].splits
        10
    """
    held = as_traces(traces)
    check_apart(held)
    wanted = None if budget is None else str(budget)
    configs = chosen(held, selection, wanted)
    baselines = _baselines(held, configs, baseline)
    sides = zip(held, configs, baselines or [None] * len(held), strict=True)
    found = [_Ranks.numbered(place, suffering(*one)) for place, one in enumerate(sides, 1)]
    return Stability(
        traces=tuple(map(_of_trace, found)),
        pairs=tuple(_between(*pair) for pair in combinations(found, 2)),
        baseline=baselines[0] if baselines else None,
        identity=together([identity(one.of.trace, [one.of.config]) for one in found]),
    )


@dataclass(frozen=True)
class _Ranks:
    """One trace and its number; kind → its heads by what they suffer, and by what they gain."""

    place: int
    of: Suffering
    suffering: dict[str, Heads]
    gain: dict[str, Heads]

    @classmethod
    def numbered(cls, place: int, of: Suffering) -> _Ranks:
        suffered, gained = ({kind: Heads.of(each) for kind, each in one.items()} for one in (of.relative, of.gain))
        return cls(place, of, suffered, gained)


def _baselines(traces: Sequence[Trace], configs: Sequence[EvictionConfig], side: str) -> list[EvictionConfig]:
    """Of each trace the side's configuration of the same budget; empty where one has none, or the sides are one."""
    try:
        places = [of_selection(trace.run, side) for trace in traces]
    except TraceError:
        return []
    fitting = [
        [one for place in held if (one := trace.run.configs[place]).budget == config.budget and one != config]
        for trace, held, config in zip(traces, places, configs, strict=True)
    ]
    return [one[0] for one in fitting] if all(len(one) == 1 for one in fitting) else []


def _of_trace(found: _Ranks) -> OfTrace:
    one, run = found.of, found.of.trace.run
    shape = one.relative["propagated"].shape
    return OfTrace(
        place=found.place,
        model=run.model,
        dataset=run.dataset,
        seed=run.seed,
        source=one.trace.source,
        tokens=float(values(one.trace, "prompt_tokens", ANALYSIS).mean()),
        samples=shape[0],
        layers=shape[1],
        heads=shape[2],
        config=one.config,
        suffering={kind: reliability(heads) for kind, heads in found.suffering.items()},
        gain={kind: reliability(heads) for kind, heads in found.gain.items()},
        over_steps={kind: _over_steps(one.early[kind], late) for kind, late in one.late.items()},
        depth={kind: depth(each) for kind, each in one.relative.items()},
    )


def _over_steps(early: Floats, late: Floats) -> Estimate:
    """Mean over samples of ρ between the heads of (sample, layer, head) arrays."""
    each = np.array(
        [float(spearman(one.reshape(-1), other.reshape(-1))) for one, other in zip(early, late, strict=True)]
    )
    return Estimate(float(each.mean()), intervals.of_mean(each, CORRELATION), len(each))


def _between(first: _Ranks, second: _Ranks) -> Between:
    here, there = first.of, second.of
    if not _same_heads(here.trace, there.trace):
        shared = {kind: alike(profiles(each), profiles(there.relative[kind])) for kind, each in here.relative.items()}
        return Between(first.place, second.place, {}, {}, shared)
    paired = _paired(here.trace, there.trace)
    suffered, gained = (
        {kind: agreement(heads, other[kind], paired) for kind, heads in own.items()}
        for own, other in ((first.suffering, second.suffering), (first.gain, second.gain))
    )
    return Between(first.place, second.place, suffered, gained, {})


def _same_heads(first: Trace, second: Trace) -> bool:
    """Whether two traces are of one model, and of the same layers of it."""
    shapes = {trace.arrays["output_norm"].shape[2:] for trace in (first, second)}
    models = {(trace.run.model, trace.run.revision) for trace in (first, second)}
    return len(shapes) == len(models) == 1 and len({identity(one, ()).measured for one in (first, second)}) == 1


def _paired(first: Trace, second: Trace) -> bool:
    """Whether the traces' samples may be the same prompts, or grow from the same draws."""
    same = first.run.seed == second.run.seed or first.sample_ids == second.sample_ids
    return same and first.run.dataset == second.run.dataset and np.array_equal(first.ok, second.ok)
