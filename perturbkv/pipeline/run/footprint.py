"""Estimates of a run's footprint: the trace's and the journal's bytes on the disk, memory; and options that take less.

Estimated from shapes alone. On the disk, variables are assumed to deflate as in traces of real prompts; for kept
positions the shorter of mask and gaps is known, and its compression is taken from SnapKV's and AdaKV's sets. Traces of
SmolLM2-135M came out within a fifth of the estimate, with `--save outputs` within a quarter.

Memory is that of tensors at the fullest moment of the longest prompt. What a GPU takes besides, for its context and
within an operation, and what the allocator cannot join, is not counted. Activations are those of dense layers as
Llama's; Gemma's took 1.3 times as much, and experts take more.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from perturbkv import memory
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import SLACK, Shape
from perturbkv.configs.run import RunConfig
from perturbkv.configs.selections import STAGED, UNION
from perturbkv.devices import block_bytes, working_bytes
from perturbkv.kept_codec import mask_bytes
from perturbkv.pipeline.run.plan import Plan, copies_each_pass
from perturbkv.pipeline.sample.compressed_spans import PLACE_BYTES, SPAN_BYTES
from perturbkv.pipeline.sample.layer import LOST_ENTRIES
from perturbkv.pipeline.sample.prefill import accumulated_request
from perturbkv.schema import DIGEST, KEPT, OF_COMPRESSIONS, PLACES, TEXTS, VARIABLES
from perturbkv.selection.resolved_config import ResolvedConfig
from perturbkv.theory import WORK

_DEFLATED_SHARE = {"float64": 0.78, "float32": 0.6, "int64": 0.05, "int32": 0.25, "uint8": 0.5}
"""Share of a type's bytes that is left after compression; single numbers and text are not compressed."""
_DIGEST_SHARE = 0.95
"""Share of the bytes of kept sets' digests that is left after compression."""
_CODES_SHARE = 0.35
"""Share of the bytes of encoded kept positions that is left after compression."""
_FILE_BYTES, _CONFIG_BYTES = 64 * 2**10, 370
"""Bytes of an empty file, and of the metadata of each configuration."""
_JOURNAL_ENTRY_BYTES = 2700
"""Bytes of the metadata in a sample's file of the journal."""
_TOKEN_BYTES = 12
"""Bytes of a token's text, its id and its offset."""
_ANSWER_TOKEN_BYTES, _ANSWER_BYTES = 5, 40
"""Bytes of a token of an answer's text, and of HDF5's overhead per answer."""
_ANSWER_VARIABLES = ("generated_full", "generated", "score_full", "score", "digits_full", "digits")
"""Variables of answers that are left out where nothing is generated."""


_RANK_BYTES = 12
"""Bytes of an entry's place in a ranking, and of its rank."""
_BY_HEAD_BYTES, _BY_GROUP_BYTES = 40, 16
"""Working bytes of an entry and query head of all layers, where shared sets rank by products or ranks of heads, and
where they rank by means of a group."""
_BLOCKS_AT_ONCE = 3.5
"""Blocks of a long loop that are in memory at once: two of logits, the weights before, and their mask."""


@dataclass(frozen=True)
class Memory:
    """The estimated bytes of a device's memory for a run's longest prompt.

    Attributes:
        weights: the model's.
        full_cache: every entry of the prompt.
        statistics: scores and value norms of all layers.
        prefill: one layer's activations, or the blocks of a long loop.
        layer: rankings of all layers, and one layer's entries, projection and sums in float64, or the joined scores of
            all layers that share kept sets.
        decoding: rankings and coded kept sets of all layers, the largest batch of evicted caches, and copies.
        backward: the larger of two backward passes through the text's tokens: over the full cache, or over the largest
            batch of evicted caches, with what decoding holds; 0 without effects.
    """

    weights: int
    full_cache: int
    statistics: int
    prefill: int
    layer: int
    decoding: int
    backward: int = 0

    @property
    def stage(self) -> str:
        """Name of the stage that takes most: `prefill`, `layer`, `decoding` or `backward`."""
        return max(("prefill", "layer", "decoding", "backward"), key=lambda name: int(getattr(self, name)))

    @property
    def total(self) -> int:
        """Bytes at the fullest moment: what stays, and the stage that takes most."""
        return self.weights + self.full_cache + self.statistics + int(getattr(self, self.stage))


