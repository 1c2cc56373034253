"""Heads compared one by one: a baseline against one or several treatments (paper, figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import isnan
from typing import Any, overload

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, column, long_form, record
from perturbkv.analyses.conclusions import Claim, compare_sides
from perturbkv.analyses.heads.head_comparison import (
    ANALYSIS,
    HEADS,
    ChangedLoss,
    HeadComparison,
    HeadKind,
    changed_losses,
    compare_pair,
)
from perturbkv.analyses.heads.token_kinds import (
    KINDS_NOTE,
    TokenKind,
    compare_token_kinds,
    kinds_note,
    kinds_table,
    shared_first_token,
)
from perturbkv.analyses.identity import RunIdentity, identity_at
from perturbkv.analyses.measurements import Measurements, select_texts_that_go_on
from perturbkv.analyses.names import pair_columns, pair_names, pairs_of, pairs_title
from perturbkv.analyses.result import MemberSequence, Result, add_first_step
from perturbkv.analyses.sides import Sides, choose_sides, configs_of, pairs
from perturbkv.analyses.verdicts import distance_of, distance_terms
from perturbkv.display import Part, plural
from perturbkv.errors import ConfigError
from perturbkv.trace import Trace

_UNEQUAL = 0.1
"""Difference of cache shares, relative to the larger one, that is told."""


@record
class HeadComparisons(
    MemberSequence[HeadComparison],
    Result,
    section="heads",
    rows="heads",
    shown=("name", "cache_share", "better_share", "sum_ratio", "median_ratio", "counts"),
):
    """Pairs of configurations compared head by head: a sequence whose slices are results, too.

    `plot` draws a scatter with a point per head: for one pair a panel per kind, for several a propagated panel each.

    Attributes:
        members: the comparisons, those of one baseline together.
        identity: of the run, with every configuration that is compared.
    """

    members: tuple[HeadComparison, ...] = column("one per pair of configurations", key="comparisons")
    identity: RunIdentity
    changed: tuple[ChangedLoss, ...] = column("one per configuration that does more than evict", default=())
    token_kinds: tuple[TokenKind, ...] = column(
        "one per pair and kind of decoded token; empty where the trace has no kinds", default=()
    )
    first_token: str = column("which token all samples decode first; empty where they differ", default="")

    def __post_init__(self) -> None:
        if not self.members:
            raise ConfigError("expected at least one comparison, got none; take a slice that holds one")

    @overload
    def __getitem__(self, index: int) -> HeadComparison: ...

    @overload
    def __getitem__(self, index: slice) -> HeadComparisons: ...

    def __getitem__(self, index: int | slice) -> HeadComparison | HeadComparisons:
        if not isinstance(index, slice):
            return self.members[index]
        members = self.members[index]
        shown = configs_of(pairs_of(members))
        changed = tuple(one for one in self.changed if one.config in shown)
        identity = replace(self.identity, configs=tuple(shown), first_step="")
        kinds = tuple(one for one in self.token_kinds if (one.baseline, one.treatment) in pairs_of(members))
        return HeadComparisons(members, identity, changed, kinds, self.first_token)

    def claims(self) -> Sequence[Claim]:
        """Return by how much the treatments perturb more or less."""
        cases = [pair.propagated.case(name) for name, pair in zip(self._names, self.members, strict=True)]
        return compare_sides(self.members, cases)

    def scope(self) -> Sequence[str]:
        """Return what the claims are of: for a single pair with the share of better heads; a first token of all."""
        first = self.members[0]
        heads = text.percent(first.propagated.better_share, first.propagated.better_share_interval)
        share = [f"{heads} of the heads better"] if len(self) == 1 else []
        token = [self.first_token] if self.first_token and first.step == 0 else []
        return ["propagated, sum over heads", *share, *distance_terms(first.distance), *super().scope(), *token]

    def title(self) -> str:
        """Return the table's title: distance, sides, and the choices that all configurations share."""
        distance = distance_of(self.members[0].distance)
        return f"perturbation ({distance}) of {pairs_title(self.members, self.identity.shared)}"

    def lines(self) -> Sequence[Line]:
        """Return a line per pair and kind of perturbation."""
        return [
            Line(name if kind is pair.isolated else "", (kind, pair, kind.sign_flips))
            for pair, name in zip(self.members, self._names, strict=True)
            for kind in (pair.isolated, pair.propagated)
        ]

    def caveats(self) -> Sequence[str]:
        """Return notes on kinds of tokens, parts of a loss, isolated perturbation, weak tests, heads with σ ≤ 0.5."""
        others = [pair.cache_shares for pair in self.members if pair.baseline.is_external or pair.treatment.is_external]
        unequal = [shares for shares in others if abs(shares[1] - shares[0]) > _UNEQUAL * max(shares)]
        shares = ", ".join(dict.fromkeys(f"{second:.2f} against {first:.2f}" for first, second in unequal))
        unknown = sum(not pair.isolated.is_known for pair in self.members)
        whose = f" in {unknown} of {len(self)} cases" if len(self) > 1 else ""
        known = [pair for pair in self.members if pair.isolated.is_known]
        different = sum(pair.isolated.sum_verdict != pair.propagated.sum_verdict for pair in known)
        named = {"gain": self.members[0].gain_most, "lose": self.members[0].lose_most}
        words = "; ".join(f"{verb} most {', '.join(heads)}" for verb, heads in named.items() if heads)
        staged = [pair for pair in self.members if pair.treatment.is_staged]
        flagged, heads = (sum(getattr(pair, name) for pair in staged) for name in ("flagged_count", "heads"))
        return [
            *kinds_note(self.token_kinds, len(self)),
            *(one.note(self.identity.name_of(one.config)) for one in self.changed),
            *([f"Cache shares differ: {shares}; `ablation --bytes` compares caches by bytes."] if shares else []),
            *([f"No isolated perturbation{whose}: the prompt was read otherwise, or attention is its own."]
              if unknown else []),
            *([f"Isolated perturbation says otherwise in {different} of {len(self)} cases."] if different else []),
            *([f"Heads by layer-head, propagated: {words}."] if words and len(self) == 1 else []),
            *self.members[0].propagated.sign_flips.power_caveat(),
            *([f"σ ≤ 0.5 in {flagged:,} of {heads:,} heads, where Theorem 3 says nothing."] if flagged else []),
        ]  # fmt: skip

    def details(self) -> Sequence[Part]:
        """Return the table by kind of token, definitions of tests, ties and noise floor, seconds of own prefills."""
        by_kind: list[Part] = [kinds_table(self.token_kinds), KINDS_NOTE] if self.token_kinds else []
        tests = self.members[0].propagated.sign_flips
        heads = tests.least_tests
        power = "no head can be decided" if not heads else f"{plural(heads, 'head')} must reach it"
        floor = self.members[0].propagated.floor_relative_median
        floors = [text.noise_floor_note(floor)]
        if distance_of(self.members[0].distance).of_text:
            floors = [text.effect_note(self.identity.effect_gradient), text.noise_floor_note(floor, "nat")]
        seconds = {
            config: duration
            for pair in self.members
            for config, duration in zip((pair.baseline, pair.treatment), pair.prefill_seconds[:2], strict=True)
            if not isnan(duration)
        }
        own = ", ".join(f"{self.identity.name_of(config)} {value:.2f} s" for config, value in seconds.items())
        full = self.members[0].prefill_seconds_full
        return [
            *by_kind,
            text.TIES_NOTE,
            f"Significant: {tests.flips:,} flips of whole samples' signs, Benjamini–Hochberg at 5 %; the smallest p is "
            f"{tests.smallest:.2g}: {power}. Without any effect p ≤ 0.05 in {tests.chance_mean:.1f} heads.",
            *floors,
            *([f"Prefill, mean over samples, masks dense: {own}; the full one {full:.2f} s."] if seconds else []),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per pair × kind × layer × head.

        Means over samples and the noise floor are in the distance's unit; `verdict` is that of the means, `significant`
        that of the corrected tests: 1 less than the baseline, 0 tied or undecided, −1 more; `flagged`: σ ≤ 0.5.
        """
        return [row for pair in self.members for kind in (pair.isolated, pair.propagated) for row in _rows(pair, kind)]

    @cached_property
    def _names(self) -> list[str]:
        """A distinct name per pair."""
        return pair_names(self.members)


def compare_heads(
    trace: Trace,
    baseline: str | None = None,
    treatments: Sides | None = None,
    *,
    step: int | None = None,
    distance: str = "l1",
) -> HeadComparisons:
    """Compare selections head by head: perturbation per query head (paper, figure 2; METHOD).

    Every treatment is compared with the baseline wherever the trace holds both with the same budget, α and so on: one
    pair each. Only complete samples that have the step count.

    Args:
        trace: from `measure` or `read_trace`.
        baseline: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`); None: attention, or the
            trace's own where it has no two-stage.
        treatments: likewise, one or several; None: two-stage, or all that the trace has.
        step: which decode step, from 0; None: the mean over the steps of each sample.
        distance: `l1`, `l2` or `cosine`: between a head's contribution to the attention output with the full cache and
            with the evicted one, each of d_model numbers; L1 and L2 in the output's own unit, cosine from 0 to 2. Or
            `effect`, of a trace with `save=("effect",)`: the size of what that difference changes log p of the text
            by, to first order, in nat.

    Returns the pairs as one result. Its arrays are (layer, head), means over samples.

    Raises TraceError where the trace has no complete sample or no such pair, or lacks the distance; ConfigError for a
    step that it does not have, and for sides that are no names; UnknownNameError for an unknown distance.

    >>> import perturbkv as pk
    >>> result = pk.compare_heads(trace, "attention", "two-stage")
    >>> len(result), result[0].propagated.verdict.shape  # (layer, head)
    (1, (2, 2))
    >>> rows = result.to_frame("heads").query("kind == 'propagated'")
    >>> rows["verdict"].tolist() == result[0].propagated.verdict.ravel().tolist()
    True
    """
    whole, (first, names) = trace, choose_sides(trace, baseline, treatments)
    if distance_of(distance).of_text:
        trace = select_texts_that_go_on(trace, ANALYSIS)
    chosen = [pair for treatment in names for pair in pairs(trace.run, first, treatment)]
    order = list(dict.fromkeys(first for first, _ in chosen))
    chosen.sort(key=lambda pair: order.index(pair[0]))
    measured, configs = Measurements(trace, ANALYSIS, step), configs_of(chosen)
    compared = tuple(compare_pair(measured, identity_at(trace, pair, step), distance) for pair in chosen)
    about = identity_at(trace, configs, step)
    result = HeadComparisons(
        compared,
        replace(about, ended=about.ended + int(whole.ok.sum() - trace.ok.sum())),
        changed_losses(measured, configs),
        compare_token_kinds(measured, compared),
        shared_first_token(trace),
    )
    return add_first_step(
        result, measured.step, partial(compare_heads, trace, baseline, treatments, step=0, distance=distance)
    )


def _rows(pair: HeadComparison, kind: HeadKind) -> list[dict[str, Any]]:
    """Return the data frame rows of one comparison in one kind of perturbation, one per layer and head."""
    sides = pair_columns(pair.baseline, pair.treatment)
    labels = {**sides, "distance": pair.distance, "step": pair.step, "kind": kind.name}
    layers, heads = (range(size) for size in kind.verdict.shape)
    axes = {"layer": [pair.identity.layer(layer) for layer in layers], "head": heads}
    arrays = {**kind.arrays(*HEADS), **kind.sign_flips.arrays(*HEADS), **pair.arrays(*HEADS)}
    return list(long_form(labels, axes, arrays))
