"""Kept sets from outside, a *source* per configuration: presses of kvpress, run on the same model and tokens; masks.

A press reads the prompt in a prefill of its own. The entries in its cache are matched with the full cache's, without
those that it only masks (`masked_key_indices`): that is its kept set, and no entry of it may have changed. The model is
restored afterwards.
"""

from __future__ import annotations

import functools
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import DynamicCache

from perturbkv.cache.external_cache import NOWHERE, RecoveredLayer, recover_positions
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.plugins import external_code
from perturbkv.errors import ConfigError, UnreadableCacheError
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.sample.prefill import Source
from perturbkv.selection.policies import kvpress
from perturbkv.selection.policies.kvpress import RATIO
from perturbkv.selection.resolved_config import ResolvedConfig

_log = logging.getLogger(__name__)
_MASKED = "masked_key_indices"
_INNER_PRESS = "prefilling_press"
"""Attribute with the press whose ratio is set, where a press has none: PrefillDecodingPress."""
_DECODING = ("decoding_press", "decoding")
"""Parameters that make a press compress again while it decodes."""


def press_source(adapter: Adapter, token_ids: Sequence[int], config: ResolvedConfig) -> Source:
    """Run a configuration's KVPress press on a prompt, and return the source of its kept sets.

    Raises ModelError for a model whose cache holds latents, and ConfigError where the press fails or would compress
    while decoding; the source raises UnreadableCacheError where the press does more than evict.
    """
    name = config.policy.name.partition(":")[2]
    adapter.check_no_latents(f"press '{name}'")
    press = kvpress.build(config.policy)
    if any(getattr(press, later, None) for later in _DECODING):
        raise ConfigError(f"press '{name}' compresses again while it decodes; leave its {' and '.join(_DECODING)} out")
    if not set_ratio(press, len(token_ids), config.kept_entries(len(token_ids))):
        _log_ignored_budget(name)
    with phase("press"):
        cached, masked = _run_press(adapter, press, token_ids, name)

    def kept_set(
        layer: int, key: Float[Tensor, "kv_head key d_key"], value: Float[Tensor, "kv_head key d_value"]
    ) -> Bool[Tensor, "kv_head key"]:
        press_entries, cached[layer] = cached[layer], (key[:0], value[:0])  # frees the press's layer, read once
        recovered = _recover_layer(press_entries, key, value, layer, name)
        _check_intact(recovered, name, layer, key.dtype)
        return _remove_masked(recovered, masked[layer]).mask(key.shape[1])

    return kept_set


def _recover_layer(
    press_entries: tuple[Tensor, Tensor], key: Tensor, value: Tensor, layer: int, name: str
) -> RecoveredLayer:
    """Return the kept positions of one layer after a press. Raises UnreadableCacheError with the press's name."""
    try:
        (recovered,) = recover_positions([press_entries], [(key.unsqueeze(0), value.unsqueeze(0))], numbers=(layer,))
    except UnreadableCacheError as error:
        raise UnreadableCacheError(f"press '{name}': {error.reason}") from None
    return recovered


@functools.cache
def _log_ignored_budget(name: str) -> None:
    """Log, once per press, that the press's own parameters rather than the budget decide how much is kept."""
    _log.info("press '%s' has no ratio to set: what it keeps, its own parameters say, and not --budget", name)


def set_ratio(press: Any, tokens: int, kept: int) -> bool:
    """Set a press's compression ratio to keep `kept` of `tokens` entries; return whether the press has a ratio.

    1 − kept / n is lowered by roundings until ⌊n (1 − ratio)⌋, which is what kvpress keeps, is `kept`.
    """
    ratio = max(0.0, 1 - kept / tokens)
    while int(tokens * (1 - ratio)) < kept:
        ratio = math.nextafter(ratio, 0)  # the next smaller float
    owner = press if hasattr(type(press), RATIO) else getattr(press, _INNER_PRESS, None)
    try:
        setattr(owner, RATIO, ratio)
    except AttributeError:
        return False
    return owner is not None


def _run_press(adapter: Adapter, press: Any, token_ids: Sequence[int], name: str) -> tuple[list[Any], list[Any]]:
    """Return, per layer, the keys and values after the press, and the indices of masked entries, None without any."""
    cache = DynamicCache()
    ids = torch.tensor([list(token_ids)], device=adapter.device)
    with restore_model(adapter), _isolate_random_numbers(token_ids, adapter.device):
        with external_code(f"press '{name}' cannot be run:", ConfigError):
            with torch.inference_mode(False), torch.no_grad(), press(adapter.model):
                run_with_cache(adapter.base, ids.clone(), cache)
        masked = [getattr(attention, _MASKED, None) for attention in adapter.attentions]
    return [(layer.keys, layer.values) for layer in cache.layers], masked


