"""What a decoder's attention is, found by running it.

A short random text is read by the loaded model under hooks. Each layer must call transformers' attention interface
once, with keywords that are known here; what the call returns must equal the softmax attention that METHOD's formulas
are of; its mask must be one of positions alone; random tensors in the output's place must arrive unchanged at one
linear map, or times a gate that depends neither on them nor on cached entries; nothing may be remembered outside the
cache, and reading in two parts must equal reading at once. A layer without attention keeps a recurrent state in the
cache, or nothing. What holds is a fact that the adapter reads; the first thing that does not is a `Refused`, with the
layer and the check. No name of a model decides anything.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from perturbkv.errors import ModelError
from perturbkv.models import gates, projection, states
from perturbkv.models.forward import run_with_cache
from perturbkv.models.interface import AttentionFunction, intercept, intercept_masks, plain_kernel

FULL, SLIDING, CHUNKED, RECURRENT, MEMORYLESS = "full", "sliding", "chunked", "recurrent", "memoryless"
TOKENS = 24
"""Length of the probe's text."""
_HARMLESS = frozenset({
    "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "sliding_window", "use_cache",
})  # fmt: skip
"""Keywords that change no output beside what the mask and the keywords of `_READ` say."""
_READ = frozenset({"s_aux", "scaling", "softcap"})
"""Keywords that are read: sinks, scale and soft cap."""
_ARGUMENTS = ("query", "key", "value", "attention_mask")
"""Arguments of the attention interface after the module, by keyword or in this order."""
_ERRORS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Relative rounding error that recomputed attention may have, by dtype; eager softmax is in float32 for all."""
LOGIT_ERRORS = {torch.float64: 1e-4, torch.float32: 5e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Relative rounding error that logits may have which were computed in another order, routing to experts included."""
_FAR = 2**20
"""Position up to which a mask's rule is looked at."""


class Refused(Exception):
    """A decoder whose attention is not what the formulas are of; `check` is the check that failed, `layer` where."""

    def __init__(self, check: str, seen: str, layer: int | None = None) -> None:
        super().__init__(seen)
        self.check: str = check
        self.layer: int | None = layer

    def message(self, name: str) -> str:
        """Return what was seen of the model `name`, in one line."""
        where = f"model '{name}'" if self.layer is None else f"layer {self.layer} of model '{name}'"
        so = "" if self.check in ("run", "twin") else "; an eviction study would misread it"
        return f"{where} {self}{so} (proof: {self.check})"


@dataclass(frozen=True)
class LayerFacts:
    """The attention of one decoder layer, and what else it remembers.

    Attributes:
        attention: path of its attention module, from the layer.
        projection: path of the map that receives the heads' outputs, from the attention module.
        kind: `full`, `sliding` or `chunked`: which entries a query sees; `recurrent` or `memoryless` without attention.
        window: number of entries of a window or chunk; None for other kinds.
        heads, kv_heads: numbers of query heads and of key/value heads.
        d_key, d_value: widths of a key and of a value.
        scale: factor on the logits.
        cap: soft cap of the logits; None without one.
        sinks: name of the attention's parameter with the heads' sink logits; empty without sinks.
        has_gate: whether the heads' outputs are multiplied by a gate before the projection receives them.
        state: numbers in the recurrent state of one text, beside attention or in its place; 0 without one.
    """

    attention: str
    projection: str
    kind: str
    window: int | None
    heads: int
    kv_heads: int
    d_key: int
    d_value: int
    scale: float
    cap: float | None = None
    sinks: str = ""
    has_gate: bool = False
    state: int = 0

    @classmethod
    def without_attention(cls, state: int) -> LayerFacts:
        """Return the facts of a layer that has no attention, and a recurrent state of so many numbers."""
        return cls("", "", RECURRENT if state else MEMORYLESS, None, 0, 0, 0, 0, 0.0, state=state)

    @property
    def attends(self) -> bool:
        """True if the layer has attention."""
        return self.kind not in (RECURRENT, MEMORYLESS)


@dataclass(frozen=True)
class Rotary:
    """The module that gives the rotations of positions: its path, and the arguments after its input and positions."""

    path: str = ""
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """The attention of a decoder.

    Attributes:
        path: path of the list of decoder layers, from the model.
        layers: facts of every layer.
        rotary: rotations of the measured layers' keys and queries, the first components by pairs half the rotary width
            apart; without a path where they have none or others.
    """

    path: str
    layers: tuple[LayerFacts, ...]
    rotary: Rotary


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of the attention interface: the module, what it was given, and the relative error of recomputing it."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    error: float


