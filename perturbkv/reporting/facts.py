"""The facts of a page: its run, warnings, answers and scores, and the parts that its trace lacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.heads.head_comparison import floor_over_norm
from perturbkv.analyses.identity import identity, identity_at
from perturbkv.analyses.measurements import EVIDENCE, Floats, Measurements, scores, texts_that_go_on
from perturbkv.analyses.quality.graded_tasks import terms
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, estimate_mean, share_kind
from perturbkv.analyses.tokens.fates import prompt_of
from perturbkv.configs import layer_types
from perturbkv.display import plural
from perturbkv.errors import TraceError
from perturbkv.escaping import escape_control_characters, escape_line
from perturbkv.reporting.arrays import kl_floor
from perturbkv.reporting.head_measures import ANALYSIS, EFFECT, available_measures
from perturbkv.reporting.sides import Sides, Start, with_interval
from perturbkv.trace import Trace
from perturbkv.user_files import parse_json

_LEAST_TIED = 0.01
"""Least share of tied heads that a warning mentions."""


def trace_title(trace: Trace) -> str:
    """Return a trace's title: model and data set."""
    return escape_line(f"{trace.run.model} · {trace.run.dataset}")


def run_facts(trace: Trace, sides: Sides) -> tuple[tuple[str, str], ...]:
    """Return (label, value) pairs that identify the run; values equal to the default are left out."""
    run = identity_at(trace, trace.run.configs, None)
    floor, norm = (Measurements(trace, ANALYSIS)[name] for name in ("noise_floor", "output_norm"))
    middle, most = floor_over_norm(floor, norm)
    count = len(trace.run.configs)
    facts = {
        "Model": run.model,
        "Weights": run.weights,
        "Layers": layer_types.describe_measured(run.measured_layers),
        "Data": run.dataset,
        "Scenario": run.scenario if run.scenario != "regular" else "",
        "Steps": run.steps,
        "Effects": text.FIRST_ORDER_NOTES[trace.run.effect_gradient] if "effect_isolated" in trace.arrays else "",
        "Samples": plural(run.samples, "sample") + (f", {run.failed} failed" if run.failed else ""),
        "Configurations": str(count)
        if len(sides.budgets) == 1
        else f"{count}: {len(sides.names)} at {len(sides.budgets)} budgets",
        "Budgets": ", ".join(map(str, sides.budgets)),
        "Cache share": _cache_shares_text(trace),
        "Noise floor": f"{middle:.1e} of ‖o_h‖ (median head), {most:.1e} (largest); KL {kl_floor(trace):.1e} nat",
        "Trace": " · ".join([trace.source or "in memory", *([run.trace] if run.trace else [])]),
        "Made with": run.made_with,
    }
    return tuple((label, escape_line(value)) for label, value in facts.items() if value)


def page_warnings(trace: Trace, sides: Sides, start: Start, tied: float | None) -> tuple[str, ...]:
    """Return the warnings of a page, such as few samples or random weights.

    `tied` is the share of heads whose propagated verdict is a tie in the pair that is shown first.
    """
    has_effects = any(one.kind == EFFECT for one in available_measures(trace))
    count = int((~texts_that_go_on(trace, ANALYSIS)).sum()) if has_effects else 0
    sentences = [
        "Random weights: the numbers say nothing of a trained model." if trace.run.random_weights else "",
        _failures_warning(trace),
        _few_samples_warning(int(trace.ok.sum())),
        _no_evidence_warning(trace, sides, start),
        _ties_warning(sides, start, tied),
        f"Δ log p leaves out {plural(count, 'sample')} whose text is one token." if count else "",
        identity(trace, trace.run.configs).no_eviction_note(),
    ]
    return tuple(escape_line(one) for one in sentences if one)


def _cache_shares_text(trace: Trace) -> str:
    """Return the range of the configurations' cache shares as text; '' if the trace has none."""
    shares = Measurements(trace, ANALYSIS).cache_shares
    known = shares[~np.isnan(shares)]
    if not known.size:
        return ""
    ends = [text.cache_share(float(end)) for end in (known.min(), known.max())]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _failures_warning(trace: Trace) -> str:
    """Return a warning with the number of failed samples and the first reason; '' where none failed."""
    if not trace.failures:
        return ""
    first, reason = next(iter(trace.failures.items()))
    failed = len(trace.failures)
    summary = (
        f"{failed} of {plural(len(trace.sample_ids), 'sample')} failed and {'is' if failed == 1 else 'are'} left out"
    )
    return f"{summary}: {reason}" if failed == 1 else f"{summary}; the first, {first}: {reason}"


def _few_samples_warning(samples: int) -> str:
    """Return a warning if there are too few samples for intervals, else ''."""
    if samples == 1:
        return "One sample: no number here has an interval."
    if samples >= MIN_SAMPLES:
        return ""
    return f"{samples} samples, too few for 95 % intervals; instead: {text.RANGES_NOTE}."


def _no_evidence_warning(trace: Trace, sides: Sides, start: Start) -> str:
    """Return a warning that σ is at most 0.5 in some heads of the treatment shown first, with counts per budget.

    '' where there are no such heads, or the treatment has no stages.
    """
    sigma = Measurements(trace, ANALYSIS)["sigma_stage1"].mean(axis=0)
    configs = [(budget, sides.config(start.treatment, index)) for index, budget in enumerate(sides.budgets)]
    staged = [config.is_staged for config in trace.run.configs]
    counts = [
        (budget, int((sigma[config] <= EVIDENCE).sum()))
        for budget, config in configs
        if config is not None and staged[config]
    ]
    heads = ", ".join(f"{count} of {sigma[0].size} at budget {budget}" for budget, count in counts if count)
    if not heads:
        return ""
    return f"σ ≤ 0.5 in heads of {sides.names[start.treatment]}: {heads}. Theorem 3 says nothing there."


