"""Assumption 1: heads in which a selection's first stage keeps more than half of the attention (paper, figure 4).

There are three readings of σ per configuration, layer and head (METHOD: Assumption 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.columns import Derived, Line, Record, attribute, column, derived, long_form, record, table
from perturbkv.analyses.conclusions import Case, Claim
from perturbkv.analyses.identity import RunIdentity, identity_at
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import EVIDENCE, Floats, Measurements, resolve_step
from perturbkv.analyses.result import Result, add_first_step
from perturbkv.analyses.sides import side_indices
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import OptionalInterval, rare_share_kind
from perturbkv.analyses.verdicts import LESS, MORE
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part
from perturbkv.trace import Trace

ANALYSIS = "assumption"
READINGS = {"sigma_topk": "top ⌊αb⌋ of A", "sigma_stage1": "stage 1, window", "retained_mass": "S: all that is kept"}
"""Variable -> entries whose attention is summed: σ as the paper states it, as the selection's first stage has it, and
of the whole kept set, which the paper's figure 4 plots (METHOD: Assumption 1)."""
_MOST_LISTED, _MOST_LAYERS = 40, 5
"""Largest numbers of heads and of layers that a table lists by name."""


@record
class WeakHead(Record):
    """A head whose mean σ is at most 0.5."""

    layer: int = column("decoder layer, from 0")
    head: int = column("query head, from 0")
    sigma: float = column("mean over samples")
    samples: int = column("samples in which σ ≤ 0.5")


@record
class Reading(Record):
    """σ of one configuration in one reading, such as `sigma_stage1`, head by head.

    Attributes:
        variable: its name in the trace.
        below: (layer, head) number of samples with σ ≤ 0.5.
        samples: number of samples.
        layers: index of each measured decoder layer.
    """

    variable: str
    mean: Floats = column("σ, mean over samples, a share of the attention", key="sigma", dims=("layer", "head"))
    below: NDArray[np.int64]
    samples: int
    share: float = column(
        "share of (sample, head) with σ > 0.5", unit="share", key="share_above_half", heading="#share of\nheads > 0.5"
    )
    share_interval: OptionalInterval = column("over samples", key="share_above_half_interval")
    layer_share: Floats = column(
        "share of (sample, head) with σ > 0.5 within each layer",
        unit="share",
        key="share_above_half_by_layer",
        dims=("layer",),
    )
    layers: tuple[int, ...]

    @property
    def is_weak(self) -> NDArray[np.bool_]:
        """(layer, head) True where the mean σ over samples is at most 0.5."""
        return self.mean <= EVIDENCE

    @derived(key="heads_at_most_half")
    def weak_heads(self) -> tuple[WeakHead, ...]:
        """Heads whose mean σ ≤ 0.5."""
        return tuple(
            WeakHead(self.layers[layer], head, float(self.mean[layer, head]), int(self.below[layer, head]))
            for layer, head in np.argwhere(self.is_weak).tolist()
        )

    @derived(heading="#heads of\nmean ≤ 0.5", json=False)
    def weak_count(self) -> str:
        """Heads whose mean over samples is at most 0.5 in stage 1."""
        return f"{int(self.is_weak.sum())} of {self.is_weak.size}"

    @derived(heading="most of them,\nas layer:heads", json=False)
    def weak_layers(self) -> str:
        """Layers with most of the heads whose mean σ is at most 0.5."""
        counts = sorted(enumerate(self.is_weak.sum(axis=1).tolist()), key=lambda pair: -pair[1])
        return " ".join(f"{self.layers[layer]}:{heads}" for layer, heads in counts[:_MOST_LAYERS] if heads) or "none"

    @derived(heading="heads ≤ 0.5, as layer-head", json=False)
    def weak_names(self) -> str:
        """Heads whose mean σ is at most 0.5, as layer-head."""
        more = f" … {len(self.weak_heads) - _MOST_LISTED} more" if len(self.weak_heads) > _MOST_LISTED else ""
        return " ".join(f"{head.layer}-{head.head}" for head in self.weak_heads[:_MOST_LISTED]) + more or "none"


@record
class ConfigAssumption(Record, section="configuration's σ"):
    """The three readings of σ of one configuration."""

    config: EvictionConfig = column("configuration of this σ")
    cache_share: float = column(
        "entries that its cache holds over those of the full cache", key="held_over_full", heading="#cache\nshare"
    )
    sigma_topk: Reading = column("the ⌊αb⌋ largest of A, as the paper states σ")
    sigma_stage1: Reading = column("what stage 1 and the window really hold")
    retained_mass: Reading = column("S: all that is kept, which the paper's figure 4 plots")

    @property
    def readings(self) -> Mapping[str, Reading]:
        """The readings by variable, in the order of `READINGS`."""
        return {name: getattr(self, name) for name in READINGS}

    stage1_share: ClassVar[Derived[float]] = attribute(
        "sigma_stage1.share",
        "Heads in which stage 1 and the window hold more than 0.5 of the attention, mean over samples",
        unit="share",
        heading="#σ > 0.5,\nstage 1",
        json=False,
    )

    topk_share: ClassVar[Derived[float]] = attribute(
        "sigma_topk.share",
        "Heads in which the ⌊αb⌋ largest of A sum to more than 0.5, as the paper states σ, mean over samples",
        unit="share",
        heading="#σ > 0.5,\ntop ⌊αb⌋",
        json=False,
    )

    kept_share: ClassVar[Derived[float]] = attribute(
        "retained_mass.share",
        "Heads in which S, all that is kept, exceeds 0.5, which the paper's figure 4 plots, mean over samples",
        unit="share",
        heading="#S > 0.5,\nall kept",
        json=False,
    )


