"""Hooks, registered here alone: context managers that observe or replace a model's attention and undo themselves.

Observation does not change what the model computes: with hooks on and nothing evicted its logits stay the same bit for
bit. `FiniteCheck` finds activations and scores that are not finite, with a single wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from perturbkv.cache.compact import CompactCache
from perturbkv.devices import stack_on_device
from perturbkv.errors import ActivationError, ModelError
from perturbkv.models import gates
from perturbkv.models.adapter import Adapter
from perturbkv.models.interface import AttentionFunction, implementation, intercept
from perturbkv.theory import Softmax


@dataclass(frozen=True)
class Observer:
    """Callbacks for the measured layers, `hidden` for all; each gets the layer's index first, `final` only the tensor.

    Attributes:
        attention: query (batch, head, query, d_key), key (batch, kv_head, key, d_key) and value (batch, kv_head, key,
            d_value), after RoPE.
        head_output: input of the output projection (batch, query, head · d_value), before it mixes the heads; a tensor
            that it returns is projected instead.
        hidden: residual stream after a decoder layer, measured or not (batch, query, d_model), or several streams side
            by side; the index is the layer's number among all.
        final: hidden state after the final norm (batch, query, d_model).
        attention_input: input of the attention module, after its norm (batch, query, d_model).
        gate: γ of a layer with a gate (batch, query, head · d_value), after `attention` and before `head_output`.
        positions: positions (batch, query) that the decoder is given; not called where it numbers the tokens itself.
    """

    attention: Callable[[int, Tensor, Tensor, Tensor], None] | None = None
    head_output: Callable[[int, Tensor], Tensor | None] | None = None
    hidden: Callable[[int, Tensor], None] | None = None
    final: Callable[[Tensor], None] | None = None
    attention_input: Callable[[int, Tensor], None] | None = None
    gate: Callable[[int, Tensor], None] | None = None
    positions: Callable[[Tensor], None] | None = None


@contextmanager
def capture(adapter: Adapter, observer: Observer) -> Iterator[None]:
    """Call the methods of `observer` in every forward pass inside the block; all hooks are removed on exit."""
    with ExitStack() as stack:
        if observer.attention is not None or observer.gate is not None:
            stack.enter_context(intercept_attention(adapter, partial(_observe_attention, adapter, observer)))
        for handle in _register_hooks(adapter, observer):
            stack.callback(handle.remove)
        yield


def intercept_attention(
    adapter: Adapter,
    replacement: Callable[[AttentionFunction, nn.Module, Any, Any], Any],
    all_layers: bool = False,
    *,
    keeps_others: bool = False,
) -> AbstractContextManager[None]:
    """Replace the model's attention by `replacement(stock, module, args, kwargs)` inside the block.

    `stock` is the model's own attention function. Only measured layers are replaced unless `all_layers`; an attention
    that others register inside the block is forgotten unless `keeps_others`. Raises ModelError as
    `interface.intercept`.
    """
    modules = adapter.every_attention.values() if all_layers else adapter.attentions
    return intercept(implementation(adapter.model), modules, replacement, keeps_others=keeps_others)


@contextmanager
def decode_from(adapter: Adapter, cache: CompactCache) -> Iterator[None]:
    """Let the model decode from `cache` inside the block, with `run_with_cache`; rows are configurations."""
    cache_layers = {
        id(attention): cache.layers[adapter.facts.holder(index)] for index, attention in adapter.every_attention.items()
    }
    readers = {
        id(attention)
        for index, attention in adapter.every_attention.items()
        if adapter.facts.layers[index].owner is not None
    }
    cache.attach(True)
    try:
        with intercept_attention(adapter, partial(_attend_to_cache, cache_layers, readers), all_layers=True):
            yield
    finally:
        cache.attach(False)


def _attend_to_cache(
    cache_layers: Mapping[int, Any],
    readers: Collection[int],
    stock: AttentionFunction,
    module: nn.Module,
    args: Any,
    kwargs: Any,
) -> tuple[Tensor, None]:
    """Append the new tokens to the module's layer of a compact cache, and return the attention output over it.

    An attention replacement. `cache_layers` are keyed by the identity of the attention modules; for those of `readers`
    another layer, whose cache they read, has appended the tokens. Models pass their soft cap as `softcap`, and the
    logits of their sinks as `s_aux`; the scale of a model that passes none is that of its attention function.
    """
    layer, (query, key, value) = cache_layers[id(module)], args[:3]
    if id(module) not in readers:
        layer.append(key, value)
    scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
    return layer.attend(query, Softmax(scale, kwargs.get("softcap"), kwargs.get("s_aux"))), None


def decode_shared(adapter: Adapter) -> AbstractContextManager[None]:
    """Let a batch of identical rows decode from a `SharedCache` inside the block, with row 0's attention for all."""
    return intercept_attention(adapter, _attend_row_0, all_layers=True)


