"""Does the error grow while the model decodes on, and in which heads? (An open question of the paper.).

The tokens are the full run's own, so both runs read the same text; what grows is the error that evicted entries leave
in later tokens' keys and values, and what shrinks is the evicted entries' share of a growing cache. Steps end where a
sample's text ends: each step is of the samples that have it, and growth of each sample's own last and first third.

The tables of growth over the decode steps, and which heads grow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import pairing, text
from perturbkv.analyses.horizon.growth import (
    ANALYSIS,
    FLOORS,
    ConfigHorizon,
    Curve,
    Lead,
    followed,
    leads,
    relative,
    steps_of,
    taken,
)
from perturbkv.analyses.horizon.growth import LEAST_STEPS as LEAST_STEPS
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import Floats, at_step, held_shares
from perturbkv.analyses.pairing import common, counted, folded, of_selection, short_names
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.text import compared, decided, extremes, factor, over, sentence, tally_verdicts
from perturbkv.display import Table
from perturbkv.trace import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LISTED = 6
Named = Sequence[tuple[str, ConfigHorizon]]
"""What tells a configuration from the others, and its curves."""


def curve_table(named: Named) -> Table:
    """A row per configuration and kind of perturbation."""
    rows = [
        _row(folded(f"{name}, held {text.held(config.held)}") if place == 0 else "", curve)
        for name, config in named
        for place, curve in enumerate(config.curves.values())
    ]
    columns = ["", "", "#first\nthird", "#last\nthird", "#growth", "#heads beyond\nchance + / = / −"]
    return Table("Σ L / Σ ‖o_h‖₁ over all heads", columns, rows)


def lead_tables(contests: Mapping[tuple[str, str], Sequence[Lead]]) -> list[Table]:
    """Of each two sides a row per setting that they share."""
    columns = ["", "#first third", "#last third"]
    return [
        Table(f"{treatment} over {baseline}: Σ L of all heads, propagated", columns, _leads(found))
        for (baseline, treatment), found in contests.items()
    ]


def said_of_heads(named: Named, layer: Callable[[int], int]) -> list[str]:
    """A line per configuration: how many of its heads grow beyond chance, and which grow most."""
    found = ["Heads that grow or shrink (propagated), and those that grow most, as layer-head ×factor:"]
    for name, config in named:
        curve = config.curves["propagated"]
        said = text.about_flips(curve.decided, ("growing", "shrinking"))
        found.append(f"  {name}: {said}. Most: {_most(curve, layer)}")
    return found


def notes(counts: Sequence[int], grown: int, short: int, configs: Sequence[ConfigHorizon], floor: float) -> str:
    """What n, growth and dashes mean; `counts` are samples per step, `floor` is the largest step's."""
    power = text.about_power(configs[0].curves["propagated"].decided)
    return (
        f"{_samples(counts, short)} {text.about_intervals(grown)} Growth: each sample's last third of its steps "
        f"over its first. + / = / −: heads that grow, are undecided, shrink. Beyond chance: {power} A dash: within two "
        f"noise floors. Noise floor: {floor:.1e} of Σ ‖o_h‖₁ (propagated, the largest step's). {text.ABOUT_HELD}"
    )


def _samples(counts: Sequence[int], short: int) -> str:
    """How many samples each step is of, and which have no growth."""
    ends = [step for step in range(1, len(counts)) if counts[step] < counts[step - 1]]
    said = f"Steps from 0 on are of {counted(counts[0], 'sample')}" + "".join(
        f", from {step} on of {counts[step]}" for step in ends
    )
    left = f" {counted(short, 'sample')} of fewer than 3 steps left out of growth." if short else ""
    return f"{said}: a text that ends has no later steps.{left}" if ends or left else f"{said}."


def _leads(found: Sequence[Lead]) -> list[list[str]]:
    names = short_names([lead.baseline for lead in found])
    return [
        [
            folded(name or f"b={lead.baseline.budget}"),
            text.decimal(lead.first, lead.first_interval),
            text.decimal(lead.last, lead.last_interval),
        ]
        for name, lead in zip(names, found, strict=True)
    ]


def _row(name: str, curve: Curve) -> list[str]:
    return [
        name,
        curve.kind,
        text.significant(curve.first),
        text.significant(curve.last),
        text.decimal(curve.growth, curve.growth_interval, apart="\n"),
        text.verdicts(curve.head_verdict),
    ]


def _most(curve: Curve, named: Callable[[int], int]) -> str:
    """The heads that grow most among those that grow."""
    shown = (curve.head_verdict == 1) & (curve.head_growth > 0)  # a sum over samples may be noise where most grow
    grown = sorted(
        ((float(curve.head_growth[place]), place) for place in zip(*shown.nonzero(), strict=True)), reverse=True
    )
    return " ".join(f"{named(layer)}-{head} ×{growth:.1f}" for growth, (layer, head) in grown[:_LISTED]) or "none"


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
        names = [name or "evicted" for name in short_names(self.identity.configs)]
        return list(zip(names, self.configs, strict=True))

    def _contests(self) -> dict[tuple[str, str], list[Lead]]:
        """The leads of each two sides, by their names, baseline first."""
        found: dict[tuple[str, str], list[Lead]] = {}
        for lead in self.leads:
            found.setdefault(pairing.side_names(lead.baseline, lead.treatment), []).append(lead)
        return found

    def _lead(self, baseline: str, treatment: str, found: list[Lead]) -> str:
        """By how much at first and in the end where there is one case, else in how many."""
        first, last = ([(name, getattr(lead, third), getattr(lead, f"{third}_interval"))
                        for name, lead in zip(short_names([one.baseline for one in found]), found, strict=True)]
                       for third in ("first", "last"))  # fmt: skip
        early = compared(treatment, baseline, first, f" in the first third of {self.steps} decode steps")
        return f"{early}; {compared('it', baseline, last, ' in the last third')}"

    def _growth(self) -> str:
        """Whether the propagated error grows from the first third of the steps to the last."""
        curves = [(name, one.curves["propagated"]) for name, one in self._named()]
        known = [(name, curve) for name, curve in curves if not isnan(curve.growth)]
        if not known:
            return "whether the error grows cannot be told from rounding"
        told = extremes(
            [(name, curve.growth, factor(curve.growth, curve.growth_interval)) for name, curve in known], "of"
        )
        verdicts = [decided(curve.growth_interval, 1) for _, curve in known]
        said = "the error changes" if None in verdicts else tally_verdicts(verdicts, _GROWS, "configuration")
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
