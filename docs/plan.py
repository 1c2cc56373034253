"""The calculation of docs/cluster.md, "A plan past this machine": `python docs/plan.py docs/bench/scale.json`.

What a run of 70B parameters takes of a cluster: from the model's shapes, from a GPU's specification, and from what
`perturbkv bench scale` measured per sample and per byte.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perturbkv.benchmark.rows import Report, read
from perturbkv.kept_code import mask_bytes
from perturbkv.pipeline.lost import ENTRIES
from perturbkv.schema import DIGEST, KEPT, TEXT, VARIABLES

SAMPLES, GPUS, GPUS_EACH, TOKENS, CONFIGS = 10**6, 1000, 4, 8192, 24
LAYERS, HEADS, KV_HEADS, D_HEAD, PARAMETERS = 80, 64, 8, 128, 70.6e9
FLOPS, USED, SWEEP = 989e12, 0.4, 1.25
"""Of one H100 in bfloat16 (its specification); what a prefill uses of them, and what a sweep takes of a prefill."""
FILES = 1000
"""Traces of as many samples each."""
_DAY, _HOUR, _TOKEN = 86_400, 3_600, 4


@dataclass(frozen=True)
class Sample:
    """Bytes of one sample, as the journal has them."""

    numbers: int
    codes: int

    @property
    def bytes(self) -> int:
        """Both."""
        return self.numbers + self.codes


@dataclass(frozen=True)
class Measured:
    """What the benchmark says of one process: of the demo's samples, each of so many bytes.

    Attributes:
        bytes: of a sample in the journal.
        coordinating: seconds of CPU per sample, journal and all.
        merging: seconds per sample.
        held: bytes of memory per sample of who coordinates, and of who merges.
    """

    bytes: int
    coordinating: float
    merging: float
    held: tuple[float, float]


def main() -> None:
    """The table: what is read, held, sent and written, by whom, and how long each takes."""
    rows = ["| what | who | how much | how long |", "|---|---|---|---|"]
    found = _rows(_sample(), _measured(read(Path(sys.argv[1]))))
    rows += [f"| {' | '.join(row)} |" for row in found]
    sys.stdout.write("\n".join(rows) + "\n")


def _sample() -> Sample:
    """One step, no answers; one kept set per kv head, each a mask of its prompt, as more than an eighth is kept."""
    sizes = {"config": CONFIGS, "step": 1, "layer": LAYERS, "head": HEADS, "answer_token": 0, "lost_entry": ENTRIES}
    names = VARIABLES.keys() - {*TEXT, KEPT[2], DIGEST}
    kept = [one for one in map(VARIABLES.__getitem__, names) if not one.raw]
    numbers = sum(math.prod(sizes[axis] for axis in one.dims) * np.dtype(one.dtype).itemsize for one in kept)
    return Sample(numbers, CONFIGS * LAYERS * KV_HEADS * mask_bytes(TOKENS))


def _measured(report: Report) -> Measured:
    rows: dict[str, Any] = {row.target.name: row for row in report.rows}
    coordination, merging = rows["coordination-workers"], rows["merging"].details
    samples = int(report.settings["samples"])
    held = [_per_sample(rows[name].details, samples) for name in ("coordinator-memory", "merging-memory")]
    return Measured(
        coordination.details["sample"]["bytes"], coordination.value / 1000, merging["merging"]["seconds"] / samples,
        (held[0], held[1]),
    )  # fmt: skip


def _per_sample(details: Any, samples: int) -> float:
    """How much memory grows from 10 samples to all."""
    return max(0.0, (details["bytes"] - details["base_bytes"]) / (samples - 10))


def _rows(sample: Sample, measured: Measured) -> Iterator[tuple[str, str, str, str]]:
    workers, spent = GPUS // GPUS_EACH, _prefill() * SWEEP
    rate, weights, all_ = workers / spent, 2 * PARAMETERS, sample.bytes * SAMPLES
    scaled = sample.bytes / measured.bytes
    coordinating, merging = measured.coordinating * scaled, measured.merging * scaled
    parts = f"{_size(sample.numbers)} numbers, {_size(sample.codes)} positions"
    yield (
        "measured",
        f"{workers} workers of {GPUS_EACH} GPUs",
        f"{spent:.1f} s a sample, {rate:.0f} samples/s",
        (_time(SAMPLES / rate)),
    )
    yield "weights read", "every worker, once", f"{_size(weights)}, {_size(weights * workers)} in all", "–"
    tokens = TOKENS * _TOKEN
    yield "prompts held", "every process, its run's", f"{_size(tokens)} each, {_size(tokens * SAMPLES)} in all", "–"
    yield "held on GPUs", "a worker", f"{_size(weights)} weights, {_size(_cache())} a prompt's full cache", "–"
    yield (
        "written",
        "journals",
        f"{_size(sample.bytes)} a sample ({parts}), {_size(all_)} in all",
        (f"{_size(sample.bytes * rate)}/s"),
    )
    yield (
        "written, `--no-kept`",
        "journals",
        f"{_size(sample.numbers * SAMPLES)} in all",
        (f"{_size(sample.numbers * rate)}/s"),
    )
    yield (
        "sent, workers or Ray",
        "all to one coordinator",
        f"{1000 * coordinating:.0f} ms of its CPU a sample",
        (_time(SAMPLES * coordinating)),
    )
    yield "kept up with", "by one coordinator", f"{spent / coordinating:.0f} workers", "–"
    yield "sent, shards", "nobody", "0", "–"
    yield "held by it", "one coordinator, one merge", " and ".join(_size(one * SAMPLES) for one in measured.held), "–"
    yield "merged into one file", "one process", _size(all_), _time(SAMPLES * merging)
    yield (
        f"merged into {FILES:,} files",
        f"{workers} processes",
        f"{_size(all_ / FILES)} each",
        (_time(SAMPLES * merging / workers)),
    )


def _prefill() -> float:
    """Seconds of one GPU: layers over several GPUs compute one after the other, so that these save no time."""
    attended = 2 * TOKENS**2 * LAYERS * HEADS * D_HEAD  # of every query by half of the keys, scores and values
    return (2 * PARAMETERS * TOKENS + attended) / (USED * FLOPS)


def _cache() -> int:
    """Bytes of keys and values in bfloat16."""
    return 2 * 2 * LAYERS * KV_HEADS * D_HEAD * TOKENS


def _time(seconds: float) -> str:
    return f"{seconds / _DAY:.0f} days" if seconds > 2 * _DAY else f"{seconds / _HOUR:.1f} h"


def _size(number: float) -> str:
    """Bytes in decimal units."""
    unit = min(4, int(math.log10(max(number, 1)) // 3))
    value = number / 1000**unit
    return f"{value:.{0 if value >= 10 else 1}f} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


if __name__ == "__main__":
    main()
