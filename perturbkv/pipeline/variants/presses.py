"""A kvpress press, run on the same model and the same tokens as for its users; what it keeps is a source.

It reads the prompt in a prefill of its own. What then lies in its cache is matched with the full cache's entries, less
what it only masks (`masked_key_indices`): that is its kept set, and no entry of it may have changed. The model is left
as it was.

What tells the kept sets of configurations that rank nothing: a *source* for each, asked layer by layer.
"""

from __future__ import annotations

import functools
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import DynamicCache

from perturbkv.cache.external_cache import NOWHERE, LayerKept, recover
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, UnreadableCacheError
from perturbkv.models.adapter import Adapter
from perturbkv.models.families import check_plain
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.sample.prefill import Source
from perturbkv.selection.policies import kvpress
from perturbkv.selection.policies.kvpress import RATIO
from perturbkv.selection.resolved_config import ResolvedConfig

_log = logging.getLogger(__name__)
_MASKED = "masked_key_indices"
_RATIOS = "prefilling_press"
"""Where a press without a ratio has the one that it sets: PrefillDecodingPress."""
_LATER = ("decoding_press", "decoding")
"""Parameters that make a press compress again while it decodes."""


def source(adapter: Adapter, token_ids: Sequence[int], config: ResolvedConfig) -> Source:
    """Run a configuration's press on a prompt; what tells its kept sets.

    Raises ConfigError where the press fails or would decode differently; the source raises UnreadableCacheError where
    it does not only evict.
    """
    name = config.policy.name.partition(":")[2]
    press = kvpress.build(config.policy)
    if any(getattr(press, later, None) for later in _LATER):
        msg = f"press '{name}' compresses again while it decodes; leave its {' and '.join(_LATER)} out"
        raise ConfigError(msg)
    if not set_ratio(press, len(token_ids), config.kept_entries(len(token_ids))):
        _say_own(name)
    with phase("press"):
        held, masked = _run(adapter, press, token_ids, name)

    def kept(
        layer: int, key: Float[Tensor, "kv_head key d_head"], value: Float[Tensor, "kv_head key d_head"]
    ) -> Bool[Tensor, "kv_head key"]:
        theirs, held[layer] = held[layer], (key[:0], value[:0])
        found = _recovered(theirs, key, value, layer, name)
        _check_intact(found, name, layer, key.dtype)
        return _unmasked(found, masked[layer]).mask(key.shape[1])

    return kept


def _recovered(theirs: tuple[Tensor, Tensor], key: Tensor, value: Tensor, layer: int, name: str) -> LayerKept:
    try:
        (found,) = recover([theirs], [(key.unsqueeze(0), value.unsqueeze(0))], first=layer)
    except UnreadableCacheError as error:
        msg = f"press '{name}': {error.reason}"
        raise UnreadableCacheError(msg) from None
    return found


@functools.cache
def _say_own(name: str) -> None:
    _log.info("press '%s' has no ratio to set: what it keeps, its own parameters say, and not --budget", name)


def set_ratio(press: Any, tokens: int, kept: int) -> bool:
    """Set the ratio at which `kept` of `tokens` entries stay; False where a press has none to be set.

    1 − kept / n is lowered by roundings until ⌊n (1 − ratio)⌋, which is what kvpress keeps, is `kept`.
    """
    ratio = max(0.0, 1 - kept / tokens)
    while int(tokens * (1 - ratio)) < kept:
        ratio = math.nextafter(ratio, 0)
    owner = press if hasattr(type(press), RATIO) else getattr(press, _RATIOS, None)
    try:
        setattr(owner, RATIO, ratio)
    except AttributeError:
        return False
    return owner is not None


def _run(adapter: Adapter, press: Any, token_ids: Sequence[int], name: str) -> tuple[list[Any], list[Any]]:
    """Per layer keys and values that the press leaves, and what it masks."""
    cache = DynamicCache()
    ids = torch.tensor([list(token_ids)], device=adapter.device)
    with left_as_it_was(adapter), _repeatable(token_ids, adapter.device):
        try:
            with torch.inference_mode(False), torch.no_grad(), press(adapter.model):
                adapter.model.model(input_ids=ids.clone(), past_key_values=cache)
        except Exception as error:
            raise ConfigError(kvpress.failure_message(name, "run", error)) from None
        masked = [getattr(attention, _MASKED, None) for attention in adapter.attentions]
    return [(layer.keys, layer.values) for layer in cache.layers], masked


