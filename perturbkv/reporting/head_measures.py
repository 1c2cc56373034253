"""Measures of a head on a page: their values of every sample, and their means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from perturbkv.analyses.heads.head_comparison import floor_name
from perturbkv.analyses.measurements import Floats, Measurements, measured_steps, only_evicts, texts_that_go_on
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.verdicts import distance_of
from perturbkv.reporting.page_blocks import Scale, linear_scale, log_scale
from perturbkv.trace import Trace

ANALYSIS = "report"
PERTURBATION, BOUND, SHARE, DISTANCE, EFFECT = "perturbation", "bound", "share", "distance", "effect"
_NO_MASS = 1e-12
"""Largest evicted mass that counts as 0: no entry with attention was evicted."""


@dataclass(frozen=True)
class Measure:
    """A quantity that is measured per head.

    Attributes:
        key, name, unit, about: its id, names on the page, and a sentence that explains it.
        kind: perturbation, bound, share, distance or effect.
        variable: the trace's variable; of `gone_distance` the isolated perturbation, from which it is computed.
        distance: l1, l2, cosine or effect; empty for shares.
        source: `isolated` or `propagated` for a perturbation or an effect; empty without a noise floor, and so without
            verdicts.
    """

    key: str
    name: str
    unit: str
    kind: str
    variable: str
    about: str
    distance: str = ""
    source: str = ""

    @property
    def is_smaller_better(self) -> bool:
        """True if smaller values of the measure are better."""
        return self.kind not in (SHARE, EFFECT)

    @property
    def is_subtracted(self) -> bool:
        """True if two configurations are compared by the difference of their values, not by the ratio."""
        return self.kind in (SHARE, EFFECT)

    @property
    def norm(self) -> str | None:
        """The variable of norms by which sums of the measure are divided; None for measures that are averaged."""
        unit = distance_of(self.distance or "l1")
        return None if self.kind in (SHARE, DISTANCE, EFFECT) or unit.angular else f"output_norm{unit.suffix}"

    @property
    def floor(self) -> str:
        """The variable of the noise floor of a measure with a source."""
        return floor_name(self.source, self.distance)

    @property
    def variables(self) -> set[str]:
        """The variables that a trace needs for the measure."""
        floor = [self.floor] if self.source else []
        return {self.variable, *floor, *(["next_token_id"] if self.kind == EFFECT else [])}

    def scale(self, values: Floats) -> Scale:
        """Return the scale of the two-byte codes of the measure's values."""
        if self.kind == EFFECT:
            return linear_scale(values, least_step=float(np.finfo(float).tiny))
        return linear_scale(values) if self.kind == SHARE else log_scale(values)

    def to_dict(self, verdict_index: int | None) -> dict[str, Any]:
        """Return the measure's JSON object for the page.

        `verdict_index`: its index among the measures whose verdicts the page has; None where it has none.
        """
        fields = {name: getattr(self, name) for name in ("key", "name", "unit", "kind", "distance")}
        compare = "difference" if self.is_subtracted else "ratio"
        less = self.is_smaller_better
        return {**fields, "less": less, "about": self.about, "ties": verdict_index, "compare": compare}


def _perturbation_measure(source: str, distance: str) -> Measure:
    """Return the measure of an isolated or propagated perturbation in one distance."""
    unit = distance_of(distance)
    words = {"isolated": "with this layer alone evicted", "propagated": "with all earlier layers evicted too"}
    return Measure(
        key=f"{source}{unit.suffix}",
        name=source if distance == "l1" else f"{source}, {unit.unit}",
        unit="1 − cos" if unit.angular else unit.unit,
        kind=PERTURBATION,
        variable=f"perturbation_{source}{unit.suffix}",
        about=f"How far the head's contribution to the attention output moves, {words[source]} ({unit.unit}).",
        distance=distance,
        source=source,
    )


def _effect_measure(source: str) -> Measure:
    """Return the measure of what a head's isolated or propagated loss changes the text's log p by."""
    again = "" if source == "isolated" else "; a loss counts again in later layers"
    return Measure(
        key=f"effect_{source}",
        name=f"Δ log p, {source}",
        unit="nat",
        kind=EFFECT,
        variable=f"effect_{source}",
        about=f"What the head's {source} loss changes the text's log p by, to first order, mean over steps{again}.",
        distance="effect",
        source=source,
    )


