"""Runs that take a second: a tiny model, a prompt for it, and what is right about the outcome of a run with them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from perturbkv.errors import PerturbkvError
from perturbkv.storage.trace.trace_file import read_trace
from tests.attack.running import Outcome, flaw_of_refusal

MODEL, PROMPTS, OUTPUT = "model", "prompts.jsonl", "out.h5"
TRACE = ("trace", "--dataset", PROMPTS, "--samples", "1", "--budget", "24", "--window", "8", "--device", "cpu",
         "--output", OUTPUT, "--model")  # fmt: skip
"""The model follows."""
Fine = Callable[[Outcome], str | None]


def prompts(folder: Path) -> Path:
    """One prompt of 182 characters."""
    path = folder / PROMPTS
    path.write_text(json.dumps({"id": "p", "prompt": "0 " + "The quick brown fox jumps over the lazy dog. " * 4}))
    return path


def refused(*words: str) -> Fine:
    """One line and exit code 2, and the line holds one of the words."""
    return functools.partial(_flaw_of_naming, words)


def measured_or_refused(folder: Path, *words: str) -> Fine:
    """As `refused`, or a whole trace of finite numbers; a sample that is not finite may have failed, with 1."""
    return functools.partial(_flaw_of_either, folder, words)


_VERDICT = "Smallest budget with"
"""How the output begins of a command whose exit code says what it found."""


def answered_or_refused(outcome: Outcome) -> str | None:
    """The command did its work, or says in one line why it does not."""
    answered = outcome.code == 0 or outcome.out.startswith(_VERDICT)
    if answered and not outcome.hung and "Traceback" not in outcome.err:
        return None
    return flaw_of_refusal(outcome)


def _flaw_of_naming(words: tuple[str, ...], outcome: Outcome) -> str | None:
    last = (outcome.err.strip().splitlines() or [""])[-1]
    if flaw := flaw_of_refusal(outcome):
        return flaw
    return None if any(word in last for word in words) or not words else f"names none of {words}: {last}"


def _flaw_of_either(folder: Path, words: tuple[str, ...], outcome: Outcome) -> str | None:
    if outcome.code == 0 and not outcome.hung:
        return _flaw_of_trace(folder / OUTPUT)
    last = (outcome.err.strip().splitlines() or [""])[-1]
    if outcome.code == 1 and not outcome.hung and last.startswith("failed: ") and "Traceback" not in outcome.err:
        return None
    return _flaw_of_naming(words, outcome)


def _flaw_of_trace(path: Path) -> str | None:
    try:
        arrays = read_trace(path).arrays
    except PerturbkvError as error:
        return f"exit code 0, and no trace: {error}"
    names = ("perturbation_isolated", "perturbation_propagated", "hidden_drift_l1")
    wrong = [name for name in names if not np.isfinite(arrays[name]).all()]
    return f"exit code 0, and {wrong[0]} is not finite" if wrong else None
