"""What to conclude of a link, in a few sentences, and what its tables' columns mean."""

from __future__ import annotations

from math import isnan

from perturbkv.analyses import first_token, text
from perturbkv.analyses.correlation.by_name import Names
from perturbkv.analyses.correlation.correlation_tables import AGAINST, HEADLINE, estimate, points
from perturbkv.analyses.correlation.link_found import Linked, Overall
from perturbkv.analyses.correlation.link_prompts import NAMES
from perturbkv.analyses.naming import counted
from perturbkv.analyses.sentences import decided, sentence
from perturbkv.analyses.stats.estimates import Estimate
from perturbkv.analyses.stats.intervals import LEAST

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
    alike = first_token.about(sum(part.alike for part in found.parts), sum(part.answered for part in found.parts))
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
