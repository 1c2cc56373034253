"""Sample traces of any size with random numbers, for tests of what comes after the pipeline."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perturbkv import kept_codec
from perturbkv.configs.run import RunConfig
from perturbkv.schema import DIGEST, TEXTS, VARIABLES
from perturbkv.schema import KEPT as KEPT_CODES
from perturbkv.selection.grid import configuration
from perturbkv.storage.run.sample_parts import distinct_codes
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.storage.trace.texts import SampleText
from perturbkv.trace import FailedSample, SampleTrace, Trace

KEPT, TOKENS = 3, 64
"""Entries kept of how many; TOKENS of the prompt's text too."""


def run_config(samples: int = 2, steps: int = 1, **more: Any) -> RunConfig:
    configs = tuple(configuration(64, selection=name) for name in ("attention", "two-stage"))
    return RunConfig(**{"model": "m", "dataset": "d", "configs": configs, "samples": samples, "steps": steps, **more})


def write(path: Path, *samples: SampleTrace | FailedSample, **run: object) -> Path:
    """The trace file of these samples."""
    writer = TraceWriter(path, run_config(len(samples), **run), [s.sample_id for s in samples], {"model": "m"})
    for sample in samples:
        writer.append(sample)
    return writer.finish()


def sample_trace(
    name: str = "s0",
    *,
    configs: int = 2,
    steps: int = 1,
    layers: int = 2,
    heads: int = 2,
    seed: int = 0,
    optional: bool = False,
    keys: int = 5,
) -> SampleTrace:
    """Floats are lognormal, kept positions c … c + KEPT − 1 for every head of configuration c."""
    draw = np.random.default_rng(seed)
    sizes = {"config": configs, "step": steps, "layer": layers, "head": heads, "d_value": 3, "d_model": 4, "key": keys}
    sizes |= {"decoder_layer": layers, "answer_token": 4, "lost_entry": 2, "place": 4}
    arrays: dict[str, Any] = text(f"Prompt of {name}:\nçé {seed}") if optional else {}
    for variable, spec in VARIABLES.items():
        if spec.optional and not optional or variable in (*KEPT_CODES, DIGEST, *TEXTS):
            continue
        shape = tuple(sizes[axis] for axis in spec.dims)
        kind = np.dtype(spec.dtype)
        arrays[variable] = np.asarray(
            draw.lognormal(size=shape) if kind.kind == "f" else draw.integers(0, 2, shape)
        ).astype(kind)
    rows = configs * layers * heads
    if optional:
        arrays["steps_measured"], arrays["question_tokens"] = np.asarray(steps), np.asarray(0)
        arrays["token_text"] = np.array([f" {name}é{step}" for step in range(steps)], dtype=object)
        arrays |= spoken(f"of {name}", [f"{config} é\n of {name}" for config in range(configs)], ["é"])
    arrays["prompt_tokens"] = np.asarray(TOKENS)
    arrays["kept_count"] = np.full((configs, layers, heads), KEPT)
    first = np.repeat(np.arange(configs, dtype=np.int32), KEPT * layers * heads)
    offsets = (np.arange(rows) * KEPT).reshape(configs, layers, heads)
    return SampleTrace(name, arrays | kept(arrays, offsets, first + np.tile(np.arange(KEPT, dtype=np.int32), rows)))


def kept(arrays: Mapping[str, Any], offsets: Any, positions: Any) -> dict[str, Any]:
    """Codes of kept sets as a sample stores them: of each head `kept_count` positions from its offset on."""
    offsets, counts = np.asarray(offsets), np.asarray(arrays["kept_count"])
    first, place = distinct_codes(offsets, counts)
    starts, own = offsets.reshape(-1)[first], counts.reshape(-1)[first]
    taken = np.asarray(positions)[kept_codec.byte_indices(starts, own)]
    code, lengths = encode_positions(taken, own, int(arrays["prompt_tokens"]))
    found = (np.cumsum(lengths) - lengths)[place], lengths[place]
    return dict(zip(KEPT_CODES, (*(one.reshape(offsets.shape) for one in found), code), strict=True))


def encode_positions(positions: Any, counts: Any, tokens: int) -> tuple[Any, Any]:
    """Return the concatenated codes of kept sets, and the bytes of each, from each set's ascending positions."""
    masks = np.zeros((len(counts), 8 * kept_codec.mask_bytes(tokens)), dtype=bool)
    masks[np.repeat(np.arange(len(counts)), counts), positions] = True
    return kept_codec.encode_masks(np.packbits(masks, axis=1), counts)


def kept_of(arrays: Mapping[str, Any], *where: int) -> list[int]:
    """The positions that one head of a sample keeps, by the ten lines of FORMAT.md rather than by the library."""
    begin, length = (int(arrays[name][where]) for name in ("kept_offset", "kept_length"))
    return decoded(arrays["kept_code"][begin : begin + length].tolist(), int(arrays["prompt_tokens"]))


