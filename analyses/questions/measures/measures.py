"""Does another distance change what is concluded? L2 and cosine beside L1, measured and selecting (appendix G).

The tables of what every distance says: ratios side by side, verdicts, orders, links, and what selects.

What to conclude of several distances, in a few sentences, and what the tables' rows and columns mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.correlation.correlation_tables import estimate
from perturbkv.analyses.heads.head_comparison import HeadKind
from perturbkv.analyses.outcomes import OfSettings, by_head
from perturbkv.analyses.pairing import Sides, counted, folded
from perturbkv.analyses.questions.measures.measure_orders import (
    FIRST,
    KINDS,
    KL,
    LOST,
    OTHERS,
    SCORE,
    Linked,
    Order,
    Row,
    linked,
    together,
)
from perturbkv.analyses.questions.measures.measure_settings import Setting, settings
from perturbkv.analyses.stats.intervals import CORRELATION, LEAST, mean_of, over_prompts
from perturbkv.analyses.text import Case, capital, compared, decided, over, sentence
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import L1, L2
from perturbkv.display import Table
from perturbkv.trace import Trace

SHORT = {"l1": "L1", "l2": "L2", "cosine": "cosine"}
"""Distances where there is little room."""
_SIDES = tuple(f"#{SHORT[name]}" for name in DISTANCES)
_AGAINST = tuple(
    f"#{SHORT[other]}: {what}" for other in OTHERS for what in ("opposite\nto L1", "decided in\none alone")
)
_TARGETS = {
    KL: "ρ with KL of the same step, which nearly is the same thing",
    SCORE: "ρ with the answer's score",
    LOST: "lost answers above kept ones",
}
_LETTERS = 22
Named = Callable[[EvictionConfig], str]


def tables(setting: Setting) -> list[Table | str]:
    """All of one setting; what it has none of is left out."""
    return [
        _ratios(f"b={setting.name}: over {baseline_of(setting)}", setting.rows, setting.side),
        _better(setting),
        _measure_tables_verdicts(setting),
        *([_order(setting)] if setting.orders else []),
        *_measure_tables_links(setting),
        *([_ratios(f"b={setting.name}: selected by L2 over by L1 norms", setting.norms, setting.side)]
          if setting.norms else []),
    ]  # fmt: skip


def baseline_of(setting: Setting) -> str:
    """What a setting's treatments stand over, in words."""
    names = list(dict.fromkeys(setting.side(one.baseline) for one in setting.rows))
    return names[0] if len(names) == 1 else "its baseline"


def _ratios(title: str, rows: Sequence[Row], named: Named) -> Table:
    """Σ of all heads, the median head and what comes out, a distance beside the other."""
    return Table(title, ("", *_SIDES), [line for row in rows for line in _ratio_lines(row, named(row.treatment))])


def _ratio_lines(row: Row, name: str) -> list[list[str]]:
    lines = [[folded(name, _LETTERS), "", "", ""]]
    for kind in KINDS:
        found = [row.kind(kind, distance) for distance in DISTANCES]
        lines += [
            [f"  {kind}, Σ", *(text.decimal(one.sum_ratio, one.sum_ratio_interval) for one in found)],
            ["    its median head", *(text.decimal(one.median_ratio, one.median_ratio_interval) for one in found)],
        ]
    drift = [row.drift[distance] for distance in DISTANCES]
    return [*lines, ["  last layer's drift", *(text.decimal(one.ratio, one.interval) for one in drift)]]


def _better(setting: Setting) -> Table:
    rows = [line for row in setting.rows for line in _better_lines(row, setting.side(row.treatment))]
    return Table(f"b={setting.name}: heads perturbed less than under {baseline_of(setting)}", ("", *_SIDES), rows)


def _better_lines(row: Row, name: str) -> list[list[str]]:
    found = [[row.kind(kind, distance) for distance in DISTANCES] for kind in KINDS]
    shares = [[text.percent(one.better_share, one.better_share_interval) for one in line] for line in found]
    return [
        [folded(name, _LETTERS), "", "", ""],
        *([f"  {kind}", *line] for kind, line in zip(KINDS, shares, strict=True)),
    ]


