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
from perturbkv.analyses.arithmetic import plain
from perturbkv.analyses.growth import FLOORS, ConfigHorizon, followed, relative
from perturbkv.analyses.horizon_tables import curve_table, notes, said_of_heads
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.leads import Lead, leads
from perturbkv.analyses.naming import common, short
from perturbkv.analyses.objects import columns_of
from perturbkv.analyses.pairing import of_selection
from perturbkv.analyses.reading import Floats, at_step, held_shares
from perturbkv.analyses.result import Result
from perturbkv.analyses.sentences import decided, difference, ends, factor, over, tally
from perturbkv.analyses.thirds import ANALYSIS, steps_of, taken
from perturbkv.analyses.thirds import LEAST_STEPS as LEAST_STEPS
from perturbkv.display import Table
from perturbkv.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDES = ("attention", "two-stage")
_GROWS = {1: "grows", -1: "shrinks", 0: "stays or is undecided"}
_LEADS = {-1: "less", 1: "more", 0: "undecided"}


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
        said = [*(self._lead(*pair) for pair in self._contests()), self._growth()]
        return f"{'; '.join(said)} ({over(self.grown)})."

    def tables(self) -> list[Table | str]:
        """First and last third and growth of every configuration, and which of its heads grow."""
        shared = f"{self.steps} decode steps · {common(self.identity.configs)}"
        return [shared, curve_table(self._named()), *said_of_heads(self._named())]

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

    def plot(self, width_mm: float = 174) -> Figure:
        """Relative L1 of all heads per step, propagated and isolated, and KL."""
        from perturbkv.figures.horizon import draw

        return draw(self, width_mm)

    def plot_heads(self, width_mm: float = 174) -> Figure:
        """Maps of each head's growth, layer × head."""
        from perturbkv.figures.horizon import draw_heads

        return draw_heads(self, width_mm)

    def _named(self) -> list[tuple[str, ConfigHorizon]]:
        names = [name or "evicted" for name in short(self.identity.configs)]
        return list(zip(names, self.configs, strict=True))

    def _contests(self) -> list[tuple[str, list[Lead]]]:
        """The leads of each two sides, by their names."""
        found: dict[str, list[Lead]] = {}
        for lead in self.leads:
            first, second = naming.sides(lead.baseline, lead.treatment)
            found.setdefault(f"{second} perturbs {{}} than {first}", []).append(lead)
        return list(found.items())

    def _lead(self, words: str, found: list[Lead]) -> str:
        """By how much at first and in the end where there is one case, else in how many."""
        first, last = ([(getattr(one, name), getattr(one, f"{name}_interval")) for one in found]
                       for name in ("first", "last"))  # fmt: skip
        if len(found) == 1:
            before, after = difference(*first[0]), difference(*last[0])
        else:
            before, after = (
                tally([decided(interval, 1) for _, interval in third], _LEADS, "case") for third in (first, last)
            )
        said = words.format(before)
        return f"{said} in the first third of {self.steps} decode steps, {after} in the last"

    def _growth(self) -> str:
        """Whether the propagated error grows from the first third of the steps to the last."""
        curves = [(name, one.curves["propagated"]) for name, one in self._named()]
        told = [(name, one.growth, factor(one.growth, one.growth_interval)) for name, one in curves]
        if all(isnan(growth) for _, growth, _ in told):
            return "whether the error grows cannot be told from rounding"
        known = [decided(one.growth_interval, 1) for _, one in curves if not isnan(one.growth)]
        return f"the error {tally(known, _GROWS, 'configuration')}: to {ends(told)} of what it was"


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
