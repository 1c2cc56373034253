"""Traces of any size for pages: random numbers of plausible spread, kept sets that a budget gives, made at once."""

from __future__ import annotations

from typing import Any

import numpy as np

from perturbkv import kept_code
from perturbkv.configs.run import RunConfig
from perturbkv.schema import DIGEST, KEPT, ROWS, TEXT, VARIABLES
from perturbkv.selection.grid import configuration
from perturbkv.trace import Trace

SHARES = ("sigma_topk", "sigma_stage1", "retained_mass")
LOST = 10
_PLACED = {*KEPT, DIGEST, *TEXT, *(name for pair in ROWS.values() for name in pair)}


def configs(sides: int = 8, budgets: tuple[float, ...] = (0.1, 0.2, 0.4)) -> tuple[Any, ...]:
    """As `sides` × `budgets`: two policies, each with up to four selections."""
    names = ("attention", "two-stage", "attention-unpooled", "two-stage-uniform")
    both = [(policy, name) for policy in ("snapkv", "adakv") for name in names][:sides]
    return tuple(configuration(budget, policy=policy, selection=name) for budget in budgets for policy, name in both)


def paged(
    samples: int = 8,
    of: tuple[Any, ...] | None = None,
    layers: int = 30,
    heads: int = 9,
    tokens: int = 1500,
    *,
    steps: int = 1,
    seed: int = 0,
    kept: bool = True,
    attention: bool = False,
) -> Trace:
    """A trace of this size; `kept`: with positions, else with their digests alone."""
    draw, of = np.random.default_rng(seed), configs() if of is None else of
    sizes = {"sample": samples, "config": len(of), "step": steps, "layer": layers, "head": heads, "lost_entry": LOST}
    arrays: dict[str, Any] = {}
    for name, spec in VARIABLES.items():
        if name in _PLACED or spec.in_rows or not set(spec.dims) <= sizes.keys() or spec.dtype == "str":
            continue
        shape = tuple(sizes[axis] for axis in spec.axes)
        arrays[name] = _numbers(name, spec.dtype, shape, draw)
    arrays["prompt_tokens"] = np.full(samples, tokens)
    arrays["steps_measured"] = np.full(samples, steps)
    arrays["evicted"] = np.ones((samples, len(of)), dtype=np.uint8)
    arrays |= _kept(samples, of, layers, heads, tokens, draw) if kept else _digests(arrays["stage1_count"].shape, draw)
    arrays |= _texts(samples, tokens)
    if attention:
        seen = draw.lognormal(size=(samples, steps, layers, heads, tokens + 1))
        arrays["attention_full"] = (seen / seen.sum(axis=-1, keepdims=True)).astype(np.float32)
    run = RunConfig(model="m", dataset="d", configs=of, samples=samples, steps=steps)
    return Trace(run, tuple(f"p{place}" for place in range(samples)), arrays, {}, {}, "", "")


def _numbers(name: str, dtype: str, shape: tuple[int, ...], draw: np.random.Generator) -> Any:
    if np.dtype(dtype).kind != "f":
        return draw.integers(0, 2, shape).astype(dtype)
    if name in SHARES:
        return draw.beta(4, 1.5, size=shape)
    small = 1e-6 if "noise_floor" in name else 1.0
    return (small * draw.lognormal(sigma=1.3, size=shape)).astype(dtype)


def _kept(
    samples: int, of: tuple[Any, ...], layers: int, heads: int, tokens: int, draw: np.random.Generator
) -> dict[str, Any]:
    """Sets that share most of their entries, as those of one head do; those of the first two configurations of the
    first layer are equal."""
    shape, rows, lengths = (samples, len(of), layers, heads), [], []
    counts = [max(1, int(config.budget.value * tokens)) for config in of]
    for _ in range(samples):
        liked = draw.normal(size=(layers * heads, tokens)).astype(np.float32)
        for place, count in enumerate(counts):
            own = liked + 0.3 * draw.normal(size=liked.shape).astype(np.float32)
            own[:heads] = liked[:heads] if place < 2 else own[:heads]
            floor = np.partition(own, tokens - count, axis=1)[:, tokens - count, None]
            masks = np.packbits(own >= floor, axis=1)
            code, length = kept_code.of_masks(masks, np.bitwise_count(masks).sum(axis=1).astype(np.int64))
            rows.append(code)
            lengths.append(length)
    each = np.concatenate(lengths)
    return {
        "kept_code": np.concatenate(rows),
        "kept_length": each.reshape(shape),
        "kept_offset": (np.cumsum(each) - each).reshape(shape),
        "kept_count": np.broadcast_to(np.array(counts)[:, None, None], shape).copy(),
    }


def _digests(shape: tuple[int, ...], draw: np.random.Generator) -> dict[str, Any]:
    found = draw.integers(1, 2**62, shape)
    return {DIGEST: found, "kept_count": np.full(shape, 10)}


def _texts(samples: int, tokens: int) -> dict[str, Any]:
    """A prompt of words of four characters each."""
    starts = np.arange(tokens, dtype=np.int32) * 5
    text = "".join(f" {place % 9000 + 1000:4d}" for place in range(tokens))
    return {
        "prompt_count": np.full(samples, tokens),
        "prompt_offset": np.arange(samples) * tokens,
        "prompt_token": np.tile(np.arange(tokens, dtype=np.int32), samples),
        "prompt_start": np.tile(starts, samples),
        "prompt_text": np.array([text] * samples, dtype=object),
    }
