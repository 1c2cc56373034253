"""The calculation of docs/how-to/cluster.md, "A plan past this machine": `python docs/scripts/plan.py docs/bench`.

What a run of 70B parameters takes of a cluster: from the model's shapes, from a GPU's specification, and from what
`python -m benchmarks` measured of one process, seconds per byte of samples that are large as well.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perturbkv.kept_codec import mask_bytes
from perturbkv.pipeline.sample.layer import LOST_ENTRIES
from perturbkv.schema import APART, DIGEST, KEPT, OF_COMPRESSIONS, TEXTS, VARIABLES

SAMPLES, GPUS, GPUS_EACH, FILES = 10**6, 1000, 4, 1000
PARAMETERS, D_HEAD = 70.6e9, 128
FLOPS, USED, SWEEP, DISK = 989e12, 0.4, 1.5, 50e9
"""Of one H100 in bfloat16, by its specification. Assumed: what a prefill uses of them, what a sweep takes of a prefill,
which is the project's aim on a GPU, and bytes per second of a shared disk."""
_MINUTE, _HOUR, _DAY, _TOKEN = 60, 3_600, 86_400, 4


@dataclass(frozen=True)
class Shape:
    """The shape of a one-step sample without answers; each layer and configuration has `sets` kept sets.

    `code` is the bytes of one: of the prompt's mask where at least an eighth is kept, else of a byte per entry.
    """

    tokens: int
    configs: int
    layers: int
    heads: int
    sets: int
    code: int

    def codes(self) -> int:
        """Return bytes of the kept positions."""
        return self.configs * self.layers * self.sets * self.code

    def numbers(self, kept: bool = True) -> int:
        """Return bytes of everything else."""
        sizes = {
            "config": self.configs,
            "layer": self.layers,
            "decoder_layer": self.layers,
            "head": self.heads,
            "step": 1,
            "answer_token": 0,
            "lost_entry": LOST_ENTRIES,
        }
        names = VARIABLES.keys() - {*TEXTS, *APART, *OF_COMPRESSIONS, KEPT[2], *({DIGEST} if kept else KEPT)}
        held = [one for one in map(VARIABLES.__getitem__, names) if not one.save]
        return sum(math.prod(sizes[axis] for axis in one.dims) * np.dtype(one.dtype).itemsize for one in held)


