"""Bounds of the perturbation, their ratios and their inequalities (paper, Theorems 2–4).

L ≤ θ ≤ θ̂ holds always, θ̂ ≤ θ̂_relax where σ > 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isnan

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.measurements import EVIDENCE, Floats, Measurements, only_evicts
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import quantiles, ratio
from perturbkv.analyses.stats.intervals import OptionalInterval, rare_share_kind
from perturbkv.analyses.text import complement, decimal
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import BoundError, TraceError
from perturbkv.trace import Trace

RELATIVE_SLACK = 1e-5
"""Relative slack: θ sums norms ν in float32, L float64 products, and their rounding is no violation."""
ABSOLUTE_SLACK = 1e-12
"""Slack relative to ‖o_h‖₁: where nearly everything is kept, both sides are rounding of a float64 subtraction."""


@dataclass(frozen=True)
class Bounds:
    """L and its bounds, (sample, config, layer, head) each, or (sample, layer, head) of one configuration.

    Attributes:
        perturbation: L, isolated.
        theta, theta_hat, theta_hat_relax: its bounds.
        sigma: of stage 1 and the always-kept entries, the least of a sample's steps.
        mass: S.
        scale: ‖o_h‖₁, with an axis for `config` of length 1.
        evicted: (sample, config) True where the configuration evicted anything of the sample.
        configs, sample_ids, layers: of the axes.
    """

    perturbation: Floats
    theta: Floats
    theta_hat: Floats
    theta_hat_relax: Floats
    sigma: Floats
    mass: Floats
    scale: Floats
    evicted: NDArray[np.bool_]
    configs: tuple[EvictionConfig, ...]
    sample_ids: tuple[str, ...]
    layers: tuple[int, ...]

    def select(self, index: int) -> Bounds:
        """Return L and bounds of the configuration at an index, over the samples in which it evicted entries.

        Their arrays, but for the axes' names, lose the axis `config`.
        """
        samples = self.evicted[:, index]
        arrays = {
            field.name: getattr(self, field.name)[samples, 0 if field.name == "scale" else index]
            for field in fields(self)
            if field.name not in ("configs", "sample_ids", "layers")
        }
        names = tuple(name for name, evicts in zip(self.sample_ids, samples, strict=True) if evicts)
        return Bounds(**arrays, configs=(self.configs[index],), sample_ids=names, layers=self.layers)


def select_evicting(trace: Trace) -> tuple[Trace, tuple[EvictionConfig, ...]]:
    """Return the trace of the configurations that the theorems apply to, and those left out.

    Left out is what quantises, corrects, moves keys, or holds entries of its own. Raises TraceError where no
    configuration is left.
    """
    evicting = only_evicts(trace)
    left_out = tuple(config for config, evicts in zip(trace.run.configs, evicting, strict=True) if not evicts)
    if not left_out:
        return trace, ()
    if len(left_out) == len(trace.run.configs):
        raise TraceError(
            "expected a configuration that only evicts, as bounds speak of eviction alone, got "
            f"{', '.join(config.label() for config in left_out)}"
        )
    part = trace.sel(where=lambda config: config not in left_out)
    return replace(part, source=trace.source, digest=trace.digest), left_out


def left_out_note(left_out: Sequence[EvictionConfig]) -> list[str]:
    """Return the note on left-out configurations, as a list; empty for none."""
    labels = ", ".join(config.label() for config in left_out)
    why = "bounds speak of eviction alone, not of few bits, moved keys, corrected outputs or other entries"
    return [f"Left out, as {why}: {labels}."] if left_out else []


def read_bounds(measured: Measurements) -> Bounds:
    """Return L and its bounds for all configurations. Raises TraceError where the trace lacks a variable."""
    trace = measured.trace
    names = {
        "perturbation": "perturbation_isolated",
        "theta": "theta",
        "theta_hat": "theta_hat",
        "theta_hat_relax": "theta_hat_relax",
        "mass": "retained_mass",
    }
    arrays = {field: measured[name] for field, name in names.items()}
    return Bounds(
        **arrays,
        sigma=measured.least("sigma_stage1"),  # below 0.5 a step's θ̂ exceeds its θ̂_relax, and bears most on the mean
        scale=measured["output_norm"][:, None],
        evicted=measured["evicted"] > 0,
        configs=trace.run.configs,
        sample_ids=measured.sample_ids,
        layers=trace.layers,
    )


def check_inequalities(bounds: Bounds) -> dict[str, int]:
    """Return inequality -> number of values checked. Raises BoundError at the first violation."""
    everywhere = np.broadcast_to(bounds.evicted[:, :, None, None], bounds.theta.shape)
    return {
        "L ≤ θ": _check_inequality("L", bounds.perturbation, "θ", bounds.theta, bounds, everywhere),
        "θ ≤ θ̂": _check_inequality("θ", bounds.theta, "θ̂", bounds.theta_hat, bounds, everywhere),
        "θ̂ ≤ θ̂_relax": _check_inequality(
            "θ̂", bounds.theta_hat, "θ̂_relax", bounds.theta_hat_relax, bounds, everywhere & (bounds.sigma > EVIDENCE)
        ),
    }


def _check_inequality(
    below: str, lower: Floats, above: str, upper: Floats, bounds: Bounds, where: NDArray[np.bool_]
) -> int:
    """Return the number of checked values. Raises BoundError at the first violation of `lower` ≤ `upper`.

    Args:
        below: name of `lower` in the message.
        lower: (sample, config, layer, head).
        above: name of `upper`.
        upper: likewise.
        bounds: that both are of; their scale sets the slack, their axes name the place.
        where: True where the inequality must hold.
    """
    slack = RELATIVE_SLACK * np.abs(upper) + ABSOLUTE_SLACK * bounds.scale
    violated = where & (lower > upper + slack)
    if violated.any():
        sample, config, layer, head = (int(index) for index in np.argwhere(violated)[0])
        raise BoundError(
            f"{below} ≤ {above}",
            f"{lower[sample, config, layer, head]:.6g} > {upper[sample, config, layer, head]:.6g}",
            f"layer {bounds.layers[layer]}, head {head} of sample '{bounds.sample_ids[sample]}', "
            f"'{bounds.configs[config].label()}'",
            int(violated.sum()),
        )
    return int(where.sum())


RATIOS = ("L/θ", "L/θ̂", "θ/θ̂", "θ̂/θ̂_relax")
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
"""Quantiles over samples and heads: the axis `level`."""
OVER_SAMPLES = (0.0, 0.5, 1.0)
"""Quantiles per head, which has one value per sample: least, median, largest."""
MASS_EDGES = np.linspace(0, 1, 21)
"""Edges of the bins of S."""


@record
class Spread(Record):
    """The distribution of one ratio over samples and heads.

    Attributes:
        by_layer: (level, layer) quantiles over samples and heads with σ > 0.5.
        by_head: (least/median/largest, layer, head) over all samples; `Tightness.flagged_heads` says where σ ≤ 0.5.
    """

    evidence: Floats = column("where σ > 0.5; null where no sample of any head has it", dims=("level",))
    flagged: Floats = column("where σ ≤ 0.5, which is no evidence", key="sigma_at_most_half", dims=("level",))
    by_layer: Floats
    by_head: Floats

    @derived(key="by_layer", dims=("layer", "level"))
    def layer_levels(self) -> Floats:
        """Quantiles over samples and heads with σ > 0.5."""
        return self.by_layer.T

    @derived(key="by_head", dims=("layer", "head", "least/median/largest"))
    def head_levels(self) -> Floats:
        """Least, median and largest over all samples."""
        return np.moveaxis(self.by_head, 0, -1)


@record
class MassCurve(Record, section="mass bins"):
    """The distribution of L/θ in bins of the retained mass S.

    Attributes:
        quantiles: (level, bin) of L/θ at `LEVELS`.
    """

    count: NDArray[np.int64] = column("values, one per sample and head", dims=("bin",))
    quantiles: Floats

    @derived(dims=("edge",))
    def edges(self) -> Floats:
        """Edges of the bins of S."""
        return MASS_EDGES

    @derived(key="L/θ", dims=("bin", "level"))
    def bin_levels(self) -> Floats:
        """Quantiles of L/θ."""
        return self.quantiles.T


@record
class RatioCells(Record):
    """Medians of the four ratios, each with the 5 % and 95 % quantile, as a table shows them."""

    share: float = column("(sample, head) with such σ, a share of all", unit="share", heading="#share of\nheads")
    share_interval: OptionalInterval = column("over samples")
    l_theta: str = column("perturbation over the bound of Theorem 2: median and 5 to 95 %", heading="#L/θ")
    l_theta_hat: str = column("perturbation over the bound of Theorem 3", heading="#L/θ̂")
    theta_theta_hat: str = column("bound of Theorem 2 over that of Theorem 3", heading="#θ/θ̂")
    hat_relax: str = column("bound of Theorem 3 over that of Theorem 4", heading="#θ̂/θ̂_relax")


@record
class Tightness(Record):
    """The tightness of one configuration's bounds.

    Attributes:
        flagged_heads: (layer, head) share of the samples in which σ ≤ 0.5.
    """

    config: EvictionConfig = column("configuration of these bounds")
    cache_share: float = column(
        "entries that its cache holds over those of the full cache", key="held_over_full", heading="#cache\nshare"
    )
    evicted_samples: int = column("samples in which anything was evicted; only these count")
    spreads: Mapping[str, Spread] = column("L/θ, L/θ̂, θ/θ̂, θ̂/θ̂_relax → how it is distributed", key="ratios")
    mass: MassCurve = column("L/θ against S", key="retained_mass_bins")
    retained_mass: float = column("mean S, a share of the attention")
    flagged_share: float = column("share of (sample, head) with σ ≤ 0.5", key="sigma_at_most_half_share", unit="share")
    flagged_share_interval: OptionalInterval = column("over samples", key="sigma_at_most_half_share_interval")
    flagged_heads: Floats = column(
        "share of the samples in which σ ≤ 0.5", key="sigma_at_most_half_by_head", unit="share", dims=("layer", "head")
    )

    def cells(self, flagged: bool = False) -> RatioCells:
        """Return the ratios as table cells, over heads with σ > 0.5, or with `flagged` over those with σ ≤ 0.5."""
        share, ends = self.flagged_share, self.flagged_share_interval
        shown = (share, ends) if flagged else (1 - share, complement(ends))
        return RatioCells(
            *shown,
            *(_quantile_cell(spread.flagged if flagged else spread.evidence) for spread in self.spreads.values()),
        )


def _quantile_cell(quantiles: Floats) -> str:
    """Return a table cell from quantiles at `LEVELS`: the median, and below it the 5 and 95 % quantiles; NaN a dash."""
    low, _, median, _, high = (float(value) for value in quantiles)
    return decimal(median) if isnan(median) else f"{decimal(median)}\n{decimal(low)}–{decimal(high)}"


def tightness(config: EvictionConfig, cache_share: float, bounds: Bounds) -> Tightness:
    """Return the tightness of one configuration, from the `bounds` of that configuration alone.

    Means and shares are NaN where it evicted nothing in any sample.
    """
    flagged = bounds.sigma <= EVIDENCE
    perturbation_over_theta = ratio(bounds.perturbation, bounds.theta)
    values = (
        perturbation_over_theta,
        ratio(bounds.perturbation, bounds.theta_hat),
        ratio(bounds.theta, bounds.theta_hat),
        ratio(bounds.theta_hat, bounds.theta_hat_relax),
    )
    known = ~np.isnan(perturbation_over_theta)
    bins = np.clip(np.digitize(bounds.mass[known], MASS_EDGES) - 1, 0, len(MASS_EDGES) - 2)
    inside = [perturbation_over_theta[known][bins == index] for index in range(len(MASS_EDGES) - 1)]
    return Tightness(
        config=config,
        cache_share=cache_share,
        evicted_samples=len(flagged),
        spreads={name: _spread(each, flagged) for name, each in zip(RATIOS, values, strict=True)},
        mass=MassCurve(
            count=np.array([len(part) for part in inside]),
            quantiles=np.stack([quantiles(part, LEVELS) for part in inside], axis=1),
        ),
        retained_mass=float(bounds.mass.mean()) if bounds.mass.size else float("nan"),
        flagged_share=float(flagged.mean()) if flagged.size else float("nan"),
        flagged_share_interval=intervals.of_mean(
            flagged.mean(axis=(1, 2)), rare_share_kind(int(np.prod(flagged.shape[1:])))
        ),
        flagged_heads=flagged.mean(axis=0) if len(flagged) else np.full(flagged.shape[1:], np.nan),
    )


def _spread(values: Floats, flagged: NDArray[np.bool_]) -> Spread:
    """Return the distribution of a (sample, layer, head) ratio, over heads with σ > 0.5 and over `flagged` heads."""
    evidence = np.where(flagged, np.nan, values)
    layers = evidence.shape[1]
    return Spread(
        evidence=quantiles(evidence, LEVELS),
        flagged=quantiles(np.where(flagged, values, np.nan), LEVELS),
        by_layer=quantiles(evidence.swapaxes(0, 1).reshape(layers, -1), LEVELS, axis=1),
        by_head=quantiles(values, OVER_SAMPLES, axis=0),
    )
