"""What the full and the evicted caches answered, and how good that was."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.quality.quality_terms import terms
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.estimates import over_prompts
from perturbkv.analyses.stats.intervals import share_of
from perturbkv.reporting.comparing import with_ends
from perturbkv.trace import Trace
from perturbkv.user_files import parse_json
from perturbkv.visible import line, plain

_UNITS = {"digits": "digits found", "score": "score"}
"""Variable -> what it is called: where a number is asked for, its leading digits tell more than right and wrong."""
_TEXTS = ("answer_full", "answer", "expected_answers")


def answers(trace: Trace) -> dict[str, Any] | None:
    """The page's `answers`; None where the trace holds neither scores nor texts."""
    name = next((one for one in _UNITS if one in trace.arrays), None)
    texts = {one: trace.arrays[one][trace.ok] for one in _TEXTS if one in trace.arrays}
    if name is None and not texts:
        return None
    full, evicted = (None, None) if name is None else (_scores(trace, f"{name}_full"), _scores(trace, name))
    of_full, of_configs = texts.get("answer_full"), texts.get("answer")
    told = terms(trace.run)
    return {
        "unit": _UNITS.get(name or "", ""),
        "metric": line(", ".join(sorted(told.metrics or told.own_metrics))),
        "expected": None if "expected_answers" not in texts else [_expected(one) for one in texts["expected_answers"]],
        "full": {"texts": _texts(of_full), "scores": _listed(full)},
        "full_mean": _mean(full),
        "configs": [
            {
                "texts": None if of_configs is None else _texts(of_configs[:, place]),
                "scores": None if evicted is None else _listed(evicted[:, place]),
                "mean": _mean(None if evicted is None else evicted[:, place]),
            }
            for place in range(len(trace.run.configs))
        ],
    }


def has_texts(trace: Trace) -> bool:
    """Whether the trace holds what was answered, not only how good it was."""
    return {"answer_full", "answer"} <= set(trace.arrays)


def _scores(trace: Trace, name: str) -> Floats:
    return np.asarray(trace.arrays[name][trace.ok], dtype=np.float64)


def _listed(scores: Floats | None) -> list[float] | None:
    return None if scores is None else scores.tolist()


def _texts(texts: NDArray[np.generic] | None) -> list[str] | None:
    return None if texts is None else [plain(str(one)) for one in texts.tolist()]


def _expected(document: Any) -> list[str]:
    """A sample's accepted answers, of the JSON list that the trace holds; of another text that text."""
    try:
        found = parse_json(str(document) or "[]")
    except ValueError:
        found = str(document)
    return [plain(str(one)) for one in found] if isinstance(found, list) else [plain(str(found))]


def _mean(scores: Floats | None) -> list[Any] | None:
    """The mean over graded samples, its ends and whether they are an interval or a range; of right and wrong exact."""
    if scores is None:
        return None
    graded = scores[~np.isnan(scores)]
    found = over_prompts(scores, share_of(0))
    exact = graded.size and np.isin(graded, (0.0, 1.0)).all()
    ends = intervals.of_samples(graded > 0) if exact else found.interval
    return [*with_ends(found.value, ends), ends.kind if ends else "none"]
