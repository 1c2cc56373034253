"""Importance scores of a model's heads for headkv: a JSON object `{"layer-head": score}`. No torch here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perturbkv.configs import layer_types
from perturbkv.errors import ConfigError
from perturbkv.user_files import FileKind

_FILE = FileKind("head scores as JSON", ConfigError, hint="perturbkv trace --head-scores measures them")
HeadScores = tuple[tuple[float, ...], ...]
"""Scores of a model's heads, a row per measured layer."""


def read_required(path: Path | None, model_config: Any, policy: str | None, alternatives: str) -> HeadScores:
    """Return the head scores in the file `path`, one row per layer; empty if no policy needs them.

    `policy` is the name of one that needs scores, None where none does; `alternatives` ends the message. Raises
    ConfigError for a policy without a file, and for a file that does not fit the model.
    """
    if policy is None:
        return ()
    if path is None:
        raise ConfigError(
            f"policy '{policy}' needs scores of the model's heads; give --head-scores FILE "
            f"(perturbkv trace --head-scores measures them), or choose another policy; {alternatives}"
        )
    try:
        return read(path, layer_types.measured_layers(model_config), int(model_config.num_attention_heads))
    except ConfigError as error:
        raise ConfigError(f"{error}; {alternatives}") from None


def read(path: Path, layers: Sequence[int], heads: int) -> HeadScores:
    """Return the head scores in a file, one row per layer; a head's list of numbers is averaged, as in HeadKV's files.

    `layers` are the indices of the measured layers. Raises ConfigError for other layers or heads, and for a score that
    is not a number of at least 0.
    """
    document = _read_document(path)
    scores = {name: _score(value, f"{path}: '{name}'") for name, value in document.items()}
    expected = [[f"{layer}-{head}" for head in range(heads)] for layer in layers]
    names = {name for row in expected for name in row}
    if set(scores) != names:
        strange = sorted(set(scores) ^ names)[0]
        what = f"'{strange}', which the model lacks" if strange in scores else f"none for '{strange}'"
        raise ConfigError(
            f"expected scores of {len(layers)} layers × {heads} heads in {path}, got {len(scores)} and {what}; "
            "measure this model's: perturbkv trace --head-scores"
        )
    if not any(scores.values()):
        raise ConfigError(f"expected a score above 0 in {path}, got none")
    return tuple(tuple(scores[name] for name in row) for row in expected)


def from_rows(scores: Sequence[Sequence[float]], layers: int, heads: int) -> HeadScores:
    """Return head scores from one row of numbers per layer. Raises ConfigError for a wrong shape or for all zeros."""
    rows = tuple(tuple(_score(value, "head scores") for value in row) for row in scores)
    if len(rows) != layers or any(len(row) != heads for row in rows):
        got = f"{len(rows)} × {', '.join(sorted({str(len(row)) for row in rows})) or 0}"
        raise ConfigError(
            f"expected head scores of {layers} layers × {heads} heads, got {got}; perturbkv trace --head-scores "
            "measures them"
        )
    if not any(map(any, rows)):
        raise ConfigError("expected a head score above 0, got none")
    return rows


def as_json(scores: Sequence[Sequence[float]], layers: Sequence[int]) -> str:
    """Return head scores as JSON text that `read` accepts, with one row per layer index in `layers`."""
    rows = zip(layers, scores, strict=True)
    named = {f"{layer}-{head}": score for layer, row in rows for head, score in enumerate(row)}
    return json.dumps(named, indent=1) + "\n"


def _read_document(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError for any other content."""
    document = _FILE.read_json(path)
    if not isinstance(document, dict):
        raise ConfigError(f'expected {{"layer-head": score}} in {path}, got {type(document).__name__}')
    return document


def _score(value: Any, where: str) -> float:
    """Return a score, or the mean of a list of scores. Raises ConfigError with its place `where` for other values."""
    numbers = value if isinstance(value, list) and value else [value]
    if not all(map(_is_score, numbers)) or not _is_score(sum(numbers)):
        raise ConfigError(
            f"{where}: expected a number of at least 0 or a list of them, got {str(value)[:40]}; add one number to "
            "all, or measure this model's: perturbkv trace --head-scores FILE --model NAME"
        )
    return float(sum(numbers)) / len(numbers)


def _is_score(number: Any) -> bool:
    """Return whether a value is a finite number of at least 0; booleans are not numbers."""
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= sys.float_info.max