MEASURES = (
    *(
        _perturbation_measure(source, distance)
        for distance in ("l1", "l2", "cosine")
        for source in ("isolated", "propagated")
    ),
    Measure("theta", "θ", "L1", BOUND, "theta", "Theorem 2's bound of the isolated perturbation.", "l1"),
    Measure("theta_hat", "θ̂", "L1", BOUND, "theta_hat", "Theorem 3's bound; evidence only where σ > 0.5.", "l1"),
    Measure(
        "theta_hat_relax", "θ̂ relaxed", "L1", BOUND, "theta_hat_relax",
        "Theorem 4's bound; holds only where σ > 0.5.", "l1",
    ),
    Measure("retained_mass", "S", "share", SHARE, "retained_mass", "Attention of the kept entries."),
    Measure(
        "sigma_stage1", "σ, stage 1", "share", SHARE, "sigma_stage1",
        "Attention of stage 1 and of what is always kept (Assumption 1).",
    ),
    Measure(
        "sigma_topk", "σ, top ⌊αb⌋", "share", SHARE, "sigma_topk", "Attention of the top ⌊αb⌋ entries (Assumption 1).",
    ),
    Measure(
        "gone_distance", "‖μ_gone − μ_kept‖", "L1", DISTANCE, "perturbation_isolated",
        "How unlike what stays is what goes: the isolated perturbation over the attention 1 − S that goes.", "l1",
    ),
    _effect_measure("isolated"),
    _effect_measure("propagated"),
)  # fmt: skip
"""All measures in the page's order."""
STEPPED = ("isolated", "propagated", "retained_mass", "sigma_stage1", "effect_isolated", "effect_propagated")
"""Measures that are shown per decode step."""
FIRST = ("isolated", "propagated", "retained_mass", "sigma_stage1", "theta_hat", "theta", "gone_distance")
"""Measures whose single samples have priority where a page has too few bytes for all."""


_OF_STAGE_1 = ("theta_hat", "theta_hat_relax", "sigma_stage1", "sigma_topk")
"""Variables that need a configuration with stages."""


def available_measures(trace: Trace) -> tuple[Measure, ...]:
    """Return the measures whose variables a trace has.

    Those of stage 1 are left out where no configuration has stages, effects where every text is a single token.
    """
    staged = any(config.is_staged for config in trace.run.configs)
    left_out = () if staged else _OF_STAGE_1
    if "next_token_id" in trace.arrays and not texts_that_go_on(trace, ANALYSIS).any():
        left_out = (*left_out, *(one.variable for one in MEASURES if one.kind == EFFECT))
    known = [one for one in MEASURES if one.variables <= set(trace.arrays)]
    return tuple(one for one in known if one.variable not in left_out)


def sample_values(trace: Trace, measure: Measure) -> Floats:
    """Return a measure's values (sample, config, layer, head), means over the decode steps of each sample.

    Effects are NaN in samples none of whose steps predicts a token of the text. Raises the TraceError of
    `Measurements`.
    """
    stored = Measurements(trace, ANALYSIS)[measure.variable]
    if measure.kind == EFFECT:
        return np.where(texts_that_go_on(trace, ANALYSIS)[:, None, None, None], stored, np.nan)
    return _evicted_distance(trace, stored) if measure.kind == DISTANCE else stored


def mean_over_samples(values: Floats) -> Floats:
    """Return (config, layer, head) the mean over samples, ignoring NaN; NaN where all samples are NaN."""
    known = ~np.isnan(values)
    if known.all():
        return np.asarray(values.mean(axis=0))
    return np.asarray(ratio(np.where(known, values, 0).sum(axis=0), known.sum(axis=0)))


def means_by_step(trace: Trace, measure: Measure) -> Floats:
    """Return a measure's mean (config, step, layer, head) over the samples that have the step.

    Steps end with the last step of the longest sample. NaN where any of these samples has NaN, unlike in
    `mean_over_samples`.
    """
    counts = measured_steps(trace)
    most = int(counts.max())
    stored = Measurements(trace, ANALYSIS, by_step=True)[measure.variable][:, :, :most]
    has_step = (np.arange(most) < counts[:, None])[:, None, :, None, None]  # (sample, 1, step, 1, 1)
    return np.asarray(np.where(has_step, stored, 0).sum(axis=0) / has_step.sum(axis=0))


def _evicted_distance(trace: Trace, isolated: Floats) -> Floats:
    """Return ‖μ_gone − μ_kept‖₁, between the means of evicted and of kept entries; NaN where S = 1.

    It is L / (1 − S) (METHOD: what goes and what stays). NaN too where entries are stored in few bits, keys are moved
    or outputs are corrected: L is then not of evicted entries alone.
    """
    gone = 1 - Measurements(trace, ANALYSIS)["retained_mass"]
    exact = only_evicts(trace)[:, None, None]
    return np.asarray(ratio(isolated, np.where((gone > _NO_MASS) & exact, gone, 0)))
