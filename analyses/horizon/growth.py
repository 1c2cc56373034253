"""Perturbation over the decode steps: its growth from the first third to the last, one selection's advantage, drafts.

Steps end where a sample's text ends, so each sample has thirds of its own steps. Perturbation within two noise floors
is rounding and has no growth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.columns import Derived, Record, attribute, column, derived, interval, record
from perturbkv.analyses.conclusions import Case
from perturbkv.analyses.horizon.compressions import Compressions, compressions_of, factor_of
from perturbkv.analyses.measurements import Floats, Measurements, known_steps, measured_steps
from perturbkv.analyses.names import PairRecord
from perturbkv.analyses.sides import Pair, pairs
from perturbkv.analyses.stats import intervals, permutation
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import POSITIVE, RATIO, Band, Interval, OptionalInterval, StatisticKind
from perturbkv.analyses.stats.permutation import SignFlips
from perturbkv.analyses.verdicts import TIE_FLOORS
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

ANALYSIS = "horizon"
LEAST_STEPS = 3
KINDS = {"propagated": "perturbation_propagated", "isolated": "perturbation_isolated"}
FLOORS = {"propagated": "noise_floor", "isolated": "noise_floor_isolated"}
DRAFTED = 4
"""Tokens that are drafted before the full cache verifies them."""
STEP = ("step",)
HEADS = ("layer", "head")


@dataclass(frozen=True)
class Steps:
    """The decode steps of each sample: `measured` (sample, step) is True where the sample has the step."""

    measured: NDArray[np.bool_]

    @property
    def long_enough(self) -> NDArray[np.bool_]:
        """True for samples of three steps or more, (sample,)."""
        return np.asarray(self.measured.sum(axis=1) >= LEAST_STEPS)

    def thirds(self, *arrays: Floats, known: NDArray[np.bool_] | None = None) -> tuple[list[Floats], list[Floats]]:
        """Return means of (sample, step, …) arrays over the first and the last third of each long sample's steps.

        Of these, only steps that are `known` (sample, step) count, by default all; the first and the last must be.
        """
        counts = self.measured.sum(axis=1)[:, None]
        step, third = np.arange(self.measured.shape[1]), counts // 3
        masks = (step < third, (step >= counts - third) & (step < counts))
        first, last = (
            [
                np.einsum("st,st...->s...", mask / mask.sum(axis=1, keepdims=True), array[self.long_enough])
                for array in arrays
            ]
            for mask in ((mask if known is None else mask & known)[self.long_enough] for mask in masks)
        )
        return first, last


def steps_of(trace: Trace) -> Steps:
    """Return the decode steps of a trace's complete samples. Raises ConfigError where all have fewer than three."""
    counts = measured_steps(trace)
    if counts.max() < LEAST_STEPS:
        raise ConfigError(
            f"{ANALYSIS} needs at least {LEAST_STEPS} decode steps, got a trace of {counts.max()}; use --steps 32"
        )
    return Steps(np.arange(counts.max()) < counts[:, None])


def variable_by_step(measured: Measurements, name: str, steps: Steps, config: int | None = None) -> Floats:
    """Return a variable as (sample, step, …), of one configuration if an index is given; 0 at steps without values.

    `measured` is of all steps.
    """
    array = measured[name]
    array = (array if config is None else array[:, config])[:, : steps.measured.shape[1]]
    mask = steps.measured.reshape(*steps.measured.shape, *[1] * (array.ndim - 2))
    return np.where(mask, array, 0.0)


@record
class Curve(Record, section="curve over steps"):
    """Isolated or propagated perturbation of one configuration over the decode steps."""

    kind: str = column("propagated or isolated", heading="kind")
    relative: Floats = column(
        "Σ L / Σ ‖o_h‖₁ over all heads and the samples that have the step; null where isolated L is not measured",
        dims=STEP,
    )
    relative_interval: Band = column(
        "over the samples that have the step; null ends where these are fewer than two, null of one sample"
    )
    first: float = column(
        "Σ L / Σ ‖o_h‖₁ over each sample's first third of its steps", heading="#first\nthird", text=text.three_digits
    )
    last: float = column(
        "Σ L / Σ ‖o_h‖₁ over each sample's last third of its steps", heading="#last\nthird", text=text.three_digits
    )
    growth: float = column("last third over first; null where either is within two noise floors", heading="#growth")
    growth_interval: OptionalInterval = interval("over the samples of three steps or more")
    head_growth: Floats = column("last third over first of each head", dims=HEADS)
    sign_flips: SignFlips = column(
        "heads that grow or shrink beyond chance, by their samples' log growth; above 0: grow"
    )

    head_verdict: ClassVar[Derived[NDArray[np.int8]]] = attribute(
        "sign_flips.significant", "1 grows, −1 shrinks, 0 undecided; beyond chance", dims=HEADS
    )
    head_counts: ClassVar[Derived[str]] = attribute(
        "sign_flips.counts",
        "Heads that grow / shrink beyond chance (sign flips, corrected)",
        heading="#heads\n+ / −",
        json=False,
    )


