"""W_O as numbers: the matrix that a layer's output projection multiplies by, however its weights are stored.

A quantised or wrapped projection is read as what it does: dequantised where its weight can say its values, else the
rows that unit vectors are taken to. What is no matrix at all, as it rounds its input too, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

_ROWS = 4
"""Random inputs that a projection is tried on, and as many again."""
_FAINT = 1 / 600
"""Beside an entry of 1: rounded to 8 bits by the largest, entries of this size are gone. LLM.int8 takes entries above 6
out of the rounding, so that 1 is the largest that is tried."""
_NEAR, _KEPT = 0.01, 0.25
"""How far what a matrix gives may lie from the product with it, relative to its length; and how far from 1 the share of
the faint entries that it passes on. A matrix that computes in bfloat16 was seen at 0.003 and 0.007, an input rounded to
float8 at 0.026 of the first, one rounded to int8 at 1 of the second."""


class NoMatrixError(Exception):
    """A projection that is no matrix, or cannot be read as one; the message says why."""


def is_plain(projection: Any) -> bool:
    """True where `weight` is the matrix as it is computed with."""
    weight: Any = getattr(projection, "weight", None)
    return type(projection) is nn.Linear and type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def read(projection: Any, width: int, dtype: torch.dtype) -> Float[Tensor, "d_model head_d_head"]:
    """The matrix of a projection of vectors of `width` numbers, laid out like `nn.Linear.weight`.

    One that is not plain is made anew by every call and held by nobody else.
    """
    if is_plain(projection):
        return cast("Tensor", projection.weight.detach())
    held = _dequantised(projection)
    matrix = _of_unit_vectors(projection, width, dtype) if held is None else held
    return matrix.to(dtype).contiguous()


def check(projection: Any, width: int, dtype: torch.dtype) -> None:
    """Raise NoMatrixError unless a projection multiplies by the matrix that `read` gives, whatever its input."""
    if is_plain(projection):
        return
    try:
        with torch.inference_mode():
            near, kept = _deviations(projection, width, dtype)
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, ImportError) as error:
        msg = f"cannot be read as a matrix ({' '.join(str(error).split())[:200] or type(error).__name__})"
        raise NoMatrixError(msg) from error
    if not (near <= _NEAR and kept <= _KEPT):
        msg = (
            "is no fixed matrix: what it does depends on its input's size, as where activations are quantised beside "
            "the weights"
        )
        raise NoMatrixError(msg)


def kind(projection: Any) -> str:
    """What a projection is, in words."""
    weight: Any = getattr(projection, "weight", None)
    held = getattr(weight, "dtype", None)
    of = "no weight" if held is None else type(weight).__name__ if _own(weight) else str(held).removeprefix("torch.")
    return f"{type(projection).__name__} of {of}"


def _deviations(projection: Any, width: int, dtype: torch.dtype) -> tuple[float, float]:
    """How far a projection is from its matrix on random vectors, and how much of faint entries it loses.

    Both relative to what the matrix alone does, in float32.
    """
    matrix = read(projection, width, dtype).float()
    apply = _applied(projection)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(_ROWS, width, generator=generator).to(matrix.device, dtype)
    expected = drawn.float() @ matrix.T
    near = (apply(drawn).float() - expected).norm() / expected.norm()
    faint = drawn.sign() * _FAINT
    faint[:, 0] = 0
    loud = torch.zeros_like(faint)
    loud[:, 0] = 1
    expected = faint.float() @ matrix.T
    passed = apply(faint + loud).float() - loud.float() @ matrix.T
    return float(near), float(((passed * expected).sum() / expected.square().sum() - 1).abs())


def _applied(projection: Any) -> Callable[[Tensor], Tensor]:
    """What a projection multiplies by: its forward without its bias, past all hooks, which are others'."""

    def apply(rows: Tensor) -> Tensor:
        with _without_bias(projection):
            return cast("Tensor", projection.forward(rows))

    return apply


@contextmanager
def _without_bias(projection: Any) -> Iterator[None]:
    """The bias is 0 inside the block: taken off what comes out, it would leave what was rounded to its size."""
    bias = getattr(projection, "bias", None)
    if bias is None:
        yield
        return
    held = bias.detach().clone()
    bias.detach().zero_()
    try:
        yield
    finally:
        bias.detach().copy_(held)


def _of_unit_vectors(projection: Any, width: int, dtype: torch.dtype) -> Tensor:
    device = next(iter([*projection.parameters(), *projection.buffers()])).device
    with torch.inference_mode():
        return _applied(projection)(torch.eye(width, dtype=dtype, device=device)).T


def _own(weight: Any) -> bool:
    """Whether a weight is a tensor of a class that knows what it stands for."""
    return getattr(type(weight), "dequantize", Tensor.dequantize) is not Tensor.dequantize


def _dequantised(projection: Any) -> Tensor | None:
    """What a weight says its values are; None where it is of no such class, or is not all that its projection is."""
    weight: Any = getattr(projection, "weight", None)
    if not _own(weight) or list(projection.children()):
        return None
    found = weight.dequantize().detach()  # the values, as a subclass itself cannot be detached while inferring
    return cast("Tensor", found) if found.is_floating_point() and found.shape == weight.shape else None
