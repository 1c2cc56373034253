"""Where the heads' outputs go: followed through the attention module by random numbers in their place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from perturbkv.models import gates, projection, recurrent_states
from perturbkv.models.attention_facts import LayerFacts, RefusedError
from perturbkv.models.interface import AttentionFunction, implementation, intercept
from perturbkv.models.proof.calls import ERRORS, LOGIT_ERRORS, probe_text, read_tokens

_LARGE = 1000
"""Factor on random outputs by which a norm or a bound of them shows; half precision holds their products."""


class Receiver(NamedTuple):
    """The map that receives a layer's heads' outputs.

    Attributes:
        path: from the attention module.
        has_gate: whether they arrive times a gate.
        inputs, outputs: what it received and put out for random heads' outputs (token, …), a token each.
    """

    path: str
    has_gate: bool
    inputs: Tensor
    outputs: Tensor


def find_projections(
    model: Any, ids: Tensor, attentions: Mapping[int, nn.Module], decoder: Sequence[nn.Module]
) -> dict[int, Receiver]:
    """Return per layer the map that receives the heads' outputs.

    Row 0 of the batch runs as it is; in the others other numbers stand in the place of the heads' outputs, after
    another text each, while the attention's input is row 0's. Once each map puts out row 0's output in all rows, and
    recurrent states are row 0's, all rows of the `decoder`'s layers and of the logits must be equal. Raises
    RefusedError where no map or several receive the heads' outputs unchanged, or times a gate, or where they, or cached
    entries, go anywhere else.
    """
    receivers = {index: _Receivers(module) for index, module in attentions.items()}
    drawn, with_gate = dict[int, Tensor](), set[int]()

    def attend(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
        output, weights = stock(module, *args, **kwargs)
        generator = torch.Generator().manual_seed(len(drawn))
        rows = torch.randn(2, *output.shape[1:], generator=generator).to(output)
        drawn[id(module)] = torch.cat([output[:1], rows[:1], _LARGE * rows[1:], torch.ones_like(rows[:1])])
        output = drawn[id(module)]
        return gates.beside_ones(output) if id(module) in with_gate else output, weights

    cache, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for each in (cache, other):
        read_tokens(model, torch.cat([probe_text(model, seed) for seed in range(1, 5)]), each)
    with ExitStack() as stack:
        for receiver in receivers.values():
            stack.enter_context(receiver)
        stack.enter_context(intercept(implementation(model), list(attentions.values()), attend))
        read_tokens(model, ids.expand(4, -1), cache)
        found = {index: receiver.find(drawn[id(receiver.attention)], index) for index, receiver in receivers.items()}
        for index, receiver in receivers.items():
            receiver.silence(found[index])
        with_gate |= {id(attentions[index]) for index, one in found.items() if one.has_gate}
        drawn.clear()
        outputs = dict[int, Tensor]()
        for index, (layer, cached) in enumerate(zip(decoder, other.layers, strict=True)):
            stack.callback(layer.register_forward_hook(partial(_keep_layer_output, outputs, index)).remove)
            if recurrent_states.size(cached):
                recurrent_states.LAYER.reorder_cache(cached, torch.zeros(4, dtype=torch.int64))
        logits = read_tokens(model, ids.expand(4, -1), other)
    for index, output in outputs.items():
        _check_alike(output.transpose(0, -3), index)
    _check_alike(logits.nan_to_num(0, 0, 0), None)  # of logits that are no numbers every run tells
    return found


def _keep_layer_output(outputs: dict[int, Tensor], index: int, module: nn.Module, args: Any, output: Any) -> None:
    """Store what a decoder layer puts out: a forward hook."""
    outputs[index] = output[0] if isinstance(output, tuple) else output


def _check_alike(rows: Tensor, index: int | None) -> None:
    """Raise RefusedError unless all rows, of other heads' outputs each, are equal behind the silenced map."""
    bound = LOGIT_ERRORS[rows.dtype] * float(rows.double().abs().amax())
    if not float((rows.double() - rows[:1].double()).abs().amax()) <= bound:
        raise RefusedError("projection", "lets its heads' outputs past the map that receives them", index)


