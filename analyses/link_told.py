"""What to conclude of a link, in one sentence, and what its tables' columns mean."""

from __future__ import annotations

from math import isnan

from perturbkv.analyses import numbers
from perturbkv.analyses.estimates import Estimate
from perturbkv.analyses.intervals import LEAST
from perturbkv.analyses.link_found import Linked
from perturbkv.analyses.link_prompts import MEASURES, NAMES
from perturbkv.analyses.link_tables import AGAINST, HEADLINE, estimate
from perturbkv.analyses.naming import counted
from perturbkv.analyses.sentences import decided, ends, sentence, tally

_TELLS = {
    -1: ("the methods of a prompt that perturb its first step more score less", "less"),
    1: ("the methods of a prompt that perturb its first step more score more", "more"),
    0: ("whether the methods of a prompt that perturb its first step more score less is undecided", "undecided"),
}


def conclusion(found: Linked) -> str:
    """Of the measure that was chosen beforehand; beside it the strongest of all."""
    samples, answered = (sum(getattr(part, name) for part in found.parts) for name in ("samples", "answered"))
    if not answered:
        return (
            f"The full cache answers none of {counted(samples, 'prompt')} (score > {found.rule.right:g}): there is "
            "nothing that eviction can lose."
        )
    return sentence("; ".join(filter(None, (_ranks(found), _areas(found), _beats(found), _strongest(found)))))


def _ranks(found: Linked) -> str:
    """In how many settings ρ is below 0, and between which ends it lies."""
    each = [(f"b={one.name}", one.strength(HEADLINE).rho) for one in found.settings]
    known = [(name, rho) for name, rho in each if not isnan(rho.value)]
    if not known:
        reasons = dict.fromkeys(filter(None, (one.no_ranks() for one in found.settings)))
        why = " or ".join(reasons) or f"{NAMES[HEADLINE]} is the same under all methods of a prompt"
        return f"whether methods that perturb more score less cannot be said: {why}"
    told = ends([(name, rho.value, estimate(rho, " ")) for name, rho in known])
    verdicts = [decided(rho.interval, 0) for _, rho in known]
    return f"{tally(verdicts, _TELLS, 'budget')}: ρ = {told} ({_few(min((rho for _, rho in known), key=_prompts))})"


def _prompts(one: Estimate) -> int:
    return one.prompts


def _few(one: Estimate) -> str:
    """'n = 12 deciding prompts', and of fewer than five that they are too few."""
    few = ", too few for an interval" if one.prompts < LEAST else ""
    return f"n = {counted(one.prompts, 'deciding prompt')}{few}"


def _areas(found: Linked) -> str:
    """How often a lost answer is the more perturbed one."""
    area = found.overall[0].strength(HEADLINE).auc
    if isnan(area.value):
        return " or ".join(dict.fromkeys(one.no_areas() for one in found.settings))
    share = numbers.percent(area.value, area.interval)
    return f"a lost answer is perturbed more than a kept one of its prompt in {share} of pairs ({_few(area)})"


def _beats(found: Linked) -> str:
    """Whether the measure tells more than the attention that was given up, as it knows values."""
    (one,) = [each for each in found.overall[0].contrasts if (each.first, each.second) == (HEADLINE, AGAINST)]
    if isnan(one.rho.value):
        return ""
    who, other = NAMES[HEADLINE], f"the attention given up ({NAMES[AGAINST]})"
    verdict = decided(one.rho.interval, 0)
    told = f"ρ differs by {estimate(one.rho, ' ')}, {_few(one.rho)}"
    if verdict:
        return f"{who} tells {'more' if verdict < 0 else 'less'} than {other}: {told}"
    return f"that {who} tells more or less than {other} is not shown: {told}"


def _strongest(found: Linked) -> str:
    """The measure of the lowest ρ, found by looking."""
    known = [one for one in found.overall[0].strengths if one.measure in MEASURES and not isnan(one.rho.value)]
    if not known:
        return ""
    best = min(known, key=lambda one: one.rho.value)
    return f"of {len(known)} measures {NAMES[best.measure]} has the lowest ρ, {estimate(best.rho, ' ')}, by looking"


def notes(found: Linked) -> str:
    """What rows and columns mean; where no prompt tells anything there are none."""
    about = f"{numbers.about_intervals(found.identity.samples)} {numbers.ABOUT_HELD}"
    return f"{_ABOUT} {about}" if any(one.decides for one in found.settings) else about


_ABOUT = (
    "ρ, τ-b: between measure and score over the methods of one prompt, mean over the n prompts whose methods differ in "
    "both; below 0 the more perturbed score less. Lost above kept: share of pairs of a lost and a kept answer of one "
    "prompt in which the lost one is more perturbed, ties half; 0.5 without a link. p: share of deals of each "
    "prompt's scores among its methods whose ρ is as far from 0; * where it stands beside all measures and budgets "
    "(Benjamini–Hochberg, 5 %); dealt: the middle 95 % of them. Of other prompts: ρ of their measure with this "
    "prompt's scores, which the methods' names make. Between prompts, hard and long prompts confound; across budgets, "
    "everything does. Methods are those of this run, n counts prompts. L1, θ, θ̂ and drift are relative to the full "
    "run's norms."
)
