"""Conclusions in L2 and cosine beside those in L1, as distances of outputs and as norms that select (appendix G)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, column, record, table
from perturbkv.analyses.heads.head_comparison import HeadKind
from perturbkv.analyses.outcomes import SettingsResult, head_rows
from perturbkv.analyses.pairing import Sides, plural
from perturbkv.analyses.questions.measures.measure_orders import (
    FIRST,
    KINDS,
    KL,
    OTHERS,
    SCORE,
    LossCorrelation,
    Order,
    correlations,
    mean_over_settings,
)
from perturbkv.analyses.questions.measures.measure_settings import Setting, settings
from perturbkv.analyses.stats.intervals import CORRELATION, MIN_SAMPLES, Estimate, estimate_mean, mean_where_known
from perturbkv.analyses.text import LESS, MORE, Case, comparison, sample_note, sentence
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.configs.selections import L1, L2
from perturbkv.display import Part
from perturbkv.trace import Trace

SHORT = {"l1": "L1", "l2": "L2", "cosine": "cosine"}
"""Distance -> its short name."""
SAME, OPPOSITE, ALONE = "same", "opposite", "alone"
"""A comparison in L1 and in another distance: the same verdict, the opposite one, or only one of both is decided."""
_LOST = {KL: "KL of the same step, which nearly is the same thing,", SCORE: "an answer's score"}


def compare_verdicts(first: HeadKind, second: HeadKind) -> str:
    """Return SAME, OPPOSITE or ALONE, from the sums of all heads in two distances; a tie is undecided."""
    verdicts = [verdict if verdict in (LESS, MORE) else "" for verdict in (first.case().verdict, second.case().verdict)]
    return SAME if verdicts[0] == verdicts[1] else OPPOSITE if all(verdicts) else ALONE


@record
class Measures(SettingsResult):
    """Settings in which something is compared with the baseline, in L1, L2 and 1 − cos."""

    SECTION = "question measures"
    SHOWN = ("l1", "l2", "cosine", "l2_opposite", "cosine_opposite")
    FIRST = "treatment"

    settings: tuple[Setting, ...] = column(
        "one per budget, granularity, precision and protection in which something is compared"
    )

    def conclusion(self) -> str:
        """Return whether another distance reverses a comparison of L1, and in how many both agree."""
        count = plural(sum(len(setting.rows) for setting in self.settings) * len(KINDS), "comparison")
        note = f"isolated and propagated, sum over heads; {sample_note(self.identity.samples)}"
        if self.identity.samples < MIN_SAMPLES:
            return sentence(f"too few samples to decide whether L2 or cosine reverses one of {count} of L1 ({note})")
        outcomes = {other: self.outcomes(other) for other in OTHERS}
        reversing = [SHORT[other] for other, counts in outcomes.items() if counts[OPPOSITE]]
        who = f"{' and '.join(reversing)} reverse{'s' * (len(reversing) == 1)} some" if reversing else ""
        agreement = "; ".join(self._counts(other, counts) for other, counts in outcomes.items())
        return sentence(f"{who or 'neither L2 nor cosine reverses any'} of {count} of L1: {agreement} ({note})")

    def setting_names(self) -> list[str]:
        """Return the name of each setting."""
        return [f"b={setting.name}" for setting in self.settings]

    def title(self) -> str:
        """Return what the ratios are over, and of a single setting its name."""
        baselines = " or ".join(dict.fromkeys(setting.baseline_name() for setting in self.settings))
        where = f", {self.setting_names()[0]}" if len(self.settings) == 1 else ""
        return f"propagated perturbation over that of {baselines}, sum over heads{where}"

    def caveats(self) -> Sequence[str]:
        """Return why ratios of cosine distances lie further from 1."""
        return ["1 − cos grows with the square of an angle: its ratios lie further from 1."]

    def details(self) -> Sequence[Part]:
        """Return every number by distance, methods' ranks, correlations with losses, and noise floors."""
        first = self.settings[0].rows[0]
        floors = ", ".join(f"{SHORT[name]} {_format_floor(first.kind('propagated', name))}" for name in first.heads)
        return [
            *self._orders(),
            *self._correlations(),
            *self._norms(),
            *(part for setting in self.settings for part in _tables(setting)),
            f"Noise floors of propagated perturbation, of ‖o_h‖ (median head; a cosine distance is relative already): "
            f"{floors}.",
            text.TIES_NOTE,
            "Sums of 1 − cos weigh the most turned heads most, whatever their length. Opposite: better in one "
            "distance, worse in the other, beyond two noise floors of each. ρ is Spearman's between the configurations "
            "of one prompt, mean over the n prompts in which both differ. KL is of the step whose heads are measured: "
            "that correlation is circular. Scores of answers are compared with the first step's perturbation.",
        ]

    def outcomes(self, distance: str) -> Counter[str]:
        """Return how many comparisons, isolated and propagated, are SAME, OPPOSITE or ALONE in a distance beside L1."""
        rows = [row for setting in self.settings for row in setting.rows]
        return Counter(
            compare_verdicts(row.kind(kind, FIRST), row.kind(kind, distance)) for row in rows for kind in KINDS
        )

    def reversed_comparisons(self, distance: str) -> list[str]:
        """Return the kinds and treatments whose verdict is the opposite in a distance, each once."""
        names = [
            f"{kind} {setting.side(row.treatment)}"
            for setting in self.settings
            for row in setting.rows
            for kind in KINDS
            if compare_verdicts(row.kind(kind, FIRST), row.kind(kind, distance)) == OPPOSITE
        ]
        return list(dict.fromkeys(names))

    def norm_cases(self) -> dict[str, list[Case]]:
        """Return, by selection, the propagated L1 of L2 norms over L1 norms in every setting."""
        cases: dict[str, list[Case]] = {}
        for setting in self.settings:
            for row in setting.norms:
                case = row.kind("propagated", FIRST).case(f"b={setting.name}")
                cases.setdefault(row.treatment.selection.name, []).append(case)
        return cases

    def records(self) -> list[dict[str, Any]]:
        """Return a row per comparison, distance, kind, layer and head: means over samples, their floor, the verdict.

        `part` is `treatment` against the baseline, or `norm`: L2 norms against L1 norms. A verdict is 1 (better), 0
        (tied) or −1 (worse).
        """
        return [
            head
            for setting in self.settings
            for part, rows in (("treatment", setting.rows), ("norm", setting.norms))
            for row in rows
            for distance in DISTANCES
            for head in head_rows(row.heads[distance], setting=setting.name, part=part, distance=distance)
        ]

    def _counts(self, other: str, counts: Counter[str]) -> str:
        """Return 'cosine agrees in 18, is opposite in 2 (isolated value), is decided alone or not at all in 4'."""
        names = ", ".join(self.reversed_comparisons(other))
        opposite = f", is opposite in {counts[OPPOSITE]} ({names})" if counts[OPPOSITE] else ""
        alone = f", in {counts[ALONE]} one of both alone is decided" if counts[ALONE] else ""
        return f"{SHORT[other]} agrees in {counts[SAME]}{opposite}{alone}"

    def _orders(self) -> list[str]:
        """Return how well the methods' order agrees with L1's, and how many pairs are exchanged."""
        orders = [order for setting in self.settings for order in setting.orders]
        if not orders:
            return []
        rho = " and ".join(f"ρ = {_rho(orders, other)} in {SHORT[other]}" for other in OTHERS)
        pairs = plural(sum(order.pairs for order in orders), "pair")
        swaps = " and ".join(_exchange_note(orders, other) for other in OTHERS)
        return [f"The methods of a prompt stand as in L1 with {rho}; by their sums, of {pairs} {swaps}."]

    def _correlations(self) -> list[str]:
        """Return the correlations of propagated perturbation with losses, and the differences of other distances."""
        each = [setting.each for setting in self.settings if setting.links]
        links = correlations(mean_over_settings(each)) if each else ()
        return [line for target, words in _LOST.items() for line in _correlation(links, target, words)]

    def _norms(self) -> list[str]:
        """Return the effect of selecting by L2 norms on propagated L1, a line per selection."""
        return [
            sentence(
                f"{comparison(f'{name} by {SHORT[L2]} norms', f'by {SHORT[L1]} norms', cases)} (propagated L1)", name
            )
            for name, cases in self.norm_cases().items()
        ]


