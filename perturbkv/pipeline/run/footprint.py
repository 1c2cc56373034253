"""Estimates of a run's footprint: the trace's and the journal's bytes on the disk, memory; and options that take less.

Estimated from shapes alone. On the disk, variables are assumed to deflate as in traces of real prompts; for kept
positions the shorter of mask and gaps is known, and its compression is taken from SnapKV's and AdaKV's sets. Traces of
SmolLM2-135M came out within a fifth of the estimate, with `--save outputs` within a quarter.

Memory is that of weights, the full cache of the longest prompt, the largest batch of evicted caches and `--chunk-mib`,
without activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from perturbkv import memory
from perturbkv.configs.resources import Shape
from perturbkv.configs.run import RunConfig
from perturbkv.devices import block_bytes
from perturbkv.kept_codec import mask_bytes
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.sample.layer import LOST_ENTRIES
from perturbkv.schema import ANSWER_TEXT, DIGEST, KEPT, TEXT, VARIABLES

_DEFLATED = {"float64": 0.78, "float32": 0.6, "int64": 0.05, "int32": 0.25, "uint8": 0.5}
"""Share of a type's bytes that is left after compression; single numbers and text are not compressed."""
_CODES = 0.35
"""Share of the bytes of encoded kept positions that is left after compression."""
_HEADERS, _LABEL = 64 * 2**10, 370
"""Bytes of an empty file, and of the metadata of each configuration."""
_ENTRY = 2700
"""Bytes of the metadata in a sample's file of the journal."""
_PER_TOKEN = 12
"""Bytes of a token's text, its id and its offset."""
_PER_ANSWER_TOKEN, _PER_ANSWER = 5, 40
"""Bytes of a token of an answer's text, and of HDF5's overhead per answer."""
_ANSWERS = ("generated_full", "generated", "score_full", "score", "digits_full", "digits")


@dataclass(frozen=True)
class Footprint:
    """The estimated bytes that a run takes on the disk and in the device's memory.

    Attributes:
        file: bytes of the trace without its samples.
        samples: bytes of each sample in the trace.
        journal: bytes of each sample in the journal, which is removed when the trace is complete.
        memory: bytes of the device's memory at most.
    """

    file: int
    samples: tuple[int, ...]
    journal: tuple[int, ...]
    memory: int

    @property
    def trace(self) -> int:
        """Bytes of the finished trace."""
        return self.file + sum(self.samples)

    @property
    def disk(self) -> int:
        """Bytes on the disk at the end of the run, before the journal is removed."""
        return self.trace + sum(self.journal)


def footprint(planned: Plan) -> Footprint:
    """Return the estimated bytes of a run on the disk and in the device's memory."""
    sizes = [
        _sample_bytes(planned, len(prompt.parts(planned.run.scenario)[0]), len(prompt.token_ids))
        for prompt in planned.prompts
    ]
    file = _HEADERS + _LABEL * len(planned.run.configs)
    in_trace, in_journal = zip(*sizes, strict=True)
    return Footprint(file, in_trace, in_journal, memory_bytes(planned))


def memory_bytes(planned: Plan) -> int:
    """Return the bytes of weights, longest prompt's full cache, largest evicted batch and working memory, summed."""
    weights = planned.files.weights_bytes(planned.placement.dtype)
    return weights + planned.caches_bytes() + _working_bytes(planned)


def suggest_options(planned: Plan, disk_free: int, memory_free: int) -> list[str]:
    """Return command-line options, each sufficient for the run to fit; empty where it fits, or where none suffices."""
    estimate = footprint(planned)
    on_disk = _options_for_disk(planned, estimate, disk_free) if estimate.disk > disk_free else ()
    return [*on_disk, *(_options_for_memory(planned, memory_free) if estimate.memory > memory_free else ())]


def _options_for_disk(planned: Plan, estimate: Footprint, free: int) -> Iterator[str]:
    """Yield command-line options with which the run fits `free` bytes of disk."""
    alternatives = {
        "--no-kept": replace(planned, kept=False),
        "--no-text": replace(planned, text=False),
        "no --save outputs": replace(planned, run=replace(planned.run, save=())),
    }
    yield from (
        name for name, changed in alternatives.items() if changed != planned and footprint(changed).disk <= free
    )
    ends = estimate.file + np.cumsum(estimate.samples) + np.cumsum(estimate.journal)
    if fitting := int(np.searchsorted(ends, free, side="right")):
        yield f"--samples {fitting}, and the others elsewhere"