@record
class Draft(Record, section="draft"):
    """Tokens that an evicted cache drafts along the text, as the full cache takes them by rejection sampling.

    Acceptances of successive steps count as independent given the text, whatever tokens were drafted before.
    """

    by_step: Floats = column(
        "mean probability that a drafted token is taken, over the samples that have the step", unit="share", dims=STEP
    )
    taken: float = column(
        "probability that a drafted token is taken, Σ min(p, q) of both caches' distributions of the next: mean over "
        "each sample's steps, then over samples",
        unit="share", heading="#draft\ntaken",
    )  # fmt: skip
    taken_interval: OptionalInterval = interval()
    in_a_row: float = column(
        f"expected number of {DRAFTED} drafted tokens that are taken before the first that is not, mean over every "
        "successive four steps of a sample, then over samples; null where no sample has four",
        unit="tokens", heading=f"#taken in a row\nof {DRAFTED} drafted",
    )  # fmt: skip
    in_a_row_interval: OptionalInterval = interval("over the samples of four steps or more")

    @derived(
        unit="tokens",
        heading="#tokens per\nverification",
        interval=lambda draft: _one_more(draft.in_a_row_interval),
    )
    def per_verification(self) -> float:
        """Tokens that one verification gives: those taken in a row, and the full cache's own behind them."""
        return self.in_a_row + 1


def _one_more(ends: OptionalInterval) -> OptionalInterval:
    """Return the interval of a number that is larger by one."""
    return ends and Interval(ends.low + 1, ends.high + 1, ends.kind)


@record
class ConfigHorizon(Record, section="configuration over steps"):
    """Perturbation, KL, top-1 agreement and draft of one configuration over the decode steps.

    Attributes:
        curves: by kind of perturbation.
    """

    config: EvictionConfig = column("configuration of these curves")
    cache_share: float = column(
        "entries that its cache holds over those of the full cache", key="held", heading="#cache\nshare"
    )
    curves: Mapping[str, Curve]
    kl: Floats = column("mean KL(full ‖ evicted) over the samples that have the step", unit="nat", dims=STEP)
    kl_interval: Band = column("over the samples that have the step; nulls as of a curve")
    top1: Floats = column(
        "share of the samples that have the step whose next token is the full run's", unit="share", dims=STEP
    )
    by_layer: Floats = column("propagated Σ L / Σ ‖o_h‖₁ of a layer's heads", dims=("layer", *STEP))
    compressions: Compressions | None = column("what compressing the cache again does; null where it is done once")
    draft: Draft | None = column("its draft for the full cache; null where a sample has no `draft_acceptance`")

    @derived(key="curves")
    def all_curves(self) -> tuple[Curve, ...]:
        """Propagated and isolated perturbation."""
        return tuple(self.curves.values())


@dataclass(frozen=True)
class _Growth:
    """Relative perturbation of the first and the last third, and two noise floors, the larger of both thirds."""

    first: Floats
    last: Floats
    noise: Floats

    @classmethod
    def from_thirds(cls, early: list[Floats], late: list[Floats], add: Callable[[Floats], Any] = np.asarray) -> _Growth:
        """Return the growth between two thirds of the steps.

        Each is a list of perturbation, norm and noise floor, (sample, layer, head). `add` sums what counts as one, such
        as all samples of a head; by default nothing is summed.
        """
        (first, first_floor), (last, last_floor) = (
            [np.asarray(ratio(add(part), add(norm))) for part in (perturbation, noise)]
            for perturbation, norm, noise in (early, late)
        )
        return cls(first, last, TIE_FLOORS * np.maximum(first_floor, last_floor))

    @property
    def above_noise(self) -> NDArray[np.bool_]:
        """True where the perturbation of both thirds exceeds two noise floors."""
        return np.asarray((self.first > self.noise) & (self.last > self.noise))

    @property
    def factor(self) -> Floats:
        """Perturbation of the last third over that of the first; NaN where either may be noise."""
        return np.where(self.above_noise, ratio(self.last, self.first), np.nan)

    @property
    def logarithm(self) -> Floats:
        """Logarithm of the factor; 0 where a third, or the difference of both, may be noise."""
        known = self.above_noise & (np.abs(self.last - self.first) > self.noise)
        return np.where(known, np.log(np.where(known, self.factor, 1.0)), 0.0)


