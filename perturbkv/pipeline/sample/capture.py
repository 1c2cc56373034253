"""Hooks, registered here alone: context managers that observe or replace a model's attention and undo themselves.

Observation does not change what the model computes: with hooks on and nothing evicted its logits stay the same bit for
bit. `FiniteCheck` finds activations and scores that are not finite, with a single wait for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from perturbkv.cache.compact import CompactCache
from perturbkv.devices import stack_on_device
from perturbkv.errors import ActivationError, ModelError
from perturbkv.models.adapter import Adapter

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Observer:
    """Callbacks for the measured layers; each gets the layer's index first, `final` only the tensor.

    Attributes:
        attention: query (batch, head, query, d_head), key and value (batch, kv_head, key, d_head) after RoPE.
        head_output: input of the output projection (batch, query, head · d_head), before it mixes the heads.
        hidden: residual stream after the decoder layer (batch, query, d_model).
        final: hidden state after the final norm (batch, query, d_model).
        attention_input: input of the attention module, after its norm (batch, query, d_model).
    """

    attention: Callable[[int, Tensor, Tensor, Tensor], None] | None = None
    head_output: Callable[[int, Tensor], None] | None = None
    hidden: Callable[[int, Tensor], None] | None = None
    final: Callable[[Tensor], None] | None = None
    attention_input: Callable[[int, Tensor], None] | None = None


@contextmanager
def capture(adapter: Adapter, observer: Observer) -> Iterator[None]:
    """Call `observer` during every forward pass inside the block; on exit all hooks are gone, errors included."""
    with ExitStack() as stack:
        if observer.attention is not None:
            stack.enter_context(
                intercept_attention(adapter, partial(_observe_attention, adapter.layer_of, observer.attention))
            )
        for handle in _register_hooks(adapter, observer):
            stack.callback(handle.remove)
        yield


@contextmanager
def intercept_attention(
    adapter: Adapter, replacement: Callable[[AttentionFunction, nn.Module, Any, Any], Any], all_layers: bool = False
) -> Iterator[None]:
    """Send this model's attention through `replacement(stock, module, args, kwargs)` inside the block.

    Only that of the measured layers, unless `all_layers`. Other models in the process keep their attention. Raises
    ModelError where the model's attention implementation is not registered with transformers' attention interface.
    """
    name = adapter.model.config._attn_implementation
    registered = ALL_ATTENTION_FUNCTIONS.get(name)
    stock = registered or _eager_attention(adapter.every_layer[0].self_attn, name)
    if stock is None:
        msg = f"capture needs an attention registered with transformers, got '{name}'; load with 'sdpa'"
        raise ModelError(msg)
    ours = {id(layer.self_attn) for layer in (adapter.every_layer if all_layers else adapter.layers)}
    ALL_ATTENTION_FUNCTIONS[name] = lambda module, *args, **kwargs: (
        replacement(stock, module, args, kwargs)
        if id(module) in ours
        else (registered or _eager_attention(module, name) or stock)(module, *args, **kwargs)
    )
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]
        if registered is not None and ALL_ATTENTION_FUNCTIONS.get(name) is not registered:
            ALL_ATTENTION_FUNCTIONS[name] = registered


def _eager_attention(attention: nn.Module, name: str) -> AttentionFunction | None:
    """Return a family's eager attention, which transformers does not register; None for another kernel."""
    own = vars(sys.modules[type(attention).__module__]) if name == "eager" else {}
    return own.get("eager_attention_forward")


@contextmanager
def decode_from(adapter: Adapter, cache: CompactCache) -> Iterator[None]:
    """Let the model decode from `cache` inside the block: pass it as `past_key_values`, one row per configuration.

    New tokens get the cache's positions in rows that have their own, whatever `position_ids` are.
    """
    held = {id(layer.self_attn): cached for layer, cached in zip(adapter.every_layer, cache.layers, strict=True)}
    cache.attach(True)
    hook = partial(_set_positions, cache, adapter.rotary_kind)
    rotary = adapter.rotary.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        with intercept_attention(adapter, partial(_attend_to_cache, held), all_layers=True):
            yield
    finally:
        rotary.remove()
        cache.attach(False)


