"""Samples from a jsonl file: a `prompt`, used verbatim, a chat's `messages`, or LongBench's fields."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from perturbkv.datasets import metrics, wording
from perturbkv.datasets.chats import chat_sample
from perturbkv.datasets.dataset_registry import DatasetOptions, LoadedDataset, in_longbench
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.rows import FILE, Row, check_identities, read_rows
from perturbkv.datasets.sample import Sample
from perturbkv.datasets.wording import Wording
from perturbkv.errors import DatasetError, UnknownNameError


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """The first samples of a file. Raises DatasetError naming file and line for what cannot be read."""
    path = Path(name)
    text = FILE.read_text(path)
    rows = read_rows(text, str(path), options.samples)
    wordings = _wordings(rows)
    samples = tuple(replace(_sample(row, wordings), metric=_metric(row)) for row in rows)
    check_identities(samples, rows)
    recorded = {dataset: worded.record() for dataset, worded in wordings.items()}
    digest = hashlib.sha256(text.encode()).hexdigest()
    return LoadedDataset(samples, {"file_sha256": digest, "wording": recorded}, tuple(wordings.values()))


def longbench_sample(row: Row, worded: Wording) -> Sample:
    """A row with LongBench's fields, in its data set's wording."""
    for name in ("context", "input") if worded.asks else ("context",):
        if name not in row.fields:
            msg = f"expected the field `{name}`, which {worded.dataset}'s prompt has; got {[*row.fields]}"
            raise row.refusal(msg)
    context = row.text("context")
    if not context.strip():
        msg = "the context is empty; give `context` some text"
        raise row.refusal(msg)
    before, after = worded.around(row.text("input"))
    return row.sample(
        id=row.own_identity(),
        context=before + context,
        question=after,
        answers=row.texts("answers"),
        task=worded.dataset,
        classes=row.texts("all_classes") if row.fields.get("all_classes") is not None else (),
    )


def _wordings(rows: list[Row]) -> dict[str, Wording]:
    """The wording of each of LongBench's data sets that a row names."""
    found: dict[str, Wording] = {}
    for row in rows:
        name = row.fields.get("dataset")
        if (
            {"prompt", "messages"} & row.fields.keys()
            or not isinstance(name, str)
            or not in_longbench(name)
            or name in found
        ):
            continue
        try:
            found[name] = wording.read(name)
        except DatasetError as error:
            raise row.refusal(error) from None
    return found


def _metric(row: Row) -> str:
    """The metric that the row names for its answers; empty where it names none."""
    named = row.text("metric")
    try:
        if named:
            metrics.check_name(named)
    except UnknownNameError as error:
        raise row.refusal(error) from None
    return named


def _sample(row: Row, wordings: dict[str, Wording]) -> Sample:
    if "messages" in row.fields:
        return chat_sample(row)
    if "prompt" in row.fields:
        return row.sample(
            id=row.identity("id"),
            context=row.text("prompt"),
            answers=row.texts("answers"),
            answer_prefix=row.text("answer_prefix"),
        )
    if "context" not in row.fields and "input" not in row.fields:
        msg = f"expected the field `prompt`, `messages`, or `context` and `input`; got {[*row.fields]}"
        raise row.refusal(msg)
    worded = wordings.get(str(row.fields.get("dataset")))
    return longbench_sample(row, worded) if worded else _plain(row)


def _plain(row: Row) -> Sample:
    """Context and question with an empty line between them, and nothing else."""
    context, question = row.text("context"), row.text("input")
    if not (context + question).strip():
        msg = "the prompt is empty; give `context` or `input` some text"
        raise row.refusal(msg)
    return row.sample(
        id=row.own_identity(),
        context=context,
        question=f"\n\n{question}" if context and question else question,
        answers=row.texts("answers"),
    )