@dataclass(frozen=True)
class Footprint:
    """The estimated bytes that a run takes on the disk and in the device's memory.

    Attributes:
        file: bytes of the trace without its samples.
        samples: bytes of each sample in the trace.
        journal: bytes of each sample in the journal, which is removed when the trace is complete.
        memory: bytes of the device's memory.
    """

    file: int
    samples: tuple[int, ...]
    journal: tuple[int, ...]
    memory: Memory

    @property
    def trace(self) -> int:
        """Bytes of the finished trace."""
        return self.file + sum(self.samples)

    @property
    def disk(self) -> int:
        """Bytes on the disk at the end of the run, before the journal is removed."""
        return self.trace + sum(self.journal)


def estimate_footprint(planned: Plan) -> Footprint:
    """Return the estimated bytes of a run on the disk and in the device's memory."""
    sizes = [
        _sample_bytes(planned, len(prompt.parts(planned.run.scenario)[0]), len(prompt.token_ids))
        for prompt in planned.prompts
    ]
    file = _FILE_BYTES + _CONFIG_BYTES * len(planned.run.configs)
    in_trace, in_journal = zip(*sizes, strict=True)
    return Footprint(file, in_trace, in_journal, estimate_memory(planned))


def estimate_memory(planned: Plan) -> Memory:
    """Return the estimated bytes of the device's memory for the longest prompt."""
    shape, run = planned.shape, planned.run
    longest = max(len(prompt.token_ids) for prompt in planned.prompts)
    tokens = max(len(prompt.parts(run.scenario)[0]) for prompt in planned.prompts)
    ranked = [config for config in planned.configs if config.requests]
    requests = {request for config in ranked for request in config.requests}
    if run.compresses:
        requests |= {accumulated_request(config) for config in ranked if config.accumulates}
    sets = [_count_sets(config, shape) * _count_compressions(run, config, tokens) for config in run.configs]
    later = 2 * (tokens + run.steps) * shape.measured * sum(sets)  # masks of compressions: kept and stage 1
    placed = 2 * WORK.itemsize * (tokens + run.steps) * shape.heads if later else 0  # ranks while such a mask is made
    norm_bytes = 4 * (1 + any(config.euclidean for config in planned.configs))  # of an entry and head, in float32
    rankings = _RANK_BYTES * _ranking_entries(ranked, shape, tokens)
    codes = sum(_count_sets(config, shape) for config in run.configs) * shape.measured * mask_bytes(tokens)
    working = working_bytes(planned.placement.device, planned.resources.chunk_bytes)
    projection = _projection_bytes(shape)
    copied = working if copies_each_pass(planned.resolved) else 0
    decoding = rankings + codes + later + placed + planned.batches.largest_bytes + max(copied, projection)
    backward = _backward_bytes(run, shape, longest, longest - tokens) if "effect" in run.save else 0
    if run.averages_gradients:
        backward = max(backward, decoding + _evicted_backward_bytes(planned, shape, tokens, longest - tokens))
    return Memory(
        weights=shape.weights_bytes,
        full_cache=shape.full_cache_bytes(longest),
        statistics=tokens * shape.layers * shape.heads * (norm_bytes + WORK.itemsize * len(requests)),
        prefill=_prefill_bytes(planned, shape, tokens, _loop_bytes(planned)),
        layer=rankings
        + later
        + max(_measured_layer_bytes(run, shape, tokens, working), _joined_bytes(ranked, shape, tokens, norm_bytes)),
        decoding=decoding,
        backward=backward,
    )