def _rho(orders: Sequence[Order], other: str) -> str:
    return _format_estimate(estimate_mean(mean_where_known([order.each[other] for order in orders]), CORRELATION))


def _format_estimate(estimate: Estimate) -> str:
    return text.decimal(estimate.value, estimate.interval)


def _exchange_note(orders: Sequence[Order], other: str) -> str:
    """Return 'L2 exchanges 3 (1 decided)'."""
    swaps = [swap for order in orders for swap in order.exchanges(other)]
    certain = sum(swap.decided for swap in swaps) or "none"
    return f"{SHORT[other]} exchanges {f'{len(swaps)} ({certain} decided)' if swaps else 'none'}"


def _correlation(links: Sequence[LossCorrelation], target: str, words: str) -> list[str]:
    """Return 'With KL … propagated L1 has ρ = 0.90 … (8 prompts); L2's less that 0.01 …, cosine's less …'."""
    own = {link.distance: link for link in links if link.target == target and link.kind == "propagated"}
    if not own or not own[FIRST].value.prompts:
        return []
    less = [(SHORT[name], link.less_l1) for name, link in own.items() if link.less_l1 is not None]
    rest = ", ".join(f"{name}'s less that {_format_estimate(value)}" for name, value in less)
    prompts = plural(own[FIRST].value.prompts, "prompt")
    return [f"With {words} propagated L1 has ρ = {_format_estimate(own[FIRST].value)} ({prompts}); {rest}."]


