"""Conclusions in L2 and cosine compared with those in L1, and L2 norms that select with L1 norms (appendix G)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, Record, column, derived, record, table
from perturbkv.analyses.heads.head_comparison import HeadKind
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import setting_object
from perturbkv.analyses.measurements import Measurements
from perturbkv.analyses.outcomes import SettingsResult, head_rows
from perturbkv.analyses.pairing import (
    LEAST_CONFIGS,
    Pair,
    Sides,
    check_sides,
    comparable_groups,
    matches,
    pairs,
    plural,
    short_names,
)
from perturbkv.analyses.questions.measures.measure_orders import (
    ANALYSIS,
    FIRST,
    KINDS,
    KL,
    OTHERS,
    SCORE,
    EachPrompt,
    LossCorrelation,
    Order,
    Row,
    compare_in_distances,
    correlate_each_prompt,
    correlations,
    format_estimate,
    head_sums,
    mean_over_settings,
    orders,
)
from perturbkv.analyses.stats.intervals import CORRELATION, MIN_SAMPLES, estimate_mean, mean_where_known
from perturbkv.analyses.text import LESS, MORE, Case, comparison, sample_note, sentence
from perturbkv.analyses.verdicts import DISTANCES
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import L1, L2
from perturbkv.display import Part
from perturbkv.errors import TraceError
from perturbkv.schema import VARIABLES
from perturbkv.trace import Trace

TREATMENTS = (
    "two-stage", "two-stage(norm=l2)", "attention-unpooled", "hindsight", "hindsight(norm=l2)", "random",
)  # fmt: skip
"""Treatments that are compared with the baseline by default, as far as a trace has them."""
_NEEDED = tuple(
    f"{name}{distance.suffix}"
    for distance in DISTANCES.values()
    for name in ("perturbation_isolated", "perturbation_propagated", "noise_floor", "noise_floor_isolated")
) + ("output_norm_l2",)


@record
class Setting(Record):
    """Configurations that share budget, granularity, precision and protection, so that they may be compared.

    Attributes:
        name: the budget as the user gave it, and the other choices that distinguish it from other settings.
        configs: all configurations of the trace with these choices.
        each: each prompt's values of `links`.
        identity: of the run.
    """

    SECTION: ClassVar[str] = "measures setting"

    name: str
    configs: tuple[EvictionConfig, ...]
    rows: tuple[Row, ...] = column("each treatment against its baseline", key="comparisons")
    norms: tuple[Row, ...] = column("each selection by L2 norms against the same by L1 norms")
    orders: tuple[Order, ...] = column(
        "of all configurations by isolated and by propagated perturbation; empty for fewer than three"
    )
    links: tuple[LossCorrelation, ...] = column("how each measure goes with what is lost; empty likewise")
    each: EachPrompt
    identity: RunIdentity

    @derived(key="setting")
    def choices(self) -> dict[str, Any]:
        """Choices that all configurations share; others and the label are absent."""
        return setting_object(self.configs)

    def config_name(self, config: EvictionConfig) -> str:
        """Return a configuration's short name, distinct among the setting's configurations."""
        return _distinct_name(config, self.configs)

    def side(self, config: EvictionConfig) -> str:
        """Return the short name of a baseline or treatment, distinct among those of the setting."""
        sides = dict.fromkeys(side for row in (*self.rows, *self.norms) for side in (row.baseline, row.treatment))
        return _distinct_name(config, list(sides))

    def baseline_name(self) -> str:
        """Return the short name of the rows' baseline; 'its baseline' for several baselines."""
        names = list(dict.fromkeys(self.side(row.baseline) for row in self.rows))
        return names[0] if len(names) == 1 else "its baseline"

    def lines(self) -> Sequence[Line]:
        """Return a line per treatment, then per selection by L2 norms: propagated perturbation by distance."""
        rows = [Line(self.side(row.treatment), (row.ratios("propagated"),)) for row in self.rows]
        norms = [Line(self.side(row.baseline), (row.ratios("propagated"),)) for row in self.norms]
        return [*rows, *([Line("by L2 over by L1 norms:", ()), *norms] if norms else [])]