def config_horizon(
    measured: Measurements, index: int, norm: Floats, floors: Mapping[str, Floats], steps: Steps
) -> ConfigHorizon:
    """Return the curves of a configuration; `norm` and `floors`, by kind, are (sample, step, layer, head)."""
    counts, kl = steps.measured.sum(axis=0), variable_by_step(measured, "logit_kl", steps, index)
    moved = variable_by_step(measured, KINDS["propagated"], steps, index)
    totals = (each.sum(axis=(2, 3)) for each in (moved, norm, floors["propagated"]))
    return ConfigHorizon(
        config=measured.trace.run.configs[index],
        cache_share=float(measured.cache_shares[index]),
        curves={
            kind: _curve(kind, variable_by_step(measured, name, steps, index), norm, floors[kind], steps)
            for kind, name in KINDS.items()
        },
        kl=kl.sum(axis=0) / counts,
        kl_interval=step_intervals(kl, np.ones_like(kl), steps.measured, POSITIVE),
        top1=variable_by_step(measured, "top1_agreement", steps, index).sum(axis=0) / counts,
        by_layer=np.asarray(ratio(moved.sum(axis=(0, 3)), norm.sum(axis=(0, 3)))).T,
        compressions=compressions_of(measured, index, steps.measured, *totals),
        draft=_draft(measured, index, steps),
    )


def _draft(measured: Measurements, index: int, steps: Steps) -> Draft | None:
    """Return what is taken of a configuration's draft; None where a sample was measured before traces had it."""
    if "draft_acceptance" not in measured or np.isnan(measured.trace.get("draft_acceptance", ANALYSIS)[..., 0]).any():
        return None
    taken = variable_by_step(measured, "draft_acceptance", steps, index)
    by_sample, runs = taken.sum(axis=1) / steps.measured.sum(axis=1), taken_in_a_row(taken, steps)
    share = intervals.share_kind(0)
    return Draft(
        by_step=taken.sum(axis=0) / steps.measured.sum(axis=0),
        taken=float(by_sample.mean()),
        taken_interval=intervals.of_mean(by_sample, share),
        in_a_row=float(ratio(np.nansum(runs), np.isfinite(runs).sum())),
        in_a_row_interval=intervals.of_mean(runs, replace(share, limits=(0, DRAFTED))),
    )


def taken_in_a_row(taken: Floats, steps: Steps) -> Floats:
    """Return the expected number of `DRAFTED` drafted tokens that are taken in a row, (sample,).

    Σ_j Π_{i<j} a(t + i) over j = 1 … 4, with the acceptance a = `taken` (sample, step): the mean over all t with four
    measured steps from t on; NaN of samples without.
    """
    if taken.shape[1] < DRAFTED:
        return np.full(len(taken), np.nan)
    runs = sliding_window_view(taken, DRAFTED, axis=1).cumprod(axis=2).sum(axis=2)
    whole = steps.measured[:, DRAFTED - 1 :]
    return np.asarray(ratio((runs * whole).sum(axis=1), whole.sum(axis=1)))


