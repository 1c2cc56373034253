"""What to conclude of several distances, in a few sentences, and what the tables' rows and columns mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from perturbkv.analyses import text
from perturbkv.analyses.correlation.correlation_tables import estimate
from perturbkv.analyses.heads.head_kind import HeadKind
from perturbkv.analyses.naming import counted
from perturbkv.analyses.questions.measures.measure_links import KL, SCORE, Linked, linked, together
from perturbkv.analyses.questions.measures.measure_orders import Order
from perturbkv.analyses.questions.measures.measure_rows import FIRST, KINDS, OTHERS, Row
from perturbkv.analyses.questions.measures.measure_settings import Setting
from perturbkv.analyses.questions.measures.measure_tables import SHORT
from perturbkv.analyses.sentences import Case, capital, compared, decided, over, sentence
from perturbkv.analyses.stats.estimates import mean_of, over_prompts
from perturbkv.analyses.stats.intervals import CORRELATION, LEAST
from perturbkv.configs.selections import L1, L2

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