def sigmas(trace: Trace, selection: str, step: int | None) -> tuple[ConfigAssumption, ...]:
    """Return σ in its three readings for every configuration of a selection, sorted by α, then budget.

    Raises TraceError where the trace holds no such configuration, no complete sample or lacks a variable that is
    needed, ConfigError where it has no such step.
    """
    measured = Measurements(trace, ANALYSIS, step)
    run, layers = measured.trace.run, trace.layers
    return tuple(
        ConfigAssumption(
            config=run.configs[index],
            cache_share=float(measured.cache_shares[index]),
            **{
                name: _reading(name, measured[name][:, index], measured.share_above(name, EVIDENCE)[:, index], layers)
                for name in READINGS
            },
        )
        for index in side_indices(run, selection)
    )


def _reading(variable: str, sigma: Floats, above: Floats, layers: tuple[int, ...]) -> Reading:
    """Return the reading of σ called `variable` of the decoder layers `layers`.

    `sigma` and `above`, the share of steps with σ > 0.5, are (sample, layer, head).
    """
    return Reading(
        variable=variable,
        mean=sigma.mean(axis=0),
        below=(above < 0.5).sum(axis=0),
        samples=len(sigma),
        share=float(above.mean()),
        share_interval=intervals.of_mean(above.mean(axis=(1, 2)), rare_share_kind(above[0].size)),
        layer_share=above.mean(axis=(0, 2)),
        layers=layers,
    )


@record
class Assumption(
    Result,
    section="assumption",
    rows="heads",
    shown=("cache_share", "stage1_share", "weak_count", "topk_share", "kept_share"),
):
    """Assumption 1 for every budget and α of one selection.

    Attributes:
        identity: of the run.
    """

    selection: str = column("selection whose configurations are shown")
    configs: tuple[ConfigAssumption, ...] = column("one per budget and α: by α, then budget", key="configurations")
    step: int | None = column(text.STEP)
    identity: RunIdentity

    samples: ClassVar[Derived[int]] = attribute("identity.samples", "Complete samples that have the step")

    @derived()
    def readings(self) -> Mapping[str, str]:
        """Reading of σ → entries whose attention is summed."""
        return READINGS

    def claims(self) -> Sequence[Claim]:
        """Return whether Assumption 1 holds in most heads, by the share of heads at each budget and α."""
        readings = [(name, config.sigma_stage1) for name, config in self._with_names(self.configs)]
        cases = [
            Case.number(name, reading.share, reading.share_interval, text.percent, 0.5) for name, reading in readings
        ]
        return [
            Claim(
                "the paper's assumption",
                "holds",
                cases,
                {MORE: "in most heads", LESS: "in fewer than half of the heads"},
                noun="configuration",
            )
        ]

    def scope(self) -> Sequence[str]:
        """Return what the claim is of."""
        return [f"heads with σ > 0.5 in the first stage of {self.selection}", *super().scope()]

    def title(self) -> str:
        """Return the table's title: the share that it shows, and the shared choices."""
        return f"share of heads that keep more than half of the attention: {self.identity.shared}"

    def lines(self) -> Sequence[Line]:
        """Return a line per configuration, with its σ of stage 1."""
        return [Line(name, (config, config.sigma_stage1)) for name, config in self._with_names(self.configs)]

    def details(self) -> Sequence[Part]:
        """Return a table per reading of σ, and the heads whose mean σ of stage 1 is at most 0.5."""
        readings = [
            table(
                f"{title} ({variable})",
                [Line(name, (config.readings[variable],)) for name, config in self._with_names(self.configs)],
                ("share", "weak_count", "weak_layers"),
                self.FIRST,
            )
            for variable, title in READINGS.items()
        ]
        weak = [Line(name, (config.sigma_stage1,)) for name, config in self._with_names(self.configs)]
        return [
            *readings,
            table("heads that fail in stage 1", weak, ("weak_names",), self.FIRST),
            "Theorem 3 says nothing where σ of stage 1 is at most 0.5.",
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per configuration, reading, layer and head: mean σ, and the number of samples with σ ≤ 0.5."""
        return [
            row
            for config in self.configs
            for variable, reading in config.readings.items()
            for row in long_form(
                {**config_columns(config.config), "reading": variable},
                {"layer": reading.layers, "head": range(reading.mean.shape[1])},
                {"sigma": reading.mean, "samples_at_most_half": reading.below, "samples": reading.samples},
            )
        ]


def assumption(trace: Trace, selection: str = "two-stage", step: int | None = None) -> Assumption:
    """Count the heads in which a selection's first stage keeps more than half of the attention (paper, figure 4).

    Three readings stand side by side (METHOD: the quantities, Assumption 1): as the paper states σ (`sigma_topk`), as
    stage 1 and the entries that always stay really hold it (`sigma_stage1`), and of the whole kept set
    (`retained_mass`). Each is a share of the attention, in [0, 1], (layer, head), mean over samples.

    Args:
        trace: what was measured.
        selection: whose stage 1 is looked at; or a policy, or `policy:selection`.
        step: decode step, from 0; None: the mean over the steps of each sample.

    Raises TraceError where the trace holds no such configuration, no complete sample or lacks a variable that is
    needed, ConfigError where it has no such step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> result = pk.assumption(trace, "attention")
        >>> result.configs[0].readings["sigma_stage1"].mean.shape  # layers, heads
        (2, 2)
    """
    configs = sigmas(trace, selection, step)
    resolved, about = resolve_step(trace, step), identity_at(trace, [shown.config for shown in configs], step)
    result = Assumption(selection, configs, resolved, about)
    return add_first_step(result, resolved, partial(assumption, trace, selection, 0))
