"""Does the first step's perturbation tell what an answer will be worth? (METHOD: the protocol, 7. No paper tested it.).

Between the configurations of one prompt that share budget, granularity and protection; the unit is the prompt.

What to conclude of a link, in a few sentences, and what its tables' columns mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import measurements, text
from perturbkv.analyses.correlation import correlation_tables
from perturbkv.analyses.correlation.correlation_settings import (
    ANALYSIS,
    Pooled,
    Setting,
    across_budgets,
    marked,
    pooled,
    setting,
)
from perturbkv.analyses.correlation.correlation_tables import AGAINST, HEADLINE, Linked, Overall, estimate, points
from perturbkv.analyses.correlation.lost_answers import BINS, LOST, Rule, check_bins
from perturbkv.analyses.correlation.method_identity import (
    NAMES,
    Names,
    beyond,
    contrasts,
    joined,
    of_prompts,
    standing,
    strengths,
)
from perturbkv.analyses.identity import RunIdentity, identity, together
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.multi_trace import as_traces
from perturbkv.analyses.pairing import LEAST_CONFIGS, counted, matches, ranked_together
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.intervals import LEAST, Estimate
from perturbkv.analyses.text import decided, sentence
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

_WHO = "the methods of a prompt that perturb its first step more"
_TELLS = {-1: f"{_WHO} score less", 1: f"{_WHO} score more"}
_CHANCE = 0.5
"""Share of pairs without a link."""
NOTHING = 0.1
"""Of ρ, and of a share of pairs: what lies within it on both sides is told as no more."""
_UNDECIDED = f"whether {_WHO} score less is undecided"


def conclusion(found: Linked) -> str:
    """Of the measure that was chosen beforehand: ranks, lost answers, each beside what methods' names alone tell."""
    samples, answered = (sum(getattr(part, name) for part in found.parts) for name in ("samples", "answered"))
    if not answered:
        return (
            f"The full cache answers none of {counted(samples, 'prompt')} (score > {found.rule.right:g}): there is "
            "nothing that eviction can lose."
        )
    every = found.overall[0]
    return "\n".join(map(sentence, filter(None, (_ranks(found, every), _areas(found, every), _beats(every)))))


def _ranks(found: Linked, every: Overall) -> str:
    """On which side of 0 ρ lies, and how much of it is more than the names."""
    rho = every.strength(HEADLINE).rho
    if isnan(rho.value):
        reasons = dict.fromkeys(filter(None, (one.no_ranks() for one in found.settings)))
        why = " or ".join(reasons) or f"{NAMES[HEADLINE]} is the same under all methods of a prompt"
        return f"whether methods that perturb more score less cannot be said: {why}"
    side = decided(rho.interval, 0) or 0
    verdict = _TELLS.get(side, _UNDECIDED)
    names = every.named(HEADLINE).rho
    more = _more(names, estimate(names.beyond, " "), side)
    return f"{verdict}: ρ = {estimate(rho, ' ')} ({_over(found)}{_few(rho)}); {more}"


def _over(found: Linked) -> str:
    """'3 budgets, one at a time, ' where there are several."""
    count = sum(one.strength(HEADLINE).rho.prompts > 0 for one in found.settings)
    return f"{count} budgets, one at a time, " if count > 1 else ""


def _few(one: Estimate) -> str:
    """'n = 12 deciding prompts', and of fewer than five that they are too few."""
    few = ", too few for an interval" if one.prompts < LEAST else ""
    return f"n = {counted(one.prompts, 'deciding prompt')}{few}"


def _more(names: Names, beyond: str, side: int) -> str:
    """Whether the prompts' own perturbation tells more than the methods' names do; `beyond` is how much, in words.

    `side`: where the statistic was decided to lie, 0 where it was not.
    """
    if isnan(names.beyond.value):
        return "how much of it the methods' names alone tell cannot be said: no data set has two such prompts"
    verdict = decided(names.beyond.interval, 0)
    if verdict is None:
        return f"less what the methods' names alone tell: {beyond}, of too few prompts to say whether that is more"
    if side and verdict:
        return f"that is {'more' if verdict == side else 'less'} than the methods' names tell (less these: {beyond})"
    if _is_nothing(names.beyond):
        return f"what is shown is no more than the methods' names tell (less these: {beyond})"
    if verdict:
        return f"less what the methods' names tell it is {beyond}"
    return f"whether that is more than the methods' names tell is undecided (less these: {beyond})"


def _is_nothing(beyond: Estimate) -> bool:
    """Whether the whole interval lies so near to 0 that what is beyond the names is as good as nothing."""
    found = beyond.interval
    return found is not None and max(abs(found.low), abs(found.high)) <= NOTHING


