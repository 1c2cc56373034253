"""Samples from RULER's rows: context and question separate, the answer's beginning in the assistant's turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perturbkv.datasets.dataset_registry import DatasetOptions, LoadedDataset
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.external_code import NoEnd
from perturbkv.datasets.ruler import tasks
from perturbkv.datasets.ruler.ruler_rows import NUMPY_SEED, RowMaker, TaskData
from perturbkv.datasets.ruler.tasks import Task
from perturbkv.datasets.sample import Sample
from perturbkv.errors import DatasetError

MOST_ROWS = 500
"""Number of rows of a task at one length in lm-eval."""
NONE_FITS = "Could not generate any"
"""Text of lm-eval's ValueError where every row was too long."""
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
"""Lengths to suggest where the requested one is too short for a task."""

Rows = Sequence[Mapping[str, Any]]


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """Return a RULER task's samples, which cycle through the lengths; sample i is independent of the number of samples.

    Raises DatasetError where lm-eval, a package or data is missing, and for a length that is too short.
    """
    task, data, lengths = tasks.read(name), TaskData(name, options.data_dir), options.lengths
    row_maker = RowMaker(tasks.folder(), tokenizer, options.seed, data)
    per_length = -(-options.samples // len(lengths))
    rows = [_rows(row_maker, task, length, per_length) for length in lengths]
    indices = [index for index in range(options.samples) if index // len(rows) < len(rows[index % len(rows)])]
    samples = tuple(_sample(index, rows[index % len(rows)][index // len(rows)], task) for index in indices)
    recorded = {
        "lengths": list(lengths),
        "seeds": {"random": options.seed, "numpy": NUMPY_SEED},
        "wording": {name: task.record()},
    }
    return LoadedDataset(samples, recorded | data.record, task.generation_length)


def _rows(row_maker: RowMaker, task: Task, length: int, count: int) -> Rows:
    """Return `count` rows of a task at one length, or at least one if lm-eval has fewer that fit.

    Raises DatasetError for a length that no row fits.
    """
    rows, tried = _try_rows(row_maker, task, length, count), count
    while len(rows) < count and tried < MOST_ROWS:
        tried = min(2 * tried, MOST_ROWS) if rows else MOST_ROWS
        rows = _try_rows(row_maker, task, length, tried)
    if rows:
        return rows
    enough = next((other for other in _LENGTHS if other > length and _try_rows(row_maker, task, other, 1)), None)
    do = f"use --length {enough} or more" if enough else "take another task, or a model of another tokenizer"
    raise DatasetError(
        f"no prompt of '{task.name}' fits {length:,} tokens of this model's tokenizer, answer included; {do}"
    )


def _try_rows(row_maker: RowMaker, task: Task, length: int, tried: int) -> Rows:
    """Return the rows, among lm-eval's first `tried`, that fit the length; none if a row lacks an answer."""
    with tasks.explain_errors(task.name, lambda: row_maker.data.path):
        try:
            rows = row_maker.make(task.maker, length, tried)
        except NoEnd:
            return ()
        except ValueError as error:
            if NONE_FITS not in str(error):
                raise
            return ()
    return rows if all(row["outputs"] for row in rows) else ()


def _sample(index: int, row: Mapping[str, Any], task: Task) -> Sample:
    """Return a row's sample; its question starts with the template's text after the context."""
    text = str(row["input"])
    question_begin = text.rfind(task.question_start)
    return Sample(
        id=f"{index}-{row['max_length']}",
        context=text[:question_begin],
        question=text[question_begin:],
        answers=tuple(row["outputs"]),
        answer_prefix=str(row["gen_prefix"]),
        task=task.name,
        delimiter=task.delimiter,
    )