class _Receivers:
    """The maps inside an attention module, with what they receive in the block."""

    def __init__(self, attention: nn.Module) -> None:
        self.attention = attention
        self.passed: dict[str, list[tuple[Tensor, Any]]] = {}  # a map's path -> what each call received and put out

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.callback(self.attention.register_forward_pre_hook(_repeat_row_0, with_kwargs=True).remove)
        for name, module in self.attention.named_modules():
            if name and not isinstance(module, nn.Dropout | nn.Identity):
                self._stack.callback(module.register_forward_hook(partial(self._keep, name)).remove)

    def __exit__(self, *about: object) -> None:
        self._stack.close()

    def _keep(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if args and isinstance(args[0], Tensor) and args[0].dtype.is_floating_point:
            self.passed.setdefault(name, []).append((args[0], output))

    def find(self, drawn: Tensor, index: int) -> Receiver:
        """Return the module that received `drawn`, heads side by side.

        A module inside another that received them is a part of that one. Raises RefusedError.
        """
        flat = drawn.flatten(2)
        alike = {name: got.reshape(flat.shape) for name, calls in self.passed.items() for got, _ in calls
                 if got.numel() == flat.numel() and got.shape[-1] == flat.shape[-1]}  # fmt: skip
        plain = _outermost(name for name, got in alike.items() if torch.equal(got, flat))
        names = plain or _outermost(name for name, got in alike.items() if _is_gated(got, flat))
        if not names:
            raise RefusedError("projection", "changes its heads' outputs before any map receives them", index)
        if len(names) > 1:
            raise RefusedError(
                "projection", f"gives its heads' outputs to {len(names)} maps, {' and '.join(names)}", index
            )
        if (times := len(self.passed[names[0]])) > 1:
            raise RefusedError(
                "projection", f"calls '{names[0]}', which receives its heads' outputs, {times} times", index
            )
        output = self.passed[names[0]][0][1].reshape(*flat.shape[:2], -1)
        return Receiver(names[0], not plain, alike[names[0]][1], output[1])

    def silence(self, receiver: Receiver) -> None:
        """Let this module put out row 0's output in all rows, and receive ones beside its input after a gate."""
        module = self.attention.get_submodule(receiver.path)
        if receiver.has_gate:
            self._stack.callback(module.register_forward_pre_hook(lambda _, args: gates.split(args[0])[:1]).remove)
        self._stack.callback(module.register_forward_hook(lambda *about: _of_row_0(about[-1])).remove)


def check_matrix(attention: nn.Module, facts: LayerFacts, index: int, dtype: torch.dtype, receiver: Receiver) -> None:
    """Raise RefusedError unless the module that receives a layer's heads' outputs is a matrix, of all tokens the same.

    `receiver` holds what it did to some tokens' random numbers.
    """
    module = attention.get_submodule(facts.projection)
    try:
        projection.check(module, facts.heads * facts.d_value, dtype)
        projection.check_outputs(module, receiver.inputs, receiver.outputs)
    except projection.NoMatrixError as error:
        raise RefusedError(
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

    A norm of the outputs, or a bound, would take from row 2 that it is larger.
    """
    expected = received[3:].double() * drawn[1:3].double()
    errors = (received[1:3].double() - expected).abs().amax(dim=(1, 2)) / expected.abs().amax(dim=(1, 2)).clamp(1e-30)
    return bool((errors <= ERRORS[received.dtype]).all())


def _of_row_0(output: Tensor) -> Tensor:
    """Return a map's output of four rows' tokens in whatever shape, with row 0's in the place of all."""
    return output.reshape(4, -1)[:1].expand(4, -1).reshape(output.shape)


def _repeat_row_0(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Give every row of a batch row 0's hidden states: a pre-hook of an attention module."""
    if args:
        return (_row_0(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": _row_0(kwargs["hidden_states"])}


def _row_0(hidden: Tensor) -> Tensor:
    """Return a batch (row, token, d_model), or one in several streams (stream, …), all of whose rows are row 0."""
    return hidden[..., :1, :, :].expand_as(hidden).contiguous()
