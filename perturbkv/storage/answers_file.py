"""The jsonl file of `perturbkv generate`: the first line is the run, each following one a sample's answers.

A last line that a killed run left unfinished is ignored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError
from perturbkv.storage import json_lines
from perturbkv.user_files import FileKind

FILE = "generation.jsonl"
_KIND = FileKind("a file of answers, which perturbkv generate writes,", ConfigError, 2 * 2**30, "give another file")
_ROW_FIELDS = {
    "sample": str,
    "prompt_tokens": int,
    "answers": list,
    "full": dict,
    "evicted": dict,
    "compressions": list,
}
_ANSWER_FIELDS = {"tokens": list, "text": str}


@dataclass(frozen=True)
class WrittenAnswers:
    """The answers that a model generated from full and evicted caches.

    Attributes:
        run: the run's configuration; ignored by ==, so that equal answers of a longer and a shorter run are equal.
        rows: an object per prompt, as `docs/reference/json.md` specifies; each holds every configuration of the run.
        source: the file's path; empty where the answers were never in a file.
        digest: short digest of the file.
        made_with: provenance, as far as it is known.
    """

    run: RunConfig = field(compare=False)
    rows: tuple[dict[str, Any], ...]
    source: str = ""
    digest: str = ""
    made_with: Mapping[str, Any] = field(default_factory=dict, compare=False)


def read_answers(path: str | Path) -> WrittenAnswers:
    """Return the generated answers stored in a file.

    Raises ConfigError, which names the file, where it is no such file or one of its lines is not a sample's answers.

    >>> import perturbkv as pk
    >>> pk.read_answers("nowhere.jsonl")
    Traceback (most recent call last):
    perturbkv.errors.ConfigError: expected a file of answers, ... got nothing; give another file
    """
    path = Path(path)
    text = _KIND.read_text(path)
    lines = json_lines.parse(path, text, _KIND)
    if not lines:
        raise _KIND.refusal(path, "an empty one")
    header, *rows = lines
    run = _parse_run(path, header)
    labels = set(run.labels())
    for number, row in enumerate(rows, start=2):
        if not is_answers_row(row) or set(row["evicted"]) != labels:
            raise _KIND.refusal(path, f"a line {number} that is no sample's answers of its run")
    if not rows:
        raise _KIND.refusal(path, "one without answers")
    if len({row["sample"] for row in rows}) < len(rows):
        raise _KIND.refusal(path, "one that answers a sample twice")
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return WrittenAnswers(run, tuple(rows), str(path), digest, header.get("made_with") or {})


def check_answers(answers: Any) -> None:
    """Raise ConfigError for a value that is not a `WrittenAnswers`, such as a path."""
    if not isinstance(answers, WrittenAnswers):
        raise ConfigError(
            f"expected answers, as pk.read_answers or a generate's .written give them; got {type(answers).__name__}"
        )


def is_answers_row(document: Mapping[str, Any]) -> bool:
    """Return whether a line's JSON object has all fields of a sample's answers, with the right types."""
    return _has_fields(document, _ROW_FIELDS) and all(
        _has_fields(answer, _ANSWER_FIELDS) for answer in (document["full"], *document["evicted"].values())
    )


def _parse_run(path: Path, header: Mapping[str, Any]) -> RunConfig:
    """Return the run's configuration from a file's first line. Raises ConfigError for an invalid line."""
    if not isinstance(header.get("run"), dict):
        raise _KIND.refusal(path, "a first line without its run")
    try:
        return RunConfig.from_json(json.dumps(header["run"]))
    except ConfigError as error:
        raise _KIND.refusal(path, f"a first line whose run cannot be read ({error})") from None


def _has_fields(document: Any, fields: Mapping[str, type]) -> bool:
    """Return whether a value is a JSON object with the given fields, each of the given type."""
    return isinstance(document, dict) and all(isinstance(document.get(name), kind) for name, kind in fields.items())
