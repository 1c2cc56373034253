"""What a page cannot show, as its trace does not hold it, and which command records it."""

from __future__ import annotations

from perturbkv.analyses.scores import scores
from perturbkv.errors import TraceError
from perturbkv.reporting.answers import has_texts
from perturbkv.reporting.head_measures import ANALYSIS
from perturbkv.reporting.prompt_texts import why_without_text
from perturbkv.trace import Trace
from perturbkv.visible import line

_NEEDED = {
    "losses": "lost_position",
    "attention": "attention_full",
    "distances": "perturbation_propagated_cosine",
}
"""Part of the page -> the variable without which there is none."""


def lacking(trace: Trace, pairs: int) -> dict[str, str]:
    """Part of the page -> the sentence that says what to run; only of parts that the trace has nothing for.

    `pairs`: how many pairs of configurations it has.
    """
    found = {part: _why(trace, variable) for part, variable in _NEEDED.items()}
    found |= {"kept": trace.why_without_kept(), "prompt": why_without_text(trace), "answers": _ungraded(trace)}
    found |= {"answers_text": _without_texts(trace), "steps": _single_step(trace)}
    found |= {"pairs": "" if pairs else _one_side(trace)}
    return {part: line(why) for part, why in found.items() if why}


def _one_side(trace: Trace) -> str:
    """What to run for something to compare with."""
    return (
        f"expected two configurations of one budget in {trace.source or 'this trace'}, got none; measure several: "
        f"perturbkv trace --model {trace.run.model} --dataset {trace.run.dataset} "
        "--selection attention --selection two-stage -o trace.h5, with its other options"
    )


def _why(trace: Trace, variable: str) -> str:
    if variable in trace.arrays:  # some are large: they are not read for this
        return ""
    try:
        trace.get(variable, ANALYSIS)
    except TraceError as error:
        return str(error)
    return ""


def _ungraded(trace: Trace) -> str:
    try:
        scores(trace, ANALYSIS)
    except TraceError as error:
        return str(error)
    return ""


def _without_texts(trace: Trace) -> str:
    if has_texts(trace) or "score_full" not in trace.arrays:
        return ""
    return (
        f"expected the answers' text in {trace.source or 'this trace'}, got their scores alone; make it again: "
        f"perturbkv quality --model {trace.run.model} --dataset {trace.run.dataset}, with its other options"
    )


def _single_step(trace: Trace) -> str:
    if trace.run.steps > 1:
        return ""
    return (
        f"expected several decode steps in {trace.source or 'this trace'}, got one; measure more: perturbkv trace "
        f"--model {trace.run.model} --dataset {trace.run.dataset} --steps 8 -o trace.h5, with its other options"
    )
