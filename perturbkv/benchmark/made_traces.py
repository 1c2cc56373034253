"""Traces of any size that nobody measured: numbers of plausible spread, kept sets that share most of their entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv import kept_codec
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.schema import DIGEST, KEPT, ROWS, TEXT, VARIABLES, Variable
from perturbkv.selection.grid import configuration
from perturbkv.trace import Trace

_SHARES = ("sigma_topk", "sigma_stage1", "retained_mass")
_LOST = 10
"""Lost entries that are listed of each head, as `measure` lists them."""
_OWN_NOISE = 0.3
"""How much configurations differ in what they keep, in standard deviations of what they share."""
_MADE_HERE = {*KEPT, DIGEST, *TEXT, *(name for pair in ROWS.values() for name in pair)}


def sweep(sides: int = 8, budgets: tuple[float, ...] = (0.1, 0.2, 0.4)) -> tuple[EvictionConfig, ...]:
    """`sides` × `budgets` configurations: two policies with four selections each, or the first of these."""
    names = ("attention", "two-stage", "attention-unpooled", "two-stage-uniform")
    both = [(policy, name) for policy in ("snapkv", "adakv") for name in names][:sides]
    return tuple(configuration(budget, policy=policy, selection=name) for budget in budgets for policy, name in both)


def made_trace(
    samples: int,
    layers: int,
    heads: int,
    tokens: int,
    *,
    configs: tuple[EvictionConfig, ...] = (),
    steps: int = 1,
    kept: bool = True,
    seed: int = 0,
) -> Trace:
    """A trace of this size, of a sweep of 24 or of `configs`, with prompts and the losses of each head.

    `kept`: with the positions of kept sets, else with their digests alone.
    """
    draw, configs = np.random.default_rng(seed), configs or sweep()
    sizes = {"sample": samples, "config": len(configs), "step": steps, "layer": layers, "head": heads}
    sizes["lost_entry"] = _LOST
    arrays: dict[str, NDArray[Any]] = {
        name: _numbers(name, variable, tuple(sizes[axis] for axis in variable.axes), draw)
        for name, variable in VARIABLES.items()
        if _is_drawn(name, variable, sizes)
    }
    arrays |= {"prompt_tokens": np.full(samples, tokens), "steps_measured": np.full(samples, steps)}
    arrays["question_tokens"] = np.zeros(samples, dtype=np.int64)
    arrays["evicted"] = np.ones((samples, len(configs)), dtype=np.uint8)
    shape = (samples, len(configs), layers, heads)
    arrays |= _kept(shape, configs, tokens, draw) if kept else _digests(shape, configs, tokens, draw)
    arrays |= _texts(samples, tokens)
    run = RunConfig(model="made", dataset="made", configs=configs, samples=samples, steps=steps)
    return Trace(run, tuple(f"p{place}" for place in range(samples)), arrays)


def _is_drawn(name: str, variable: Variable, sizes: Mapping[str, int]) -> bool:
    others = name in _MADE_HERE or variable.in_rows or variable.dtype == "str"
    return not others and set(variable.dims) <= sizes.keys()


def _numbers(name: str, variable: Variable, shape: tuple[int, ...], draw: np.random.Generator) -> NDArray[Any]:
    if np.dtype(variable.dtype).kind != "f":
        return draw.integers(0, 2, shape).astype(variable.dtype)
    if name in _SHARES:
        return draw.beta(4, 1.5, size=shape)
    unit = 1e-6 if "noise_floor" in name else 1.0
    return (unit * draw.lognormal(sigma=1.3, size=shape)).astype(variable.dtype)


def _kept(
    shape: tuple[int, ...], configs: tuple[EvictionConfig, ...], tokens: int, draw: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """What every head keeps: the entries that it likes best, by a liking that configurations nearly share.

    In the first layer the first two configurations share it: heads of equal sets are tied.
    """
    counts, rows, lengths = [_count(one, tokens) for one in configs], [], []
    for _ in range(shape[0]):
        liked = draw.normal(size=(shape[2] * shape[3], tokens)).astype(np.float32)
        for place, count in enumerate(counts):
            own = liked + np.float32(_OWN_NOISE) * draw.normal(size=liked.shape).astype(np.float32)
            own[: shape[3]] = liked[: shape[3]] if place < 2 else own[: shape[3]]
            least = np.partition(own, tokens - count, axis=1)[:, tokens - count, np.newaxis]
            masks = np.packbits(own >= least, axis=1)
            code, length = kept_codec.of_masks(masks, np.bitwise_count(masks).sum(axis=1).astype(np.int64))
            rows.append(code)
            lengths.append(length)
    each = np.concatenate(lengths)
    return {
        "kept_code": np.concatenate(rows),
        "kept_length": each.reshape(shape),
        "kept_offset": (np.cumsum(each) - each).reshape(shape),
        "kept_count": np.broadcast_to(np.array(counts)[:, np.newaxis, np.newaxis], shape).copy(),
    }


def _digests(
    shape: tuple[int, ...], configs: tuple[EvictionConfig, ...], tokens: int, draw: np.random.Generator
) -> dict[str, NDArray[Any]]:
    """Sets that are told apart and nothing else."""
    counts = np.array([_count(one, tokens) for one in configs])[:, np.newaxis, np.newaxis]
    return {DIGEST: draw.integers(1, 2**62, shape), "kept_count": np.broadcast_to(counts, shape).copy()}


def _count(config: EvictionConfig, tokens: int) -> int:
    """Entries that a budget keeps."""
    return max(1, int(config.budget.value * tokens))


def _texts(samples: int, tokens: int) -> dict[str, NDArray[Any]]:
    """Prompts of words of four characters each."""
    text = "".join(f" {place % 9000 + 1000}" for place in range(tokens))
    return {
        "prompt_count": np.full(samples, tokens),
        "prompt_offset": np.arange(samples) * tokens,
        "prompt_token": np.tile(np.arange(tokens, dtype=np.int32), samples),
        "prompt_start": np.tile(np.arange(tokens, dtype=np.int32) * 5, samples),
        "prompt_text": np.array([text] * samples, dtype=object),
    }