def _distinct_name(config: EvictionConfig, configs: Sequence[EvictionConfig]) -> str:
    """Return a configuration's short name among `configs`; its selection if it is the only one."""
    return short_names(configs)[configs.index(config)] or config.selection.name


def settings(trace: Trace, baseline: str, treatments: Sides | None, step: int) -> tuple[Setting, ...]:
    """Return every setting of the trace that has a treatment with its baseline.

    Raises TraceError where a side is missing or the trace lacks a distance, and as `head_comparison.summarise`.
    """
    _check_distances(trace)
    compared, measured = _treatment_pairs(trace, baseline, treatments), Measurements(trace, ANALYSIS, step)
    sums, results = head_sums(measured), []
    for name, indices in comparable_groups(trace.run.configs).items():
        configs = [trace.run.configs[index] for index in indices]
        own, norms = [pair for pair in compared if pair[0] in configs], _norm_pairs(configs)
        if not own:
            continue
        ranked = len(indices) >= LEAST_CONFIGS
        each = correlate_each_prompt(trace, measured, sums, indices) if ranked else {}
        results.append(
            Setting(
                name=name,
                configs=tuple(configs),
                rows=tuple(compare_in_distances(trace, pair, step) for pair in own),
                norms=tuple(compare_in_distances(trace, pair, step) for pair in norms),
                orders=orders(sums, indices, configs) if ranked else (),
                links=correlations(each),
                each=each,
                identity=identity(trace, configs, step),
            )
        )
    return tuple(results)


def _treatment_pairs(trace: Trace, baseline: str, treatments: Sides | None) -> list[Pair]:
    """Return each treatment with its baseline; by default the `TREATMENTS` that the trace has.

    Raises TraceError where it has none of them, and as `check_sides` and `pairs`.
    """
    sides = check_sides(trace, baseline, TREATMENTS if treatments is None else treatments)
    known = [side for side in sides if treatments is not None or any(matches(one, side) for one in trace.run.configs)]
    if not known:
        raise TraceError(
            f"{ANALYSIS} compares {', '.join(TREATMENTS)} with {baseline}; got a trace of none of them: name its own"
        )
    return list(dict.fromkeys(pair for side in known for pair in pairs(trace.run, baseline, side)))


def _norm_pairs(configs: Sequence[EvictionConfig]) -> list[Pair]:
    """Return the pairs of configurations whose selection uses L1 norms (baseline) and L2 norms (treatment)."""
    norm_pairs = []
    for config in configs:
        defaults = config.selection.defaults
        options = {**config.selection.options, "norm": L1}
        selection = Choice(config.selection.name, options, defaults and defaults | {"norm"})
        with_l1 = dataclasses.replace(config, selection=selection)
        if config.euclidean and with_l1 in configs:
            norm_pairs.append((configs[configs.index(with_l1)], config))
    return norm_pairs


def _check_distances(trace: Trace) -> None:
    """Raise TraceError for a trace without L2 and cosine distances."""
    missing = [name for name in _NEEDED if VARIABLES[name].optional and name not in trace.arrays]
    if missing:
        raise TraceError(
            f"{ANALYSIS} needs L2 and cosine distances, and {trace.source or 'this trace'} lacks {missing[0]}"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; record them: perturbkv question "
            f"{ANALYSIS} --model {trace.run.model} --dataset {trace.run.dataset}"
        )


SHORT = {"l1": "L1", "l2": "L2", "cosine": "cosine"}
"""Distance -> its short name."""
SAME, OPPOSITE, ALONE = "same", "opposite", "alone"
"""Verdict of a comparison in L1 and in another distance: the same, the opposite, or decided in one of them alone."""
_LOST = {KL: "KL of the same step, which nearly is the same thing,", SCORE: "an answer's score"}


def compare_verdicts(first: HeadKind, second: HeadKind) -> str:
    """Return SAME, OPPOSITE, or ALONE (decided in one distance only), for the verdicts of two distances."""
    verdicts = [verdict if verdict in (LESS, MORE) else "" for verdict in (first.case().verdict, second.case().verdict)]
    return SAME if verdicts[0] == verdicts[1] else OPPOSITE if all(verdicts) else ALONE


