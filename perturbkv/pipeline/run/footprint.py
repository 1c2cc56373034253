"""What a run will take: the trace's bytes on the disk, the journal's while it goes on, memory; and what takes less.

Estimated from shapes alone. On the disk, numbers that were measured are taken to deflate as they did in traces of real
prompts; of kept positions the shorter of mask and gaps is known, and how far it deflates is taken from SnapKV's and
AdaKV's sets. Traces of SmolLM2-135M came out within a fifth of the estimate, with `--save outputs` within a quarter.
Memory is that of weights, the full cache of the longest prompt, the largest batch of evicted caches and `--chunk-mib`;
activations are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from perturbkv import memory as room
from perturbkv.configs.resources import Shape
from perturbkv.configs.run import RunConfig
from perturbkv.kept_codec import mask_bytes
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.sample.layer import ENTRIES
from perturbkv.schema import ANSWER_TEXT, DIGEST, KEPT, TEXT, VARIABLES

_DEFLATED = {"float64": 0.78, "float32": 0.6, "int64": 0.05, "int32": 0.25, "uint8": 0.5}
"""What is left of a type's bytes; of single numbers and of the text all is."""
_CODES = 0.35
"""What is left of codes of kept positions."""
_HEADERS, _LABEL = 64 * 2**10, 370
"""Bytes of a file that holds nothing, and of what it says of each configuration."""
_ENTRY = 2700
"""Bytes of a sample's file in the journal beside its numbers: what it says of them."""
_PER_TOKEN = 12
"""Bytes of a token's text, its number and its place."""
_PER_ANSWER_TOKEN, _PER_ANSWER = 5, 40
"""Bytes of a token of an answer's text, and of what HDF5 keeps beside each."""
_ANSWERS = ("generated_full", "generated", "score_full", "score", "digits_full", "digits")


@dataclass(frozen=True)
class Footprint:
    """Bytes that a run takes at most at once; those of the disk estimated, each sample's on its own.

    Attributes:
        file: of the trace without its samples.
        samples: of each sample in it.
        journal: of each sample in the journal, until the trace is whole.
        memory: of the device.
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
        """Bytes of the disk before the journal is removed."""
        return self.trace + sum(self.journal)


def footprint(planned: Plan) -> Footprint:
    """What a run takes."""
    sizes = [
        _sample_bytes(planned, len(one.parts(planned.run.scenario)[0]), len(one.token_ids)) for one in planned.prompts
    ]
    file = _HEADERS + _LABEL * len(planned.run.configs)
    return Footprint(file, tuple(stored for stored, _ in sizes), tuple(raw for _, raw in sizes), memory_bytes(planned))


def memory_bytes(planned: Plan) -> int:
    """Weights, the longest prompt's full cache, the largest batch of evicted ones, and working memory."""
    weights = planned.files.weights_bytes(planned.placement.dtype)
    return weights + planned.caches_bytes() + planned.resources.chunk_bytes


def advice(planned: Plan, disk_free: int, memory_free: int) -> list[str]:
    """Options each of which alone makes the run fit what it does not; none where it fits, or where nothing does."""
    found = footprint(planned)
    on_disk = _less_disk(planned, found, disk_free) if found.disk > disk_free else ()
    return [*on_disk, *(_less_memory(planned, memory_free) if found.memory > memory_free else ())]


def _less_disk(planned: Plan, found: Footprint, free: int) -> Iterator[str]:
    others = {
        "--no-kept": replace(planned, kept=False),
        "--no-text": replace(planned, text=False),
        "no --save outputs": replace(planned, run=replace(planned.run, save=())),
    }
    yield from (name for name, other in others.items() if other != planned and footprint(other).disk <= free)
    ends = found.file + np.cumsum(found.samples) + np.cumsum(found.journal)
    if fitting := int(np.searchsorted(ends, free, side="right")):
        yield f"--samples {fitting}, and the others elsewhere"


