"""What tells the kept sets of configurations that rank nothing: a *source* for each, asked layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.models.families import check_plain
from perturbkv.pipeline.sample.prefill import Source
from perturbkv.pipeline.variants.presses import source as run_press
from perturbkv.selection.policies import kvpress

KeptMasks = Mapping[EvictionConfig, Sequence[Tensor]]
"""Of each configuration, per layer: (kv_head, key), True where an entry of the prompt stays."""


def sources(
    adapter: Adapter, token_ids: Sequence[int], configs: Sequence[EvictionConfig], masks: KeptMasks
) -> dict[EvictionConfig, Source]:
    """Of each configuration whose kept sets come from outside, what tells them.

    Raises what `check` raises, and ConfigError where one has none, for masks of other shapes than the model's and the
    prompt's, and for a press that fails; a press' source raises UnreadableError where it does not only evict.
    """
    check(configs, adapter.config, adapter.name)
    return {config: _source(adapter, token_ids, config, masks) for config in configs if config.given}


def check(configs: Iterable[EvictionConfig], model_config: Any, name: str) -> None:
    """Raise ModelError where a configuration is a press, which compresses every layer, and the model has others."""
    for config in configs:
        if kvpress.is_press(config.policy):
            check_plain(model_config, name, f"press '{config.policy.name.partition(':')[2]}'")


def _source(adapter: Adapter, token_ids: Sequence[int], config: EvictionConfig, masks: KeptMasks) -> Source:
    if kvpress.is_press(config.policy):
        return run_press(adapter, token_ids, config)
    return _handed_over(adapter, len(token_ids), config, masks)


def _handed_over(adapter: Adapter, tokens: int, config: EvictionConfig, masks: KeptMasks) -> Source:
    if config not in masks:
        msg = f"the kept sets of policy '{config.policy}' are handed over, by `foreign.measure`; here are none"
        raise ConfigError(msg)
    own, wanted = masks[config], (adapter.kv_heads, tokens)
    shapes = [tuple(mask.shape) for mask in own]
    if len(own) != len(adapter.layers) or set(shapes) != {wanted}:
        wrong = next((shape for shape in shapes if shape != wanted), wanted)
        msg = (
            f"expected kept sets (kv_head, key) {wanted} of {len(adapter.layers)} layers for '{config.policy}', got "
            f"{wrong} of {len(own)}"
        )
        raise ConfigError(msg)
    return lambda layer, key, value: own[layer].to(key.device)