def _measure_tables_verdicts(setting: Setting) -> Table:
    rows = [line for row in setting.rows for line in _verdict_lines(row, setting.side(row.treatment))]
    return Table(f"b={setting.name}: heads whose verdict is another than in L1", ("", *_AGAINST), rows)


def _verdict_lines(row: Row, name: str) -> list[list[str]]:
    lines = [[folded(name, _LETTERS), *[""] * len(_AGAINST)]]
    for kind in KINDS:
        cells = [
            text.percent(*pair)
            for one in row.against
            if one.kind == kind
            for pair in ((one.opposite, one.opposite_interval), (one.alone, one.alone_interval))
        ]
        lines.append([f"  {kind}", *cells])
    return lines


def _order(setting: Setting) -> Table:
    """The place of every method by each measure, in the order of propagated L1; below, agreement with L1."""
    last = setting.orders[-1].ranks["l1"]
    places = sorted(range(len(setting.configs)), key=lambda place: float(last[place]))
    columns = ("", *(f"#{kind[:4]}.\n{SHORT[name]}" for kind in KINDS for name in DISTANCES))
    rows = [
        [folded(setting.named(setting.configs[place]), _LETTERS), *_places(setting.orders, place)] for place in places
    ]
    return Table(f"b={setting.name}: methods' places, 1 perturbs least", columns, [*rows, _agreement(setting.orders)])


def _places(orders: Sequence[Order], place: int) -> list[str]:
    return [f"{order.ranks[name][place]:g}" for order in orders for name in DISTANCES]


def _agreement(orders: Sequence[Order]) -> list[str]:
    cells = [estimate(order.rho[name]) if name in order.rho else "" for order in orders for name in DISTANCES]
    return ["ρ with L1 in a prompt", *cells]


def _measure_tables_links(setting: Setting) -> list[Table]:
    """A table for each thing that is lost: what L1 tells, and how much more or less the others do."""
    found = {target: [one for one in setting.links if one.target == target] for target in _TARGETS}
    columns = ("", "#L1", "#L2", "#cosine", "#L2 less L1", "#cosine less L1", "#n")
    return [
        Table(f"b={setting.name}: {_TARGETS[target]}", columns, [_measure_tables_link(kind, links) for kind in KINDS])
        for target, links in found.items()
        if links
    ]


def _measure_tables_link(kind: str, links: Sequence[Linked]) -> list[str]:
    own = [one for one in links if one.kind == kind]
    less = [one.less_l1 for one in own if one.less_l1 is not None]
    return [kind, *(estimate(one.value) for one in own), *map(estimate, less), str(own[0].value.prompts)]


SAME, TURNED, ALONE = "same", "turned", "alone"


def conclusion(settings: Sequence[Setting], samples: int) -> str:
    """Whether another distance turns a comparison round, reorders methods, or tells more of what is lost."""
    said = [_verdicts(settings, samples), *_orders(settings), *_links(settings), *_norms(settings)]
    return " ".join([*said, f"({over(samples)})"])


def outcome(first: HeadKind, other: HeadKind) -> str:
    """Whether the sums of all heads say the same in both distances; what is tied in every head decides nothing."""
    sides = [
        0 if one.tied_count == one.verdict.size else decided(one.sum_ratio_interval, 1) or 0 for one in (first, other)
    ]
    return SAME if sides[0] == sides[1] else TURNED if 0 not in sides else ALONE


def outcomes(settings: Sequence[Setting], distance: str) -> Counter[str]:
    """How many comparisons, isolated and propagated, say what in a distance beside L1."""
    rows = [row for setting in settings for row in setting.rows]
    return Counter(outcome(row.kind(kind, FIRST), row.kind(kind, distance)) for row in rows for kind in KINDS)


def _verdicts(settings: Sequence[Setting], samples: int) -> str:
    """'Neither L2 nor cosine turns any of 24 comparisons round: L2 says the same as L1 in all, cosine in 22, …'."""
    found = {other: outcomes(settings, other) for other in OTHERS}
    count = counted(sum(len(setting.rows) for setting in settings) * len(KINDS), "comparison")
    what = "(isolated and propagated, Σ of all heads)"
    if samples < LEAST:
        few = f"{counted(samples, 'sample')} decide{'s' * (samples == 1)}"
        return f"{few} nothing: {count} {what} in L1, L2 and cosine have no intervals."
    turning = [SHORT[other] for other, one in found.items() if one[TURNED]]
    who = (
        f"{' and '.join(turning)} turn{'s' * (len(turning) == 1)} some"
        if turning
        else "Neither L2 nor cosine turns any"
    )
    told = "; ".join(_counts(settings, other, one) for other, one in found.items())
    return f"{capital(who)} of {count} of L1 round {what}: {told}."


