"""Transformers' attention interface: functions that replace a model's attention inside a block and undo themselves.

A model calls a function registered under the name of its attention implementation; eager attention is not registered,
but is a function of the family's own file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, cast

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from perturbkv.errors import ModelError

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
"""A function of transformers' attention interface: attention module, query, key, value, mask and options -> output
(batch, query, head, d_value), and the weights or None."""


PLAIN_KERNELS = ("sdpa", "eager")
"""Attention implementations that the proof runs as they are."""


def default_implementation(kind: Any) -> str:
    """Return the attention implementation that a class of models is run with: sdpa, or eager where it needs more."""
    return "sdpa" if kind._supports_sdpa else "eager"


@contextmanager
def intercept(
    implementation: str,
    modules: Collection[nn.Module],
    replacement: Callable[[AttentionFunction, nn.Module, Any, Any], Any],
    *,
    keeps_others: bool = False,
) -> Iterator[None]:
    """Replace the attention of some modules by `replacement(stock, module, args, kwargs)` inside the block.

    `stock` is the module's own attention function, which all other modules in the process keep; `args` are query, key,
    value and mask, however the model gives them. `keeps_others` as in `_registered`. Raises ModelError where the
    attention implementation is not registered with transformers' attention interface.
    """
    registered, replaced = ALL_ATTENTION_FUNCTIONS.get(implementation), {id(module) for module in modules}
    if registered is None and implementation != "eager":
        raise ModelError(
            f"capture needs an attention registered with transformers, got '{implementation}'; load with 'sdpa'"
        )

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *more: Any, **kwargs: Any
    ) -> Any:
        stock, args = registered or _eager_attention(module), (query, key, value, attention_mask, *more)
        return replacement(stock, module, args, kwargs) if id(module) in replaced else stock(module, *args, **kwargs)

    with _registered(ALL_ATTENTION_FUNCTIONS, implementation, attend, keeps_others=keeps_others):
        yield


def intercept_masks(implementation: str, make: Callable[..., Any]) -> AbstractContextManager[None]:
    """Let `make`, with the arguments of transformers' mask interface, make the masks of an implementation's models."""
    return _registered(ALL_MASK_ATTENTION_FUNCTIONS, implementation, make)


@contextmanager
def plain_kernel(implementation: str) -> Iterator[None]:
    """Let a model run sdpa inside the block where its attention implementation, such as flash attention, is another.

    Masks of such kernels cannot be looked at. A name that is not registered is left to `intercept`.
    """
    if implementation in PLAIN_KERNELS or implementation not in ALL_ATTENTION_FUNCTIONS:
        yield
        return
    attention, masks = ALL_ATTENTION_FUNCTIONS["sdpa"], ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    with (
        _registered(ALL_ATTENTION_FUNCTIONS, implementation, attention),
        _registered(ALL_MASK_ATTENTION_FUNCTIONS, implementation, masks),
    ):
        yield


def _eager_attention(module: nn.Module) -> AttentionFunction:
    """Return the eager attention of a module's family. Raises ModelError where its file has none."""
    function = vars(sys.modules[type(module).__module__]).get("eager_attention_forward")
    if function is None:
        raise ModelError(f"{type(module).__name__} has no eager attention; load the model with 'sdpa'")
    return cast("AttentionFunction", function)


@contextmanager
def _registered(
    functions: MutableMapping[str, Any], name: str, function: Callable[..., Any], *, keeps_others: bool = False
) -> Iterator[None]:
    """Register a function under a name inside the block, and what was there before afterwards.

    With `keeps_others` what others register inside the block stays.
    """
    before = functions.get(name)
    functions[name] = function
    try:
        yield
    finally:
        if not keeps_others or functions.get(name) is function:
            with suppress(KeyError):  # what was there before may be a function for every model
                del functions[name]
            if before is not None and functions.get(name) is not before:
                functions[name] = before


def text_config(model: Any) -> Any:
    """Return the configuration of a model's decoder, which is a part of that of a model that reads images too."""
    return model.config.get_text_config(decoder=True)


def implementation(model: Any) -> str:
    """Return the name of the attention implementation that a model's text part is run with."""
    return str(text_config(model)._attn_implementation)