def _backward_bytes(run: RunConfig, shape: Shape, entries: int, question: int) -> int:
    """Return the bytes that a backward pass through a text and its question holds of all layers.

    Of each layer these are the entries, with the text's behind them, once as they are and once for every query head;
    attention weights, before and after the softmax; a token's activations, as in a prefill; and the steps' logits.
    """
    read, wide = question + run.steps, shape.heads / shape.kv_heads
    weights = 2 * shape.itemsize * shape.decoder_layers * read * shape.heads * (entries + read)
    copies = int((1 + wide) * shape.full_cache_bytes(entries + read))
    return copies + weights + _activation_bytes(run, shape, read)


def _activation_bytes(run: RunConfig, shape: Shape, read: int) -> int:
    """Return the bytes of one row's activations in a backward pass through `read` tokens, without attention's."""
    layers = shape.itemsize * shape.decoder_layers * read * (8 * shape.d_model + 4 * shape.d_mlp)
    return layers + 3 * WORK.itemsize * run.steps * shape.vocab  # the steps' logits


def _evicted_backward_bytes(planned: Plan, shape: Shape, tokens: int, question: int) -> int:
    """Return the bytes that the backward pass over a batch of evicted caches holds beside them, and the gradients.

    Of each layer these are a row's entries, copied in float32 unless the cache is that already; attention weights,
    before and after the softmax; a token's activations. One row keeps everything. The gradients are those of all
    configurations, in float64.
    """
    run, read = planned.run, question + planned.run.steps
    wide = max(4, shape.itemsize)  # bytes of a number in attention
    copies = wide / shape.itemsize if copies_each_pass(planned.resolved) or wide > shape.itemsize else 0
    everything = shape.full_cache_bytes(tokens) if wide > shape.itemsize else 0
    activations = _activation_bytes(run, shape, read)

    def row(config: EvictionConfig) -> float:
        evicts = config.cache_contents.evicts
        entries = copies * (1 + SLACK) * shape.kept_bytes(config, tokens) if evicts else 2 * everything
        attended = read + (config.kept_entries(tokens) if evicts else tokens)
        return entries + 2 * wide * shape.measured * shape.heads * read * attended + activations

    control = 2 * everything + 2 * wide * shape.measured * shape.heads * read * (tokens + read) + activations
    batches = [sum(row(run.configs[index]) for index in batch) for batch in planned.batches.indices]
    gradients = WORK.itemsize * len(run.configs) * run.steps * shape.measured * shape.heads * shape.d_value
    return int(control + max(batches) + gradients)


def _loop_bytes(planned: Plan) -> int:
    """Return the bytes of long loops over queries while a prefill computes scores; 0 where no score needs one."""
    scores = [request.score for config in planned.configs for request in config.requests]
    in_loops = any("queries" in score.needs or score.replay for score in scores)
    if in_loops or not all(config.requests for config in planned.configs):
        return int(_BLOCKS_AT_ONCE * block_bytes(planned.placement.device))
    return 0


def _measured_layer_bytes(run: RunConfig, shape: Shape, tokens: int, working: int) -> int:
    """Return the bytes of one layer's entries, projection and sums in float64, with `working` bytes for the sums."""
    row = WORK.itemsize * shape.heads * tokens  # a number per entry and query head
    sums, weights = (1 + len(run.configs)) * row, 2 * run.steps
    if run.compresses:
        most = max(_count_compressions(run, config, tokens) for config in run.configs)
        sums += len(run.configs) * shape.heads * tokens * (PLACE_BYTES + SPAN_BYTES * (1 + most))
        stacked = run.steps // (1 + most)  # weights of a span once more; largest sums stand at measured steps alone
        weights = run.steps + run.steps // run.isolated_every + most + stacked
    entries = WORK.itemsize * shape.kv_heads * max(shape.d_key, shape.d_value) * tokens
    return (4 + weights) * row + entries + max(entries, _projection_bytes(shape) + min(working, sums))