def _curve(kind: str, perturbation: Floats, norm: Floats, floor: Floats, steps: Steps) -> Curve:
    """Return the curve of one kind of perturbation from (sample, step, layer, head) arrays; NaN at unmeasured steps."""
    known = steps.measured & known_steps(np.where(steps.measured, perturbation[..., 0, 0], np.nan))
    perturbation, norm, floor = (np.where(known[..., None, None], each, 0.0) for each in (perturbation, norm, floor))
    early, late = steps.thirds(perturbation, norm, floor, known=known)
    total = _Growth.from_thirds(early, late, np.sum)
    by_head = _Growth.from_thirds(early, late, partial(np.sum, axis=0))
    by_sample = _Growth.from_thirds(early, late)
    first, last = ([part.sum(axis=(1, 2)) for part in third[:2]] for third in (early, late))
    growth_of_weights = partial(factor_of, earlier=first, later=last)
    return Curve(
        kind=kind,
        relative=relative_perturbation(perturbation, norm),
        relative_interval=step_intervals(perturbation.sum(axis=(2, 3)), norm.sum(axis=(2, 3)), known, RATIO),
        first=float(total.first),
        last=float(total.last),
        growth=float(total.factor),
        growth_interval=intervals.of_statistic(growth_of_weights, len(early[0]), RATIO) if total.above_noise else None,
        head_growth=by_head.factor,
        sign_flips=permutation.sign_flip_tests(by_sample.logarithm),
    )


def relative_perturbation(perturbation: Floats, norm: Floats) -> Floats:
    """Return Σ perturbation / Σ norm over samples and heads, (step,), of (sample, step, layer, head) each."""
    return np.asarray(ratio(perturbation.sum(axis=(0, 2, 3)), norm.sum(axis=(0, 2, 3))))


def step_intervals(numerators: Floats, denominators: Floats, measured: NDArray[np.bool_], kind: StatisticKind) -> Band:
    """Return the interval of Σ numerators / Σ denominators at each step, over the samples that have it.

    None where the first step has none, as of a single sample; NaN at steps whose interval is of another kind or none.
    `numerators`, `denominators` and `measured` are (sample, step).
    """
    each = [
        intervals.of_ratio(top[rows], bottom[rows], kind) if rows.any() else None
        for top, bottom, rows in zip(numerators.T, denominators.T, measured.T, strict=True)
    ]
    return intervals.joined(each)


@record
class Advantage(PairRecord, Record):
    """The ratio of propagated perturbation of two configurations that differ in selection, or policy, alone."""

    baseline: EvictionConfig = column("what is compared with")
    treatment: EvictionConfig = column("what is compared")
    first_ratio: float = column(
        "Σ L of all heads and samples over the baseline's, in each sample's first third of its steps; null where "
        "either is within two noise floors",
        key="first",
        heading="#first third\n/ baseline",
    )
    first_ratio_interval: OptionalInterval = column("over samples", key="first_interval")
    last_ratio: float = column(
        "Σ L of all heads and samples over the baseline's, in each sample's last third of its steps",
        key="last",
        heading="#last third\n/ baseline",
    )
    last_ratio_interval: OptionalInterval = column("over samples", key="last_interval")

    def cases(self, name: str = "") -> tuple[Case, Case]:
        """Return the ratios of the first and of the last third as named cases of comparisons."""
        return (
            Case.ratio(name, self.first_ratio, self.first_ratio_interval),
            Case.ratio(name, self.last_ratio, self.last_ratio_interval),
        )


def advantages(measured: Measurements, sides: Sequence[str], steps: Steps) -> tuple[Advantage, ...]:
    """Compare each side but the first with the first, wherever the trace has both with equal other choices."""
    run, floors = measured.trace.run, steps.thirds(variable_by_step(measured, "noise_floor", steps))

    def thirds(config: EvictionConfig) -> tuple[list[Floats], list[Floats]]:
        return steps.thirds(variable_by_step(measured, KINDS["propagated"], steps, run.configs.index(config)))

    matched: list[Pair] = []
    for side in sides[1:]:
        with contextlib.suppress(TraceError):  # sides that cannot be paired
            matched += pairs(run, sides[0], side)
    found = []
    for pair in matched:
        baseline, treatment = map(thirds, pair)
        (first, first_interval), (last, last_interval) = (
            _third_ratio(*(array.sum(axis=(1, 2)) for (array,) in third))
            for third in zip(treatment, baseline, floors, strict=True)
        )
        found.append(Advantage(*pair, first, first_interval, last, last_interval))
    return tuple(found)


def _third_ratio(treatment: Floats, baseline: Floats, floor: Floats) -> tuple[float, OptionalInterval]:
    """Return Σ treatment / Σ baseline over samples, with its interval; NaN and None if within two noise floors."""
    if min(treatment.sum(), baseline.sum()) <= TIE_FLOORS * floor.sum():
        return float("nan"), None
    return float(ratio(treatment.sum(), baseline.sum())), intervals.of_ratio(treatment, baseline)