def _attend_to_cache(
    held: Mapping[int, Any], stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Tensor, None]:
    """Return the attention over a module's own layer of the cache."""
    return held[id(module)].attend(args[0], kwargs["scaling"], kwargs.get("s_aux")), None


def _set_positions(
    cache: CompactCache, kind: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return arguments with the positions at which the cache's rows continue, where these differ from the prompt's.

    A rotary module that serves several kinds of layers gets them for the measured kind alone.
    """
    positions = cache.positions(args[0].shape[1], args[0].device)
    others = kind and kwargs.get("layer_type", args[-1]) != kind[0]
    return None if positions is None or others else ((args[0], positions, *kind), {})


@contextmanager
def decode_shared(adapter: Adapter) -> Iterator[None]:
    """Let a batch of identical rows decode from a `SharedCache`, with the stock attention of row 0 for all rows."""
    with intercept_attention(adapter, _attend_row_0, all_layers=True):
        yield


def _attend_row_0(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Return the stock attention of row 0, for all rows."""
    query, key, value, mask, *others = args
    first = mask[:1] if isinstance(mask, Tensor) else mask
    output, weights = stock(module, query[:1], key, value, first, *others, **kwargs)
    return output.expand(query.shape[0], *output.shape[1:]), weights


def _observe_attention(
    layer_of: Callable[[nn.Module], int],
    callback: Callable[[int, Tensor, Tensor, Tensor], None],
    stock: AttentionFunction,
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> Any:
    """Return the stock attention after a call of `callback`."""
    callback(layer_of(module), args[0], args[1], args[2])
    return stock(module, *args, **kwargs)


def _register_hooks(adapter: Adapter, observer: Observer) -> Iterator[RemovableHandle]:
    """Register the hooks of an observer; the generator yields each handle as soon as its hook is on."""
    for index, (layer, attention) in enumerate(zip(adapter.layers, adapter.attentions, strict=True)):
        if observer.attention_input is not None:
            yield attention.register_forward_pre_hook(_entering_hook(index, observer.attention_input), with_kwargs=True)
        if observer.head_output is not None:
            yield attention.o_proj.register_forward_pre_hook(_head_output_hook(index, observer.head_output))
        if observer.hidden is not None:
            yield layer.register_forward_hook(_hidden_hook(index, observer.hidden))
    if observer.final is not None:
        callback = observer.final
        yield adapter.final_norm.register_forward_hook(lambda module, args, output: callback(output))


def _head_output_hook(index: int, callback: Callable[[int, Tensor], None]) -> Callable[..., None]:
    return lambda module, args: callback(index, args[0])


def _entering_hook(index: int, callback: Callable[[int, Tensor], None]) -> Callable[..., None]:
    return lambda module, args, kwargs: callback(index, args[0] if args else kwargs["hidden_states"])


def _hidden_hook(index: int, callback: Callable[[int, Tensor], None]) -> Callable[..., None]:
    return lambda module, args, output: callback(index, output[0] if isinstance(output, tuple) else output)


FINAL_NORM, LOGITS = "the outputs of the final norm", "the logits"


class FiniteCheck:
    """A record of activations that are not finite, kept without waiting for the device."""

    def __init__(self) -> None:
        self._finite: list[tuple[str, Tensor]] = []
        self._made: list[tuple[str, Tensor]] = []

    def __call__(self, layer: int, hidden: Tensor) -> None:
        """Check one layer's activations."""
        self.check(f"the hidden states of layer {layer}", hidden)

    def check(self, where: str, activations: Tensor) -> None:
        """Check activations; `where` names them in the error."""
        self._finite.append((where, torch.isfinite(activations).all()))

    def check_derived(self, where: str, numbers: Tensor) -> None:
        """Check numbers computed from activations, which are reported first."""
        self._made.append((where, torch.isfinite(numbers).all()))

    def raise_if_not(self, sample: str) -> None:
        """Raise ActivationError for the first record of NaN or Inf; waits for the device once."""
        if not self._finite:
            return
        names, flags = zip(*self._finite, *self._made, strict=True)
        for where, finite in zip(names, stack_on_device(flags[0].device, flags).tolist(), strict=True):
            if not finite:
                raise ActivationError(where, sample)
