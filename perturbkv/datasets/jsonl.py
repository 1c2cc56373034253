"""Samples from a jsonl file: a `prompt`, used verbatim, or LongBench's fields."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perturbkv.datasets import wording
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.registry import DatasetOptions, LoadedDataset
from perturbkv.datasets.sample import Sample
from perturbkv.errors import DatasetError


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """The first samples of a file. Raises DatasetError naming file and line for what cannot be read."""
    path = Path(name)
    rows = read_rows(read_text(path), str(path), options.samples)
    samples = tuple(_sample(row, f"{path}, line {line}", place) for place, (line, row) in enumerate(rows))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    kinds = {wording.kind_of(row["dataset"]) for _, row in rows if "prompt" not in row and "dataset" in row}
    return LoadedDataset(samples, {"file_sha256": digest, "wording": wording.record(kinds)})


def read_text(path: Path) -> str:
    """The file's text. Raises DatasetError where it is missing or no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        msg = f"expected a jsonl file at {path}, which does not exist"
        raise DatasetError(msg) from None
    except (OSError, UnicodeDecodeError) as error:
        msg = f"expected a UTF-8 jsonl file at {path}, got one that cannot be read: {error}"
        raise DatasetError(msg) from None


def read_rows(text: str, where: str, most: int) -> list[tuple[int, dict[str, Any]]]:
    """At most `most` (line number, object) of a jsonl text. Raises DatasetError for a line that is no JSON object."""
    rows: list[tuple[int, dict[str, Any]]] = []
    for line, content in _lines(text):
        if len(rows) == most:
            break
        rows.append((line, _parse(content, f"{where}, line {line}")))
    if not rows:
        msg = f"expected at least one sample in {where}, got none"
        raise DatasetError(msg)
    return rows


def longbench_sample(row: dict[str, Any], dataset: str, where: str, place: int) -> Sample:
    """A row with LongBench's fields, in the wording of its task kind."""
    before, after = wording.around(dataset)
    question = str(row.get("input") or "")
    return _make(
        where,
        id=f"{place}-{row['_id']}" if row.get("_id") else str(place),
        context=before + str(row.get("context") or ""),
        question=after.format(input=question) if question or "{input}" not in after else "",
        answers=tuple(map(str, row.get("answers") or ())),
    )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, content in enumerate(text.split("\n"), start=1):
        if content.strip():
            yield number, content


def _parse(content: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(content)
    except json.JSONDecodeError as error:
        msg = f"{where}: expected a JSON object, got text that is no JSON ({error.msg})"
        raise DatasetError(msg) from None
    if not isinstance(row, dict):
        msg = f"{where}: expected a JSON object, got {type(row).__name__}"
        raise DatasetError(msg)
    return row


def _sample(row: dict[str, Any], where: str, place: int) -> Sample:
    if "prompt" in row:
        return _make(
            where,
            id=str(row.get("id", place)),
            context=str(row["prompt"]),
            answers=tuple(map(str, row.get("answers") or ())),
            answer_prefix=str(row.get("answer_prefix") or ""),
        )
    if "context" not in row and "input" not in row:
        msg = f"{where}: expected the field `prompt`, or LongBench's `context` and `input`; got {list(row)}"
        raise DatasetError(msg)
    if not str(row.get("context") or row.get("input") or "").strip():
        msg = f"{where}: the prompt is empty; give `context` or `input` some text"
        raise DatasetError(msg)
    return longbench_sample(row, str(row.get("dataset", "")), where, place)


def _make(where: str, **fields: Any) -> Sample:
    try:
        return Sample(**fields)
    except DatasetError as error:
        msg = f"{where}: {error}"
        raise DatasetError(msg) from None
