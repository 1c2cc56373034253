"""Tightness of the bounds of the perturbation, and the order of selections by them (paper, Theorems 2–4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.bounds.rank_agreement import BOUNDS, CONTENDERS, Concordance, RankAgreement, compare_orders
from perturbkv.analyses.bounds.ratios import (
    LEVELS,
    Tightness,
    check_inequalities,
    left_out_note,
    read_bounds,
    select_evicting,
    tightness,
)
from perturbkv.analyses.columns import Line, column, derived, long_form, record, table
from perturbkv.analyses.conclusions import Case, Claim
from perturbkv.analyses.identity import RunIdentity, identity_at
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Floats, Measurements, measured_steps
from perturbkv.analyses.names import short_names
from perturbkv.analyses.result import Result, add_first_step
from perturbkv.analyses.sides import side_indices
from perturbkv.analyses.stats.intervals import MIN_SAMPLES
from perturbkv.analyses.text import factor, sample_note
from perturbkv.analyses.verdicts import LESS, MORE
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import Part, plural
from perturbkv.trace import Trace

if TYPE_CHECKING:
    from perturbkv.captions import CaptionedFigure


ANALYSIS = "bound-tightness"
_BOUND = "θ̂"
_LOW, _MEDIAN, _HIGH = (LEVELS.index(level) for level in (0.05, 0.5, 0.95))
"""Indices of three quantiles in `LEVELS`."""
_PER_HEAD = ("least", "median", "largest")
_BOUND_RATIOS = ("theta_theta_hat", "hat_relax")


@record
class BoundTightness(
    Result, section="bound-tightness", rows="heads", shown=("cache_share", "share", "l_theta", "l_theta_hat")
):
    """The bounds of all configurations of a trace, shown for one selection.

    Attributes:
        selection: the one whose bounds are shown.
        run: the run's choices.
        identity: of the run, with the configurations shown.
        left_out: configurations that also quantise, correct or move keys, to which the theorems do not apply.
    """

    selection: str
    configs: tuple[Tightness, ...] = column("one per configuration, in the trace's order", key="configurations")
    inequalities_checked: Mapping[str, int] = column(
        "inequality → (sample, configuration, head) that it was checked in"
    )
    agreements: tuple[RankAgreement, ...] = column("one per setting of several selections", key="rank_agreement")
    step: int | None = column(text.STEP)
    run: RunConfig
    identity: RunIdentity
    left_out: tuple[EvictionConfig, ...] = ()

    @derived()
    def levels(self) -> tuple[float, ...]:
        """Quantiles along the axes called level."""
        return LEVELS

    @derived()
    def per_head_levels(self) -> tuple[str, ...]:
        """Numbers along the last axis of `by_head`."""
        return ("least", "median", "largest over samples")

    @derived()
    def violations(self) -> int:
        """Number of violated bounds: 0, as a violation is an error."""
        return 0

    @property
    def shown(self) -> tuple[Tightness, ...]:
        """The configurations of the selection, by α, then budget."""
        return tuple(self.configs[index] for index in side_indices(self.run, self.selection))

    def claims(self) -> Sequence[Claim]:
        """Return by what factor θ̂ exceeds the perturbation L, and whether a lower θ̂ means a lower L at one stage 1."""
        levels = [(name, config.spreads["L/θ̂"].evidence) for name, config in self._with_names(self.shown)]
        factors = [Case(name, float(each[_MEDIAN]), _factor_text(each)) for name, each in levels]
        subject = f"the ratio of the paper's bound {_BOUND} to the perturbation of {self.selection}"
        tightness = Claim(subject, "is", factors, missing=self._no_ratio_reason())
        pairs = self._theta_hat_pairs()
        known = [(name, pair) for name, pair in pairs if pair.samples >= MIN_SAMPLES]
        shares = [Case.number(name, pair.share, pair.share_interval, text.percent, 0.5) for name, pair in known]
        gains = [Case.number(name, pair.gain, pair.gain_interval, text.difference_in_points, 0) for name, pair in known]
        few = "too few samples hold heads in which σ > 0.5 and both differ" if pairs else "the trace lacks one of them"
        lower = "the one of two-stage and two-stage-uniform with the lower θ̂"
        order = Claim(
            lower,
            "perturbs less",
            shares,
            {MORE: "in most heads", LESS: "in fewer than half of the heads"},
            noun="setting",
            missing=few,
        )
        often = {MORE: "more often", LESS: "less often"}
        picks = Claim("θ̂", "picks the better one", gains, often, "the attention given up (1 − S)", noun="setting")
        return [tightness, order, *([picks] if known else [])]

    def scope(self) -> Sequence[str]:
        """Return what the claims are of: heads, and the numbers of samples behind the factor and behind the order."""
        evicted = max(config.evicted_samples for config in self.shown)
        known = [pair.samples for _, pair in self._theta_hat_pairs() if pair.samples >= MIN_SAMPLES]
        ordered = min(known, default=evicted)
        order = [f"order: n = {plural(ordered, 'sample')}"] if ordered != evicted else []
        heads = "median over heads with σ > 0.5, nine in ten in parentheses"
        return list(filter(None, [heads, self.identity.steps, sample_note(evicted), *order]))

    def title(self) -> str:
        """Return the table's title: the ratios that it shows, and the shared choices."""
        return f"ratios where σ > 0.5, median and 5 to 95 % of samples and heads: {self.identity.shared}"

    def lines(self) -> Sequence[Line]:
        """Return a line per configuration of the selection."""
        return [Line(name, (config, config.cells())) for name, config in self._with_names(self.shown)]

    def caveats(self) -> Sequence[str]:
        """Return the note on left-out configurations; empty for none."""
        return left_out_note(self.left_out)

    def details(self) -> Sequence[Part]:
        """Return the checked inequalities, further ratios, and the order of selections by each bound."""
        counts = ", ".join(f"{name} ({count:,})" for name, count in self.inequalities_checked.items())
        flagged = [Line(name, (config.cells(flagged=True),)) for name, config in self._with_names(self.shown)]
        named = list(zip(self._setting_names(), self.agreements, strict=True))
        ranks = [
            Line(name if index == 0 else "", (rho,))
            for name, agreement in named
            for index, rho in enumerate(rho for rho in agreement.correlations if set(rho.selections) <= {*CONTENDERS})
        ]
        picks = [
            Line(f"{name} {pair.first} or {pair.second}".strip() if pair.bound == BOUNDS[0] else "", (pair,))
            for name, agreement in named
            for pair in agreement.shown
        ]
        numbers, first = ("values", "samples"), "setting"
        title = f"the better of two selections, by a bound; {_BOUND} where both have one stage 1, heads with σ > 0.5"
        return [
            f"No violation over all configurations; checked {counts}.",
            "L: isolated perturbation; 1 − S: attention that was given up, which knows no values.",
            table("ratios of the bounds where σ > 0.5", self.lines(), _BOUND_RATIOS, self.FIRST),
            table(
                "ratios where σ ≤ 0.5, no evidence for Theorems 3 and 4",
                flagged,
                ("share", "l_theta", "l_theta_hat", *_BOUND_RATIOS),
                self.FIRST,
            ),
            table("order of selections by a bound and by L, all heads", ranks, ("bound", "mean", *numbers), first)
            if ranks
            else "Rank correlation needs three or more selections of one budget; this trace has fewer.",
            *([table(title, picks, ("bound", "agreement", "advantage", *numbers), first)] if picks else []),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per configuration, ratio, layer and head: least, median and largest over the samples.

        `sigma_at_most_half` is the share of the samples in which σ ≤ 0.5.
        """
        return [
            row
            for config in self.configs
            for name, spread in config.spreads.items()
            for row in long_form(
                {**config_columns(config.config), "ratio": name},
                {
                    "layer": [self.identity.layer(layer) for layer in range(len(config.flagged_heads))],
                    "head": range(config.flagged_heads.shape[1]),
                },
                {
                    **{name: np.where(np.isnan(each), None, each)
                       for name, each in zip(_PER_HEAD, spread.by_head, strict=True)},
                    "sigma_at_most_half": config.flagged_heads,
                    "samples": config.evicted_samples,
                },
            )
        ]  # fmt: skip

    def plot_heads(self, width_mm: float | None = None, style: str = "screen") -> CaptionedFigure:
        """Return a figure of L/θ as maps of layer × head, one per budget."""
        return self._draw("BoundTightness.plot_heads", width_mm, style)

    def _no_ratio_reason(self) -> str:
        """Return the reason why θ̂ / L is unknown, as a clause."""
        if not any(config.evicted_samples for config in self.shown):
            return "nothing was evicted"
        if all(config.flagged_share == 1 for config in self.shown):
            return "stage 1 keeps at most half of the attention in every head, where Theorem 3 says nothing"
        return "perturbation and bounds are 0"

    def _theta_hat_pairs(self) -> list[tuple[str, Concordance]]:
        """Return (setting's name, comparison by θ̂) of every two selections of one stage 1."""
        named = zip(self._setting_names(), self.agreements, strict=True)
        return [(name, pair) for name, one in named for pair in one.pairs if pair.bound == _BOUND]

    def _setting_names(self) -> list[str]:
        """Return a short name per setting of several selections."""
        return short_names([agreement.most_specific_config for agreement in self.agreements], "selection")


def bound_tightness(trace: Trace, selection: str = "two-stage", step: int | None = None) -> BoundTightness:
    """Compare the paper's bounds with the perturbation: how tight they are, and whether they order selections alike.

    L is the isolated L1 perturbation; L/θ, L/θ̂, θ/θ̂ and θ̂/θ̂_relax are plain numbers in [0, 1] where σ > 0.5. All
    configurations are measured and checked; tables and figures show those of one selection.

    Args:
        trace: what was measured.
        selection: whose bounds tables and figures show; or a policy, or `policy:selection`.
        step: decode step, from 0; None: the mean over the steps of each sample.

    Raises BoundError where a bound is violated (METHOD: L ≤ θ ≤ θ̂, and θ̂ ≤ θ̂_relax where σ > 0.5), TraceError where
    the trace holds no such configuration, no complete sample or lacks a variable that is needed, ConfigError where it
    has no such step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> result = pk.bound_tightness(trace, "attention")
        >>> result.shown[0].spreads["L/θ̂"].by_head.shape  # least, median and largest; layers; heads
        (3, 2, 2)
    """
    trace, left_out = select_evicting(trace)
    measured = Measurements(trace, ANALYSIS, step)
    bounds, shares, checked = read_bounds(measured), measured.cache_shares, Counter[str]()
    for one in range(int(measured_steps(trace).max())) if measured.step is None else (measured.step,):
        checked.update(check_inequalities(read_bounds(Measurements(trace, ANALYSIS, one))))
    result = BoundTightness(
        selection=selection,
        inequalities_checked=dict(checked),
        configs=tuple(
            tightness(config, float(shares[index]), bounds.select(index)) for index, config in enumerate(bounds.configs)
        ),
        agreements=compare_orders(bounds, trace.run),
        step=measured.step,
        run=trace.run,
        identity=identity_at(trace, [trace.run.configs[index] for index in side_indices(trace.run, selection)], step),
        left_out=left_out,
    )
    return add_first_step(result, measured.step, partial(bound_tightness, trace, selection, 0))


def _factor_text(ratios: Floats) -> str:
    """Return a factor by which the bound exceeds L, as median and 5 to 95 % of heads: '3.1 × (1.6 to 8.2)'.

    `ratios` are the quantiles at `LEVELS` of the inverse, L over the bound; of a ratio of 0 the factor is infinite.
    """
    median, largest, least = (
        1 / float(ratios[index]) if ratios[index] else float("inf") for index in (_MEDIAN, _LOW, _HIGH)
    )
    return f"{factor(median)} ({text.decimal(least, digits=1)} to {text.decimal(largest, digits=1)})"
