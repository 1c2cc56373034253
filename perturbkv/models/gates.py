"""Gates between attention and projection: what the projection receives where attention's output is all ones.

The module's own code makes γ, whatever it is called there: it is run on the attention's output and on ones beside it,
from the attention on until the projection. The attention itself and all products with weights run once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class BesideOnes(Tensor):
    """A tensor with a second one beside it: every function of it is computed of both.

    Attributes:
        plain: the tensor itself.
        ones: the one beside it, which began as ones.
    """

    plain: Tensor
    ones: Tensor

    @classmethod
    def pair(cls, plain: Tensor, ones: Tensor) -> BesideOnes:
        """Return a tensor with another one of its shape beside it."""
        made = plain.as_subclass(cls)
        made.plain, made.ones = plain, ones
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the pair of the function's results; what is no tensor, such as a shape, is the plain tensor's."""
        given = (tuple(args), dict(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            found, beside = (_apply(func, given, side) for side in ("plain", "ones"))
            if isinstance(found, Tensor):
                return cls.pair(found, beside)
            if isinstance(found, tuple) and all(isinstance(part, Tensor) for part in found):
                return tuple(map(cls.pair, found, beside))
        return found


def _apply(func: Callable[..., Any], given: Any, side: str) -> Any:
    """Return a function of arguments, each pair of tensors replaced by one side of it."""
    args, kwargs = tree_map_only(BesideOnes, lambda pair: getattr(pair, side), given)
    return func(*args, **kwargs)


def beside_ones(output: Tensor) -> BesideOnes:
    """Return attention's output with ones beside it."""
    return BesideOnes.pair(output, torch.ones_like(output))


def split(received: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a projection receives, and γ of the same shape, from the attention's output `beside_ones`."""
    if not isinstance(received, BesideOnes):
        raise TypeError("expected a projection that receives what follows from attention's output")
    return received.plain, received.ones
