"""The jsonl file of `perturbkv generate`: the first line is the run, each following one a sample's answers.

A last line that a killed run left unfinished is ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError
from perturbkv.storage import json_lines
from perturbkv.user_files import FileKind

FILE = "generation.jsonl"
_KIND = FileKind("a file of answers, which perturbkv generate writes,", ConfigError, 2 * 2**30, "give another file")
_ROW = {"sample": str, "prompt_tokens": int, "answers": list, "full": dict, "evicted": dict, "compressions": list}
_ANSWER = {"tokens": list, "text": str}


@dataclass(frozen=True)
class WrittenAnswers:
    """The answers that a model generated from full and evicted caches.

    Attributes:
        run: the run's configuration; ignored by ==, so that equal answers of a longer and a shorter run are equal.
        rows: an object per prompt, as `docs/json.md` specifies; each holds every configuration of the run.
        compress_every: number of entries above which a cache was compressed again; None: never.
        source: the file's path; empty where the answers were never in a file.
        digest: short digest of the file.
        made_with: provenance, as far as it is known.
    """

    run: RunConfig = field(compare=False)
    rows: tuple[dict[str, Any], ...]
    compress_every: int | None = None
    source: str = ""
    digest: str = ""
    made_with: Mapping[str, Any] = field(default_factory=dict, compare=False)


def read_answers(path: str | Path) -> WrittenAnswers:
    """Return the answers of a file.

    Raises ConfigError, which names the file, where it is no such file or one of its lines is not a sample's answers.

    >>> import perturbkv as pk
    >>> pk.read_answers("nowhere.jsonl")
    Traceback (most recent call last):
    perturbkv.errors.ConfigError: expected a file of answers, ... got nothing; give another file
    """
    where = Path(path)
    text = _KIND.read_text(where)
    header, *rows = json_lines.parsed(where, text, _KIND) or _nothing(where)
    run = _run(where, header)
    labels = set(run.labels())
    for place, row in enumerate(rows, start=2):
        if not is_row(row) or set(row["evicted"]) != labels or not _followed(row):
            raise _KIND.refusal(where, f"a line {place} that is no sample's answers of its run")
    if not rows:
        raise _KIND.refusal(where, "one without answers")
    if len({row["sample"] for row in rows}) < len(rows):
        raise _KIND.refusal(where, "one that answers a sample twice")
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return WrittenAnswers(
        run, tuple(rows), header.get("compress_every"), str(where), digest, header.get("made_with") or {}
    )


def check_answers(given: Any) -> None:
    """Raise ConfigError for anything but the result of `read_answers`, such as a path."""
    if not isinstance(given, WrittenAnswers):
        msg = f"expected answers, as pk.read_answers or a generate's .written give them; got {type(given).__name__}"
        raise ConfigError(msg)


def is_row(document: Mapping[str, Any]) -> bool:
    """Return whether a line is a sample's answers."""
    return _has(document, _ROW) and all(
        _has(made, _ANSWER) for made in (document["full"], *document["evicted"].values())
    )


def _nothing(path: Path) -> NoReturn:
    raise _KIND.refusal(path, "an empty one")


def _run(path: Path, header: Mapping[str, Any]) -> RunConfig:
    limit = header.get("compress_every")
    if not isinstance(header.get("run"), dict):
        raise _KIND.refusal(path, "a first line without its run")
    try:
        run = RunConfig.from_json(json.dumps(header.get("run")))
    except ConfigError as error:
        raise _KIND.refusal(path, f"a first line whose run cannot be read ({error})") from None
    if not (limit is None or (isinstance(limit, int) and not isinstance(limit, bool))):
        raise _KIND.refusal(path, f"a first line whose compress_every is {str(limit)[:40]}")
    return run


def _followed(row: Mapping[str, Any]) -> bool:
    """Return whether a line's divergence, if it has one, has a number for each token of the full cache's answer."""
    found = row.get("divergence")
    if found is None:
        return True
    if not _has(found, {"noise_floor": list, "caches": dict}) or set(found["caches"]) != set(row["evicted"]):
        return False
    if not all(_has(one, {"kl": list, "top1": list}) for one in found["caches"].values()):
        return False
    numbers = [found["noise_floor"], *(one["kl"] for one in found["caches"].values())]
    truths = [one["top1"] for one in found["caches"].values()]
    steps = len(row["full"]["tokens"])
    return (
        all(len(one) == steps for one in (*numbers, *truths))
        and all(_is_number(value) for one in numbers for value in one)
        and all(isinstance(value, bool) for one in truths for value in one)
    )


def _is_number(value: Any) -> bool:
    """Return whether a value can be a KL divergence: a finite number that is not negative."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0


def _has(document: Any, fields: Mapping[str, type]) -> bool:
    return isinstance(document, dict) and all(isinstance(document.get(name), kind) for name, kind in fields.items())
