"""Is a head hurt by how much goes or by what goes, and what would a stored mean of what went win back?."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import at_step
from perturbkv.analyses.pairing import Pair, matches, pairs
from perturbkv.analyses.questions.split.corrections import Setting, settings
from perturbkv.analyses.questions.split.mass_and_distance import (
    ANALYSIS,
    Contest,
    Parts,
    Spread,
    contest,
    parts,
    spread,
)
from perturbkv.analyses.questions.split.split_told import conclusion, notes, tables
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_FIRST = "attention"
"""The selection that others are held against where nobody says otherwise."""


@dataclass(frozen=True, repr=False)
class Split(Result):
    """The uncorrected configurations of a trace, against each other and against what corrects them.

    Attributes:
        spreads: of each what tells its heads apart.
        parts: likewise its log L and log (1 − S), (sample, layer, head).
        contests: each later side against the first, at equal budgets.
        corrections: each configuration that the trace holds corrected too.
        step: decode step looked at.
        identity: of the run, with every configuration that is told of.
    """

    spreads: tuple[Spread, ...]
    parts: tuple[Parts, ...]
    contests: tuple[Contest, ...]
    corrections: tuple[Setting, ...]
    step: int
    identity: RunIdentity

    def conclusion(self) -> str:
        """What tells heads apart, by which of both each method wins, and what corrections win."""
        return conclusion(self.spreads, self.contests, self.corrections, self.identity.samples)

    def tables(self) -> list[Table | str]:
        """The parts of the variance, each contest's two factors, and every correction."""
        return tables(self.spreads, self.contests, self.corrections)

    def notes(self) -> str:
        """What the columns mean, which heads are left out, and what the oracle is."""
        return notes(self.spreads, self.contests, self.corrections, self.identity.samples)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "spreads": list(self.spreads),
                "contests": list(self.contests),
                "corrections": [setting.to_dict() for setting in self.corrections],
            }
        )
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per uncorrected configuration, layer and head: geometric means over the samples that have a number.

        `isolated` is L, `gone_mass` 1 − S and `gone_distance` ‖μ_gone − μ_kept‖₁; None where no sample has one.
        """
        return [
            row
            for one, found in zip(self.spreads, self.parts, strict=True)
            for row in _by_head(one.config, found, self.identity)
        ]


def split(trace: Trace, compare: str | Sequence[str] | None = None, step: int = 0) -> Split:
    """Whether heads lose by how much attention goes or by what goes, and what a correction of the output wins.

    `L = (1 − S) ‖μ_gone − μ_kept‖₁` per head (METHOD, the split of an evicted output), from the stored S and the
    isolated perturbation: the parts of Var(log L) over the heads of a sample; both factors of each side's L over the
    first's; and L (isolated and propagated), drift and KL of `corrected` configurations over the same uncorrected.

    Args:
        trace: what was measured.
        compare: selections, policies or `policy:selection`, the first of which the others are held against. Left out:
            every uncorrected configuration, against selection `attention` where the trace holds it.
        step: decode step.

    Raises TraceError where a side is not there, all configurations are corrected or in few bits, or the trace has no
    complete sample or not what is needed; ConfigError where it has no such step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> found = pk.split(trace).contests[0]
        >>> abs(found.loss - found.mass * found.difference) < 1e-12
        True
    """
    held = at_step(trace, ANALYSIS, step)
    sides = _sides(trace.run) if compare is None else [compare] if isinstance(compare, str) else list(compare)
    shown = _shown(trace.run, sides)
    found = tuple(parts(held, config, step) for config in shown)
    contests = tuple(contest(held, *pair, step) for pair in _pairs(trace.run, sides))
    corrections = settings(trace, shown, step)
    every = [*shown, *(config for one in corrections for config in one.identity.configs)]
    return Split(
        spreads=tuple(spread(config, one) for config, one in zip(shown, found, strict=True)),
        parts=found,
        contests=contests,
        corrections=corrections,
        step=step,
        identity=identity(trace, list(dict.fromkeys(every)), step),
    )


def _alone(run: RunConfig) -> list[EvictionConfig]:
    """Configurations of which the split is exact. Raises TraceError where there is none."""
    found = [config for config in run.configs if config.evicts_alone]
    if not found:
        msg = (
            f"{ANALYSIS} needs an uncorrected configuration in full precision, as L = (1 − S) ‖μ_gone − μ_kept‖₁ is "
            f"of eviction alone; got {', '.join(run.labels())}"
        )
        raise TraceError(msg)
    return found


def _sides(run: RunConfig) -> list[str]:
    """Every policy and selection that evicts alone, one that takes attention first where there is one."""
    alone = _alone(run)
    several = len({one.policy.name for one in alone}) > 1
    named = [
        one.policy.name if one.given else f"{one.policy.name}:{one.selection.name}" if several else one.selection.name
        for one in alone
    ]
    first = [name for name, one in zip(named, alone, strict=True) if one.selection.name == _FIRST]
    return list(dict.fromkeys([*first[:1], *named]))


def _shown(run: RunConfig, sides: Sequence[str]) -> list[EvictionConfig]:
    """What evicts alone of these sides, in the run's order. Raises TraceError for a side that is not there."""
    alone = _alone(run)
    for side in sides:
        if not any(matches(config, side) for config in alone):
            held = ", ".join(dict.fromkeys(f"{one.policy.name}:{one.selection.name}" for one in alone))
            msg = f"expected uncorrected configurations of '{side}', got a trace of {held}"
            raise TraceError(msg)
    return [config for config in alone if any(matches(config, side) for side in sides)]


def _pairs(run: RunConfig, sides: Sequence[str]) -> list[Pair]:
    """Each later side against the first, wherever the run holds both alike; none where nothing is attention's."""
    baseline, *others = sides
    found = [pair for side in others for pair in pairs(run, baseline, side)]
    return [pair for pair in found if all(one.evicts_alone for one in pair)]


def _by_head(config: EvictionConfig, found: Parts, run: RunIdentity) -> list[dict[str, Any]]:
    numbers = {"isolated": found.loss, "gone_mass": found.mass, "gone_distance": found.difference}
    held = found.held.sum(axis=0)
    means = {name: np.nansum(logs, axis=0) / np.maximum(held, 1) for name, logs in numbers.items()}
    return [
        {
            **columns_of(config),
            "layer": run.layer(layer),
            "head": head,
            "samples": int(held[layer, head]),
            **{name: float(np.exp(logs[layer, head])) if held[layer, head] else None for name, logs in means.items()},
        }
        for layer, head in np.ndindex(held.shape)
    ]