@record
class Measures(SettingsResult):
    """Treatments compared with their baselines in L1, L2 and 1 − cos, per setting."""

    SECTION: ClassVar[str] = "question measures"
    SHOWN: ClassVar[tuple[str, ...]] = ("l1", "l2", "cosine", "l2_opposite", "cosine_opposite")
    FIRST: ClassVar[str] = "treatment"

    settings: tuple[Setting, ...] = column(
        "one per budget, granularity, precision and protection in which something is compared"
    )

    def conclusion(self) -> str:
        """Return whether L2 or cosine reverses a comparison of L1, and in how many comparisons they agree."""
        count = plural(sum(len(setting.rows) for setting in self.settings) * len(KINDS), "comparison")
        note = f"isolated and propagated, sum over heads; {sample_note(self.identity.samples)}"
        if self.identity.samples < MIN_SAMPLES:
            return sentence(f"too few samples to decide whether L2 or cosine reverses one of {count} of L1 ({note})")
        outcomes = {other: self.outcomes(other) for other in OTHERS}
        reversing = [SHORT[other] for other, counts in outcomes.items() if counts[OPPOSITE]]
        verdict = f"{' and '.join(reversing)} reverse{'s' * (len(reversing) == 1)} some" if reversing else ""
        agreement = "; ".join(self._agreement_clause(other, counts) for other, counts in outcomes.items())
        return sentence(f"{verdict or 'neither L2 nor cosine reverses any'} of {count} of L1: {agreement} ({note})")

    def setting_names(self) -> list[str]:
        """Return the name of each setting."""
        return [f"b={setting.name}" for setting in self.settings]

    def title(self) -> str:
        """Return the baseline of the ratios, and the name of a single setting."""
        baselines = " or ".join(dict.fromkeys(setting.baseline_name() for setting in self.settings))
        where = f", {self.setting_names()[0]}" if len(self.settings) == 1 else ""
        return f"propagated perturbation over that of {baselines}, sum over heads{where}"

    def caveats(self) -> Sequence[str]:
        """Return the note on why ratios of cosine distances lie further from 1."""
        return ["1 − cos grows with the square of an angle: its ratios lie further from 1."]

    def details(self) -> Sequence[Part]:
        """Return every number by distance, methods' ranks, correlations with losses, and noise floors."""
        first = self.settings[0].rows[0]
        floors = ", ".join(
            f"{SHORT[name]} {first.kind('propagated', name).floor_relative_median:.1e}" for name in first.heads
        )
        return [
            *self._order_note(),
            *self._correlation_notes(),
            *self._norm_notes(),
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
        """Return the number of comparisons per outcome: SAME as in L1, OPPOSITE or ALONE."""
        rows = [row for setting in self.settings for row in setting.rows]
        return Counter(
            compare_verdicts(row.kind(kind, FIRST), row.kind(kind, distance)) for row in rows for kind in KINDS
        )

    def reversed_comparisons(self, distance: str) -> list[str]:
        """Return 'kind treatment' of each comparison whose verdict in a distance is opposite to L1's."""
        names = [
            f"{kind} {setting.side(row.treatment)}"
            for setting in self.settings
            for row in setting.rows
            for kind in KINDS
            if compare_verdicts(row.kind(kind, FIRST), row.kind(kind, distance)) == OPPOSITE
        ]
        return list(dict.fromkeys(names))

    def norm_cases(self) -> dict[str, list[Case]]:
        """Return selection -> cases: propagated L1 when it uses L2 norms, over that with L1 norms, per setting."""
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

    def _agreement_clause(self, other: str, counts: Counter[str]) -> str:
        """Return a clause on comparisons in `other`: 'cosine agrees in 18, is opposite in 2 (isolated value), …'."""
        names = ", ".join(self.reversed_comparisons(other))
        opposite = f", is opposite in {counts[OPPOSITE]} ({names})" if counts[OPPOSITE] else ""
        alone = f", in {counts[ALONE]} one of both alone is decided" if counts[ALONE] else ""
        return f"{SHORT[other]} agrees in {counts[SAME]}{opposite}{alone}"

    def _order_note(self) -> list[str]:
        """Return the note on the rank agreement of L2 and cosine with L1; empty without orders."""
        every = [order for setting in self.settings for order in setting.orders]
        if not every:
            return []
        rho = " and ".join(f"ρ = {_mean_rho(every, other)} in {SHORT[other]}" for other in OTHERS)
        count = plural(sum(order.pairs for order in every), "pair")
        swaps = " and ".join(_exchange_note(every, other) for other in OTHERS)
        return [f"The methods of a prompt stand as in L1 with {rho}; by their sums, of {count} {swaps}."]

    def _correlation_notes(self) -> list[str]:
        """Return a sentence per loss on its correlation with propagated L1, and the differences of L2 and cosine."""
        each = [setting.each for setting in self.settings if setting.links]
        links = correlations(mean_over_settings(each)) if each else ()
        return [line for target, words in _LOST.items() for line in _correlation_note(links, target, words)]

    def _norm_notes(self) -> list[str]:
        """Return a sentence per selection: the effect of L2 instead of L1 norms on propagated L1."""
        return [
            sentence(
                f"{comparison(f'{name} by {SHORT[L2]} norms', f'by {SHORT[L1]} norms', cases)} (propagated L1)", name
            )
            for name, cases in self.norm_cases().items()
        ]


def _mean_rho(orders: Sequence[Order], other: str) -> str:
    """Return, as text, the mean ρ between the orders in L1 and in another distance, with its interval."""
    return format_estimate(estimate_mean(mean_where_known([order.each[other] for order in orders]), CORRELATION))


def _exchange_note(orders: Sequence[Order], other: str) -> str:
    """Return the number of pairs of methods in opposite order in a distance: 'L2 exchanges 3 (1 decided)'."""
    swaps = [swap for order in orders for swap in order.exchanges(other)]
    certain = sum(swap.decided for swap in swaps) or "none"
    return f"{SHORT[other]} exchanges {f'{len(swaps)} ({certain} decided)' if swaps else 'none'}"


def _correlation_note(links: Sequence[LossCorrelation], target: str, words: str) -> list[str]:
    """Return a sentence with the correlation of propagated L1 with `target`, and the other distances' differences."""
    by_distance = {link.distance: link for link in links if link.target == target and link.kind == "propagated"}
    if not by_distance or not by_distance[FIRST].value.prompts:
        return []
    less = [(SHORT[name], link.less_l1) for name, link in by_distance.items() if link.less_l1 is not None]
    rest = ", ".join(f"{name}'s less that {format_estimate(value)}" for name, value in less)
    prompts = plural(by_distance[FIRST].value.prompts, "prompt")
    return [f"With {words} propagated L1 has ρ = {format_estimate(by_distance[FIRST].value)} ({prompts}); {rest}."]


def _tables(setting: Setting) -> list[Part]:
    """Return the tables of one setting: perturbation, drift and verdicts by distance, ranks and correlations."""
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
        *(_rank_table(setting, order) for order in setting.orders),
        *([table(f"b={setting.name}: correlations with what is lost", links, loss)] if links else []),
    ]  # fmt: skip


def _rank_table(setting: Setting, order: Order) -> Part:
    """Return the table of every method's rank by each distance, in the order of L1."""
    methods = sorted(order.methods, key=lambda method: method.ranks[FIRST])
    lines = [Line(setting.config_name(method.config), (method,)) for method in methods]
    return table(f"b={setting.name}: methods' ranks, {order.kind}; 1 perturbs least", lines, tuple(DISTANCES), "method")


def measures(trace: Trace, baseline: str = "attention", treatments: Sides | None = None, *, step: int = 0) -> Measures:
    """Compare the conclusions in L2 and 1 − cos with those in L1 (METHOD: measures beside L1).

    In each distance: every treatment head by head with the baseline; the ranks of all configurations of a prompt, and
    their correlation with KL of the same step and, where the trace holds answers, with the answers' scores (METHOD: the
    protocol, 7); and selections by L2 norms with the same selections by L1 norms.

    Args:
        trace: from `measure` or `read_trace`.
        baseline: a selection, a policy, or both (`adakv:attention`).
        treatments: one or several sides, named like the baseline; by default two-stage and hindsight by both norms,
            attention-unpooled and random, as far as the trace holds them.
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
