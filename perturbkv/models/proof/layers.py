"""What one layer's call of the attention interface says of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from perturbkv.models import recurrent_states
from perturbkv.models.attention_facts import LayerFacts, RefusedError
from perturbkv.models.interface import text_config
from perturbkv.models.proof.calls import ERRORS, Call
from perturbkv.models.proof.masks import Masks, mask_kind, pattern, visible

IGNORED_KEYWORDS = frozenset({
    "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "sliding_window", "use_cache",
})  # fmt: skip
"""Keywords of attention that change no output beyond what the mask and `USED_KEYWORDS` say."""

USED_KEYWORDS = frozenset({"s_aux", "scaling", "softcap"})
"""Keywords of attention with the sinks, the scale and the soft cap."""


def layer_stack(model: Any, calls: Sequence[Call], cache: Cache) -> tuple[str, dict[int, tuple[str, Call]]]:
    """Return the path of the decoder layers, and the attention's path and call of each layer that has one.

    Raises RefusedError where a layer calls the interface twice, or never and remembers more than a recurrent state.
    """
    if not calls:
        raise RefusedError("interface", "never calls transformers' attention interface")
    names = {module: name for name, module in model.named_modules()}
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    first = names[calls[0].module]
    path = next((name for name in sorted(lists, key=len) if first.startswith(f"{name}.")), None)
    if path is None:
        raise RefusedError("interface", "calls the attention interface outside its list of layers")
    told = text_config(model).num_hidden_layers
    if len(lists[path]) != told:
        raise RefusedError(
            "interface",
            f"has {len(lists[path])} layers and its configuration says {told}; change num_hidden_layers too",
        )
    found: dict[int, list[tuple[str, Call]]] = {index: [] for index in range(told)}
    for call in calls:
        name = names[call.module]
        if not name.startswith(f"{path}."):
            raise RefusedError("interface", f"calls the attention interface outside its layers, in '{name}'")
        index, _, attention = name.removeprefix(f"{path}.").partition(".")
        found[int(index)].append((attention, call))
    order = [int(names[call.module].removeprefix(f"{path}.").partition(".")[0]) for call in calls]
    if order != sorted(order):
        raise RefusedError("interface", f"runs its layers in another order than that of their list, {order[:8]}")
    kinds = {type(call.module) for call in calls}
    for index, entries in found.items():
        if not entries:
            _check_no_attention(lists[path][index], index, kinds, cache)
        elif len(entries) > 1:
            raise RefusedError("interface", f"calls the attention interface {len(entries)} times", index)
        elif others := _attention_paths(lists[path][index], kinds, entries[0][0]):
            raise RefusedError("interface", f"has a second attention, '{others[0]}', which takes no part", index)
    return path, {index: entries[0] for index, entries in found.items() if entries}


def _attention_paths(layer: nn.Module, kinds: Collection[type], beside: str = "") -> list[str]:
    """Return the paths of modules of a layer that look like attention, without the one at `beside` and its parents."""
    return [
        name
        for name, module in layer.named_modules()
        if (type(module) in kinds or type(module).__name__.endswith("Attention"))
        and (not beside or not f"{beside}.".startswith(f"{name}."))
    ]


def _check_no_attention(layer: nn.Module, index: int, kinds: Collection[type], cache: Cache) -> None:
    """Raise RefusedError unless a layer that never calls the interface has a recurrent state, or no memory at all."""
    cached = cache.layers[index] if index < len(cache.layers) else None
    if recurrent_states.size(cached):
        if recurrent_states.LAYER is not None and type(cached) is recurrent_states.LAYER:
            return
        raise RefusedError("cache", f"keeps more than a recurrent state, in a {type(cached).__name__}", index)
    if cached is None or getattr(cached, "keys", None) is not None or _attention_paths(layer, kinds):
        raise RefusedError("interface", f"never calls the attention interface{recurrent_states.version_note()}", index)


def read_layer(index: int, call: Call, masks: Masks, cache: Cache, attention: str) -> LayerFacts:
    """Return a layer's facts without its projection's. Raises RefusedError."""
    if unknown := sorted(call.options.keys() - IGNORED_KEYWORDS - USED_KEYWORDS):
        raise RefusedError("keywords", f"gives its attention '{unknown[0]}', which is not known here", index)
    owner = _find_owner(index, call, cache)
    held = index if owner is None else owner
    size = getattr(cache.layers[held], "sliding_window", None) if held < len(cache.layers) else None
    kind, window = _read_mask(index, call, masks, size)
    if owner is None and call.query.shape[2] < call.key.shape[2]:
        raise RefusedError("mask", f"has the queries of {call.query.shape[2]} of {call.key.shape[2]} tokens", index)
    if call.options.get("dropout"):
        raise RefusedError("output", "drops out attention weights", index)
    if math.isnan(call.error):
        raise RefusedError("run", "has queries, keys or values that are no numbers", index)
    if not call.error <= ERRORS[call.query.dtype]:
        raise RefusedError(
            "output", f"has an attention that is no softmax of its logits (off by {call.error:.1g})", index
        )
    latent = check_entries(index, call, cache, owner)
    if size != window:
        raise RefusedError("cache", f"sees {window or 'all'} entries, and its cache is one of {size or 'all'}", index)
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    return LayerFacts(
        attention, "", kind, window, heads, kv_heads, call.key.shape[-1], call.value.shape[-1],
        call.options["scaling"], call.options.get("softcap"), sink_parameter(index, call),
        state=recurrent_states.size(cache.layers[index]), latent=latent, owner=owner,
    )  # fmt: skip


def _read_mask(index: int, call: Call, masks: Masks, cached_window: int | None) -> tuple[str, int | None]:
    """Return the kind of a layer's mask and its window. Raises RefusedError for a mask that is not one of positions.

    `cached_window` is that of the layer's cache, None where it holds all entries.
    """
    if (rule := masks.rule(call.mask, cached_window)) is None:
        raise RefusedError("mask", "has a mask that transformers did not make from positions", index)
    numbers = call.mask if call.mask is not None and call.mask.dtype != torch.bool else None
    if numbers is not None and bool(((numbers != 0) & (numbers > -1e4)).any()):
        raise RefusedError("mask", "has a mask that adds numbers to the logits", index)
    try:
        kind = mask_kind(rule)
    except (RuntimeError, TypeError, IndexError) as error:
        raise RefusedError(
            "mask", f"has a mask whose rule cannot be asked beyond the text ({type(error).__name__})", index
        ) from error
    if kind is None:
        raise RefusedError("mask", "sees neither all earlier entries nor a window or chunk of them", index)
    seen = visible(call.mask, call.query, call.key).expand(*call.query.shape[:2], -1, -1)
    positions = torch.arange(seen.shape[-1], device=seen.device)
    last = positions[-seen.shape[2] :].unsqueeze(-1)  # the last queries may be all that a layer without a cache has
    if not torch.equal(seen, pattern(*kind, last, positions).expand_as(seen)):
        raise RefusedError("mask", "has a mask that is not what its rule says", index)
    return kind


def _find_owner(index: int, call: Call, cache: Cache) -> int | None:
    """Return the earlier layer whose cache holds what a layer's attention read, and which has none of its own.

    None for a layer with a cache. Raises RefusedError where no single earlier layer holds it.
    """
    if index >= len(cache.layers) or getattr(cache.layers[index], "keys", None) is not None:
        return None
    owners = [other for other in range(index) if _holds(cache.layers[other], call)]
    if len(owners) != 1:
        held = " and ".join(map(str, owners))
        seen = f"reads entries that layers {held} hold alike" if owners else "reads those of no single other layer"
        raise RefusedError("cache", f"fills no cache of its own, and {seen}", index)
    if cache.layers[owners[0]].keys.device != call.query.device:
        raise RefusedError("cache", f"reads entries of layer {owners[0]} from another device; load it on one", index)
    return owners[0]


def _holds(cached: Any, call: Call) -> bool:
    """Return whether a cache layer holds the keys and values that attention read, or the last of them."""
    pairs = ((getattr(cached, "keys", None), call.key), (getattr(cached, "values", None), call.value))
    return all(
        held is not None and torch.equal(held.to(read.device), read[:, :, -held.shape[2] :]) for held, read in pairs
    )


def check_entries(index: int, call: Call, cache: Cache, owner: int | None) -> int:
    """Return how many numbers a layer's cache holds of a token, as a latent; 0 where attention read what it holds.

    The cache is the layer's own, or its owner's. A latent has other heads or widths than the keys and values that
    attention reads, and is one for all heads: a cache of several could evict of each by itself. Raises RefusedError
    where the cache holds other entries of the same shape, of other tokens, or of fewer heads that are repeated.
    """
    holder = index if owner is None else owner
    cached = cache.layers[holder] if holder < len(cache.layers) else None
    keys, values = (getattr(cached, kind, None) for kind in ("keys", "values"))
    if keys is None or values is None:
        raise RefusedError("cache", "fills no cache of its own", index)
    if type(cached) not in (DynamicLayer, DynamicSlidingWindowLayer, recurrent_states.ATTENTION_LAYER):
        raise RefusedError("cache", f"keeps more than keys and values, in a {type(cached).__name__}", index)
    where = "its cache holds" if owner is None else f"the cache of layer {owner} holds, whose entries it read before"
    length = keys.shape[2]  # a sliding layer holds the last entries
    read = [entries[:, :, -length:] for entries in (call.key, call.value)]
    alike = [held.shape[1::2] == other.shape[1::2] for held, other in zip((keys, values), read, strict=True)]
    is_shared = keys.shape[1] == values.shape[1] == 1 and not all(
        held.shape[3] == other.shape[3] and torch.equal(held.expand_as(other), other)
        for held, other in zip((keys, values), read, strict=True)
    )
    whole = type(cached) is DynamicLayer and call.key.shape[2] == length == values.shape[2]
    if whole and is_shared and not all(alike):
        return sum(held.shape[1] * held.shape[3] for held in (keys, values))
    for what, held, other in zip(("keys", "values"), (keys, values), read, strict=True):
        if held.shape != other.shape or not torch.equal(held, other):
            raise RefusedError("cache", f"attends to other {what} than {where}", index)
    return 0


def sink_parameter(index: int, call: Call) -> str:
    """Return the name of the attention's parameter that is its sinks; empty without sinks. Raises RefusedError."""
    if (sinks := call.options.get("s_aux")) is None:
        return ""
    for name, parameter in call.module.named_parameters():
        if parameter.numel() == sinks.numel() == call.query.shape[1] and torch.equal(
            parameter.detach().flatten(), sinks.detach().flatten().to(parameter.dtype)
        ):
            return name
    raise RefusedError("keywords", "has sinks that are no parameter of its attention, one per head", index)
