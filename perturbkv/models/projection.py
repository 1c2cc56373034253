"""W_O as a matrix of numbers: what a layer's output projection multiplies by, however its weights are stored.

A quantised or wrapped projection is dequantised where its weight supports that, else applied to unit vectors. A
projection that is no matrix, because it rounds its input too, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

_ROWS = 4
"""Random inputs on which a projection is tested, and as many of faint entries."""
_FAINT_SIZE = 1 / 600
"""Size of faint entries next to an entry of 1: rounding to 8 bits by the largest entry removes them.

LLM.int8 exempts entries above 6 from rounding, so that 1 is the largest that is tested.
"""
_MAX_ERROR, _MAX_LOSS = 0.01, 0.25
"""Tolerances: the relative error of the product with the matrix, and the deviation from 1 of the faint entries' share.

Measured: 0.003 and 0.007 for a matrix in bfloat16, 0.026 of the first for inputs rounded to float8, 1 of the second for
inputs rounded to int8.
"""


class NoMatrixError(Exception):
    """A projection that is no matrix, or cannot be read as one; the message says why."""


def is_plain(projection: Any) -> bool:
    """Return whether `weight` is the matrix that the projection computes with."""
    weight: Any = getattr(projection, "weight", None)
    return type(projection) is nn.Linear and type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def read(projection: Any, width: int, dtype: torch.dtype) -> Float[Tensor, "d_model head_d_head"]:
    """Return the matrix of a projection of vectors of `width` numbers, laid out like `nn.Linear.weight`.

    A matrix that is not plain is computed anew by every call.
    """
    if is_plain(projection):
        return cast("Tensor", projection.weight.detach())
    dequantised = _dequantise(projection)
    matrix = _matrix_from_unit_vectors(projection, width, dtype) if dequantised is None else dequantised
    return matrix.to(dtype).contiguous()


def check(projection: Any, width: int, dtype: torch.dtype) -> None:
    """Raise NoMatrixError unless a projection multiplies by the matrix of `read`, whatever its input."""
    if is_plain(projection):
        return
    try:
        with torch.inference_mode():
            deviation, loss = _deviations(projection, width, dtype)
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, ImportError) as error:
        msg = f"cannot be read as a matrix ({' '.join(str(error).split())[:200] or type(error).__name__})"
        raise NoMatrixError(msg) from error
    if not (deviation <= _MAX_ERROR and loss <= _MAX_LOSS):
        msg = (
            "is no fixed matrix: what it does depends on its input's size, as where activations are quantised beside "
            "the weights"
        )
        raise NoMatrixError(msg)


def kind(projection: Any) -> str:
    """Return a description of a projection: its class and the type of its weight."""
    weight: Any = getattr(projection, "weight", None)
    dtype = getattr(weight, "dtype", None)
    weight_type = (
        "no weight"
        if dtype is None
        else type(weight).__name__
        if _has_dequantize(weight)
        else str(dtype).removeprefix("torch.")
    )
    return f"{type(projection).__name__} of {weight_type}"


def _deviations(projection: Any, width: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error of a projection on random vectors, and the lost share of faint entries.

    Both are relative to the product with the matrix in float32.
    """
    matrix = read(projection, width, dtype).float()
    apply = _linear_map(projection)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(_ROWS, width, generator=generator).to(matrix.device, dtype)
    expected = drawn.float() @ matrix.T
    deviation = (apply(drawn).float() - expected).norm() / expected.norm()
    faint = drawn.sign() * _FAINT_SIZE
    faint[:, 0] = 0
    loud = torch.zeros_like(faint)
    loud[:, 0] = 1
    expected = faint.float() @ matrix.T
    passed = apply(faint + loud).float() - loud.float() @ matrix.T
    return float(deviation), float(((passed * expected).sum() / expected.square().sum() - 1).abs())


def _linear_map(projection: Any) -> Callable[[Tensor], Tensor]:
    """Return the linear map of a projection: its forward without bias and without hooks."""

    def apply(rows: Tensor) -> Tensor:
        with _without_bias(projection):
            return cast("Tensor", projection.forward(rows))

    return apply


@contextmanager
def _without_bias(projection: Any) -> Iterator[None]:
    """Set the bias to 0 inside the block: subtracting it from the output would leave its rounding."""
    bias = getattr(projection, "bias", None)
    if bias is None:
        yield
        return
    saved = bias.detach().clone()
    bias.detach().zero_()
    try:
        yield
    finally:
        bias.detach().copy_(saved)


def _matrix_from_unit_vectors(projection: Any, width: int, dtype: torch.dtype) -> Tensor:
    device = next(iter([*projection.parameters(), *projection.buffers()])).device
    with torch.inference_mode():
        return _linear_map(projection)(torch.eye(width, dtype=dtype, device=device)).T


def _has_dequantize(weight: Any) -> bool:
    """Return whether a weight is a tensor of a class with a `dequantize` of its own."""
    return getattr(type(weight), "dequantize", Tensor.dequantize) is not Tensor.dequantize


def _dequantise(projection: Any) -> Tensor | None:
    """Return the dequantised values of a weight.

    None for another class, or where the projection has more than a weight.
    """
    weight: Any = getattr(projection, "weight", None)
    if not _has_dequantize(weight) or list(projection.children()):
        return None
    values = weight.dequantize().detach()  # the values, as a subclass itself cannot be detached while inferring
    return cast("Tensor", values) if values.is_floating_point() and values.shape == weight.shape else None