def _less_memory(planned: Plan, free: int) -> Iterator[str]:
    shape, largest = _shape(planned), planned.batches.largest_bytes
    least = max(_rows(planned, shape))
    if least < largest and memory_bytes(planned) - largest + least <= free:
        yield f"--max-memory {math.ceil(least / 2**20)}MiB"
    if planned.placement.dtype.itemsize > 2 and _in_16_bits(planned) <= free:
        yield "--dtype bfloat16"


def _in_16_bits(planned: Plan) -> int:
    """Memory with numbers of two bytes; caches shrink as these do."""
    import torch

    weights = planned.files.weights_bytes(torch.bfloat16)
    return weights + planned.caches_bytes() * 2 // planned.placement.dtype.itemsize + planned.resources.chunk_bytes


def _shape(planned: Plan) -> Shape:
    dtype = planned.placement.dtype
    return Shape.from_config(planned.files.config, dtype.itemsize, planned.files.weights_bytes(dtype))


def _rows(planned: Plan, shape: Shape) -> list[int]:
    """Bytes of each configuration alone, of the longest prompt."""
    run, prompts = planned.run, planned.prompts
    tokens = max(len(one.parts(run.scenario)[0]) for one in prompts)
    decoded = max(len(one.token_ids) for one in prompts) - tokens + max(run.steps, run.generate)
    return [shape.row_bytes(config, tokens, decoded, run.steps) for config in run.configs]


def _sample_bytes(planned: Plan, tokens: int, read: int) -> tuple[int, int]:
    """Bytes of a sample in the trace, and in the journal, which compresses nothing and holds no text."""
    run, shape = planned.run, _shape(planned)
    sizes = _sizes(run, shape, read)
    codes = _code_bytes(run, shape, tokens) if planned.kept else 0
    text = _PER_TOKEN * read + _answer_bytes(run) if planned.text else 0
    stored, raw = codes * _CODES + text, _ENTRY + float(codes)
    for name in _names(planned):
        dims, dtype = VARIABLES[name].dims, VARIABLES[name].dtype
        length = math.prod(sizes[axis] for axis in dims) * np.dtype(dtype).itemsize
        deflated = 0.95 if name == DIGEST else _DEFLATED[dtype] if dims else 1
        stored, raw = stored + length * deflated, raw + length
    return int(stored), int(raw)


def _answer_bytes(run: RunConfig) -> int:
    """The text of a sample's answers, the full cache's among them."""
    return (1 + len(run.configs)) * (_PER_ANSWER + _PER_ANSWER_TOKEN * run.generate) if run.generate else 0


def _sizes(run: RunConfig, shape: Shape, read: int) -> dict[str, int]:
    heads = {"layer": shape.layers, "head": shape.heads, "d_head": shape.d_head, "d_model": shape.d_model}
    counts = {"config": len(run.configs), "step": run.steps, "answer_token": run.generate, "lost_entry": ENTRIES}
    return {**heads, **counts, "key": read + run.steps}


def _names(planned: Plan) -> list[str]:
    """The variables of a sample that lie along axes of one length, or have none."""
    left_out = {
        *TEXT,
        *ANSWER_TEXT,
        KEPT[2],
        *((DIGEST,) if planned.kept else KEPT),
        *(() if planned.run.generate else _ANSWERS),
    }
    raw = "outputs" in planned.run.save
    return [name for name, one in VARIABLES.items() if name not in left_out and (raw or not one.raw)]


def _code_bytes(run: RunConfig, shape: Shape, tokens: int) -> int:
    """Codes of all configurations: of each kept set a mask, or a byte for each entry where these are fewer."""
    found = 0
    for config in run.configs:
        sets = shape.heads if config.granularity.name == "query" else shape.kv_heads
        found += shape.layers * sets * min(mask_bytes(tokens), config.kept_entries(tokens))
    return found


def free_memory(planned: Plan) -> int:
    """Bytes that the run may take where it computes."""
    return room.free_bytes(planned.placement.device)
