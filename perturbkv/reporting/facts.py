"""What stands at the head of a page: which run this is, and what to keep in mind while reading it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.heads.head_kind import floor_over_norm
from perturbkv.analyses.identity import identity
from perturbkv.analyses.measurements import EVIDENCE, held_shares, values
from perturbkv.analyses.naming import counted
from perturbkv.analyses.stats.intervals import LEAST
from perturbkv.reporting.configurations import evicted_nothing, kl_floor
from perturbkv.reporting.head_measures import ANALYSIS
from perturbkv.reporting.sides import Sides, Start
from perturbkv.trace import Trace
from perturbkv.visible import line

_NAMED = 4
"""Configurations that a warning names."""
_WORTH_SAYING = 0.01
"""A share of tied heads that a warning tells."""
Fact = tuple[str, str]


def title_of(trace: Trace) -> str:
    """Model and data set."""
    return line(f"{trace.run.model} · {trace.run.dataset}")


def facts(trace: Trace, sides: Sides) -> tuple[Fact, ...]:
    """Label and value of everything that a reader needs to find the run again; what is usual goes unsaid."""
    run = identity(trace, trace.run.configs)
    told = {
        "Model": run.model,
        "Weights": run.weights,
        "Layers": f"{run.measured} measured" if run.measured else "",
        "Data": run.dataset,
        "Scenario": run.scenario if run.scenario != "regular" else "",
        "Samples": counted(run.samples, "sample") + (f", {run.failed} failed" if run.failed else ""),
        "Configurations": _configurations(trace, sides),
        "Budgets": ", ".join(map(str, sides.budgets)),
        "Held / full": _held(trace),
        "Noise floor": _floor(trace),
        "Trace": " · ".join([trace.source or "in memory", *([run.trace] if run.trace else [])]),
        "Made with": run.made_with,
    }
    return tuple((label, line(value)) for label, value in told.items() if value)


def warnings(trace: Trace, sides: Sides, start: Start, tied: float | None) -> tuple[str, ...]:
    """What to keep in mind; `tied`: the share of heads whose propagated verdict is a tie in the pair shown first."""
    found = [
        _random(trace),
        _failed(trace),
        _few(int(trace.ok.sum())),
        *_no_evidence(trace, sides, start),
        _ties(sides, start, tied),
        _nothing_evicted(trace),
        identity(trace, trace.run.configs).about_read(),
    ]
    return tuple(line(one) for one in found if one)


def _configurations(trace: Trace, sides: Sides) -> str:
    count = len(trace.run.configs)
    return str(count) if len(sides.budgets) == 1 else f"{count}: {len(sides.names)} at {len(sides.budgets)} budgets"


def _held(trace: Trace) -> str:
    shares = held_shares(trace, ANALYSIS)
    known = shares[~np.isnan(shares)]
    if not known.size:
        return ""
    ends = [text.held(float(end)) for end in (known.min(), known.max())]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _floor(trace: Trace) -> str:
    floor, norm = (values(trace, name, ANALYSIS, 0) for name in ("noise_floor", "output_norm"))
    middle, most = floor_over_norm(floor, norm)
    return f"{middle:.1e} of ‖o_h‖ (median head), {most:.1e} (largest); KL {kl_floor(trace):.1e} nat"


def _random(trace: Trace) -> str:
    return "Random weights: the numbers say nothing of a trained model." if trace.run.random_weights else ""


def _failed(trace: Trace) -> str:
    if not trace.failures:
        return ""
    first, reason = next(iter(trace.failures.items()))
    failed = len(trace.failures)
    told = (
        f"{failed} of {counted(len(trace.sample_ids), 'sample')} failed and {'is' if failed == 1 else 'are'} left out"
    )
    return f"{told}: {reason}" if failed == 1 else f"{told}; the first, {first}: {reason}"


def _few(samples: int) -> str:
    if samples == 1:
        return "One sample: no number here has an interval."
    if samples >= LEAST:
        return ""
    return f"{samples} samples, too few for 95 % intervals; instead: {text.ABOUT_RANGES}."


def _no_evidence(trace: Trace, sides: Sides, start: Start) -> Sequence[str]:
    """Where σ of the treatment that is shown first is at most 0.5, budget by budget."""
    sigma = values(trace, "sigma_stage1", ANALYSIS, 0).mean(axis=0)
    places = [(budget, sides.config(start.treatment, place)) for place, budget in enumerate(sides.budgets)]
    counts = [(budget, int((sigma[place] <= EVIDENCE).sum())) for budget, place in places if place is not None]
    told = ", ".join(f"{count} of {sigma[0].size} at budget {budget}" for budget, count in counts if count)
    return (
        [f"σ ≤ 0.5 in heads of {sides.names[start.treatment]}: {told}. Theorem 3 says nothing there."] if told else []
    )


def _ties(sides: Sides, start: Start, tied: float | None) -> str:
    if not tied or tied < _WORTH_SAYING:
        return ""
    who = f"{sides.names[start.treatment]} and {sides.names[start.baseline]}"
    return (
        f"{text.percent(tied)} of the heads are tied between {who} at budget {sides.budgets[start.budget]} "
        "(propagated): they differ by no more than rounding, or keep the same entries."
    )


def _nothing_evicted(trace: Trace) -> str:
    labels = evicted_nothing(trace)
    if not labels:
        return ""
    more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
    return f"Nothing was evicted, as the budget covers every prompt: {'; '.join(labels[:_NAMED])}{more}."
