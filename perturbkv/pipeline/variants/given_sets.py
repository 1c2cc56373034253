"""Kept sets that are handed over, a *source* per configuration: masks of policies `given:NAME`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.prefill import Source
from perturbkv.selection.resolved_config import ResolvedConfig

KeptMasks = Mapping[EvictionConfig, Sequence[Tensor]]
"""Configuration -> the mask (kv_head, key) of the kept entries of the prompt, per layer."""


_GIVEN = "given:"


def sources(
    adapter: Adapter, token_ids: Sequence[int], configs: Sequence[ResolvedConfig], masks: KeptMasks
) -> dict[ResolvedConfig, Source]:
    """Return configuration -> source of its kept sets, for the configurations whose kept sets are handed over.

    `masks` are the kept sets of policies `given:NAME`. Raises what `check_sources` raises, and ConfigError for missing
    masks, and masks of another shape than the model's and the prompt's; ModelError for a model with layers that read
    another's cache.
    """
    check_sources(configs, adapter.config, adapter.name)
    if given := [config for config in configs if config.policy.name.startswith(_GIVEN)]:
        adapter.check_own_caches("a policy whose kept sets come from elsewhere")
    return {config: _mask_source(adapter, token_ids, config, masks) for config in given}


def check_sources(configs: Iterable[ResolvedConfig], model_config: Any, name: str) -> None:
    """Raise ModelError if a configuration uses a KVPress press and presses cannot compress some layer of the model."""
    for config in configs:
        config.system.check_model(model_config, name)


def _mask_source(adapter: Adapter, token_ids: Sequence[int], config: ResolvedConfig, masks: KeptMasks) -> Source:
    """Return a source of the user's masks for a configuration. Raises ConfigError for missing or misshapen masks."""
    if config not in masks:
        raise ConfigError(
            f"the kept sets of policy '{config.policy}' are handed over, by `loss.measure_kept_sets`; here are none"
        )
    layer_masks, expected = masks[config], (adapter.kv_heads, len(token_ids))
    shapes = [tuple(mask.shape) for mask in layer_masks]
    if len(layer_masks) != len(adapter.layers) or set(shapes) != {expected}:
        wrong = next((shape for shape in shapes if shape != expected), expected)
        raise ConfigError(
            f"expected kept sets (kv_head, key) {expected} of {len(adapter.layers)} layers for '{config.policy}', got "
            f"{wrong} of {len(layer_masks)}"
        )
    return lambda layer, key, value: layer_masks[layer].to(key.device)