@dataclass
class _Masks:
    """The masks that transformers made in a forward pass, each with the rule that it was made by."""

    stock: Callable[..., Any]
    rules: list[tuple[Tensor, Callable[..., Any]]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mask of the stock interface, never left out, and record its rule."""
        made: Tensor = self.stock(*args, **{**kwargs, "allow_is_causal_skip": False})
        self.rules.append((made, kwargs["mask_function"]))
        return made

    def rule(self, mask: Tensor | None, window: int | None) -> Callable[..., Any] | None:
        """Return the rule of a mask that attention got; None for a mask that was made or changed elsewhere.

        A layer on another device gets a copy, which is known by its numbers, and by the `window` of the layer's cache.
        """
        if mask is None:
            return None
        own = [rule for made, rule in self.rules if made.data_ptr() == mask.data_ptr()]
        if len(own) == 1:
            return own[0]
        moved = (
            rule
            for made, rule in self.rules
            if made.device != mask.device and made.shape == mask.shape and torch.equal(made.to(mask.device), mask)
        )
        return next((rule for rule in (*own, *moved) if (mask_kind(rule) or ("", -1))[1] == window), None)


_FAILURES = (ModelError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError)
"""Exceptions of models that cannot read a text with a cache of transformers."""


def prove(model: Any) -> Facts:
    """Return the facts of a loaded causal language model in eval mode. Raises Refused."""
    with _explain_failures(), plain_kernel(implementation(model)):
        return _prove(model)


def prove_evicted(model: Any, facts: Facts) -> None:
    """Check that a small model decodes from an evicted cache as a forward pass in which the evicted are masked.

    Each query head of a measured layer keeps other entries; what no head of a group keeps is NaN in the cache. Raises
    Refused.
    """
    with _explain_failures():
        _check_evicted(model, facts)


@contextmanager
def _explain_failures() -> Iterator[None]:
    """Turn what a model raises while it reads a short text into a Refused."""
    try:
        yield
    except _FAILURES as error:
        words = " ".join(str(error).split())[:200]
        told = f"{type(error).__name__}: {words}"
        raise Refused("run", f"cannot read a short text ({told}){states.version_note()}") from error


@torch.no_grad()
def _prove(model: Any) -> Facts:
    """Return the facts of a model. Raises Refused, and what the model raises while it reads."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise Refused("interface", "is an encoder with a decoder, whose cross-attention is not measured")
    ids = probe_text(model)
    calls, masks, cache = _observe(model, ids)
    path, attentions = _layer_stack(model, calls, cache)
    modules = {index: call.module for index, (_, call) in attentions.items()}
    read = {index: _read_layer(index, call, masks, cache, name) for index, (name, call) in attentions.items()}
    receivers = _find_projections(model, ids, modules)
    layers = tuple(
        replace(read[index], projection=receivers[index][0], has_gate=receivers[index][1])
        if index in read
        else LayerFacts.without_attention(states.size(cached))
        for index, cached in enumerate(cache.layers)
    )
    measured = measured_layers(layers)
    _check_alike([layers[index] for index in measured])
    _check_reading(model, ids, layers, modules)
    for index in measured:
        _check_matrix(modules[index], layers[index], index, model.dtype)
    return Facts(path, layers, _find_rotary(model, ids, [modules[index] for index in measured]))


def _check_alike(layers: Sequence[LayerFacts]) -> None:
    """Raise Refused unless the measured layers have the same heads, which a trace has one axis for."""
    sizes = {(layer.heads, layer.kv_heads, layer.d_key, layer.d_value) for layer in layers}
    if len(sizes) > 1:
        raise Refused("heads", f"has measured layers of {len(sizes)} shapes, in heads or widths, and not of one")


def measured_layers(layers: Sequence[LayerFacts]) -> tuple[int, ...]:
    """Return the indices of the measured layers: those that see the whole prompt, or all where none does."""
    full = tuple(index for index, layer in enumerate(layers) if layer.kind == FULL)
    return full or tuple(index for index, layer in enumerate(layers) if layer.attends)


def probe_text(model: Any, seed: int = 0) -> Tensor:
    """Return a random text (1, token) without the configuration's special tokens."""
    config = text_config(model)
    told = {**model.config.to_dict(), **config.to_dict()}
    special = {told[key] for key in told if key.endswith("_token_id") and isinstance(told[key], int)}
    tokens = range(min(config.vocab_size, 512))
    allowed = [token for token in tokens if token not in special] or list(tokens)
    length = min(TOKENS, getattr(config, "max_position_embeddings", TOKENS) // 2)
    drawn = torch.randint(len(allowed), (1, length), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(allowed)[drawn].to(model.device)


def _observe(model: Any, ids: Tensor) -> tuple[list[_Call], _Masks, Cache]:
    """Read a text; return its attention calls, each recomputed, the masks of the pass, and the cache."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    kernel, calls, cache = implementation(model), list[_Call](), DynamicCache(config=model.config)
    masks = _Masks(ALL_MASK_ATTENTION_FUNCTIONS[kernel])

    def attend(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        found = stock(module, *args, **kwargs)
        calls.append(_record(module, args, kwargs, found[0]))
        return found

    with intercept(kernel, list(model.modules()), attend), intercept_masks(kernel, masks):
        forward(model, ids, cache, logits_to_keep=1)
    return calls, masks, cache


def text_config(model: Any) -> Any:
    """Return the configuration of a model's decoder, which is a part of that of a model that reads images too."""
    return model.config.get_text_config(decoder=True)


def implementation(model: Any) -> str:
    """Return the name of the attention implementation that a model's text part is run with."""
    return str(text_config(model)._attn_implementation)


def forward(model: Any, ids: Tensor, cache: Cache | None = None, **more: Any) -> Tensor:
    """Return the logits (batch, token, vocab) of tokens that follow a cache."""
    if cache is not None:
        return cast("Tensor", run_with_cache(model, ids, cache, **more).logits)
    return cast("Tensor", model(input_ids=ids, use_cache=False, **more).logits)


def _record(module: nn.Module, args: Any, kwargs: Any, found: Tensor) -> _Call:
    """Return a call of the interface with the relative error of recomputing what it returned."""
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    query, key, value, mask = (given.pop(name) for name in _ARGUMENTS)
    options = {name: option for name, option in given.items() if option is not None and option is not False}
    scale = options.get("scaling", query.shape[-1] ** -0.5)
    seen = visible(mask, query, key)
    expected = recompute(query, key, value, seen, scale, options.get("softcap"), options.get("s_aux"))
    error = (found.double() - expected).abs().amax() / expected.abs().amax().clamp(min=1e-30)
    options["scaling"] = float(scale)
    return _Call(module, query, key, value, mask, options, float(error))


def visible(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return which keys each query sees, by its mask of truth values or of numbers to add; None is causal."""
    if mask is None:
        return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril(
            key.shape[2] - query.shape[2]
        )
    mask = mask[..., : key.shape[2]]
    return mask if mask.dtype == torch.bool else mask > -1e4


def recompute(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return softmax attention (batch, query, head, d_value) in float64 over the entries that each query sees."""
    group = query.shape[1] // key.shape[1]
    keys, values = (entries.double().repeat_interleave(group, dim=1) for entries in (key, value))
    logits = query.double() @ keys.mT * scale
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sink = sinks.double().reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], dim=-1)
    weights = logits.softmax(dim=-1)[..., : key.shape[2]]
    return (weights @ values).transpose(1, 2)


def _layer_stack(model: Any, calls: Sequence[_Call], cache: Cache) -> tuple[str, dict[int, tuple[str, _Call]]]:
    """Return the path of the decoder layers, and the attention's path and call of each layer that has one.

    Raises Refused where a layer calls the interface twice, or not at all and remembers more than a recurrent state.
    """
    if not calls:
        raise Refused("interface", "never calls transformers' attention interface")
    names = {module: name for name, module in model.named_modules()}
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    first = names[calls[0].module]
    path = next((name for name in sorted(lists, key=len) if first.startswith(f"{name}.")), None)
    if path is None:
        raise Refused("interface", "calls the attention interface outside its list of layers")
    told = text_config(model).num_hidden_layers
    if len(lists[path]) != told:
        raise Refused(
            "interface",
            f"has {len(lists[path])} layers and its configuration says {told}; change num_hidden_layers too",
        )
    found: dict[int, list[tuple[str, _Call]]] = {index: [] for index in range(told)}
    for call in calls:
        name = names[call.module]
        if not name.startswith(f"{path}."):
            raise Refused("interface", f"calls the attention interface outside its layers, in '{name}'")
        index, _, attention = name.removeprefix(f"{path}.").partition(".")
        found[int(index)].append((attention, call))
    order = [int(names[call.module].removeprefix(f"{path}.").partition(".")[0]) for call in calls]
    if order != sorted(order):
        raise Refused("interface", f"runs its layers in another order than that of their list, {order[:8]}")
    kinds = {type(call.module) for call in calls}
    for index, entries in found.items():
        if not entries:
            _check_no_attention(lists[path][index], index, kinds, cache)
        elif len(entries) > 1:
            raise Refused("interface", f"calls the attention interface {len(entries)} times", index)
        elif others := _attention_paths(lists[path][index], kinds, entries[0][0]):
            raise Refused("interface", f"has a second attention, '{others[0]}', which takes no part", index)
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
    """Raise Refused unless a layer that never calls the interface has a recurrent state, or no memory at all."""
    cached = cache.layers[index] if index < len(cache.layers) else None
    if states.size(cached):
        if states.LAYER is not None and type(cached) is states.LAYER:
            return
        raise Refused("cache", f"keeps more than a recurrent state, in a {type(cached).__name__}", index)
    if cached is None or getattr(cached, "keys", None) is not None or _attention_paths(layer, kinds):
        raise Refused("interface", f"never calls the attention interface{states.version_note()}", index)


def _read_layer(index: int, call: _Call, masks: _Masks, cache: Cache, attention: str) -> LayerFacts:
    """Return a layer's facts without its projection's. Raises Refused."""
    unknown = sorted(call.options.keys() - _HARMLESS - _READ)
    if unknown:
        raise Refused("keywords", f"gives its attention '{unknown[0]}', which is not known here", index)
    size = getattr(cache.layers[index], "sliding_window", None) if index < len(cache.layers) else None
    kind, window = _read_mask(index, call, masks, size)
    if call.options.get("dropout"):
        raise Refused("output", "drops out attention weights", index)
    if math.isnan(call.error):
        raise Refused("run", "has queries, keys or values that are no numbers", index)
    if not call.error <= _ERRORS[call.query.dtype]:
        raise Refused("output", f"has an attention that is no softmax of its logits (off by {call.error:.1g})", index)
    _check_entries(index, call, cache)
    if window is not None and size != window:
        raise Refused("cache", f"sees {window or 'all'} entries, and its cache is one of {size or 'all'}", index)
    heads, kv_heads = call.query.shape[1], call.key.shape[1]
    cap = call.options.get("softcap")
    return LayerFacts(
        attention, "", kind, window, heads, kv_heads, call.key.shape[-1], call.value.shape[-1],
        call.options["scaling"], None if cap is None else float(cap), _sink_parameter(index, call),
        state=states.size(cache.layers[index]),
    )  # fmt: skip


def _check_entries(index: int, call: _Call, cache: Cache) -> None:
    """Raise Refused unless attention read the keys and values that the layer's cache holds."""
    cached = cache.layers[index] if index < len(cache.layers) else None
    keys, values = (getattr(cached, kind, None) for kind in ("keys", "values"))
    if keys is None or values is None:
        raise Refused("cache", "fills no cache of its own", index)
    if type(cached) not in (DynamicLayer, DynamicSlidingWindowLayer, states.ATTENTION_LAYER):
        raise Refused("cache", f"keeps more than keys and values, in a {type(cached).__name__}", index)
    length = keys.shape[2]  # a sliding layer holds the last entries
    for what, held, read in (("keys", keys, call.key), ("values", values, call.value)):
        if held.shape != read[:, :, -length:].shape or not torch.equal(held, read[:, :, -length:]):
            raise Refused("cache", f"attends to other {what} than its cache holds", index)


def _sink_parameter(index: int, call: _Call) -> str:
    """Return the name of the attention's parameter that is its sinks; empty without sinks. Raises Refused."""
    sinks = call.options.get("s_aux")
    if sinks is None:
        return ""
    for name, parameter in call.module.named_parameters():
        if parameter.numel() == sinks.numel() == call.query.shape[1] and torch.equal(
            parameter.detach().flatten(), sinks.detach().flatten().to(parameter.dtype)
        ):
            return name
    raise Refused("keywords", "has sinks that are no parameter of its attention, one per head", index)


def _read_mask(index: int, call: _Call, masks: _Masks, cached_window: int | None) -> tuple[str, int | None]:
    """Return the kind of a layer's mask and its window. Raises Refused for a mask that is not one of positions.

    `cached_window` is that of the layer's cache, None where it holds all entries.
    """
    rule = masks.rule(call.mask, cached_window)
    if rule is None:
        raise Refused("mask", "has a mask that transformers did not make from positions", index)
    numbers = call.mask if call.mask is not None and call.mask.dtype != torch.bool else None
    if numbers is not None and bool(((numbers != 0) & (numbers > -1e4)).any()):
        raise Refused("mask", "has a mask that adds numbers to the logits", index)
    try:
        kind = mask_kind(rule)
    except (RuntimeError, TypeError, IndexError) as error:
        raise Refused("mask", f"has a mask whose rule cannot be asked ({error})", index) from error
    if kind is None:
        raise Refused("mask", "sees neither all earlier entries nor a window or chunk of them", index)
    seen = visible(call.mask, call.query, call.key).expand(*call.query.shape[:2], -1, -1)
    positions = torch.arange(seen.shape[-1], device=seen.device)
    if not torch.equal(seen, _pattern(*kind, positions.unsqueeze(-1), positions).expand_as(seen)):
        raise Refused("mask", "has a mask that is not what its rule says", index)
    return kind


def mask_kind(rule: Callable[..., Any]) -> tuple[str, int | None] | None:
    """Return the kind and window of transformers' rule for a mask; None where it is neither full, window nor chunk."""
    zero = torch.tensor(0)

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        return torch.as_tensor(rule(zero, zero, queries, keys)).expand_as(queries)

    first = torch.arange(_FAR)
    hidden = (~sees(first, torch.zeros_like(first))).nonzero()
    window = int(hidden[0]) if len(hidden) else None
    kinds: list[tuple[str, int | None]] = [(FULL, None)] if window is None else [(SLIDING, window), (CHUNKED, window)]
    queries, keys = _sampled_positions(window)
    found = sees(queries, keys)
    return next((kind for kind in kinds if torch.equal(found, _pattern(*kind, queries, keys))), None)


def _sampled_positions(window: int | None) -> tuple[Tensor, Tensor]:
    """Return pairs of positions of queries and keys at which a mask's rule is compared: near, far, and at its edges."""
    edges = [0, 1, 2, 3, 7, *((window - 1, window, window + 1, 2 * window, 3 * window) if window else ())]
    drawn = torch.randint(_FAR, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    queries = torch.tensor([*range(40), *edges, *drawn])
    distances = torch.tensor([-5, -1, *edges, *(edge + 1 for edge in edges), 100, 5000])
    generator = torch.Generator().manual_seed(1)
    anywhere = (queries.unsqueeze(-1) * torch.rand(len(queries), 8, generator=generator)).long()
    powers = queries.unsqueeze(-1) - 2 ** torch.arange(21)
    keys = torch.cat([queries.unsqueeze(-1) - distances, anywhere, powers], dim=-1)
    pairs = queries.unsqueeze(-1).expand_as(keys)[keys >= 0], keys[keys >= 0]
    return pairs


def _pattern(kind: str, window: int | None, queries: Tensor, keys: Tensor) -> Tensor:
    """Return which of the keys at some positions are seen by queries at some positions."""
    causal = keys <= queries
    if window is None:
        return causal
    return causal & (keys > queries - window if kind == SLIDING else keys // window == queries // window)


def _find_projections(model: Any, ids: Tensor, attentions: Mapping[int, nn.Module]) -> dict[int, tuple[str, bool]]:
    """Return per layer the path, from its attention, of the map that receives the heads' outputs, and if it has a gate.

    Row 0 of the batch runs as it is; in the others other numbers stand in the place of the heads' outputs, after
    another text each, while the attention's input is row 0's. Raises Refused where no map or several receive them
    unchanged, or times a gate.
    """
    receivers = {index: _Receivers(module) for index, module in attentions.items()}
    drawn, with_gate = dict[int, Tensor](), set[int]()

    def attend(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        output, weights = stock(module, *args, **kwargs)
        generator = torch.Generator().manual_seed(len(drawn))
        rows = torch.randn(2, *output.shape[1:], generator=generator).to(output)
        drawn[id(module)] = torch.cat([output[:1], rows[:1], 4 * rows[1:], torch.ones_like(rows[:1])])
        output = drawn[id(module)]
        return gates.beside_ones(output) if id(module) in with_gate else output, weights

    cache, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for each in (cache, other):
        forward(model, torch.cat([probe_text(model, seed) for seed in range(1, 5)]), each)
    with ExitStack() as stack:
        for receiver in receivers.values():
            stack.enter_context(receiver)
        stack.enter_context(intercept(implementation(model), list(attentions.values()), attend))
        forward(model, ids.expand(4, -1), cache)
        found = {index: receiver.find(drawn[id(receiver.attention)], index) for index, receiver in receivers.items()}
        for index, receiver in receivers.items():
            receiver.silence(*found[index])
        with_gate |= {id(attentions[index]) for index, (_, has_gate) in found.items() if has_gate}
        drawn.clear()
        forward(model, ids.expand(4, -1), other)
    for index, receiver in receivers.items():
        receiver.check_silent(index)
    return found


class _Receivers:
    """The maps inside an attention module, with what they receive in the block."""

    def __init__(self, attention: nn.Module) -> None:
        self.attention, self.received, self.output = attention, dict[str, Tensor](), torch.empty(0)

    def __enter__(self) -> None:
        self._stack = ExitStack()
        hook = self.attention.register_forward_pre_hook(_repeat_row_0, with_kwargs=True)
        self._stack.callback(hook.remove)
        self._stack.callback(self.attention.register_forward_hook(self._keep_output).remove)
        for name, module in self.attention.named_modules():
            if name and not isinstance(module, nn.Dropout | nn.Identity):
                self._stack.callback(module.register_forward_pre_hook(partial(self._receive, name)).remove)

    def __exit__(self, *about: object) -> None:
        self._stack.close()

    def _receive(self, name: str, module: nn.Module, args: Any) -> None:
        if args and isinstance(args[0], Tensor) and args[0].dtype.is_floating_point:
            self.received[name] = args[0]

    def find(self, drawn: Tensor, index: int) -> tuple[str, bool]:
        """Return the name of the module that received `drawn`, heads side by side, and whether times a gate.

        A module inside another that received them is a part of that one. Raises Refused.
        """
        flat = drawn.flatten(2)
        alike = {name: got.reshape(flat.shape) for name, got in self.received.items() if got.numel() == flat.numel()
                 and got.shape[-1] == flat.shape[-1]}  # fmt: skip
        plain = _outermost(name for name, got in alike.items() if torch.equal(got, flat))
        names = plain or _outermost(name for name, got in alike.items() if _is_gated(got, flat))
        if not names:
            raise Refused("projection", "changes its heads' outputs before any map receives them", index)
        if len(names) > 1:
            raise Refused("projection", f"gives its heads' outputs to {len(names)} maps, {' and '.join(names)}", index)
        return names[0], not plain

    def _keep_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self.output = output[0] if isinstance(output, tuple) else output

    def silence(self, name: str, has_gate: bool) -> None:
        """Let the module of this name put out zeros in the block, and receive ones beside its input after a gate."""
        module = self.attention.get_submodule(name)
        if has_gate:
            self._stack.callback(module.register_forward_pre_hook(lambda _, args: gates.split(args[0])[:1]).remove)
        self._stack.callback(module.register_forward_hook(lambda *about: torch.zeros_like(about[-1])).remove)

    def check_silent(self, index: int) -> None:
        """Raise Refused unless all rows, of other heads' outputs each, are equal behind the silenced map."""
        rows = self.output.double()
        if not float((rows - rows[:1]).abs().amax()) <= _ERRORS[self.output.dtype] * float(rows.abs().amax()):
            raise Refused("projection", "lets its heads' outputs past the map that receives them", index)


def _check_matrix(attention: nn.Module, facts: LayerFacts, index: int, dtype: torch.dtype) -> None:
    """Raise Refused unless the module that receives a layer's heads' outputs is a matrix."""
    module = attention.get_submodule(facts.projection)
    try:
        projection.check(module, facts.heads * facts.d_value, dtype)
    except projection.NoMatrixError as error:
        raise Refused(
            "projection",
            f"gives its heads' outputs to '{facts.projection}', a {projection.describe(module)}, "
            f"which {error} (weights that are quantised alone, or none, can be read)",
            index,
        ) from error


def _outermost(names: Iterable[str]) -> list[str]:
    """Return the names of modules that are in no other named one."""
    found = list(names)
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found)]


def _is_gated(received: Tensor, drawn: Tensor) -> bool:
    """Return whether random outputs, rows 1 and 2, arrive times the numbers that ones, row 3, arrive as.

    A norm of the outputs would take from row 2 that it is larger.
    """
    expected = received[3:].double() * drawn[1:3].double()
    errors = (received[1:3].double() - expected).abs().amax(dim=(1, 2)) / expected.abs().amax(dim=(1, 2)).clamp(1e-30)
    return bool((errors <= _ERRORS[received.dtype]).all())


def _repeat_row_0(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Give every row of a batch row 0's hidden states: a pre-hook of an attention module."""
    if args:
        return (_row_0(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _row_0(kwargs["hidden_states"])}


def _row_0(hidden: Tensor) -> Tensor:
    """Return a batch all of whose rows are row 0."""
    return hidden[:1].expand_as(hidden).contiguous()


def _check_reading(model: Any, ids: Tensor, layers: Sequence[LayerFacts], modules: Mapping[int, nn.Module]) -> None:
    """Raise Refused unless reading in parts equals reading at once, also where another text is read in between.

    What attention is given, and what the cache holds afterwards, must be the same too.
    """
    tail, full = min(4, ids.shape[1] - 1), DynamicCache(config=model.config)
    whole = forward(model, ids, full)[0, -tail:].double()
    if not bool(whole.isfinite().all()):
        return  # which every run says of its samples
    bound = LOGIT_ERRORS[model.dtype] * float((whole - whole.mean()).norm())

    def check(name: str, found: Tensor, seen: str) -> None:
        off = float((found.double() - whole).norm()) / bound
        if not off <= 1:
            raise Refused(name, f"{seen} (logits off by {off:.1g} bounds){states.version_note()}")

    check("random", forward(model, ids)[0, -tail:], "reads the same text otherwise a second time")
    rows = torch.cat([ids, probe_text(model, seed=2), probe_text(model, seed=3)])
    check("rows", forward(model, rows)[0, -tail:], "reads a text otherwise beside others in a batch")
    for name, between, seen in (
        ("parts", False, "reads a text in two parts otherwise than at once"),
        ("state", True, "remembers another text outside its cache"),
    ):
        cache = DynamicCache(config=model.config)
        own = vars(cache).keys()
        forward(model, ids[:, :-tail], cache)
        if between:
            forward(model, probe_text(model, seed=1), DynamicCache(config=model.config))
        check(name, _read_on(model, ids[:, -tail:], cache, layers, modules), seen)
        if more := sorted(vars(cache).keys() - own):
            raise Refused("state", f"keeps '{more[0]}' on the cache beside its layers")
        for index in modules:
            _check_same_entries(index, cache.layers[index], full.layers[index], LOGIT_ERRORS[model.dtype])


def _read_on(
    model: Any, ids: Tensor, cache: Cache, layers: Sequence[LayerFacts], modules: Mapping[int, nn.Module]
) -> Tensor:
    """Return the logits of the next tokens of a text, the last two read one by one. Raises Refused.

    Each attention must be what it was for the whole text, and read what its cache holds.
    """
    logits = []
    for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        if part.shape[1] == 0:
            continue
        calls, found = _observe_part(model, part, cache, modules)
        logits.append(found[0])
        for index, call in calls:
            _check_entries(index, call, cache)
            _check_decoding(index, call, layers[index])
    return torch.cat(logits)


def _observe_part(
    model: Any, ids: Tensor, cache: Cache, modules: Mapping[int, nn.Module]
) -> tuple[list[tuple[int, _Call]], Tensor]:
    """Read the next tokens of a text; return the attention calls with their layers' indices, and the logits."""
    indices, calls = {id(module): index for index, module in modules.items()}, list[tuple[int, _Call]]()

    def attend(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        found = stock(module, *args, **kwargs)
        calls.append((indices[id(module)], _record(module, args, kwargs, found[0])))
        return found

    with intercept(implementation(model), list(modules.values()), attend):
        logits = forward(model, ids, cache)
    if [index for index, _ in calls] != sorted(modules):
        missing = sorted(modules.keys() - {index for index, _ in calls})
        raise Refused("decoding", "does not call the attention interface while it decodes", *missing[:1])
    return calls, logits


def _check_decoding(index: int, call: _Call, facts: LayerFacts) -> None:
    """Raise Refused unless attention while decoding is what it was for the whole text."""
    cap, sinks = call.options.get("softcap"), call.options.get("s_aux")
    if call.options["scaling"] != facts.scale or (None if cap is None else float(cap)) != facts.cap:
        raise Refused("decoding", "has another scale or cap while it decodes", index)
    told = "" if sinks is None else _sink_parameter(index, call)
    if call.options.keys() - _HARMLESS - _READ or told != facts.sinks:
        raise Refused("decoding", "gives its attention other keywords while it decodes", index)
    if not call.error <= _ERRORS[call.query.dtype]:
        off = f"off by {call.error:.1g}"
        raise Refused("decoding", f"has an attention that is no softmax while it decodes ({off})", index)


def _check_same_entries(index: int, one: Any, other: Any, bound: float) -> None:
    """Raise Refused unless a cache layer holds the same entries after reading in parts as after reading at once."""
    for what in ("keys", "values"):
        found, expected = getattr(one, what).double(), getattr(other, what).double()
        if found.shape != expected.shape or not (found - expected).norm() <= bound * expected.norm():
            raise Refused("decoding", f"stores other {what} while it decodes", index)


@torch.no_grad()
def _check_evicted(model: Any, facts: Facts) -> None:
    """Raise Refused unless decoding from an evicted cache equals a forward pass in which the evicted are masked.

    As in the toolkit's own decoding, the cache gives a layer its new entries alone, and attention finds the others.
    """
    ids, layers = probe_text(model), model.get_submodule(facts.path)
    attentions = {
        index: layers[index].get_submodule(layer.attention) for index, layer in enumerate(facts.layers) if layer.attends
    }
    kept, generator = dict[int, Tensor](), torch.Generator().manual_seed(0)
    for index in measured_layers(facts.layers):
        kept[index] = torch.rand(facts.layers[index].heads, ids.shape[1], generator=generator).to(ids.device) < 0.4
        kept[index][:, -1] = True
    naive = _NaiveAttention(facts.layers, {id(module): index for index, module in attentions.items()}, kept)
    with intercept(implementation(model), list(attentions.values()), naive):
        expected = forward(model, ids)[0, -1].double()
    cache = DynamicCache(config=model.config)
    forward(model, ids[:, :-1], cache)
    for index in attentions:
        cached = cache.layers[index]
        if index in kept:
            _empty_evicted(cached, kept[index])
        if type(cached) in (DynamicLayer, DynamicSlidingWindowLayer):
            naive.entries[index] = cached.keys, cached.values
            cache.layers[index] = _NewAlone(cached.get_seq_length())
    with intercept(implementation(model), list(attentions.values()), naive):
        found = forward(model, ids[:, -1:], cache)[0, -1].double()
    if not float((found - expected).norm()) <= 1e-3 * float((expected - expected.mean()).norm()):
        raise Refused("evicted", "decodes from an evicted cache otherwise than with the evicted entries masked")


@dataclass
class _NaiveAttention:
    """Attention whose last query sees what its heads keep: an attention replacement.

    Attributes:
        layers: facts of all layers.
        indices: identity of an attention module -> its layer.
        kept: layer -> which tokens of the text each head's last query sees (head, token).
        entries: layer -> keys and values of the earlier tokens, where the cache gives the new ones alone.
    """

    layers: Sequence[LayerFacts]
    indices: Mapping[int, int]
    kept: Mapping[int, Tensor]
    entries: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return softmax attention over the entries that each query sees, and no weights."""
        query, key, value, mask = args[:4]
        index = self.indices[id(module)]
        if index in self.entries:
            key, value = (torch.cat(pair, dim=2) for pair in zip(self.entries[index], (key, value), strict=True))
            mask = self._newest_sees(index, key.shape[2]).to(key.device)
        seen = visible(mask, query, key).expand(*query.shape[:2], -1, -1).clone()
        if index in self.kept:
            seen[:, :, -1] &= self.kept[index][:, -key.shape[2] :]
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        found = recompute(query, key, value.nan_to_num(), seen, scale, kwargs.get("softcap"), kwargs.get("s_aux"))
        return found.to(query.dtype).contiguous(), None

    def _newest_sees(self, index: int, entries: int) -> Tensor:
        """Return which of the last `entries` tokens the newest one sees, by its layer's kind (1, entry)."""
        layer, newest = self.layers[index], torch.tensor([[TOKENS - 1]])
        return _pattern(layer.kind, layer.window, newest, torch.arange(TOKENS - entries, TOKENS))


class _NewAlone(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer as those of an evicted cache: its update gives the new tokens alone, and it shows no entries."""

    is_sliding = False

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen, self.keys, self.values, self.is_initialized = seen, None, None, True

    def lazy_initialization(self, *states: Tensor) -> None:
        """Do nothing, as nothing is stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new tokens' keys and values."""
        self.seen += key_states.shape[2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the position of the next token."""
        return self.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return (length, offset) of transformers' mask, which is not looked at."""
        queries = len(query_length) if isinstance(query_length, Tensor) else query_length
        return self.seen + queries, 0

    def get_max_length(self) -> int:
        """Return −1, as the length is unlimited."""
        return -1

    get_max_cache_shape = get_max_length


def _empty_evicted(cached: Any, kept: Tensor) -> None:
    """Set to NaN the entries of a cache layer that no query head of a group keeps; `kept` is (head, token)."""
    entries = cached.keys.shape[2]
    held = kept.view(cached.keys.shape[1], -1, kept.shape[1]).any(dim=1)[:, -entries - 1 : -1]
    for tensor in (cached.keys, cached.values):
        tensor[0][~held] = math.nan


def _find_rotary(model: Any, ids: Tensor, attentions: Sequence[nn.Module]) -> Rotary:
    """Return the module whose rotations all given attentions' keys and queries have; without a path where none has.

    A text that is read further back has keys and queries which are equal when they are rotated back.
    """
    paths = {name.rpartition(".")[0] for name, _ in model.named_buffers() if name.endswith("inv_freq")}
    limit = getattr(text_config(model), "max_position_embeddings", None) or 0
    shift = min(100, limit - ids.shape[1])
    if len(paths) != 1 or shift < 1 or "position_ids" not in inspect.signature(model.forward).parameters:
        return Rotary()
    path = paths.pop()
    near, far = (_rotated(model, path, ids, begin, attentions) for begin in (0, shift))
    bound = 20 * _ERRORS[model.dtype]
    for arguments in [given for given in near.rotations if given in far.rotations and near.fits(given)]:
        pairs = zip(near.rotated_back(arguments), far.rotated_back(arguments), strict=True)
        if all(float((one - other).norm()) <= bound * float(one.norm()) for one, other in pairs):
            return Rotary(path, arguments)
    return Rotary()


@dataclass
class _Rotated:
    """Queries and keys (batch, head, token, d_key) of a text, and the rotations that a rotary module gave for it.

    `rotations` maps the module's further arguments to cosines and sines (batch, token, rotary).
    """

    vectors: list[Tensor] = field(default_factory=list)
    rotations: dict[tuple[str, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record the output of a rotary module that is a pair of tensors: a forward hook."""
        if isinstance(output, tuple) and len(output) == 2:
            texts = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
            self.rotations[tuple(texts)] = output

    def pairs(self, arguments: tuple[str, ...]) -> int:
        """Return the number of pairs of components that are rotated."""
        cosine = self.rotations[arguments][0]
        twice = torch.equal(*cosine.chunk(2, dim=-1))  # most modules give each pair's angle twice
        return int(cosine.shape[-1]) // (2 if twice else 1)

    def fits(self, arguments: tuple[str, ...]) -> bool:
        """Return whether all vectors have as many components as are rotated."""
        return all(vectors.shape[-1] >= 2 * self.pairs(arguments) for vectors in self.vectors)

    def rotated_back(self, arguments: tuple[str, ...]) -> Iterator[Tensor]:
        """Yield all vectors rotated back, pairs half the rotary width apart, in float64."""
        cosine, sine = (part.double().unsqueeze(1) for part in self.rotations[arguments])
        pairs = self.pairs(arguments)
        size = 2 * pairs
        for vectors in self.vectors:
            one, other = vectors[..., :size].double().chunk(2, dim=-1)
            cos, sin = (part[..., :pairs].to(vectors.device) for part in (cosine, sine))
            yield torch.cat([one * cos + other * sin, other * cos - one * sin, vectors[..., size:].double()], dim=-1)


def _rotated(model: Any, path: str, ids: Tensor, begin: int, attentions: Sequence[nn.Module]) -> _Rotated:
    """Read a text whose first token has the position `begin`; return what its attentions were given."""
    found = _Rotated()

    def attend(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        found.vectors += args[:2]
        return stock(module, *args, **kwargs)

    hook = model.get_submodule(path).register_forward_hook(found.add, with_kwargs=True)
    try:
        with intercept(implementation(model), attentions, attend):
            forward(model, ids, position_ids=torch.arange(begin, begin + ids.shape[1], device=ids.device).unsqueeze(0))
    finally:
        hook.remove()
    return found
