"""Whether a trace's numbers can be what they say: counts within the prompt, positions in order, no NaN for a number.

A sum tells that numbers are those that were written; files without sums are held against what no run can have measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from perturbkv import kept_codec
from perturbkv.errors import TraceError
from perturbkv.schema import VARIABLES

Arrays = Mapping[str, NDArray[Any]]
_FLAGS = ("evicted", "top1_agreement")
_MOST_TOKENS = 2**31
"""Positions are numbers of 32 bits."""
_MEASURED = tuple(name for name, variable in VARIABLES.items() if not variable.optional and variable.dtype == "float64")
"""Variables that hold a number for every step that was measured."""


def check_states(path: Path, complete: NDArray[Any], reasons: NDArray[Any]) -> None:
    """Raise TraceError unless every sample is complete without a reason, or failed with one."""
    for place, (whole, reason) in enumerate(zip(complete.tolist(), reasons.tolist(), strict=True)):
        if whole not in (0, 1) or bool(whole) == bool(reason):
            _refuse(path, f"sample {place} complete, or failed for a reason,", f"complete {whole} and '{reason}'")


def check_numbers(path: Path, arrays: Arrays, measured: NDArray[np.bool_]) -> None:
    """Raise TraceError unless counts, flags and measured numbers make sense.

    `measured`: (sample, step) True where a step holds numbers. Variables that are absent are passed over.
    """
    ok = np.asarray(measured.any(axis=1))
    for name in _FLAGS:
        if name in arrays and (arrays[name] > 1).any():
            _refuse(path, f"{name} of 0 or 1", str(arrays[name].max()))
    for name in _MEASURED:
        if name in arrays:
            _check_finite(path, name, arrays[name], measured)
    if {"prompt_tokens", "kept_count", "stage1_count"} <= arrays.keys():
        _check_counts(path, arrays, ok)
    if {"prompt_tokens", "lost_position"} <= arrays.keys():
        tokens, lost = arrays["prompt_tokens"], arrays["lost_position"]
        _check_within(path, "lost_position", lost[ok], -1, _like(tokens, lost)[ok])


def check_codes(path: Path, arrays: Arrays, ok: NDArray[np.bool_], codes: NDArray[Any]) -> None:
    """Raise TraceError unless every head's code is that of `kept_count` positions within its prompt, or is not there.

    `arrays` holds kept_offset, kept_length, kept_count and prompt_tokens; their places lie within `codes`.
    """
    told = np.stack(
        [arrays[name].reshape(len(ok), -1) for name in ("kept_offset", "kept_length", "kept_count")], axis=-1
    )
    for place in np.flatnonzero(ok):
        offsets, lengths, counts = np.unique(told[place], axis=0).T
        there = (lengths > 0) | (counts == 0)
        if not kept_codec.are_sound(
            codes, offsets[there], lengths[there], counts[there], int(arrays["prompt_tokens"][place])
        ):
            _refuse(path, "kept_code of as many positions within the prompt as kept_count says", "others")


def check_text(path: Path, arrays: Arrays, starts: NDArray[Any]) -> None:
    """Raise TraceError unless every prompt's tokens begin within its text, one behind the other.

    `arrays` holds prompt_offset, prompt_count, whose places lie within `starts`, and prompt_text.
    """
    told = zip(*(arrays[name].tolist() for name in ("prompt_offset", "prompt_count", "prompt_text")), strict=True)
    for begin, count, text in told:
        own = starts[begin : begin + count]
        if count and (own[0] != 0 or (own[1:] < own[:-1]).any() or own[-1] > len(text)):
            _refuse(path, "prompt_start ascending from 0 within each prompt's text", "others")


def check_expected(path: Path, expected: NDArray[Any]) -> None:
    """Raise TraceError unless accepted answers are a JSON list of texts in every sample that has any."""
    for text in filter(None, expected.tolist()):
        try:
            told = json.loads(text)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, list) or not all(isinstance(one, str) for one in told):
            _refuse(path, "expected_answers as a JSON list of texts", repr(text[:80]))


def _check_counts(path: Path, arrays: Arrays, ok: NDArray[np.bool_]) -> None:
    tokens, kept, stage1 = (arrays[name][ok] for name in ("prompt_tokens", "kept_count", "stage1_count"))
    _check_within(path, "prompt_tokens", tokens, 1, np.full_like(tokens, _MOST_TOKENS))
    _check_within(path, "kept_count", kept, 0, _like(tokens, kept) + 1)
    _check_within(path, "stage1_count", stage1, 0, kept + 1)
    if {"prompt_count", "question_tokens"} <= arrays.keys():
        held, question = arrays["prompt_count"][ok], arrays["question_tokens"][ok]
        if ((held != 0) & (held != tokens + question)).any():
            _refuse(path, "prompt_count of the prompt's tokens and its question's", str(held.tolist()))


def _check_finite(path: Path, name: str, numbers: NDArray[Any], measured: NDArray[np.bool_]) -> None:
    steps = np.moveaxis(numbers, VARIABLES[name].axes.index("step"), 1)
    if np.isnan(steps[measured]).any():
        _refuse(path, f"a number everywhere in {name} where a step was measured", "NaN")


def _check_within(path: Path, name: str, held: NDArray[Any], least: int, above: NDArray[Any]) -> None:
    """Refuse numbers below `least` or not below `above`."""
    wrong = (held < least) | (held >= above)
    if wrong.any():
        where = tuple(np.argwhere(wrong)[0].tolist())
        most = np.broadcast_to(above, held.shape)[where] - 1
        _refuse(path, f"{name} from {least} to {most}", f"{held[where]}")


def _like(of_samples: NDArray[Any], held: NDArray[Any]) -> NDArray[Any]:
    """(sample,) numbers as they lie along the axes of others."""
    spread = of_samples.reshape(-1, *[1] * (held.ndim - 1))
    return np.broadcast_to(spread, held.shape)


def _refuse(path: Path, expected: str, got: str) -> NoReturn:
    msg = f"expected {expected} in {path}, got {got}; the file was changed since it was made; make it again"
    raise TraceError(msg)