def _ties_warning(sides: Sides, start: Start, tied: float | None) -> str:
    """Return a warning with the share of tied heads in the pair that is shown first; '' below 1 %."""
    if not tied or tied < _LEAST_TIED:
        return ""
    pair = f"{sides.names[start.treatment]} and {sides.names[start.baseline]}"
    return (
        f"{text.percent(tied)} of the heads are tied between {pair} at budget {sides.budgets[start.budget]} "
        "(propagated): they differ by no more than rounding, or keep the same entries."
    )


_UNITS = {"digits": "digits found", "score": "score"}
"""Variable of scores -> its name; leading digits come first, as their share is finer than right or wrong."""


def answers_part(trace: Trace) -> dict[str, Any] | None:
    """Return the page's JSON object on answers, their scores and texts; None where the trace has neither."""
    name = next((one for one in _UNITS if one in trace.arrays), None)
    texts = {
        one: trace.arrays[one][trace.ok] for one in ("answer_full", "answer", "expected_answers") if one in trace.arrays
    }
    if name is None and not texts:
        return None
    full = None if name is None else _complete_scores(trace, f"{name}_full")
    evicted = None if name is None else _complete_scores(trace, name)  # (sample, config)
    full_texts, config_texts = texts.get("answer_full"), texts.get("answer")
    tasks = terms(trace.run)
    return {
        "unit": _UNITS.get(name or "", ""),
        "metric": escape_line(", ".join(sorted(tasks.metrics or tasks.own_metrics))),
        "expected": None
        if "expected_answers" not in texts
        else [_accepted_answers(one) for one in texts["expected_answers"]],
        "full": {"texts": _escaped_texts(full_texts), "scores": _as_list(full)},
        "full_mean": _mean_with_interval(full),
        "configs": [
            {
                "texts": None if config_texts is None else _escaped_texts(config_texts[:, config]),
                "scores": None if evicted is None else _as_list(evicted[:, config]),
                "mean": _mean_with_interval(None if evicted is None else evicted[:, config]),
            }
            for config in range(len(trace.run.configs))
        ],
    }


def _complete_scores(trace: Trace, name: str) -> Floats:
    """Return a score variable of the trace's complete samples, as float64."""
    return np.asarray(trace.arrays[name][trace.ok], dtype=np.float64)


def _as_list(scores: Floats | None) -> list[float] | None:
    """Return scores as a list of floats; None for None."""
    return None if scores is None else scores.tolist()


def _escaped_texts(texts: NDArray[np.generic] | None) -> list[str] | None:
    """Return texts as a list, with control characters escaped; None for None."""
    return None if texts is None else [escape_control_characters(str(one)) for one in texts.tolist()]


def _accepted_answers(document: Any) -> list[str]:
    """Return a sample's accepted answers from a JSON list; any other text is returned as a single answer."""
    try:
        accepted = parse_json(str(document) or "[]")
    except ValueError:
        accepted = str(document)
    return (
        [escape_control_characters(str(one)) for one in accepted]
        if isinstance(accepted, list)
        else [escape_control_characters(str(accepted))]
    )


def _mean_with_interval(scores: Floats | None) -> list[Any] | None:
    """Return [mean, low, high, kind] of the graded samples' scores, kind being interval, range or none; None for None.

    Samples with NaN are not graded. The interval is exact where all scores are 0 or 1.
    """
    if scores is None:
        return None
    graded = scores[~np.isnan(scores)]
    mean = estimate_mean(scores, share_kind(0))
    exact = graded.size and np.isin(graded, (0.0, 1.0)).all()
    ends = intervals.of_share(graded > 0) if exact else mean.interval
    return [*with_interval(mean.value, ends), ends.kind if ends else "none"]


def missing_parts(trace: Trace, pairs: int) -> dict[str, str]:
    """Return missing part of the page -> sentence on how to measure it.

    `pairs` is the number of its pairs of configurations.
    """
    lacking = {
        part: variable
        for part, variable in {
            "losses": "lost_position",
            "attention": "attention_full",
            "distances": "perturbation_propagated_cosine",
        }.items()
        if variable not in trace.arrays
    }
    where, made_of = trace.source or "this trace", f"--model {trace.run.model} --dataset {trace.run.dataset}"
    one_config = (
        f"expected two configurations of one budget in {where}, got none; measure several: perturbkv trace {made_of} "
        "--selection attention --selection two-stage -o trace.h5, with its other options"
    )
    one_step = (
        f"expected several decode steps in {where}, got one; measure more: perturbkv trace {made_of} --steps 8 "
        "-o trace.h5, with its other options"
    )
    no_texts = (
        f"expected the answers' text in {where}, got their scores alone; make it again: perturbkv quality {made_of}, "
        "with its other options"
    )
    scored_alone = "score_full" in trace.arrays and not {"answer_full", "answer"} <= set(trace.arrays)
    reasons = {
        **{part: _refusal(partial(trace.get, variable, ANALYSIS)) for part, variable in lacking.items()},
        "kept": trace.missing_positions_message(),
        "prompt": _refusal(partial(prompt_of, trace)),
        "answers": _refusal(partial(scores, trace, ANALYSIS)),
        "answers_text": no_texts if scored_alone else "",
        "steps": "" if trace.run.steps > 1 else one_step,
        "pairs": "" if pairs else one_config,
    }
    return {part: escape_line(why) for part, why in reasons.items() if why}


def _refusal(read: Callable[[], object]) -> str:
    """Return the message of the TraceError that a function raises; '' where it raises none."""
    try:
        read()
    except TraceError as error:
        return str(error)
    return ""