def _areas(found: Linked, every: Overall) -> str:
    """How often a lost answer is the more perturbed one, and how much of that is more than the names."""
    area, names = every.strength(HEADLINE).auc, every.named(HEADLINE).auc
    if isnan(area.value):
        return " or ".join(dict.fromkeys(one.no_areas() for one in found.settings))
    share, side = text.percent(area.value, area.interval), decided(area.interval, _CHANCE) or 0
    told = f"a lost answer is perturbed more than a kept one of its prompt in {share} of pairs ({_few(area)})"
    return f"{told}; {_more(names, f'{points(names.beyond)} points', side)}"


def _beats(every: Overall) -> str:
    """Where it is decided, that the measure tells more, or less, than the attention given up: it knows values.

    Only of a link that is more than the methods' names: between names alone, a lower ρ tells nothing of values.
    """
    one = every.contrast(HEADLINE, AGAINST)
    verdict = decided(one.rho.interval, 0)
    if not verdict or decided(every.named(HEADLINE).rho.beyond.interval, 0) != -1:
        return ""
    told = f"ρ differs by {estimate(one.rho, ' ')}, {_few(one.rho)}"
    more = "more" if verdict < 0 else "less"
    return f"{NAMES[HEADLINE]} tells {more} than the attention given up ({NAMES[AGAINST]}): {told}"


def notes(found: Linked) -> str:
    """What rows and columns mean; where no prompt tells anything there are none."""
    alike = measurements.about_first_token(
        sum(part.alike for part in found.parts), sum(part.answered for part in found.parts)
    )
    said = [f"{text.about_intervals(found.identity.samples)} {text.ABOUT_HELD}", alike]
    if any(one.decides for one in found.settings):
        said = [_ABOUT, _ABOUT_ALL if found.everything else _MORE, *said]
    return "\n".join(filter(None, said))


_ABOUT = (
    "ρ: Spearman's, between measure and score over the methods of one prompt, mean over the n prompts whose methods "
    "differ in both; below 0 the more perturbed score less. Lost above kept: share of pairs of a lost and a kept "
    "answer of one prompt in which the lost one is more perturbed, ties half; 50 % without a link. Less names: the "
    "same less what other prompts of the data set show, whose measures know the methods' names and not this prompt. "
    "*: it and less names are decided as a link, and its p stands beside all measures and budgets (Benjamini–Hochberg, "
    "5 %); p tests whether prompts' measures may be dealt out among the prompts: that they tell no more than names, "
    f"which is said where the interval of less names lies within {NOTHING:g}, or {100 * NOTHING:g} points. "
    "Methods are those of this run; intervals are over prompts. L1, θ, θ̂ and drift are relative to the full run's "
    "norms."
)
_MORE = "Each budget's measures, what else could make a link, contrasts and curves: --all, in Python everything=True."
_ABOUT_ALL = (
    "τ-b: Kendall's. Of dealt scores: the middle 95 % where each prompt's scores are dealt out among its methods, "
    "which any difference between methods leaves. Between prompts, hard and long prompts confound; across budgets, "
    "everything does. A bin's intervals are of answers between its ends, over prompts, some of which hold more of them."
)