def _count_compressions(run: RunConfig, config: EvictionConfig, tokens: int) -> int:
    """Return how often a configuration's cache is compressed while the steps are decoded, after `tokens` entries."""
    if run.compress_over:
        return (run.steps - 1) // max(1, run.compress_over - config.budget.tokens(tokens))
    return (run.steps - 1) // run.compress_every if run.compress_every else 0


def _projection_bytes(shape: Shape) -> int:
    """Return the bytes of one layer's output projection in float64."""
    return WORK.itemsize * shape.heads * shape.d_value * shape.d_model


def _prefill_bytes(planned: Plan, shape: Shape, tokens: int, loops: int) -> int:
    """Return the bytes of a prefill in one layer: those of its feed-forward part, or of attention and its `loops`."""
    fused = any("gate_up_proj" in name for name in planned.files.shapes())  # both halves of one product stay
    feed_forward = 4 * shape.d_model + (3 + fused) * shape.d_mlp
    attention = 3 * shape.d_model + shape.heads * shape.d_key
    rotations = shape.itemsize * tokens * 2 * shape.d_key
    return rotations + max(shape.itemsize * tokens * feed_forward, shape.itemsize * tokens * attention + loops)


def _joined_bytes(configs: Sequence[ResolvedConfig], shape: Shape, tokens: int, norm_bytes: int) -> int:
    """Return the bytes of the joined statistics of all layers while sets that layers share are ranked; 0 without such.

    `norm_bytes` are those of an entry's value norms per query head.
    """
    if not (sharing := [config for config in configs if config.shares_layers]):
        return 0
    joined = len({config.requests for config in sharing}) * (norm_bytes + 2 * WORK.itemsize)
    by_head = any(
        config.reduction == UNION or config.granularity.options.get("product") == "mean-of-products"
        for config in sharing
    )
    return tokens * shape.layers * shape.heads * (joined + (_BY_HEAD_BYTES if by_head else _BY_GROUP_BYTES))


