"""Does Assumption 1 hold: does a selection's first stage keep more than half of the attention? (Paper, figure 4.).

Three readings of σ per configuration, layer and head, and where it is at most 0.5 (METHOD: Assumption 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import EVIDENCE, Floats, at_step, held_shares, values
from perturbkv.analyses.pairing import budgets, counted, folded, of_selection
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import Scalar, rare_share_of
from perturbkv.analyses.text import decided, extremes, over, sentence
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.trace import Trace

ANALYSIS = "assumption"
READINGS = {"sigma_topk": "top ⌊αb⌋ of A", "sigma_stage1": "stage 1, window", "retained_mass": "S: all that is kept"}
"""Variable -> what is summed: as the paper states σ, as the selection's first stage really holds it, and the whole
kept set, which the paper's figure 4 plots (METHOD: Assumption 1)."""


@dataclass(frozen=True)
class Reading:
    """One reading of σ for one configuration.

    Attributes:
        variable: its name in the trace.
        mean: (layer, head) σ, mean over samples.
        below: (layer, head) in how many samples σ ≤ 0.5.
        samples: of how many.
        share: of (sample, head) with σ > 0.5, in [0, 1], with its interval over samples.
        layer_share: (layer,) the same within each layer.
    """

    variable: str
    mean: Floats
    below: NDArray[np.int64]
    samples: int
    share: float
    share_interval: Scalar
    layer_share: Floats

    @property
    def failing(self) -> NDArray[np.bool_]:
        """(layer, head) True where the mean σ is at most 0.5."""
        return self.mean <= EVIDENCE

    def to_dict(self, named: Callable[[int], int]) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers; the heads below are listed, layers by what `named` says."""
        document: dict[str, Any] = plain(
            {
                "share_above_half": self.share,
                "share_above_half_interval": self.share_interval,
                "share_above_half_by_layer": self.layer_share,
                "heads_at_most_half": [
                    {
                        "layer": named(layer),
                        "head": head,
                        "sigma": self.mean[layer, head],
                        "samples": self.below[layer, head],
                    }
                    for layer, head in np.argwhere(self.failing).tolist()
                ],  # fmt: skip
                "sigma": self.mean,
            }
        )
        return document


@dataclass(frozen=True)
class ConfigAssumption:
    """One configuration: budget and α.

    Attributes:
        config: the configuration.
        held: entries that its cache holds over those of the full cache; NaN where the trace does not tell.
        readings: variable -> reading, in the order of `READINGS`.
    """

    config: EvictionConfig
    held: float
    readings: dict[str, Reading]

    def to_dict(self, named: Callable[[int], int]) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers, layers by what `named` says."""
        told: dict[str, Any] = plain({"config": self.config, "held_over_full": self.held})
        return {**told, **{name: reading.to_dict(named) for name, reading in self.readings.items()}}


def sigmas(trace: Trace, selection: str, step: int) -> tuple[ConfigAssumption, ...]:
    """The three readings of σ for every configuration of a selection, by α, then budget.

    Raises TraceError where the trace holds none, and TraceError and ConfigError as `measurements.at_step`.
    """
    held = at_step(trace, ANALYSIS, step)
    places = of_selection(held.run, selection)
    sigma = {name: values(held, name, ANALYSIS, step) for name in READINGS}
    shares = held_shares(held, ANALYSIS)
    return tuple(
        ConfigAssumption(
            held.run.configs[place],
            float(shares[place]),
            {name: _reading(name, array[:, place]) for name, array in sigma.items()},
        )
        for place in places
    )


def _reading(variable: str, sigma: Floats) -> Reading:
    above = sigma > EVIDENCE
    return Reading(
        variable=variable,
        mean=sigma.mean(axis=0),
        below=(~above).sum(axis=0),
        samples=len(sigma),
        share=float(above.mean()),
        share_interval=intervals.of_mean(above.mean(axis=(1, 2)), rare_share_of(above[0].size)),
        layer_share=above.mean(axis=(0, 2)),
    )


_STAGE = "sigma_stage1"
_MOST_LISTED = 40


