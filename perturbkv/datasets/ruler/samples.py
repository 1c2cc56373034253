"""Samples from RULER's rows: context and question separate, the answer's beginning in the assistant's turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perturbkv.datasets.dataset_registry import DatasetOptions, LoadedDataset
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.external_code import NoEnd
from perturbkv.datasets.ruler import tasks
from perturbkv.datasets.ruler.ruler_rows import NUMPY_SEED, Data, RowMaker
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
    """Return samples that cycle through the lengths; sample i does not depend on the number of samples.

    Raises DatasetError where lm-eval, a package or data is missing, and for a length that is too short.
    """
    task, data, lengths = tasks.read(name), Data(name, options.data_dir), options.lengths
    row_maker, share = RowMaker(tasks.folder(), tokenizer, options.seed, data), -(-options.samples // len(lengths))
    rows = [_rows(row_maker, task, length, share) for length in lengths]
    chosen_rows = [(index, rows[index % len(rows)][index // len(rows) :][:1]) for index in range(options.samples)]
    samples = tuple(_sample(index, row, task) for index, chosen in chosen_rows for row in chosen)
    recorded = {
        "lengths": list(lengths),
        "seeds": {"random": options.seed, "numpy": NUMPY_SEED},
        "wording": {name: task.record()},
    }
    return LoadedDataset(samples, recorded | data.record, (task,))


def _rows(row_maker: RowMaker, task: Task, length: int, wanted: int) -> Rows:
    """Return at least one row, and `wanted` where lm-eval generates as many: it drops those that are too long.

    Raises DatasetError for a length that no row fits.
    """
    rows, tried = _try_rows(row_maker, task, length, wanted), wanted
    while len(rows) < wanted and tried < MOST_ROWS:
        tried = min(2 * tried, MOST_ROWS) if rows else MOST_ROWS
        rows = _try_rows(row_maker, task, length, tried)
    if rows:
        return rows
    enough = next((other for other in _LENGTHS if other > length and _try_rows(row_maker, task, other, 1)), None)
    do = f"use --length {enough} or more" if enough else "take another task, or a model of another tokenizer"
    msg = f"no prompt of '{task.name}' fits {length:,} tokens of this model's tokenizer, answer included; {do}"
    raise DatasetError(msg)


def _try_rows(row_maker: RowMaker, task: Task, length: int, tried: int) -> Rows:
    """Return those of lm-eval's first rows that fit; none where they are too short for a question."""
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
    text = str(row["input"])
    border = text.rfind(task.question_start)
    return Sample(
        id=f"{index}-{row['max_length']}",
        context=text[:border],
        question=text[border:],
        answers=tuple(row["outputs"]),
        answer_prefix=str(row["gen_prefix"]),
        task=task.name,
        delimiter=task.delimiter,
    )