def _counts(settings: Sequence[Setting], other: str, found: Counter[str]) -> str:
    """'cosine says the same in 18, the opposite in 2 (isolated value), and in 4 one of both alone is decided'."""
    turned = f", the opposite in {found[TURNED]} ({', '.join(_turned(settings, other))})" if found[TURNED] else ""
    alone = f", and in {found[ALONE]} one of both alone is decided" if found[ALONE] else ""
    return f"{SHORT[other]} says the same in {found[SAME]}{turned}{alone}"


def _turned(settings: Sequence[Setting], other: str) -> list[str]:
    """What is turned round, each once, whatever the budget."""
    named = [
        f"{kind} {setting.side(row.treatment)}"
        for setting in settings
        for row in setting.rows
        for kind in KINDS
        if outcome(row.kind(kind, FIRST), row.kind(kind, other)) == TURNED
    ]
    return list(dict.fromkeys(named))


def _orders(settings: Sequence[Setting]) -> list[str]:
    """'The methods of a prompt stand in the order of L1 with ρ = 1.00 … in L2; by their sums, 3 of 42 pairs …'."""
    ranked = [order for setting in settings for order in setting.orders]
    if not ranked:
        return []
    told = " and ".join(f"ρ = {_rho(ranked, other)} in {SHORT[other]}" for other in OTHERS)
    pairs = counted(sum(order.pairs for order in ranked), "pair")
    swaps = " and ".join(_swapped(ranked, other) for other in OTHERS)
    return [f"The methods of a prompt stand as in L1 with {told}; by their sums, of {pairs} {swaps}."]


def _rho(ranked: Sequence[Order], other: str) -> str:
    return estimate(over_prompts(mean_of([order.each[other] for order in ranked]), CORRELATION), " ")


def _swapped(ranked: Sequence[Order], other: str) -> str:
    """'L2 exchanges 3 (1 decided)'."""
    swaps = [swap for order in ranked for swap in order.swapped(other)]
    certain = sum(swap.decided for swap in swaps)
    told = f"{len(swaps)} ({certain or 'none'} decided)" if swaps else "none"
    return f"{SHORT[other]} exchanges {told}"


def _links(settings: Sequence[Setting]) -> list[str]:
    telling = [setting.each for setting in settings if setting.links]
    found = linked(together(telling)) if telling else ()
    return [told for target, what in _LOST.items() for told in _link(found, target, what)]


_LOST = {KL: "KL of the same step, which nearly is the same thing,", SCORE: "an answer's score"}


def _link(found: Sequence[Linked], target: str, what: str) -> list[str]:
    """'With KL … propagated L1 has ρ = 0.90 … (8 prompts); L2's less that 0.01 …, cosine's less that −0.02 …'."""
    own = {one.distance: one for one in found if one.target == target and one.kind == "propagated"}
    if not own or not own[FIRST].value.prompts:
        return []
    less = [(SHORT[name], one.less_l1) for name, one in own.items() if one.less_l1 is not None]
    told = ", ".join(f"{name}'s less that {estimate(one, ' ')}" for name, one in less)
    prompts = counted(own[FIRST].value.prompts, "prompt")
    return [f"With {what} propagated L1 has ρ = {estimate(own[FIRST].value, ' ')} ({prompts}); {told}."]


def _norms(settings: Sequence[Setting]) -> list[str]:
    """What it brings to select by L2 norms, in L1, propagated, of each selection."""
    rows = [(setting, row) for setting in settings for row in setting.norms]
    named: dict[str, list[tuple[Setting, Row]]] = {}
    for setting, row in rows:
        named.setdefault(row.treatment.selection.name, []).append((setting, row))
    return [_norm(name, own) for name, own in named.items()]