@contextmanager
def _repeatable(token_ids: Sequence[int], device: torch.device) -> Iterator[None]:
    """Random numbers of a press depend on the prompt alone, and those of others not on the press; it logs nothing."""
    devices = [device] if device.type == "cuda" else []
    with kvpress.quiet(), torch.random.fork_rng(devices=devices):
        torch.manual_seed(zlib.crc32(str(list(token_ids)).encode()))
        yield


@contextmanager
def left_as_it_was(adapter: Adapter) -> Iterator[None]:
    """Take away what presses leave on a model: hooks, masks, a rotary module in each attention, replaced forwards."""
    model, touched = adapter.model, [*adapter.attentions, adapter.model, adapter.model.model]
    before = [(module, dict(vars(module)), dict(module._modules), dict(module._forward_hooks)) for module in touched]
    attention = model.config._attn_implementation
    try:
        yield
    finally:
        model.config._attn_implementation = attention
        for module, own, modules, hooks in before:
            _restore(vars(module), own, ("forward", _MASKED))
            _restore(module._modules, modules, set(module._modules) - set(modules))
            _restore(module._forward_hooks, hooks, set(module._forward_hooks) - set(hooks))


def _restore(held: Any, before: dict[Any, Any], names: Any) -> None:
    """These entries as they were, gone where there were none."""
    for name in names:
        held.pop(name, None)
        if name in before:
            held[name] = before[name]


def _check_intact(found: LayerKept, name: str, layer: int, dtype: torch.dtype) -> None:
    """Raise UnreadableCacheError where anything but a kept set is left: changed, duplicate or unknown entries.

    A press that reads the prompt through another attention kernel rounds otherwise; this much is allowed.
    """
    said = [
        f"{sum(found.strangers)} entries are like none of the prompt's" if any(found.strangers) else "",
        f"{sum(found.duplicates)} entries are there twice" if any(found.duplicates) else "",
        *(_changed(what, distance, dtype) for what, distance in
          (("keys", found.key_distance), ("values", found.value_distance))),
    ]  # fmt: skip
    if reasons := [one for one in said if one]:
        msg = f"press '{name}' does not only evict: in layer {layer} {', '.join(reasons)}"
        raise UnreadableCacheError(msg)


def _changed(what: str, distances: Sequence[Tensor], dtype: torch.dtype) -> str:
    far = max((float(one.max()) for one in distances if len(one)), default=0.0)
    return f"{what} differ by up to {far:.2g} of their norm" if far > 2 * math.sqrt(torch.finfo(dtype).eps) else ""


def _unmasked(found: LayerKept, masked: Any) -> LayerKept:
    """What is kept without the entries that the press masks: batch, head and place of each."""
    if masked is None:
        return found
    positions = [one.clone() for one in found.positions]
    _, heads, places = (torch.as_tensor(kind).cpu() for kind in masked)
    for head, position in enumerate(positions):
        position[places[heads == head].to(position.device)] = NOWHERE
    return LayerKept(tuple(positions), found.key_distance, found.value_distance)


KeptMasks = Mapping[EvictionConfig, Sequence[Tensor]]
"""Of each configuration, per layer: (kv_head, key), True where an entry of the prompt stays."""


def sources(
    adapter: Adapter, token_ids: Sequence[int], configs: Sequence[ResolvedConfig], masks: KeptMasks
) -> dict[ResolvedConfig, Source]:
    """Of each configuration whose kept sets come from outside, what tells them.

    Raises what `check` raises, and ConfigError where one has none, for masks of other shapes than the model's and the
    prompt's, and for a press that fails; a press' source raises UnreadableCacheError where it does not only evict.
    """
    check_sources(configs, adapter.config, adapter.name)
    return {config: _source(adapter, token_ids, config, masks) for config in configs if config.is_external}


def check_sources(configs: Iterable[ResolvedConfig], model_config: Any, name: str) -> None:
    """Raise ModelError where a configuration is a press, which compresses every layer, and the model has others."""
    for config in configs:
        if kvpress.is_press(config.policy):
            check_plain(model_config, name, f"press '{config.policy.name.partition(':')[2]}'")


def _source(adapter: Adapter, token_ids: Sequence[int], config: ResolvedConfig, masks: KeptMasks) -> Source:
    if kvpress.is_press(config.policy):
        return source(adapter, token_ids, config)
    return _handed_over(adapter, len(token_ids), config, masks)


def _handed_over(adapter: Adapter, tokens: int, config: ResolvedConfig, masks: KeptMasks) -> Source:
    if config not in masks:
        msg = f"the kept sets of policy '{config.policy}' are handed over, by `loss.measure_kept_sets`; here are none"
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