LARGE = Shape(8192, 24, 80, 64, sets=8, code=mask_bytes(8192))
_BUDGETS = (64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
MEASURED = Shape(4096, 200, 30, 9, sets=9, code=sum(min(one, mask_bytes(4096)) for one in _BUDGETS) // len(_BUDGETS))
"""That of the row `writing-200`."""


@dataclass(frozen=True)
class Taken:
    """Seconds that one process takes for a large sample, scaled by bytes, and memory of a demo's sample in bytes.

    Attributes:
        answers: CPU of taking a worker's answer in.
        journal: of writing it there.
        file: of its part of the trace's file.
        held: of whoever coordinates, and of a merge, per sample.
    """

    answers: float
    journal: float
    file: float
    held: tuple[float, float]


def main() -> None:
    """Print the table: what is read, stored, received and written, by which process, and how long each takes."""
    folder = Path(sys.argv[1])
    documents = [json.loads((folder / f"{name}.json").read_text()) for name in ("cpu", "scale")]
    rows = {row["name"]: row for document in documents for row in document["rows"]}
    lines = ["| what | who | how much | how long |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in _rows(_taken(rows))]
    print("\n".join(lines))


def _taken(rows: dict[str, Any]) -> Taken:
    size = LARGE.numbers() + LARGE.codes()
    written, scaled = rows["writing-200"]["details"], size / (MEASURED.numbers() + MEASURED.codes())
    answered = rows["coordination-workers"]["details"]
    answers = answered["ms_per_sample"]["handing"]["cpu"] / 1000 * size / answered["sample"]["bytes"]
    journal, file = (statistics.median(written[part]) * scaled for part in ("journal", "file"))
    coordinator, merge = (_grown(rows[name]["details"]) for name in ("coordinator-memory", "merging-memory"))
    return Taken(answers, journal, file, (coordinator, merge))


def _grown(details: Any) -> float:
    """Return the bytes per sample, from 10 samples to 10,000."""
    return max(0.0, (details["bytes"] - details["base_bytes"]) / (10_000 - 10))


def _rows(taken: Taken) -> Iterator[tuple[str, str, str, str]]:
    workers, measuring = GPUS // GPUS_EACH, _prefill() * SWEEP
    each, rate = measuring + taken.journal, workers / (measuring + taken.journal)
    size, weights = LARGE.numbers() + LARGE.codes(), 2 * PARAMETERS
    alone = taken.answers + taken.journal
    yield (
        "measured",
        f"{workers} workers of {GPUS_EACH} GPUs",
        f"{each:.1f} s a sample, {rate:.0f} samples/s",
        (_time(SAMPLES / rate)),
    )
    yield "weights read", f"{workers} workers, once", _size(weights * workers), _time(weights * workers / DISK)
    yield "weights read", f"{FILES:,} tasks", _size(weights * FILES), _time(weights * FILES / DISK)
    yield "prompts in memory", "a process", f"{_size(LARGE.tokens * _TOKEN)} each", "–"
    yield "GPU memory", "a worker", f"{_size(weights)} weights, {_size(_cache())} full cache of a prompt", "–"
    parts = f"{_size(LARGE.numbers())} numbers, {_size(LARGE.codes())} positions"
    yield (
        "written",
        "journals",
        f"{_size(size)} a sample ({parts}), {_size(size * SAMPLES)} in all",
        (f"{_size(size * rate)}/s"),
    )
    without = LARGE.numbers(kept=False)
    yield "written, `--no-kept`", "journals", f"{_size(without * SAMPLES)} in all", f"{_size(without * rate)}/s"
    yield "received, workers or Ray", "one coordinator", f"{alone:.2f} s a sample", _time(SAMPLES * alone)
    yield "workers served", "one coordinator", f"{measuring / alone:.0f}", "–"
    yield "received, shards", "no coordinator", "–", "–"
    yield "memory", "one coordinator, one merge", " and ".join(_size(one * SAMPLES) for one in taken.held), "–"
    yield "one file", "one process", f"{taken.file:.2f} s a sample", _time(SAMPLES * taken.file)
    yield (
        f"{FILES:,} files",
        f"{workers} tasks at once, GPUs idle",
        f"{_size(size * SAMPLES / FILES)} each, at most",
        (f"{_time(SAMPLES / FILES * taken.file)} each, {_time(SAMPLES * taken.file / workers)} in all"),
    )


def _prefill() -> float:
    """Return the seconds of one GPU; layers over several GPUs compute one after the other and save no time."""
    attended = 2 * LARGE.tokens**2 * LARGE.layers * LARGE.heads * D_HEAD  # each query by half of all
    return (2 * PARAMETERS * LARGE.tokens + attended) / (USED * FLOPS)


def _cache() -> int:
    """Return bytes of keys and values in bfloat16."""
    return 2 * 2 * LARGE.layers * LARGE.sets * D_HEAD * LARGE.tokens


def _time(seconds: float) -> str:
    if seconds > 2 * _DAY:
        return f"{seconds / _DAY:.0f} days"
    return f"{seconds / _HOUR:.1f} h" if seconds > 2 * _HOUR else f"{seconds / _MINUTE:.0f} min"


def _size(number: float) -> str:
    """Return bytes in decimal units."""
    unit = min(4, int(math.log10(max(number, 1)) // 3))
    value = number / 1000**unit
    return f"{value:.{0 if value >= 10 else 1}f} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


if __name__ == "__main__":
    main()