def decoded(code: list[int], tokens: int) -> list[int]:
    """Kept positions from their code, entry by entry."""
    if len(code) == (tokens + 7) // 8:
        return [place for place in range(tokens) if code[place // 8] & 128 >> place % 8]
    found, position, gap, shift = [], 0, 0, 0
    for byte in code:
        gap, shift = gap + ((byte & 127) << shift), shift + 7
        if byte < 128:
            position, gap, shift = position + gap, 0, 0
            found.append(position)
    return found


def rekept(arrays: dict[str, Any], change: Callable[[tuple[int, ...], list[int]], Sequence[int]]) -> None:
    """Give every head of a sample, or of a trace, the positions that `change` makes of its place and its own.

    Every head gets a code of its own; the arrays are changed where they lie, but for `kept_code`.
    """
    rows: list[Any] = [np.zeros(0, dtype=np.uint8)]
    tokens = np.asarray(arrays["prompt_tokens"])
    for where in np.ndindex(arrays["kept_offset"].shape):
        own = int(tokens[where[0]]) if tokens.ndim else int(tokens)
        begin, length = int(arrays["kept_offset"][where]), int(arrays["kept_length"][where])
        positions = np.array(change(where, decoded(arrays["kept_code"][begin : begin + length].tolist(), own)))
        code, _ = encode_positions(positions.astype(np.int32), np.array([len(positions)]), own)
        arrays["kept_offset"][where], arrays["kept_length"][where] = sum(map(len, rows)), len(code)
        arrays["kept_count"][where] = len(positions)
        rows.append(code)
    arrays["kept_code"] = np.concatenate(rows)


def text(said: str) -> dict[str, Any]:
    """A prompt of TOKENS tokens of two characters each, the last ones empty."""
    starts = np.minimum(np.arange(TOKENS, dtype=np.int32) * 2, len(said))
    return {
        "prompt_count": np.asarray(len(starts)),
        "prompt_offset": np.asarray(0),
        "prompt_token": starts + 7,
        "prompt_start": starts,
        "prompt_text": np.asarray(said),
    }


def spoken(full: str, evicted: Sequence[str], expected: Sequence[str] = ()) -> dict[str, Any]:
    """The text of a sample's answers as a sample holds it."""
    return {
        "answer_full": np.array(full, dtype=object),
        "answer": np.array(list(evicted), dtype=object),
        "expected_answers": np.array(json.dumps(list(expected), ensure_ascii=False), dtype=object),
    }


def told(said: str, decode: Callable[[list[int]], str] = str, expected: Sequence[str] = ()) -> SampleText:
    """What a writer is told of a sample's text; answers are their tokens unless `decode` says other."""
    return SampleText(text(said), decode, lambda tokens: [f" {token}" for token in tokens], expected)


def ragged(sample: SampleTrace, seed: int = 0, sharing: int = 1) -> SampleTrace:
    """The sample with kept sets of different lengths; `sharing` heads beside one another share one."""
    draw, shape = np.random.default_rng(seed), sample.arrays["kept_count"].shape
    offsets, counts, rows = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64), []
    for config, layer, head in itertools.product(*map(range, shape)):
        if head % sharing == 0:
            start, length = sum(map(len, rows)), int(draw.integers(1, 6))
            rows.append(np.sort(draw.choice(50, length, replace=False)))
        offsets[config, layer, head], counts[config, layer, head] = start, length
    arrays = {**sample.arrays, "kept_count": counts}
    return SampleTrace(sample.sample_id, arrays | kept(arrays, offsets, np.concatenate(rows).astype(np.int32)))


def cut(sample: SampleTrace, configs: Sequence[int]) -> SampleTrace:
    """What measuring these configurations of the sample alone would give; each one's cache takes 100 + i bytes."""
    arrays: dict[str, Any] = {
        name: array[list(configs)] if VARIABLES[name].dims[:1] == ("config",) else array
        for name, array in sample.arrays.items()
    }
    moved: dict[tuple[int, int], int] = {}
    rows: list[Any] = [np.zeros(0, dtype=np.uint8)]
    for where in np.ndindex(arrays["kept_offset"].shape):
        start, length = int(arrays["kept_offset"][where]), int(arrays["kept_length"][where])
        if (start, length) not in moved:
            moved[start, length] = sum(map(len, rows))
            rows.append(sample.arrays["kept_code"][start : start + length])
        arrays["kept_offset"][where] = moved[start, length]
    arrays["kept_code"] = np.concatenate(rows)
    if "cache_bytes" in arrays:
        arrays["cache_bytes"] = np.asarray(sum(100 + config for config in configs))
        arrays["cache_padding_bytes"] = np.asarray(sum(configs))
    return SampleTrace(sample.sample_id, arrays)


def trace(*samples: SampleTrace, failures: dict[str, str] | None = None, **run: Any) -> Trace:
    """Samples joined in memory, failed ones behind them as NaN."""
    failures = failures or {}
    names = [sample.sample_id for sample in samples] + list(failures)
    arrays = {}
    for variable in samples[0].arrays:
        if VARIABLES[variable].is_concatenated:
            arrays[variable] = np.concatenate([sample.arrays[variable] for sample in samples])
            continue
        stacked = np.stack([sample.arrays[variable] for sample in samples])
        for row, offset in (("prompt_token", "prompt_offset"), ("kept_code", "kept_offset")):
            if variable == offset:
                starts = np.cumsum([0, *(len(sample.arrays[row]) for sample in samples)])[:-1]
                stacked = stacked + starts.reshape(-1, *[1] * (stacked.ndim - 1))
        nothing = 0 if stacked.dtype.kind in "iu" else "" if stacked.dtype.kind in "OU" else np.nan
        blank = np.full_like(stacked[:1], nothing)
        arrays[variable] = np.concatenate([stacked, *[blank] * len(failures)])
    steps = samples[0].sizes()["step"]
    config = run_config(samples=len(names), **{"steps": steps, **run})
    return Trace(config, tuple(names), arrays, failures, {}, "made.h5", "0123456789ab")
