"""Caches at equal bytes: evicted, rounded, both, or with entries of their own; which of them another one dominates.

A configuration is dominated where another one takes no more bytes and loses less (METHOD: Caches that are no kept set).
Two are compared over the same samples, by the interval of the ratio of their sums (METHOD: the protocol, 11), and tie
where rounding explains every difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import isnan
from typing import Any, ClassVar, NamedTuple

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.ablation.methods import RELATIVE, relative_sum
from perturbkv.analyses.columns import Derived, Line, Record, attribute, column, interval, record
from perturbkv.analyses.conclusions import Case, Claim
from perturbkv.analyses.heads.head_comparison import compared_perturbation, sum_ratio
from perturbkv.analyses.identity import RunIdentity, identity_at
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Floats, Measurements
from perturbkv.analyses.result import Result, add_first_step
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, OptionalInterval
from perturbkv.analyses.verdicts import FEW, LESS, MORE, UNDECIDED, ratio_verdict, verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part, Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "equal-bytes"
EVICTED, ROUNDED, BOTH, OWN, WHOLE = "evicted", "rounded", "both", "own entries", "whole"
"""Kinds of caches: with fewer entries, with all in few bits, with fewer in few bits, with entries that the full cache
does not hold, with every entry of the full cache."""
SUBJECTS = {
    EVICTED: "evicting alone",
    ROUNDED: "rounding alone",
    BOTH: "doing both",
    OWN: "a cache of own entries",
    WHOLE: "a whole cache",
}
_KINDS = {(True, False): EVICTED, (False, True): ROUNDED, (True, True): BOTH, (False, False): WHOLE}
"""(evicts, quantised) -> kind."""
DOMINATED, ON_CURVE = "dominated", "curve"
CURVES = {"packed": "held_bytes", "resident": "resident_bytes"}
"""How bytes are counted, as a file would hold the cache or as memory does -> variable."""


@record
class Standing(Record, section="standing among equal bytes"):
    """One configuration among all of the trace, by bytes and loss."""

    share: float = column(
        "bytes of its cache over those of the full one in 16 bits, mean over samples; null where it does not tell"
    )
    verdict: str = column(
        "dominated: another one takes no more bytes and loses less; curve: none does; undecided: one may; empty where "
        "its bytes are not told"
    )
    rival: EvictionConfig | None = column(
        "of those that take no more bytes and lose less, or else may, the one that loses least; null without one"
    )
    ratio: float | None = column("the rival's loss over its own, summed over heads and samples; null without a rival")
    ratio_interval: OptionalInterval = interval()

    @property
    def is_told(self) -> bool:
        """Whether the number of bytes is known."""
        return not isnan(self.share)


def _share_text(share: float, ends: OptionalInterval = None) -> str:
    """Return a share of the full cache's bytes as text: '0.33', 'not told'."""
    return "not told" if isnan(share) else text.cache_share(share)


@record
class CachePoint(Record, section="cache's bytes and loss"):
    """One configuration: what its cache takes, and what it loses."""

    config: EvictionConfig = column("the configuration")
    kind: str = column(
        "evicted: fewer entries in 16 bits; rounded: every entry in few bits; both; own entries: of somebody's cache; "
        "whole: every entry in 16 bits",
        heading="kind",
    )
    relative: float = column(RELATIVE, heading="#loss", text=text.three_digits)
    relative_interval: OptionalInterval = interval()
    packed: Standing = column("by the bytes that its cache takes in a file")
    resident: Standing = column("by the bytes that its cache takes in memory while it is read")

    packed_share: ClassVar[Derived[float]] = attribute(
        "packed.share",
        "Bytes as a file would hold the cache, over those of the full one in 16 bits",
        json=False,
        heading="#packed\n/ full",
        text=_share_text,
    )
    packed_verdict: ClassVar[Derived[str]] = attribute(
        "packed.verdict",
        "Whether another one takes no more packed bytes and loses less",
        json=False,
        heading="packed\ncurve",
    )
    resident_share: ClassVar[Derived[float]] = attribute(
        "resident.share",
        "Bytes in memory while the cache is read, over those of the full one in 16 bits",
        json=False,
        heading="#resident\n/ full",
        text=_share_text,
    )
    resident_verdict: ClassVar[Derived[str]] = attribute(
        "resident.verdict",
        "Whether another one takes no more resident bytes and loses less",
        json=False,
        heading="resident\ncurve",
    )

    def standing(self, curve: str) -> Standing:
        """Return the standing on a curve, of `CURVES`."""
        return {"packed": self.packed, "resident": self.resident}[curve]


