"""Does the error grow while the model decodes on, and in which heads? (An open question of the paper.).

The tokens are the full run's own, so both runs read the same text; what grows is the error that evicted entries leave
in later tokens' keys and values, and what shrinks is the evicted entries' share of a growing cache. Steps end where a
sample's text ends: each step is of the samples that have it, and growth of each sample's own last and first third.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import naming
from perturbkv.analyses.horizon.growth import FLOORS, ConfigHorizon, followed, relative
from perturbkv.analyses.horizon.horizon_tables import curve_table, lead_tables, notes, said_of_heads
from perturbkv.analyses.horizon.leads import Lead, leads
from perturbkv.analyses.horizon.thirds import ANALYSIS, steps_of, taken
from perturbkv.analyses.horizon.thirds import LEAST_STEPS as LEAST_STEPS
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import Floats, at_step, held_shares
from perturbkv.analyses.naming import common, short
from perturbkv.analyses.pairing import of_selection
from perturbkv.analyses.result import Result
from perturbkv.analyses.sentences import compared, decided, ends, factor, over, sentence, tally
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.display import Table
from perturbkv.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDES = ("attention", "two-stage")
_GROWS = {
    1: ("the error grows", "it grows"),
    -1: ("the error shrinks", "it shrinks"),
    0: ("whether the error grows is undecided", "it is undecided"),
}


@dataclass(frozen=True, repr=False)
class Horizon(Result):
    """Every configuration that was asked for.

    Attributes:
        identity: which run this is.
        steps: T, of the longest text.
        samples_at: (step,) how many samples have the step.
        grown: samples of at least three steps, of which growth is told; `short`: the others.
        configs: in the order of the sides, then by α and budget.
        leads: each later side against the first, where the trace holds both alike.
        noise_floor: (step,) the propagated curve of the run that keeps everything.
    """

    identity: RunIdentity
    steps: int
    samples_at: NDArray[np.int64]
    grown: int
    short: int
    configs: tuple[ConfigHorizon, ...]
    leads: tuple[Lead, ...]
    noise_floor: Floats

    def conclusion(self) -> str:
        """Whether a selection's lead lasts, and whether the error grows."""
        said = [*(self._lead(*sides, found) for sides, found in self._contests().items()), self._growth()]
        names = [treatment for _, treatment in self._contests()]
        return sentence(f"{'; '.join(said)} ({over(self.grown)})", *names)

    def tables(self) -> list[Table | str]:
        """Leads at first and at last, growth of every configuration, and which of its heads grow."""
        shared = f"{self.steps} decode steps · {common(self.identity.configs)}"
        named = self._named()
        return [shared, *lead_tables(self._contests()), curve_table(named), *said_of_heads(named, self.identity.layer)]

    def notes(self) -> str:
        """Of how many samples the steps are, what grows, and the noise floor."""
        return notes(self.samples_at.tolist(), self.grown, self.short, self.configs, float(self.noise_floor.max()))

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "steps": self.steps,
                "samples_at_step": self.samples_at,
                "samples_with_growth": self.grown,
                "samples_too_short_for_growth": self.short,
                "noise_floor": self.noise_floor,
                "configs": [config.to_dict() for config in self.configs],
                "leads": [lead.to_dict() for lead in self.leads],
            }
        )
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per configuration and step: relative L1 of both kinds, KL in nat, the share of equal next tokens."""
        return [
            {
                **columns_of(one.config),
                "step": step,
                "samples": int(count),
                **{kind: float(curve.relative[step]) for kind, curve in one.curves.items()},
                "kl": float(one.kl[step]),
                "top1": float(one.top1[step]),
                "noise_floor": float(self.noise_floor[step]),
            }
            for one in self.configs
            for step, count in enumerate(self.samples_at)
        ]

    def plot_heads(self, width_mm: float = 174) -> Figure:
        """Maps of each head's growth, layer × head."""
        return self._drawn("Horizon.plot_heads", width_mm)

    def _named(self) -> list[tuple[str, ConfigHorizon]]:
        names = [name or "evicted" for name in short(self.identity.configs)]
        return list(zip(names, self.configs, strict=True))

    def _contests(self) -> dict[tuple[str, str], list[Lead]]:
        """The leads of each two sides, by their names, baseline first."""
        found: dict[tuple[str, str], list[Lead]] = {}
        for lead in self.leads:
            found.setdefault(naming.sides(lead.baseline, lead.treatment), []).append(lead)
        return found

    def _lead(self, baseline: str, treatment: str, found: list[Lead]) -> str:
        """By how much at first and in the end where there is one case, else in how many."""
        first, last = ([(name, getattr(lead, third), getattr(lead, f"{third}_interval"))
                        for name, lead in zip(short([one.baseline for one in found]), found, strict=True)]
                       for third in ("first", "last"))  # fmt: skip
        early = compared(treatment, baseline, first, f" in the first third of {self.steps} decode steps")
        return f"{early}; {compared('it', baseline, last, ' in the last third')}"

    def _growth(self) -> str:
        """Whether the propagated error grows from the first third of the steps to the last."""
        curves = [(name, one.curves["propagated"]) for name, one in self._named()]
        known = [(name, curve) for name, curve in curves if not isnan(curve.growth)]
        if not known:
            return "whether the error grows cannot be told from rounding"
        told = ends([(name, curve.growth, factor(curve.growth, curve.growth_interval)) for name, curve in known], "of")
        verdicts = [decided(curve.growth_interval, 1) for _, curve in known]
        said = "the error changes" if None in verdicts else tally(verdicts, _GROWS, "configuration")
        return f"{said}, last third over first: {told}"


def horizon(trace: Trace, compare: str | Sequence[str] = _SIDES) -> Horizon:
    """Whether the perturbation grows over the decode steps, and whether one selection's lead over another lasts.

    Curves are Σ L1 / Σ ‖o_h‖₁ over all heads, (step,), propagated and isolated (METHOD: the quantities), teacher-forced
    on the full run's own text; growth is the last third of a sample's steps over its first.

    Args:
        trace: what was measured, over three decode steps or more.
        compare: selections, policies, or `policy:selection`; the first is what the others are held against.

    Raises ConfigError where no text has three decode steps, TraceError where a side is not there, or the trace has no
    complete sample or not what is needed.

    Example, of a `trace` of 3 decode steps:
        >>> import perturbkv as pk
        >>> pk.horizon(trace).configs[0].curves["propagated"].relative.shape
        (3,)
    """
    sides = [compare] if isinstance(compare, str) else list(compare)
    at_step(trace, ANALYSIS, 0)
    steps, held = steps_of(trace), held_shares(trace, ANALYSIS)
    places = list(dict.fromkeys(place for side in sides for place in of_selection(trace.run, side)))
    norm = taken(trace, "output_norm", steps)
    floors = {kind: taken(trace, name, steps) for kind, name in FLOORS.items()}
    return Horizon(
        identity=identity(trace, [trace.run.configs[place] for place in places]),
        steps=steps.held.shape[1],
        samples_at=steps.held.sum(axis=0),
        grown=int(steps.long.sum()),
        short=int((~steps.long).sum()),
        configs=tuple(followed(trace, place, float(held[place]), norm, floors, steps) for place in places),
        leads=leads(trace, sides, steps),
        noise_floor=relative(floors["propagated"], norm),
    )