class Link(Linked, Result):
    """The link between the first step's perturbation and the score of the answer; it shows itself, as any result."""

    def conclusion(self) -> str:
        """Whether more perturbed configurations score less, or lose answers, by more than the methods' names tell."""
        return conclusion(self)

    def tables(self) -> list[Table | str]:
        """Measures, and budgets; of `everything` also data sets, what else could make a link, contrasts, and curves."""
        return correlation_tables.tables(self) + (correlation_tables.further_tables(self) if self.everything else [])

    def notes(self) -> str:
        """What rows and columns mean."""
        return notes(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers; what single prompts say is in `records`."""
        left_out = ("within", "measured", "full", "evicted", "lost", "tables")
        settings = [
            {**{name: value for name, value in vars(one).items() if name not in left_out},
             "answers": int(one.lost.size), "lost": int(one.lost.sum()), "silence": one.silence()}
            for one in self.settings
        ]  # fmt: skip
        shown = {name: getattr(self, name) for name in ("parts", "rule", "too_few", "overall", "across")}
        found: dict[str, Any] = plain({**shown, "settings": settings})
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per answered prompt and configuration: its measures, both scores in [0, 1], and whether it is lost.

        A measure that a prompt lacks is None.
        """
        return [
            {
                **columns_of(config),
                "setting": one.name,
                "dataset": self.parts[part].dataset,
                "sample": sample,
                "score_full": float(one.full[place]),
                "score": float(one.evicted[place, column]),
                "lost_answer": int(one.lost[place, column]),
                **{name: plain(float(array[place, column])) for name, array in one.measured.items()},
            }
            for one in self.settings
            for place, (part, sample) in enumerate(self.prompts)
            for column, config in enumerate(one.configs)
        ]


def link(
    traces: Trace | Sequence[Trace], *, only: Sequence[str] = (), right: float = 0.0, lost: float = LOST,
    bins: int = BINS, everything: bool = False,
) -> Link:  # fmt: skip
    """Does the first step's perturbation tell what an answer will be worth?.

    Within each prompt that the full cache answers, between its configurations of one budget, granularity and
    protection (METHOD: the protocol, 7): Spearman's ρ and Kendall's τ-b between each measure and the score, and the
    share of pairs of a lost and a kept answer in which the lost one is more perturbed. Beside each stands what scores
    dealt out anew within the prompts show, what a method's name alone tells, and the same between prompts.

    Args:
        traces: with graded answers; several are pooled, and their data sets told apart.
        only: policies, selections or `policy:selection`, where not all that the traces hold are to be ranked.
        right: a prompt counts where the full cache's score is above this.
        lost: an answer is lost where its score is below this share of the full cache's.
        bins: of the calibration curves.
        everything: show all tables; by default those that one reads first. What is found is the same.

    Raises TraceError for traces without graded answers, that do not belong together, or without three configurations
    of one setting; ConfigError for a rule or bins that make no sense.

    Example, of a `trace` of answers under three methods and more of one budget:
        >>> import perturbkv as pk
        >>> [one.measure for one in pk.link(trace).settings[0].strengths][:2]
        ['isolated', 'propagated']
    """
    rule, bins = Rule(right, lost), check_bins(bins)
    held = [_of_methods(trace, only) for trace in as_traces(traces)]
    found = pooled(held, rule)
    groups = ranked_together(found.configs)
    settings = marked(
        [setting(found, name, places, rule, bins) for name, places in groups.items() if len(places) >= LEAST_CONFIGS]
    )
    if not settings:
        told = ", ".join(f"{len(places)} of b={name}" for name, places in groups.items())
        msg = f"{ANALYSIS} needs at least {LEAST_CONFIGS} methods of one budget to rank, got {told}; measure more"
        raise TraceError(msg)
    return Link(
        identity=_identity(held, settings),
        parts=found.parts,
        rule=rule,
        settings=settings,
        too_few=tuple(name for name, places in groups.items() if len(places) < LEAST_CONFIGS),
        overall=_overall(found, settings),
        across=across_budgets(found),
        everything=everything,
        prompts=tuple(zip(found.part.tolist(), found.names, strict=True)),
    )


def _of_methods(trace: Trace, only: Sequence[str]) -> Trace:
    """The part of a trace that some methods measured. Raises TraceError for a method that it does not hold."""
    if not only:
        return trace
    for name in only:
        if not any(matches(config, name) for config in trace.run.configs):
            known = ", ".join(dict.fromkeys(f"{one.policy.name}:{one.selection.name}" for one in trace.run.configs))
            msg = f"expected {name} among the trace's methods, got a trace of {known}"
            raise TraceError(msg)
    part = trace.sel(where=lambda config: any(matches(config, name) for name in only))
    return dataclasses.replace(part, source=trace.source, digest=trace.digest)


def _overall(found: Pooled, settings: Sequence[Setting]) -> tuple[Overall, ...]:
    """Of all prompts, and of each data set where there are several."""
    datasets = list(dict.fromkeys(part.dataset for part in found.parts))
    names = np.array([found.parts[part].dataset for part in found.part], dtype=str)
    rows = {"": np.ones(len(names), dtype=bool)}
    if len(datasets) > 1:
        rows |= {name: names == name for name in datasets}
    return tuple(_of_prompts(found, settings, name, places) for name, places in rows.items())


def _of_prompts(found: Pooled, settings: Sequence[Setting], dataset: str, rows: NDArray[np.bool_]) -> Overall:
    """Each prompt's mean over the settings, of some prompts; what stands is said of all prompts alone."""
    each = of_prompts({name: joined([one.within[name] for one in settings]) for name in NAMES}, rows)
    tables = [{name: table.of(rows) for name, table in one.tables.items()} for one in settings]
    names, own = beyond(tables, found.alike[np.ix_(rows, rows)]), strengths(each)
    return Overall(dataset, own, contrasts(each), names if dataset else standing([names], [own])[0])


def _identity(traces: Sequence[Trace], settings: Sequence[Setting]) -> RunIdentity:
    """The first trace's, with the data sets, digests and samples of all."""
    configs = [config for one in settings for config in one.configs]
    return together([identity(trace, configs) for trace in traces])