@record
class EqualBytes(
    Result,
    section="ablation --bytes",
    rows="samples",
    shown=(
        "kind",
        "packed_share",
        "packed_verdict",
        "resident_share",
        "resident_verdict",
        "relative",
    ),
):
    """Bytes and loss of every configuration of a trace.

    Attributes:
        samples: names of the samples.
        relative, shares: (sample, point) loss over ‖o_h‖ of each sample; and, per curve, its share of the bytes.
    """

    points: tuple[CachePoint, ...] = column("one per configuration, that of the fewest packed bytes first")
    step: int | None = column(text.STEP)
    identity: RunIdentity
    samples: tuple[str, ...]
    relative: Floats
    shares: Mapping[str, Floats]

    def claims(self) -> Sequence[Claim]:
        """Return in how many cases caches of each kind are dominated, and the losses at the least and the most."""
        return [
            Claim(
                subject,
                "is",
                cases,
                {DOMINATED: "dominated", ON_CURVE: "on the curve"},
                missing="its bytes are not told",
            )
            for kind, subject in SUBJECTS.items()
            if (cases := self._cases(kind))
        ]

    def scope(self) -> Sequence[str]:
        """Return which bytes and which loss the claims are of, and the number of samples."""
        return [f"loss at {self.main_curve} bytes / full", "propagated, all heads", *super().scope()]

    @property
    def main_curve(self) -> str:
        """The curve that the claims are of: by packed bytes, where any are told."""
        return next((curve for curve in CURVES if any(one.standing(curve).is_told for one in self.points)), "packed")

    def least_losses(self, curve: str) -> list[CachePoint]:
        """Return the points, by bytes, that lose less than all that take no more bytes, as far as the means tell."""
        told = [one for one in self.points if one.standing(curve).is_told]
        found: list[CachePoint] = []
        for one in sorted(told, key=lambda one: (one.standing(curve).share, one.relative)):
            if not found or one.relative < found[-1].relative:
                found.append(one)
        return found

    def title(self) -> str:
        """Return what a loss is, and the choices that all configurations share."""
        return f"loss: Σ L1 / Σ ‖o_h‖: {self.identity.shared}"

    def lines(self) -> Sequence[Line]:
        """Return a line per configuration."""
        return [Line(self.identity.name_of(one.config), (one,)) for one in self.points]

    def caveats(self) -> Sequence[str]:
        """Return what dominated means, and what the two numbers of bytes are."""
        return [
            "Dominated: another takes no more bytes and loses less, over the same samples.",
            "Packed: as a file would hold it; resident: in memory while it is read.",
        ]

    def details(self) -> Sequence[Part]:
        """Return the rival of each configuration that is dominated, or may be, on both curves."""
        rows = [
            [
                self.identity.name_of(one.config),
                curve,
                self.identity.name_of(rival),
                text.decimal(ratio, found.ratio_interval),
            ]
            for one in self.points
            for curve in CURVES
            if (found := one.standing(curve)) and (rival := found.rival) and (ratio := found.ratio) is not None
        ]
        heads = ("", "bytes", "no more bytes", "#its loss over\nthis one's")
        return [Table("what loses less, or may", heads, rows), text.TIES_NOTE]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per configuration and sample: kind, loss over ‖o_h‖, and bytes over the full cache's."""
        return [
            {**config_columns(one.config), "kind": one.kind, "sample": sample,
             "relative": float(self.relative[row, index]),
             **{curve: float(shares[row, index]) for curve, shares in self.shares.items()}}
            for index, one in enumerate(self.points) for row, sample in enumerate(self.samples)
        ]  # fmt: skip

    def _cases(self, kind: str) -> list[Case]:
        """Return the losses of a kind's configurations as cases, each with its share of the main curve's bytes."""
        found = [(one, one.standing(self.main_curve)) for one in self.points if one.kind == kind]
        few = self.identity.samples < MIN_SAMPLES
        cases = []
        for one, where in found:
            loss = text.three_digits(one.relative, one.relative_interval).replace("\n", " ")
            verdict = FEW if few and where.verdict == UNDECIDED else where.verdict
            known = one.relative if where.is_told else np.nan
            cases.append(Case("", known, f"{loss} at {_share_text(where.share)}", verdict))
        return cases