@dataclass(frozen=True, repr=False)
class Assumption(Result):
    """Assumption 1 for every budget and α of one selection.

    Attributes:
        selection: whose stage 1 is looked at.
        configs: by α, then budget.
        step: decode step looked at.
        identity: of the run.
    """

    selection: str
    configs: tuple[ConfigAssumption, ...]
    step: int
    identity: RunIdentity

    def conclusion(self) -> str:
        """In how many heads it holds, at the budgets where it holds least and most, and where it fails."""
        told = [
            (f"b={name}", reading.share, text.percent(reading.share, reading.share_interval))
            for name, reading in zip(self._names(), self._stage(), strict=True)
        ]
        said = (
            f"the first stage of {self.selection} keeps more than half of the attention in {extremes(told)} of heads "
            f"({over(self.identity.samples)}); {self._where()}"
        )
        judged = _judged([decided(reading.share_interval, 0.5) for reading in self._stage()])
        return sentence(f"{judged}: {said}" if judged else said)

    def tables(self) -> list[Table | str]:
        """A table per reading of σ, a row per configuration; beneath them the heads below."""
        names = self._names()
        below = [
            f"  {name}: {_below(one, self.identity.layer) or 'none'}"
            for name, one in zip(names, self._stage(), strict=True)
        ]
        listed = ["Heads at most 0.5 in stage 1, as layer-head:", *below]
        return [*(self._table(variable, title, names) for variable, title in READINGS.items()), *listed]

    def notes(self) -> str:
        """What the columns mean."""
        return (
            f"{text.about_intervals(self.identity.samples)} Share > 0.5: mean over samples of each sample's share "
            "of heads. Heads ≤ 0.5: by their mean over samples. Theorem 3 says nothing where σ of stage 1 is at most "
            f"0.5; S is what the paper's figure 4 plots. {text.ABOUT_HELD}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        return {
            "selection": self.selection,
            "step": self.step,
            "samples": self.identity.samples,
            "readings": READINGS,
            "configurations": [one.to_dict(self.identity.layer) for one in self.configs],
        }

    def records(self) -> list[dict[str, Any]]:
        """A row per configuration, reading, layer and head: mean σ in [0, 1], and in how many samples it is ≤ 0.5."""
        return [
            {
                **columns_of(one.config),
                "reading": variable,
                "layer": self.identity.layer(layer),
                "head": head,
                "sigma": float(sigma),
                "samples_at_most_half": int(reading.below[layer, head]),
                "samples": reading.samples,
            }
            for one in self.configs
            for variable, reading in one.readings.items()
            for layer, heads in enumerate(reading.mean)
            for head, sigma in enumerate(heads)
        ]

    def _names(self) -> list[str]:
        return [" ".join(parts) for parts in budgets([one.config for one in self.configs])]

    def _stage(self) -> list[Reading]:
        """What the first stage really holds, of each configuration."""
        return [one.readings[_STAGE] for one in self.configs]

    def _where(self) -> str:
        """The layer with most of the heads that fail, at the budget where most do."""
        place = max(range(len(self.configs)), key=lambda place: int(self._stage()[place].failing.sum()))
        failing = self._stage()[place].failing
        if not failing.any():
            return "no head fails in the mean over samples"
        alike = all((one.failing == failing).all() for one in self._stage())
        at = "" if alike else f" at b={self._names()[place]}"
        total, counts = int(failing.sum()), failing.sum(axis=1)
        heads = counted(total, "head")
        if failing.all():
            return f"all {heads} fail{at}"
        layer = int(counts.argmax())
        if 2 * counts[layer] > total:
            return f"most that fail{at} are in layer {self.identity.layer(layer)} ({counts[layer]} of {heads})"
        return f"{heads} of {failing.size} fail{at}, in {counted(int((counts > 0).sum()), 'layer')}"

    def _table(self, variable: str, title: str, names: list[str]) -> Table:
        columns = ["budget", "#held /\nfull", "#share > 0.5", "#heads ≤ 0.5", "most of them in layer"]
        layer = self.identity.layer
        rows = [_row(name, one, one.readings[variable], layer) for name, one in zip(names, self.configs, strict=True)]
        return Table(f"{title} ({variable})", columns, rows)


def assumption(trace: Trace, selection: str = "two-stage", step: int = 0) -> Assumption:
    """Whether the first stage of a selection keeps more than half of the attention (paper, Assumption 1, figure 4).

    Three readings stand side by side (METHOD: the quantities, Assumption 1): as the paper states σ (`sigma_topk`), as
    stage 1 and the entries that always stay really hold it (`sigma_stage1`), and of the whole kept set
    (`retained_mass`). Each is a share of the attention, in [0, 1], (layer, head), mean over samples.

    Args:
        trace: what was measured.
        selection: whose stage 1 is looked at; or a policy, or `policy:selection`.
        step: decode step.

    Raises TraceError where the trace holds no such configuration, no complete sample or not what is needed, ConfigError
    where it has no such step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> found = pk.assumption(trace, "attention")
        >>> found.configs[0].readings["sigma_stage1"].mean.shape  # layers, heads
        (2, 2)
    """
    configs = sigmas(trace, selection, step)
    return Assumption(selection, configs, step, identity(trace, [one.config for one in configs], step))


def _judged(verdicts: list[int | None]) -> str:
    """Whether it holds in most heads, at every budget or not; empty of samples that are too few to say."""
    if None in verdicts:
        return ""
    if len(set(verdicts)) > 1:
        return "Whether the paper's assumption holds in most heads depends on the budget"
    held = {1: "The paper's assumption holds in most heads", -1: "The paper's assumption fails in most heads"}
    return held.get(verdicts[0] or 0, "Whether the paper's assumption holds in most heads is undecided")


def _row(name: str, one: ConfigAssumption, reading: Reading, named: Callable[[int], int]) -> list[str]:
    counts = sorted(enumerate(reading.failing.sum(axis=1).tolist()), key=lambda pair: -pair[1])
    return [
        folded(name),
        text.held(one.held),
        text.percent(reading.share, reading.share_interval),
        f"{int(reading.failing.sum())} of {reading.failing.size}",
        " ".join(f"{named(layer)}:{heads}" for layer, heads in counts[:5] if heads) or "none",
    ]


def _below(reading: Reading, named: Callable[[int], int]) -> str:
    """The heads below as layer-head, the first of them."""
    found = [f"{named(layer)}-{head}" for layer, head in zip(*reading.failing.nonzero(), strict=True)]
    more = f" … {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
    return " ".join(found[:_MOST_LISTED]) + more
