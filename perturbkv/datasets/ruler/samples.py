"""RULER's rows as samples: context and question apart, the answer's beginning at the assistant's turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perturbkv.datasets.dataset_registry import DatasetOptions, LoadedDataset
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.external_code import NoEnd
from perturbkv.datasets.ruler import tasks
from perturbkv.datasets.ruler.ruler_rows import NUMPY_SEED, Data, Making
from perturbkv.datasets.ruler.tasks import Task
from perturbkv.datasets.sample import Sample
from perturbkv.errors import DatasetError

MOST_ROWS = 500
"""Of a task at one length, in lm-eval."""
NONE_FITS = "Could not generate any"
"""What lm-eval's ValueError says where every row was too long."""
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
"""Tried for whoever asked for less than a task needs."""

Rows = Sequence[Mapping[str, Any]]


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """Samples that go through the lengths in turn; sample i is the same however many are asked for.

    Raises DatasetError where lm-eval, a package or data is missing, and for a length that is too short.
    """
    task, data, lengths = tasks.read(name), Data(name, options.data_dir), options.lengths
    making, share = Making(tasks.folder(), tokenizer, options.seed, data), -(-options.samples // len(lengths))
    rows = [_rows(making, task, length, share) for length in lengths]
    places = [(place, rows[place % len(rows)][place // len(rows) :][:1]) for place in range(options.samples)]
    samples = tuple(_sample(place, row, task) for place, found in places for row in found)
    recorded = {
        "lengths": list(lengths),
        "seeds": {"random": options.seed, "numpy": NUMPY_SEED},
        "wording": {name: task.record()},
    }
    return LoadedDataset(samples, recorded | data.record, (task,))


def _rows(making: Making, task: Task, length: int, wanted: int) -> Rows:
    """At least one row, and `wanted` where lm-eval makes as many: it leaves out what is too long.

    Raises DatasetError for a length that none fits.
    """
    rows, tried = _tried(making, task, length, wanted), wanted
    while len(rows) < wanted and tried < MOST_ROWS:
        tried = min(2 * tried, MOST_ROWS) if rows else MOST_ROWS
        rows = _tried(making, task, length, tried)
    if rows:
        return rows
    enough = next((other for other in _LENGTHS if other > length and _tried(making, task, other, 1)), None)
    do = f"use --length {enough} or more" if enough else "take another task, or a model of another tokenizer"
    msg = f"no prompt of '{task.name}' fits {length:,} tokens of this model's tokenizer, answer included; {do}"
    raise DatasetError(msg)


def _tried(making: Making, task: Task, length: int, tried: int) -> Rows:
    """What becomes of the first rows of lm-eval's; none where they are too long, or so short that nothing is asked."""
    with tasks.explained(task.name, lambda: making.data.path):
        try:
            rows = making.make(task.maker, length, tried)
        except NoEnd:
            return ()
        except ValueError as error:
            if NONE_FITS not in str(error):
                raise
            return ()
    return rows if all(row["outputs"] for row in rows) else ()


def _sample(place: int, row: Mapping[str, Any], task: Task) -> Sample:
    text = str(row["input"])
    border = text.rfind(task.question_begins)
    return Sample(
        id=f"{place}-{row['max_length']}",
        context=text[:border],
        question=text[border:],
        answers=tuple(row["outputs"]),
        answer_prefix=str(row["gen_prefix"]),
        task=task.name,
        delimiter=task.delimiter,
    )