def _norm(name: str, rows: Sequence[tuple[Setting, Row]]) -> str:
    said = compared(f"{name} by {SHORT[L2]} norms", f"by {SHORT[L1]} norms", [_case(*pair) for pair in rows])
    return sentence(f"{said} (propagated L1)", name)


def _case(setting: Setting, row: Row) -> Case:
    kind = row.kind("propagated", FIRST)
    return f"b={setting.name}", kind.sum_ratio, kind.sum_ratio_interval


def notes(settings: Sequence[Setting], samples: int) -> str:
    """What rows and columns mean, each distance's noise floor, and what no column says."""
    first = settings[0].rows[0]
    floors = ", ".join(f"{SHORT[name]} {_floor(first, name)}" for name in first.heads)
    return "\n".join(
        [
            f"{text.about_intervals(samples)} {_ABOUT}",
            f"Noise floors of propagated perturbation, of ‖o_h‖ (median head; a cosine distance is relative already): "
            f"{floors}. {text.ABOUT_TIES}",
        ]
    )


def _floor(row: Row, distance: str) -> str:
    return f"{row.kind('propagated', distance).floor_relative_median:.1e}"


_ABOUT = (
    "Ratios are treatment over baseline, below 1 the treatment perturbs less. 1 − cos grows with the square of an "
    "angle: its ratios lie further from 1, and its sums weigh the most turned heads most, whatever their length. "
    "Opposite: better in one distance, worse in the other, beyond 2 noise floors of each. ρ is Spearman's between the "
    "configurations of one prompt, mean over the n prompts in which both differ. KL is of the step whose heads are "
    "measured: that link is circular. Scores of answers are held against the first step's perturbation, by "
    "link's rules. Where all samples are alike, an interval says how much so many leave open."
)


class Measures(OfSettings[Setting]):
    """Every setting of a trace in which something is compared with the baseline, in L1, L2 and 1 − cos.

    A setting: configurations that share budget, granularity and protection.
    """

    def conclusion(self) -> str:
        """Whether verdicts, orders and links are others in another distance, and what selecting by L2 brings."""
        return conclusion(self.settings, self.identity.samples)

    def tables(self) -> list[Table | str]:
        """Of each setting ratios, better heads, verdicts, places, links, and what selects."""
        return [part for setting in self.settings for part in tables(setting)]

    def notes(self) -> str:
        """What rows and columns mean."""
        return notes(self.settings, self.identity.samples)

    def records(self) -> list[dict[str, Any]]:
        """A row per comparison, distance, kind, layer and head: means over samples, their floor and the verdict.

        `part` is `treatment` against the baseline, or `norm`: L2 norms against L1 norms. A verdict is 1 (better), 0
        (tied) or −1 (worse).
        """
        return [
            one
            for setting in self.settings
            for part, rows in (("treatment", setting.rows), ("norm", setting.norms))
            for row in rows
            for distance in DISTANCES
            for one in by_head(row.heads[distance], setting=setting.name, part=part, distance=distance)
        ]


def measures(trace: Trace, baseline: str = "attention", treatments: Sides | None = None, *, step: int = 0) -> Measures:
    """Does another distance than L1 change what is concluded?.

    Compared are, in L1, L2 and as 1 − cos (METHOD: measures beside L1): every treatment with the baseline, head by
    head; all configurations of a prompt by rank; their ranks with KL of the same step and, where the trace holds
    answers, with the answers' scores (METHOD: the protocol, 7); and selections by L2 norms with the same by L1 norms.

    Args:
        trace: from `measure` or `read_trace`.
        baseline: a selection, a policy, or both (`adakv:attention`).
        treatments: likewise, one or several; by default two-stage and hindsight by both norms, attention-unpooled and
            random, as far as the trace holds them.
        step: which decode step, from 0.

    Raises TraceError where the trace lacks a side or a distance, or has no complete sample; ConfigError where it has no
    such step, and for sides that are no names.

    Example, of a `trace` of attention and two-stage of one budget:
        >>> import perturbkv as pk
        >>> row = pk.measures(trace, treatments="two-stage").settings[0].rows[0]
        >>> list(row.heads), [one.distance for one in row.against]
        (['l1', 'l2', 'cosine'], ['l2', 'cosine', 'l2', 'cosine'])
    """
    return Measures.of(trace, settings(trace, baseline, treatments, step), step)
