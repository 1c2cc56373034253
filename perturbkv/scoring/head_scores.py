"""Scores of a model's heads, as headkv takes them: a JSON object `{"layer-head": score}`. No torch here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perturbkv.configs import layer_types
from perturbkv.errors import ConfigError
from perturbkv.user_files import FileKind

_FILE = FileKind("head scores as JSON", ConfigError, hint="perturbkv head-scores measures them")
HeadScores = tuple[tuple[float, ...], ...]


def given(path: Path | None, model_config: Any, policy: str | None, works: str) -> HeadScores:
    """The scores of a file, one row per layer; empty where no configuration needs them.

    `policy` is the one that does, `works` tells what else could be asked for. Raises ConfigError where it has no file,
    or the file is not of this model's shape.
    """
    if policy is None:
        return ()
    if path is None:
        msg = (
            f"policy '{policy}' needs scores of the model's heads; give --head-scores FILE "
            f"(perturbkv head-scores measures them), or choose another policy; {works}"
        )
        raise ConfigError(msg)
    try:
        return read(path, layer_types.measured(model_config), int(model_config.num_attention_heads))
    except ConfigError as error:
        msg = f"{error}; {works}"
        raise ConfigError(msg) from None


def read(path: Path, layers: Sequence[int], heads: int) -> HeadScores:
    """The file's scores; a list counts as its mean, as HeadKV's own files hold one score per sample.

    `layers` are the indices of the measured ones. Raises ConfigError where it is not of these layers and heads, or a
    score is no number of at least 0.
    """
    document = _parsed(path)
    found = {name: _score(value, f"{path}: '{name}'") for name, value in document.items()}
    wanted = [[f"{layer}-{head}" for head in range(heads)] for layer in layers]
    names = {name for row in wanted for name in row}
    if set(found) != names:
        strange = sorted(set(found) ^ names)[0]
        what = f"'{strange}', which the model lacks" if strange in found else f"none for '{strange}'"
        msg = (
            f"expected scores of {len(layers)} layers × {heads} heads in {path}, got {len(found)} and {what}; "
            "measure this model's: perturbkv head-scores"
        )
        raise ConfigError(msg)
    if not any(found.values()):
        msg = f"expected a score above 0 in {path}, got none"
        raise ConfigError(msg)
    return tuple(tuple(found[name] for name in row) for row in wanted)


def checked(scores: Sequence[Sequence[float]], layers: int, heads: int) -> HeadScores:
    """Scores that were given as numbers. Raises ConfigError where they are not of that shape, or mean nothing."""
    rows = tuple(tuple(_score(value, "head scores") for value in row) for row in scores)
    if len(rows) != layers or any(len(row) != heads for row in rows):
        got = f"{len(rows)} × {', '.join(sorted({str(len(row)) for row in rows})) or 0}"
        msg = f"expected head scores of {layers} layers × {heads} heads, got {got}; perturbkv head-scores measures them"
        raise ConfigError(msg)
    if not any(map(any, rows)):
        msg = "expected a head score above 0, got none"
        raise ConfigError(msg)
    return rows


def as_json(scores: Sequence[Sequence[float]], layers: Sequence[int]) -> str:
    """The file that `read` takes; a row of scores for each of these layers."""
    rows = zip(layers, scores, strict=True)
    named = {f"{layer}-{head}": score for layer, row in rows for head, score in enumerate(row)}
    return json.dumps(named, indent=1) + "\n"


def _parsed(path: Path) -> dict[str, Any]:
    document = _FILE.read_json(path)
    if not isinstance(document, dict):
        msg = f'expected {{"layer-head": score}} in {path}, got {type(document).__name__}'
        raise ConfigError(msg)
    return document


def _score(value: Any, where: str) -> float:
    numbers = value if isinstance(value, list) and value else [value]
    if not all(map(_is_score, numbers)) or not _is_score(sum(numbers)):
        msg = f"{where}: expected a number of at least 0 or a list of them, got {str(value)[:40]}"
        raise ConfigError(msg)
    return float(sum(numbers)) / len(numbers)


def _is_score(number: Any) -> bool:
    """Whether it is a number that a float can be, of at least 0; true is none."""
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= sys.float_info.max
