"""What single heads attend to at the first decoding step, and what configurations keep of it: for searches per head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perturbkv import theory
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.models.adapter import Adapter
from perturbkv.optimum.entries import HeadEntries, Kept
from perturbkv.pipeline.sample.decoding import StepRecord, decode_full
from perturbkv.pipeline.sample.prefill import Prefill, prefill
from perturbkv.selection.budgets import blocks_at_ends

Place = tuple[int, int]
"""A measured layer's place and a query head."""


@dataclass(frozen=True)
class HeadView:
    """One head.

    Attributes:
        layer, head: its place.
        entries: what its query attends to; what stays in every configuration, the window with it, always stays.
        kept: of each configuration the set, (entry,) True where an entry stays.
    """

    layer: int
    head: int
    entries: HeadEntries
    kept: tuple[Kept, ...]


@torch.inference_mode()
def head_views(
    adapter: Adapter,
    context: Sequence[int],
    question: Sequence[int],
    configs: Sequence[EvictionConfig],
    heads: Sequence[Place],
    sample: str,
    resources: Resources,
) -> Iterator[HeadView]:
    """The chosen heads of one prompt, layer by layer: prefill, and one decode step from the full cache (METHOD).

    All configurations have one window. Raises ActivationError for NaN or Inf.
    """
    before = prefill(adapter, context, configs, resources, sample)
    (full,), _ = decode_full(adapter, before, question, 1, 1)
    before.finite.raise_if_not(sample)
    for layer in dict.fromkeys(sorted(layer for layer, _ in heads)):
        yield from _of_layer(adapter, before, full, configs, layer, [head for at, head in heads if at == layer])


def _of_layer(
    adapter: Adapter,
    before: Prefill,
    full: StepRecord,
    configs: Sequence[EvictionConfig],
    layer: int,
    heads: Sequence[int],
) -> Iterator[HeadView]:
    held, n = adapter.held(before.cache, layer), before.statistics.tokens
    keys, values = held.keys[0][:, : full.entries], held.values[0][:, : full.entries]
    weights, sinks = theory.decode_weights(full.query[layer][0], keys, adapter.scale(layer), adapter.sinks(layer))
    masks = _masks(before, configs, layer, keys[:, :n], values[:, :n], weights)
    slices = theory.head_slices(adapter.output_projection(layer), adapter.heads)
    always = _always(configs, n, full.entries)
    for head in heads:
        projected = values[head * len(values) // adapter.heads].to(theory.WORK) @ slices[head]
        entries = HeadEntries(weights[head].cpu().numpy(), projected.cpu().numpy(), always, float(sinks[head]))
        yield HeadView(layer, head, entries, tuple(_with_decoded(mask[head], full.entries) for mask in masks))


def _always(configs: Sequence[EvictionConfig], prompt_tokens: int, entries: int) -> Kept:
    """What stays in every configuration whatever its scores: the window, what all protect, and what was decoded."""
    ends = [blocks_at_ends(config, prompt_tokens) for config in configs]
    first, recent = (min(side) for side in zip(*ends, strict=True))
    begin = prompt_tokens - min(configs[0].window, prompt_tokens) - recent
    place = np.arange(entries)
    return np.asarray((place < first) | (place >= begin))


def _masks(
    before: Prefill, configs: Sequence[EvictionConfig], layer: int, keys: Tensor, values: Tensor, weights: Tensor
) -> list[Tensor]:
    """Of each configuration (head, n) True where an entry stays."""
    found: dict[int, Tensor] = {}
    for group in before.statistics.groups(configs, layer, keys, values, weights):
        found |= dict(zip(group.places, group.kept_sets().kept, strict=True))
    return [found[place] for place in range(len(configs))]


def _with_decoded(mask: Tensor, entries: int) -> Kept:
    """The set of the prompt's entries, and all that was decoded since."""
    kept = np.ones(entries, dtype=np.bool_)
    kept[: len(mask)] = mask.cpu().numpy()
    return kept