@contextmanager
def _isolate_random_numbers(token_ids: Sequence[int], device: torch.device) -> Iterator[None]:
    """Seed the random numbers by the prompt inside the block, then restore them; silence kvpress inside it too."""
    devices = [device] if device.type == "cuda" else []
    with kvpress.quiet(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(zlib.crc32(str(list(token_ids)).encode()))
        yield


@contextmanager
def restore_model(adapter: Adapter) -> Iterator[None]:
    """Remove after the block everything that presses leave on a model: hooks, masks, rotary modules, forwards."""
    model, touched = adapter.model, [*adapter.attentions, adapter.model, adapter.base]
    before = [(module, dict(vars(module)), dict(module._modules), dict(module._forward_hooks)) for module in touched]
    attention = model.config._attn_implementation
    try:
        yield
    finally:
        model.config._attn_implementation = attention
        for module, attributes, modules, hooks in before:
            _restore_items(vars(module), attributes, ("forward", _MASKED))
            _restore_items(module._modules, modules, set(module._modules) - set(modules))
            _restore_items(module._forward_hooks, hooks, set(module._forward_hooks) - set(hooks))


def _restore_items(items: Any, before: dict[Any, Any], names: Any) -> None:
    """Restore the items of a dict with keys `names` to their values in `before`, and delete those absent there."""
    for name in names:
        items.pop(name, None)
        if name in before:
            items[name] = before[name]


def _check_intact(recovered: RecoveredLayer, name: str, layer: int, dtype: torch.dtype) -> None:
    """Raise UnreadableCacheError for a press that changed keys or values, or added or duplicated entries.

    A press that reads the prompt through another attention kernel rounds differently, which is allowed.
    """
    strangers, duplicates = sum(recovered.stranger_counts), sum(recovered.duplicate_counts)
    findings = [
        f"{strangers} entries are like none of the prompt's" if strangers else "",
        f"{duplicates} entries are there twice" if duplicates else "",
        _describe_change("keys", recovered.key_distance, dtype),
        _describe_change("values", recovered.value_distance, dtype),
    ]
    if reasons := [finding for finding in findings if finding]:
        raise UnreadableCacheError(f"press '{name}' does not only evict: in layer {layer} {', '.join(reasons)}")


def _describe_change(what: str, distances: Sequence[Tensor], dtype: torch.dtype) -> str:
    """Return a phrase on the largest change of `what` (keys or values); empty where rounding explains it."""
    largest = max((float(distance.max()) for distance in distances if len(distance)), default=0.0)
    beyond_rounding = largest > 2 * math.sqrt(torch.finfo(dtype).eps)
    return f"{what} differ by up to {largest:.2g} of their norm" if beyond_rounding else ""


def _remove_masked(recovered: RecoveredLayer, masked: Any) -> RecoveredLayer:
    """Return the kept entries of a layer without those at the indices `masked` (batch, head, entry), None for none."""
    if masked is None:
        return recovered
    positions = [position.clone() for position in recovered.positions]
    _, heads, entries = (torch.as_tensor(kind).cpu() for kind in masked)
    for head, position in enumerate(positions):
        position[entries[heads == head].to(position.device)] = NOWHERE
    return RecoveredLayer(tuple(positions), recovered.key_distance, recovered.value_distance)


KeptMasks = Mapping[EvictionConfig, Sequence[Tensor]]
"""Configuration -> the mask (kv_head, key) of the kept entries of the prompt, per layer."""


def sources(
    adapter: Adapter, token_ids: Sequence[int], configs: Sequence[ResolvedConfig], masks: KeptMasks
) -> dict[ResolvedConfig, Source]:
    """Return configuration -> source of its kept sets, for the configurations with external kept sets.

    `masks` are the kept sets of policies `given:NAME`. Raises what `check_sources` raises, and ConfigError for missing
    masks, masks of another shape than the model's and the prompt's, and a press that fails; ModelError for a model
    with layers that read another's cache; a press's source raises UnreadableCacheError where the press does more than
    evict.
    """
    check_sources(configs, adapter.config, adapter.name)
    names = {config: config.policy.name for config in configs}
    makers = {config: _SOURCES.get(name[: name.find(":") + 1]) for config, name in names.items()}  # up to the colon
    if any(makers.values()):
        adapter.check_own_caches("a policy whose kept sets come from elsewhere")
    return {config: make(adapter, token_ids, config, masks) for config, make in makers.items() if make}


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


_SOURCES: Mapping[str, Callable[[Adapter, Sequence[int], ResolvedConfig, KeptMasks], Source]] = {
    f"{kvpress.PREFIX}:": lambda adapter, token_ids, config, masks: press_source(adapter, token_ids, config),
    "given:": _mask_source,
}
"""Beginning of an external policy's name -> function that returns the source of its kept sets."""
