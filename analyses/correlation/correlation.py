"""Score correlation: perturbation against the score of the free answer (METHOD: the protocol, 7).

Perturbation is that of the first step of the model's own text, or of all steps of the accepted answer.

Between the configurations of one prompt that share budget, granularity and protection; the unit is the prompt. No paper
tested it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import measurements, text
from perturbkv.analyses.columns import Line, column, record
from perturbkv.analyses.conclusions import Case, Claim, unanswered_claims
from perturbkv.analyses.correlation import correlation_tables
from perturbkv.analyses.correlation.correlation_settings import (
    ANALYSIS,
    AcrossBudgets,
    GradedTrace,
    PooledPrompts,
    Setting,
    across_budgets,
    correlate_setting,
    mark_significant_settings,
    pool_prompts,
)
from perturbkv.analyses.correlation.correlation_tables import Overall, format_estimate, format_points
from perturbkv.analyses.correlation.lost_answers import BINS, LOST, Rule, check_bins
from perturbkv.analyses.correlation.method_identity import (
    contrasts,
    identity_baselines,
    mark_significant,
    mean_over_settings,
    select_prompts,
    strengths,
)
from perturbkv.analyses.identity import RunIdentity, identity, identity_at, joint_identity
from perturbkv.analyses.json_values import config_columns, json_value
from perturbkv.analyses.measures import Measures, effect_note
from perturbkv.analyses.multi_trace import as_traces
from perturbkv.analyses.result import Result
from perturbkv.analyses.sides import LEAST_CONFIGS, comparable_groups, matches
from perturbkv.analyses.stats.intervals import Estimate
from perturbkv.analyses.verdicts import ALIKE, EQUIVALENT, LESS, MORE, UNDECIDED, verdict_at
from perturbkv.configs.cache_contents import SOMEBODYS
from perturbkv.display import Part, plural
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_SCORE = {LESS: "lower", MORE: "higher", ALIKE: "the same"}
NOTHING = 0.1
"""A difference of ρ, or of a share of pairs, whose interval lies within this of 0 is as good as nothing."""


def _beyond_claim(statistic: str, beyond: Estimate, shown: str, words: Mapping[str, str], margin: str) -> Claim:
    """Return the claim that a statistic differs from its method identity baseline.

    An undecided difference whose whole interval lies within `NOTHING` of 0 is EQUIVALENT.

    Args:
        statistic: its name.
        beyond: the statistic less its baseline.
        shown: text of the difference.
        words: verdict -> side of 0 in words, the expected one first.
        margin: `NOTHING` as text.
    """
    ends, verdict = beyond.interval, verdict_at(beyond.interval, 0)
    if verdict == UNDECIDED and ends is not None and max(abs(ends.low), abs(ends.high)) <= NOTHING:
        verdict = EQUIVALENT
    case, missing = Case("", beyond.value, shown, verdict), "no data set has two such prompts"
    return Claim(f"{statistic} minus what the methods' names tell", "is", [case], words, margin=margin, missing=missing)


_TESTS = (
    "Less names: the same less that of the other prompts of the data set, whose measures share the methods' names and "
    "not this prompt. *: both are decided, and p beside all measures and budgets (Benjamini–Hochberg, 5 %); "
    "p tests whether measures may be exchanged among the prompts. No more than names: the interval of less names lies "
    f"within {NOTHING:g}, or {100 * NOTHING:g} points. L1, θ, θ̂ and drift are relative to the full run's norms. τ-b: "
    "Kendall's. Permuted scores: the middle 95 % where each prompt's scores are permuted among its methods. Between "
    "prompts, hard and long prompts confound; across budgets, everything does."
)


@record
class Correlation(Result, section="correlation", rows="samples", shown=correlation_tables.SHOWN, first="measure"):
    """The correlation between perturbation and the score of the free answer.

    Attributes:
        identity: of the run; of several traces with all of their data sets.
        prompts: per prompt of the arrays in `settings`, the index of its trace in `parts` and its sample's name.
    """

    identity: RunIdentity
    text: str = column(
        "text that the steps read: own, of which the first step counts, or answer, the accepted one, of which all do"
    )
    parts: tuple[GradedTrace, ...] = column("the traces, which are pooled")
    rule: Rule = column("which prompts count, and which answers are lost")
    settings: tuple[Setting, ...] = column("one per budget, granularity and protection of three configurations or more")
    too_few: tuple[str, ...] = column("budgets of fewer than three configurations, which have no ranks")
    overall: tuple[Overall, ...] = column(
        "all settings, one at a time: of all prompts, then of each data set where there are several"
    )
    across: tuple[AcrossBudgets, ...] = column("for many reasons; empty where no method has three budgets")
    prompts: tuple[tuple[int, str], ...]

    @property
    def measures(self) -> Measures:
        """The measures of the text that was measured."""
        return self.overall[0].measures

    def claims(self) -> Sequence[Claim]:
        """Return the headline's correlation with scores and lost answers, also less the identity baseline."""
        if not self._total("answered"):
            samples, limits = self._total("samples"), [part.answer_tokens for part in self.parts]
            none = f"the full cache answers none of {plural(samples, 'prompt')} (score > {self.rule.right:g})"
            return unanswered_claims(
                Claim(self.measures.subject, "score", [], _SCORE), none, self._total("cut_off"), samples, limits
            )
        return [*self._rank_claims(), *self._area_claims()]

    def _rank_claims(self) -> list[Claim]:
        """Return the claims on ρ with scores, and on ρ less its identity baseline where any prompt has a ρ."""
        headline = self.measures.headline
        rho = self.overall[0].strength(headline).rho
        beyond = self.overall[0].identity_baselines(headline).rho.beyond
        unranked = dict.fromkeys(filter(None, (one.no_ranks_reason() for one in self.settings)))
        scores = Case("", rho.value, f"ρ = {format_estimate(rho, ' ')}", verdict_at(rho.interval, 0))
        equal = f"{self.measures.names[headline]} is the same under all methods of a prompt"
        claim = Claim(self.measures.subject, "score", [scores], _SCORE, missing=" or ".join(unranked) or equal)
        if isnan(rho.value):
            return [claim]
        return [
            claim,
            _beyond_claim(
                "ρ",
                beyond,
                format_estimate(beyond, " "),
                {LESS: "below 0", MORE: "above 0", ALIKE: "0"},
                f"within {NOTHING:g}",
            ),
        ]

    def _area_claims(self) -> list[Claim]:
        """Return the claims on pairs of a lost and a kept answer, and on their share less its identity baseline."""
        headline = self.measures.headline
        area = self.overall[0].strength(headline).auc
        beyond = self.overall[0].identity_baselines(headline).auc.beyond
        unpaired = dict.fromkeys(one.no_areas_reason() for one in self.settings)
        pairs = Case.number("", area.value, area.interval, text.percent, 0.5)
        more = "is perturbed more than a kept one of its prompt"
        claim = Claim(
            "a lost answer",
            more,
            [pairs],
            {MORE: "in most pairs", LESS: "in fewer than half of the pairs"},
            missing=" or ".join(unpaired),
        )
        if isnan(area.value):
            return [claim]
        margin = f"within {100 * NOTHING:g} points"
        return [
            claim,
            _beyond_claim(
                "this share",
                beyond,
                f"{format_points(beyond)} points",
                {MORE: "above 0", LESS: "below 0", ALIKE: "0"},
                margin,
            ),
        ]

    def _total(self, name: str) -> int:
        """Return a count of prompts, the field `name` of `GradedTrace`, summed over the traces."""
        return sum(getattr(part, name) for part in self.parts)

    def scope(self) -> Sequence[str]:
        """Return what the claims are of: steps of an answer, budgets, the prompts behind ρ and behind pairs."""
        strength = self.overall[0].strength(self.measures.headline)
        budgets = sum(one.strength(strength.measure).rho.prompts > 0 for one in self.settings)
        several = [f"{budgets} budgets, one at a time"] if budgets > 1 else []
        prompts = {"ρ": strength.rho.prompts, "pairs": strength.auc.prompts}
        deciding = [f"{name}: n = {plural(count, 'deciding prompt')}" for name, count in prompts.items() if count]
        if not deciding:
            return [*several, *super().scope()]
        return [*filter(None, [self.identity.steps]), *several, *deciding]

    def title(self) -> str:
        """Return the table's title: the single setting, or that it shows each prompt's mean over all budgets."""
        if len(self.settings) == 1:
            return correlation_tables.describe_setting(self.settings[0])
        return "all budgets, one at a time: each prompt's mean over them"

    def lines(self) -> Sequence[Line]:
        """Return a line per measure that is not circular."""
        return correlation_tables.measure_lines(self.overall[0])

    def caveats(self) -> Sequence[str]:
        """Return which budgets have no ranks and why, and the limits of the budgets that have."""
        deciding = [one for one in self.settings if one.decides]
        few = f"No ranks of fewer than {LEAST_CONFIGS} methods: b={', '.join(self.too_few)}."
        return [
            *correlation_tables.undecided_notes(self.settings),
            *([few] if self.too_few else []),
            *measurements.first_token_caveat(self._total("alike"), self._total("answered")),
            *correlation_tables.few_methods_note(deciding),
        ]

    def details(self) -> Sequence[Part]:
        """Return the number of answered prompts, the further tables, and notes on the tests."""
        deciding = [one for one in self.settings if one.decides]
        each = ", ".join(
            f"{part.answered} of {plural(part.samples, 'prompt')} of {part.dataset}"
            + (f" (score > {self.rule.right:g}; median {part.median_full:.2g})" if part.answered else "")
            for part in self.parts
        )
        return [
            f"The full cache answers {each}; lost: below {self.rule.lost:g} of its score.",
            *(correlation_tables.lowest_rho_notes(self.overall[0]) if deciding else []),
            *map(correlation_tables.describe_setting, self.settings),
            *correlation_tables.further_tables(self.settings, self.overall, self.across),
            *([_TESTS] if deciding else []),
            *([effect_note(self.identity.effect_gradient)] if "effect" in self.measures.predictors else []),
            text.CACHE_SHARE_NOTE,
            *filter(None, [measurements.first_token_note(self._total("alike"), self._total("answered"))]),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per answered prompt and configuration: measures, both scores in [0, 1], and whether it is lost.

        A measure that a prompt lacks is None.
        """
        return [
            {
                **config_columns(config),
                "setting": one.name,
                "dataset": self.parts[part].dataset,
                "sample": sample,
                "score_full": float(one.full[index]),
                "score": float(one.evicted[index, number]),
                "lost_answer": int(one.lost[index, number]),
                **{name: json_value(float(array[index, number])) for name, array in one.measured.items()},
            }
            for one in self.settings
            for index, (part, sample) in enumerate(self.prompts)
            for number, config in enumerate(one.configs)
        ]


def correlation(
    traces: Trace | Sequence[Trace], *, only: Sequence[str] = (), right: float = 0.0, lost: float = LOST,
    bins: int = BINS,
) -> Correlation:  # fmt: skip
    """Correlate perturbation with the score of the free answer.

    Perturbation is that of the first step of the model's own text; of a trace with `text="answer"` the isolated one of
    all steps along the accepted answer, with `save=("effect",)` also what it changes the answer's log p by.

    Within each prompt that the full cache answers, between its configurations of one budget, granularity and
    protection (METHOD: the protocol, 7): Spearman's ρ and Kendall's τ-b between each measure and the score, and the
    share of pairs of a lost and a kept answer in which the lost one is more perturbed. Beside each stands a permutation
    null within the prompts, the method identity baseline, and the same between prompts.

    Args:
        traces: with graded answers; several are pooled, and their data sets kept distinct.
        only: policies, selections or `policy:selection` to rank; empty: all that the traces hold.
        right: a prompt counts where the full cache's score is above this.
        lost: an answer is lost where its score is below this share of the full cache's.
        bins: of the calibration curves.

    Raises TraceError for traces without graded answers, along a given text, that do not belong together, or without
    three configurations of one setting; ConfigError for thresholds out of their range and for fewer than two bins.

    Example, of a `trace` of answers under three methods and more of one budget:
        >>> import perturbkv as pk
        >>> [one.measure for one in pk.correlation(trace).settings[0].strengths][:2]
        ['isolated', 'propagated']
    """
    rule, bins = Rule(right, lost), check_bins(bins)
    chosen = [_select_methods(trace, only) for trace in as_traces(traces)]
    prompts = pool_prompts(chosen, rule)
    groups = {
        name: [index for index in indices if prompts.configs[index].cache_contents is not SOMEBODYS]
        for name, indices in comparable_groups(prompts.configs).items()
    }  # of somebody's caches the budget tells nothing
    settings = mark_significant_settings(
        [
            correlate_setting(prompts, name, group, rule, bins)
            for name, group in groups.items()
            if len(group) >= LEAST_CONFIGS
        ]
    )
    if not settings:
        got = ", ".join(f"{len(group)} of b={name}" for name, group in groups.items())
        raise TraceError(
            f"{ANALYSIS} needs at least {LEAST_CONFIGS} methods of one budget to rank, got {got}; measure more"
        )
    configs = [config for one in settings for config in one.configs]
    step = prompts.measures.step  # named where it is not the first of the model's own text
    identities = [identity(one, configs) if step == 0 else identity_at(one, configs, step) for one in chosen]
    datasets = list(dict.fromkeys(part.dataset for part in prompts.parts))
    dataset_of = np.array([prompts.parts[part].dataset for part in prompts.part], dtype=str)  # (prompt,)
    rows = {"": np.ones(len(dataset_of), dtype=bool)}
    if len(datasets) > 1:
        rows |= {dataset: dataset_of == dataset for dataset in datasets}
    return Correlation(
        identity=joint_identity(identities),
        text=prompts.run.text,
        parts=prompts.parts,
        rule=rule,
        settings=settings,
        too_few=tuple(name for name, group in groups.items() if len(group) < LEAST_CONFIGS),
        overall=tuple(_overall_correlations(prompts, settings, dataset, chosen) for dataset, chosen in rows.items()),
        across=across_budgets(prompts),
        prompts=tuple(zip(prompts.part.tolist(), prompts.names, strict=True)),
    )


def _select_methods(trace: Trace, only: Sequence[str]) -> Trace:
    """Return a trace with the configurations of the named methods alone; all without names.

    Raises TraceError for a method that the trace does not hold.
    """
    if not only:
        return trace
    for name in only:
        if not any(matches(config, name) for config in trace.run.configs):
            known = ", ".join(dict.fromkeys(f"{one.policy.name}:{one.selection.name}" for one in trace.run.configs))
            raise TraceError(f"expected {name} among the trace's methods, got a trace of {known}")
    part = trace.sel(where=lambda config: any(matches(config, name) for name in only))
    return dataclasses.replace(part, source=trace.source, digest=trace.digest)


def _overall_correlations(
    prompts: PooledPrompts, settings: Sequence[Setting], dataset: str, rows: NDArray[np.bool_]
) -> Overall:
    """Return the correlations over all settings for the prompts in `rows`, those of `dataset` or, if empty, of all.

    `significant` is set for all prompts alone.
    """
    names, predictors = prompts.measures.names, prompts.measures.predictors
    each = select_prompts({name: mean_over_settings([one.within[name] for one in settings]) for name in names}, rows)
    tables = [{name: table.select(rows) for name, table in one.tables.items()} for one in settings]
    baselines, own = identity_baselines(tables, prompts.same_dataset[np.ix_(rows, rows)]), strengths(each)
    if not dataset:
        (baselines,) = mark_significant([baselines], [own], predictors)
    return Overall(prompts.measures, dataset, own, contrasts(each, predictors), baselines)