def _attend_row_0(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Return the stock attention of row 0, expanded to all rows: an attention replacement."""
    query, key, value, mask, *rest = args
    first = mask[:1] if isinstance(mask, Tensor) else mask
    output, weights = stock(module, query[:1], key, value, first, *rest, **kwargs)
    return output.expand(query.shape[0], *output.shape[1:]), weights


def _observe_attention(
    adapter: Adapter, observer: Observer, stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the stock attention, with ones beside it where a gate follows and is observed: an attention replacement.

    `observer.attention` is called with the attention's inputs.
    """
    layer, (query, key, value, *_) = adapter.layer_of(module), args
    if observer.attention is not None:
        observer.attention(layer, query, key, value)
    output, weights = stock(module, *args, **kwargs)
    return gates.beside_ones(output) if observer.gate is not None and adapter.has_gate(layer) else output, weights


def _register_hooks(adapter: Adapter, observer: Observer) -> Iterator[RemovableHandle]:
    """Register the hooks of an observer on the model, and yield every hook's handle on registration."""
    if observer.hidden is not None:
        for number, layer in enumerate(adapter.every_layer):
            yield layer.register_forward_hook(partial(_give_hidden, observer.hidden, number))
    for index, attention in enumerate(adapter.attentions):
        if observer.attention_input is not None:
            hook = partial(_give_input, observer.attention_input, index)
            yield attention.register_forward_pre_hook(hook, with_kwargs=True)
        projection = adapter.projections[index]
        if observer.gate is not None and adapter.has_gate(index):
            yield projection.register_forward_pre_hook(partial(_give_gate, observer.gate, index))
        if observer.head_output is not None:
            yield projection.register_forward_pre_hook(partial(_give_head_output, observer.head_output, index))
    if observer.final is not None:
        callback = observer.final
        yield adapter.base.register_forward_hook(lambda module, args, output: callback(output[0]))
    if observer.positions is not None:
        hook = partial(_give_positions, observer.positions)
        yield adapter.base.register_forward_pre_hook(hook, with_kwargs=True)


def _give_gate(callback: Callable[[int, Tensor], None], index: int, module: nn.Module, args: Any) -> Any:
    """Call `callback` with γ, and leave the rest to layer `index`'s output projection: a pre-hook."""
    received, gate = gates.split(args[0])
    callback(index, gate.flatten(2))
    return (received, *args[1:])


def _give_head_output(
    callback: Callable[[int, Tensor], Tensor | None], index: int, module: nn.Module, args: Any
) -> Tensor | None:
    """Call `callback` with the input of layer `index`'s output projection, which it may replace: a pre-hook."""
    return callback(index, args[0])


def _give_input(callback: Callable[[int, Tensor], None], index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Call `callback` with the input of layer `index`'s attention: a pre-hook."""
    callback(index, args[0] if args else kwargs["hidden_states"])


def _give_positions(callback: Callable[[Tensor], None], module: nn.Module, args: Any, kwargs: Any) -> None:
    """Call `callback` with the positions that a decoder is given, if it is: a pre-hook."""
    if kwargs.get("position_ids") is not None:
        callback(kwargs["position_ids"])


def _give_hidden(
    callback: Callable[[int, Tensor], None], number: int, module: nn.Module, args: Any, output: Any
) -> None:
    """Call `callback` with the output of decoder layer `number`, parallel streams side by side: a hook."""
    states = output[0] if isinstance(output, tuple) else output
    callback(number, states if states.dim() == 3 else states.movedim(0, -2).flatten(-2))


FINAL_NORM, LOGITS = "the outputs of the final norm", "the logits"
"""Names of activations in error messages."""


def _are_finite(numbers: Tensor) -> Tensor:
    """Return whether all numbers are finite, as a tensor, by the least and the largest: one pass, no copy.

    NaN is the least and the largest where there is one; no numbers at all are finite.
    """
    return torch.isfinite(torch.stack(torch.aminmax(numbers))).all() if numbers.numel() else numbers.new_ones(()).bool()


class FiniteCheck:
    """A record of which activations are finite, filled without waiting for the device."""

    def __init__(self) -> None:
        self._activations: list[tuple[str, Tensor]] = []
        self._derived: list[tuple[str, Tensor]] = []
        self._agreements: list[tuple[str, Tensor]] = []

    def __call__(self, layer: int, hidden: Tensor) -> None:
        """Record whether the hidden states of a layer are finite: an `Observer.hidden`."""
        self.check(f"the hidden states of layer {layer}", hidden)

    def check(self, where: str, activations: Tensor) -> None:
        """Record whether activations are finite; `where` describes the activations in an error message."""
        self._activations.append((where, _are_finite(activations)))

    def check_derived(self, where: str, numbers: Tensor) -> None:
        """Record whether numbers computed from activations are finite; an error about activations takes precedence."""
        self._derived.append((where, _are_finite(numbers)))

    def check_agreement(self, what: str, off: Tensor, bound: float) -> None:
        """Record whether a difference that should be rounding is at most `bound`; `what` is the error's beginning."""
        self._agreements.append((what, off <= bound))

    def raise_if_not(self, sample: str) -> None:
        """Raise for the first bad record, after waiting for the device once.

        Raises ActivationError for NaN or Inf, and ModelError for a difference that is no rounding.
        """
        if not self._activations:
            return
        names, flags = zip(*self._activations, *self._derived, *self._agreements, strict=True)
        checked = len(self._activations) + len(self._derived)
        for index, good in enumerate(stack_on_device(flags[0].device, flags).tolist()):
            if not good:
                raise (
                    ActivationError(names[index], sample)
                    if index < checked
                    else ModelError(f"{names[index]} in sample '{sample}'; its numbers would be wrong")
                )
