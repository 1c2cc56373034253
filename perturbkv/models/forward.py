"""The one place where a model runs with a cache, under whichever name its forward takes it.

transformers 5.24 renames the argument `past_key_values` to `cache`. An older forward passes over a `cache=` among its
further arguments and runs without it, so the name is asked of the signature, and the outputs must give the cache back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from perturbkv.errors import ModelError

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the forward's argument that takes the cache: from transformers 5.24 on, and before."""


@functools.cache
def cache_argument(forward: Callable[..., Any]) -> tuple[str, bool]:
    """Return the name of the argument by which the forward of a class of models takes a cache, as `generate` does.

    The second is whether it takes the positions of tokens. Raises ModelError for a forward that names no cache.
    """
    parameters = signature(forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in parameters:
            return name, "position_ids" in parameters
    raise ModelError(
        f"expected {forward.__qualname__} to take a cache as {' or '.join(CACHE_ARGUMENTS)}, got "
        f"({', '.join(list(parameters)[1:])}); name the argument in its signature"
    )


def run_with_cache(model: Any, input_ids: Tensor, cache: Cache, **arguments: Any) -> Any:
    """Return the outputs of a forward pass that reads the tokens into `cache`; `model` is one with or without a head.

    Positions are given as `generate` gives them, as a forward may begin at 0 by itself whatever is cached (Bamba's).

    Raises ModelError for a forward that takes no cache, or that ran without the one it was given.
    """
    name, takes_positions = cache_argument(type(model).forward)
    if takes_positions:
        begin = cache.get_seq_length()
        positions = torch.arange(begin, begin + input_ids.shape[1], device=input_ids.device)
        arguments = {"position_ids": positions.unsqueeze(0), **arguments}
    outputs = model(input_ids=input_ids, use_cache=True, **{name: cache}, **arguments)
    if getattr(outputs, name, None) is not cache:
        raise ModelError(
            f"{type(model).__name__} ran without the cache that it was given as {name}: its outputs hold another; use "
            "the forward of transformers"
        )
    return outputs
