"""Which distance tells best what is lost: KL of the same step, and the scores of answers by the rules of `link`.

Within each prompt, between its configurations of one setting. KL is of the very step whose heads are measured, so that
it nearly is what they are (METHOD: the protocol, 7); answers are held against the first step alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perturbkv.analyses import first_step
from perturbkv.analyses.correlation.by_name import AREAS, DIFFERENCES
from perturbkv.analyses.correlation.link_prompts import within
from perturbkv.analyses.correlation.lost_answers import AREA, Rule
from perturbkv.analyses.measurements import Floats, at_step, values
from perturbkv.analyses.questions.measures.measure_orders import MEASURES, Measure, sums
from perturbkv.analyses.questions.measures.measure_rows import FIRST
from perturbkv.analyses.scores import scores
from perturbkv.analyses.stats.estimates import Estimate, mean_of, over_prompts
from perturbkv.analyses.stats.intervals import CORRELATION
from perturbkv.analyses.stats.rank_correlation import spearman
from perturbkv.trace import Trace

RULE = Rule()
KL, SCORE, LOST = "kl", "score", "lost"
TARGETS = (KL, SCORE, LOST)
"""What is lost: nats of the same step; the answer's score; a lost answer among kept ones."""
_KINDS = {KL: (CORRELATION, DIFFERENCES), SCORE: (CORRELATION, DIFFERENCES), LOST: (AREA, AREAS)}
EachPrompt = Mapping[tuple[str, Measure], Floats]
"""Target and measure -> (prompt,), NaN where the prompt does not decide."""


@dataclass(frozen=True)
class Linked:
    """How strongly one measure is linked with one thing that is lost.

    Attributes:
        target: `kl` (Spearman's ρ with KL of the same step: above 0 more perturbed methods lose more), `score` (ρ with
            the answer's score: below 0 they score less), or `lost` (share of pairs of a lost and a kept answer in which
            the lost one is more perturbed).
        kind, distance: the measure.
        value: over prompts.
        less_l1: the same less that of L1 on the same prompts; None of L1 itself.
    """

    target: str
    kind: str
    distance: str
    value: Estimate
    less_l1: Estimate | None


def answered(trace: Trace) -> bool:
    """Whether every complete sample's answers have scores."""
    return "score_full" in trace.arrays and all(
        not np.isnan(np.asarray(trace.arrays[name], dtype=np.float64)[trace.ok]).any()
        for name in ("score_full", "score")
    )


def each_prompt(trace: Trace, moved: Mapping[Measure, Floats], places: Sequence[int], step: int) -> EachPrompt:
    """What every prompt says of these configurations; `moved`: of the trace's samples at `step`, as `sums` gives it."""
    held = at_step(trace, "measures", step)
    lost = first_step.alike(held, {KL: values(held, "logit_kl", "measures", step)})[KL][:, places]
    found: dict[tuple[str, Measure], Floats] = {
        (KL, measure): spearman(moved[measure][:, places].T, lost.T) for measure in MEASURES
    }
    return {**found, **_of_answers(trace, places)} if answered(trace) else found


def _of_answers(trace: Trace, places: Sequence[int]) -> EachPrompt:
    """Of the prompts that the full cache answers, by the first step."""
    held = at_step(trace, "measures", 0)
    graded, moved = scores(held, "measures"), sums(held, 0)
    right = graded.full > RULE.right
    scored = graded.evicted[right][:, places]
    gone = RULE.lost_of(graded.full[right], scored)
    found = {measure: within(moved[measure][right][:, places], scored, gone) for measure in MEASURES}
    return {
        **{(SCORE, measure): one.rho for measure, one in found.items()},
        **{(LOST, measure): one.area for measure, one in found.items()},
    }


def together(settings: Sequence[EachPrompt]) -> EachPrompt:
    """Each prompt's mean over several settings, in every one of which its configurations were compared."""
    return {key: mean_of([one[key] for one in settings]) for key in settings[0]}


def linked(each: EachPrompt) -> tuple[Linked, ...]:
    """One per target and measure that is there."""
    return tuple(
        _linked(each, target, measure) for target in TARGETS for measure in MEASURES if (target, measure) in each
    )


def _linked(each: EachPrompt, target: str, measure: Measure) -> Linked:
    (kind, distance), (own, between) = measure, _KINDS[target]
    value, first = each[target, measure], each[target, (kind, FIRST)]
    less = None if distance == FIRST else over_prompts(value - first, between)
    return Linked(target, kind, distance, over_prompts(value, own), less)
