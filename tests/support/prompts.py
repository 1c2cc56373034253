"""A trace of two heads and a prompt of nine tokens, its kept sets and losses by hand."""

from __future__ import annotations

from typing import Any

import numpy as np

from perturbkv.trace import SampleTrace, Trace
from tests.support.traces import kept, run_config, sample_trace

PIECES = ("The", " cat", "", "é", " [red]", "\n\n", " sat", ".", " Who?")
"""The third is a part of the fourth's character; the last is a question, which is not compressed."""
KEPT = (((0, 1, 6, 7), (0, 1, 2, 7)), ((1, 3, 4, 7), (0, 1, 2, 7)))
"""Of attention and of two-stage: both heads' positions."""
LOST = (((4, 3), (6, 5)), ((0, 5), (6, 5)))


def words(pieces: tuple[str, ...] = PIECES) -> dict[str, Any]:
    starts = np.cumsum([0, *map(len, pieces)])[:-1].astype(np.int32)
    return {
        "prompt_count": np.asarray(len(pieces)),
        "prompt_offset": np.asarray(0),
        "prompt_token": np.arange(100, 100 + len(pieces), dtype=np.int32),
        "prompt_start": starts,
        "prompt_text": np.asarray("".join(pieces)),
    }


def sample(name: str = "p0", pieces: tuple[str, ...] = PIECES, question: int = 1, **more: Any) -> SampleTrace:
    arrays = dict(sample_trace(name, layers=1).arrays)
    rows = [kept for side in KEPT for kept in side]
    arrays["kept_count"] = np.array([[list(map(len, side))] for side in KEPT])
    moved = np.array([[[[4.0, 1.0]]], [[[2.0, 1.0]]]])  # (config, step, layer, head)
    arrays |= {"perturbation_isolated": moved, "output_norm": np.array([[[10.0, 2.0]]])}
    arrays |= {"prompt_tokens": np.asarray(len(pieces) - question), "question_tokens": np.asarray(question)}
    arrays |= kept(arrays, np.arange(0, 16, 4).reshape(2, 1, 2), np.concatenate(rows))
    arrays |= {"cut_tokens": np.asarray(0), "held_share": np.array([0.5, 0.25])}
    arrays["lost_position"] = np.array([[[list(lost) for lost in side]] for side in LOST], dtype=np.int32)
    arrays["lost_output"] = np.tile(np.array([3.0, 0.5], dtype=np.float32), (2, 1, 2, 1))
    arrays["weighted_norm"] = np.array([[6.0, 6.0]])
    return SampleTrace(name, {**arrays, **words(pieces), **more})


def made(*samples: SampleTrace, **run: Any) -> Trace:
    held = samples or (sample(),)
    return Trace.from_samples(run_config(len(held), **run), held, {})