def _options_for_memory(planned: Plan, free: int) -> Iterator[str]:
    """Yield command-line options with which the run fits `free` bytes of memory."""
    shape, largest = planned.shape, planned.batches.largest_bytes
    least = max(_row_bytes(planned, shape))
    if least < largest and memory_bytes(planned) - largest + least <= free:
        yield f"--max-memory {math.ceil(least / 2**20)}MiB"
    if planned.placement.dtype.itemsize > 2 and _memory_in_16_bits(planned) <= free:
        yield "--dtype bfloat16"


def _memory_in_16_bits(planned: Plan) -> int:
    """Return the bytes of memory that the run would take with a 16-bit precision."""
    import torch

    weights = planned.files.weights_bytes(torch.bfloat16)
    return weights + planned.caches_bytes() * 2 // planned.placement.dtype.itemsize + _working_bytes(planned)


def _working_bytes(planned: Plan) -> int:
    """Return the bytes of working memory: the larger of what the run was given and a block of the longest loops."""
    return max(planned.resources.chunk_bytes, block_bytes(planned.placement.device))


def _row_bytes(planned: Plan, shape: Shape) -> list[int]:
    """Return the bytes of each configuration's cache row for the longest prompt."""
    run, prompts = planned.run, planned.prompts
    tokens = max(len(prompt.parts(run.scenario)[0]) for prompt in prompts)
    decoded = max(len(prompt.token_ids) for prompt in prompts) - tokens + max(run.steps, run.generate)
    return [shape.row_bytes(config, tokens, decoded, run.steps) for config in run.configs]


def _sample_bytes(planned: Plan, context: int, tokens: int) -> tuple[int, int]:
    """Return the bytes of a sample in the compressed trace, and in the journal, which is uncompressed and without text.

    The sample has `tokens` tokens, of which the `context` first ones are compressed.
    """
    run, shape = planned.run, planned.shape
    sizes = _axis_lengths(run, shape, tokens)
    codes = _kept_set_bytes(run, shape, context) if planned.kept else 0
    text = _PER_TOKEN * tokens + _answer_bytes(run) if planned.text else 0
    stored, raw = codes * _CODES + text, _ENTRY + float(codes)
    for name in _fixed_size_variables(planned):
        dims, dtype = VARIABLES[name].dims, VARIABLES[name].dtype
        length = math.prod(sizes[axis] for axis in dims) * np.dtype(dtype).itemsize
        deflated = 0.95 if name == DIGEST else _DEFLATED[dtype] if dims else 1
        stored, raw = stored + length * deflated, raw + length
    return int(stored), int(raw)


def _answer_bytes(run: RunConfig) -> int:
    """Return the bytes of one sample's answers as text, the full cache's answer included."""
    return (1 + len(run.configs)) * (_PER_ANSWER + _PER_ANSWER_TOKEN * run.generate) if run.generate else 0


def _axis_lengths(run: RunConfig, shape: Shape, tokens: int) -> dict[str, int]:
    """Return axis name -> length for the variables of a sample."""
    heads = {"layer": shape.layers, "head": shape.heads, "d_head": shape.d_head, "d_model": shape.d_model}
    counts = {"config": len(run.configs), "step": run.steps, "answer_token": run.generate, "lost_entry": LOST_ENTRIES}
    return {**heads, **counts, "key": tokens + run.steps}


def _fixed_size_variables(planned: Plan) -> list[str]:
    """Return the names of a sample's variables whose size is independent of its text and kept positions."""
    left_out = {
        *TEXT,
        *ANSWER_TEXT,
        KEPT[2],
        *((DIGEST,) if planned.kept else KEPT),
        *(() if planned.run.generate else _ANSWERS),
    }
    raw = "outputs" in planned.run.save
    return [name for name, variable in VARIABLES.items() if name not in left_out and (raw or not variable.raw)]


def _kept_set_bytes(run: RunConfig, shape: Shape, tokens: int) -> int:
    """Return the bytes of a sample's encoded kept sets: per set a mask, or a byte per kept entry if smaller."""
    total = 0
    for config in run.configs:
        sets = shape.heads if config.granularity.name == "query" else shape.kv_heads
        total += shape.layers * sets * min(mask_bytes(tokens), config.kept_entries(tokens))
    return total


def free_memory(planned: Plan) -> int:
    """Return the free bytes of the run's device."""
    return memory.free_bytes(planned.placement.device)