def _ranking_entries(configs: Sequence[ResolvedConfig], shape: Shape, tokens: int) -> int:
    """Return the number of entries in the rankings of all layers, which stay until the sample is done."""
    entries_of_ranking: dict[Hashable, int] = {}  # configurations with the same scores and rule share a ranking
    for config in configs:
        scores = (config.requests, config.pooling, config.granularity)
        staged = config.selection.name in STAGED or config.has_own_stages
        first = "attention" if staged or config.selection.name == "attention" else config.selection
        for rule in (first, config.selection) if staged else (first,):
            layers = 1 if config.shares_layers else shape.layers
            entries_of_ranking[scores, rule] = layers * _count_sets(config, shape) * (tokens // config.block)
    return sum(entries_of_ranking.values())


def _count_sets(config: EvictionConfig, shape: Shape) -> int:
    """Return the number of kept sets of a configuration in one layer."""
    return shape.heads if config.granularity.name == "query" else shape.kv_heads


def suggest_options(planned: Plan, disk_free: int, memory_free: int) -> list[str]:
    """Return command-line options, each sufficient for the run to fit; empty where it fits, or where none suffices."""
    estimate, found = estimate_footprint(planned), list[str]()
    if estimate.disk > disk_free:
        found += _options_for_disk(planned, estimate, disk_free)
    if estimate.memory.total > memory_free:
        found += _options_for_memory(planned, memory_free)
    return found


def _options_for_disk(planned: Plan, estimate: Footprint, free: int) -> Iterator[str]:
    """Yield command-line options with which the run fits `free` bytes of disk."""
    alternatives = {
        "--no-kept": replace(planned, kept=False),
        "--no-prompts": replace(planned, with_text=False),
        "no --save outputs": replace(planned, run=replace(planned.run, save=tuple({*planned.run.save} - {"outputs"}))),
    }
    yield from (
        name
        for name, changed in alternatives.items()
        if changed != planned and estimate_footprint(changed).disk <= free
    )
    after_sample = estimate.file + np.cumsum(estimate.samples) + np.cumsum(estimate.journal)
    if fitting := int(np.searchsorted(after_sample, free, side="right")):
        yield f"--samples {fitting}, and the others elsewhere"


def _options_for_memory(planned: Plan, free: int) -> Iterator[str]:
    """Yield command-line options with which the run fits `free` bytes of memory."""
    run, prompts = planned.run, planned.prompts
    tokens = max(len(prompt.parts(run.scenario)[0]) for prompt in prompts)
    decoded = max(len(prompt.token_ids) for prompt in prompts) - tokens + max(run.steps, run.generate)
    largest = max(planned.shape.row_bytes(one, tokens, decoded, run.recorded_steps) for one in run.configs)
    mib = math.ceil(largest / 2**20)  # of a batch of one configuration
    bounded = replace(planned, batches=replace(planned.batches, largest_bytes=mib * 2**20))
    if mib * 2**20 < planned.batches.largest_bytes and estimate_memory(bounded).total <= free:
        yield f"--max-memory {mib}MiB"
    half = replace(planned, placement=replace(planned.placement, dtype=torch.bfloat16))
    if planned.placement.dtype.itemsize > 2 and estimate_memory(half).total <= free:
        yield "--dtype bfloat16"


def _sample_bytes(planned: Plan, context: int, tokens: int) -> tuple[int, int]:
    """Return the bytes of a sample in the compressed trace, and in the journal, which is uncompressed and without text.

    The sample has `tokens` tokens, of which the `context` first ones are compressed.
    """
    run, shape = planned.run, planned.shape
    sizes = {  # by axis
        "config": len(run.configs), "step": run.steps, "answer_token": run.generate, "lost_entry": LOST_ENTRIES,
        "layer": shape.measured, "decoder_layer": shape.decoder_layers, "head": shape.heads, "d_value": shape.d_value,
        "d_model": shape.streams * shape.d_model, "key": tokens + run.steps,
        "place": len(PLACES),
    }  # fmt: skip
    codes = 0
    if planned.kept:  # of each set a mask, or a byte per kept entry if smaller
        sets = ((_count_sets(each, shape), each.kept_entries(context)) for each in run.configs)
        codes = shape.measured * sum(count * min(mask_bytes(context), kept) for count, kept in sets)
    answers = (1 + len(run.configs)) * (_ANSWER_BYTES + _ANSWER_TOKEN_BYTES * run.generate) if run.generate else 0
    pieces = _TOKEN_BYTES * run.steps if run.compresses else 0
    text = _TOKEN_BYTES * tokens + pieces + answers if planned.with_text else 0
    stored, raw = codes * _CODES_SHARE + text, _JOURNAL_ENTRY_BYTES + float(codes)
    left_out = {
        *TEXTS,
        KEPT[2],  # the codes, whose size is that of the kept sets
        *((DIGEST,) if planned.kept else KEPT),
        *(() if run.generate else _ANSWER_VARIABLES),
        *(() if run.compresses else OF_COMPRESSIONS),
    }
    saved = {"", *run.save}
    for name in [name for name, one in VARIABLES.items() if name not in left_out and one.save in saved]:
        dims, dtype = VARIABLES[name].dims, VARIABLES[name].dtype
        length = math.prod(sizes[axis] for axis in dims) * np.dtype(dtype).itemsize
        deflated = _DIGEST_SHARE if name == DIGEST else _DEFLATED_SHARE[dtype] if dims else 1
        stored, raw = stored + length * deflated, raw + length
    return int(stored), int(raw)


def free_memory(planned: Plan) -> int:
    """Return the free bytes of the run's device."""
    return memory.free_bytes(planned.placement.device)