def _format_floor(kind: HeadKind) -> str:
    return f"{kind.floor_relative_median:.1e}"


def _tables(setting: Setting) -> list[Part]:
    """Return the tables of one setting: perturbation by distance, other verdicts, methods' ranks and correlations."""
    rows = [(setting.side(row.treatment), row) for row in setting.rows]
    measured = [Line(name, (kind,)) for name, row in rows for kind in row.measured]
    changes = [Line(name, (change,)) for name, row in rows for change in row.against]
    drifts = [Line(name, (drift,)) for name, row in rows for drift in row.drift]
    ratios = ("kind", "distance", "sum_ratio", "median_ratio", "better_share")
    links = [Line("", (link,)) for link in setting.links]
    loss = ("target", "kind", "distance", "value", "less_l1", "prompts")
    return [
        table(f"b={setting.name}: over {setting.baseline_name()}", measured, ratios),
        table(f"b={setting.name}: last layer's drift over {setting.baseline_name()}'s", drifts, ("distance", "ratio")),
        table(f"b={setting.name}: heads whose verdict is another than in L1", changes,
              ("kind", "distance", "opposite", "alone")),
        *(_ranks(setting, order) for order in setting.orders),
        *([table(f"b={setting.name}: correlations with what is lost", links, loss)] if links else []),
    ]  # fmt: skip


def _ranks(setting: Setting, order: Order) -> Part:
    """Return the rank of every method by each distance, in the order of L1."""
    methods = sorted(order.methods, key=lambda method: method.ranks[FIRST])
    lines = [Line(setting.config_name(method.config), (method,)) for method in methods]
    return table(f"b={setting.name}: methods' ranks, {order.kind}; 1 perturbs least", lines, tuple(DISTANCES), "method")


def measures(trace: Trace, baseline: str = "attention", treatments: Sides | None = None, *, step: int = 0) -> Measures:
    """Compare the conclusions in L2 and 1 − cos with those in L1.

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
    return Measures.from_settings(trace, settings(trace, baseline, treatments, step), step)