def equal_bytes(trace: Trace, step: int | None = None) -> EqualBytes:
    """Compare all configurations of a trace by bytes and loss: evicted caches, rounded ones, both, somebody's own.

    Loss is the propagated L1 of all heads over ‖o_h‖₁ (METHOD: the quantities), bytes are those of the cache over the
    full one's in 16 bits: packed, as a file would hold it, and resident, as memory does while it is read.

    Args:
        trace: what was measured.
        step: decode step, from 0; None: the mean over the steps of each sample.

    Raises TraceError where all configurations of a policy take the same bytes, none in few bits or with entries of its
    own, and where the trace has no complete sample or lacks a variable that is needed; ConfigError where it has no such
    step.

    Example, of a `trace` of six configurations, that of the fewest bytes first:
        >>> import perturbkv as pk
        >>> [point.kind for point in pk.equal_bytes(trace).points]
        ['both', 'rounded', 'evicted', 'evicted', 'evicted', 'evicted']
    """
    measured = Measurements(trace, ANALYSIS, step)
    shares = {curve: measured.byte_shares_by_sample(variable) for curve, variable in CURVES.items()}
    means = {curve: np.asarray(each.mean(axis=0)) for curve, each in shares.items()}
    kinds = _kinds(measured)
    _check_comparable(measured, means["packed"], kinds)

    @cache
    def compare(own: int, other: int) -> _Compared:
        (first, second), floor = compared_perturbation(measured, "propagated", "l1", (own, other))
        ratio, ends = sum_ratio(first, second)
        tied = not verdicts(first, second, floor).any()
        if isnan(ratio) and not tied:  # nothing loses less than nothing
            return _Compared(ratio, ends, MORE)
        return _Compared(ratio, ends, ratio_verdict(ratio, ends, tied))

    points = [
        CachePoint(
            config=config,
            kind=kind,
            **relative_sum(measured, config),
            packed=_standing(measured, index, means["packed"], compare),
            resident=_standing(measured, index, means["resident"], compare),
        )
        for index, (config, kind) in enumerate(zip(measured.trace.run.configs, kinds, strict=True))
    ]
    places = [one.packed.share if one.packed.is_told else np.inf for one in points]
    order = sorted(range(len(points)), key=lambda index: (places[index], -points[index].relative))
    moved = measured["perturbation_propagated"].sum(axis=(2, 3)) / measured["output_norm"].sum(axis=(1, 2))[:, None]
    result = EqualBytes(
        points=tuple(points[index] for index in order),
        step=measured.step,
        identity=identity_at(trace, trace.run.configs, step),
        samples=measured.sample_ids,
        relative=moved[:, order],
        shares={curve: each[:, order] for curve, each in shares.items()},
    )
    return add_first_step(result, result.step, partial(equal_bytes, trace, 0))


def _kinds(measured: Measurements) -> list[str]:
    """Return the kind of each configuration's cache, as it was in any sample."""
    configs = measured.trace.run.configs
    evicted = measured["evicted"].max(axis=0)
    own = measured["own_entries"].max(axis=0) if "own_entries" in measured else np.zeros(len(configs))
    return [
        OWN if own[index] else _KINDS[bool(evicted[index]) and config.evicts, config.quantised]
        for index, config in enumerate(configs)
    ]


def _check_comparable(measured: Measurements, packed: Floats, kinds: Sequence[str]) -> None:
    """Raise TraceError where bytes, (config,), tell no more than budgets: each policy has one share, in 16 bits."""
    configs = measured.trace.run.configs
    policies = [config.policy.name for config in configs]
    told = {*zip(policies, map(text.cache_share, packed), strict=True)}
    if len(told) > len({*policies}) or not {*kinds} <= {EVICTED, WHOLE}:
        return
    measured.trace.get(CURVES["packed"], ANALYSIS)
    raise TraceError(
        f"{ANALYSIS} needs configurations of different bytes, such as several budgets of a policy, or few bits; got "
        f"a trace of {', '.join(config.label() for config in configs)}"
    )


class _Compared(NamedTuple):
    """The ratio of another configuration's sum to one's own, its interval, and the verdict on it."""

    ratio: float
    interval: OptionalInterval
    verdict: str


def _standing(measured: Measurements, index: int, shares: Floats, compare: Callable[[int, int], _Compared]) -> Standing:
    """Return the standing of the configuration at an index among those that take no more bytes; `shares`: (config,)."""
    rivals = [other for other in np.flatnonzero(shares <= shares[index]).tolist() if other != index]
    compared = {other: compare(index, other) for other in rivals}
    less = [other for other, one in compared.items() if one.verdict == LESS]
    unsure = [other for other, one in compared.items() if one.verdict in (UNDECIDED, FEW)]
    verdict = DOMINATED if less else UNDECIDED if unsure else ON_CURVE
    rival = min(less or unsure, key=lambda other: compared[other].ratio, default=None)
    return Standing(
        share=float(shares[index]),
        verdict="" if isnan(shares[index]) else verdict,
        rival=None if rival is None else measured.trace.run.configs[rival],
        ratio=None if rival is None else compared[rival].ratio,
        ratio_interval=None if rival is None else compared[rival].interval,
    )
