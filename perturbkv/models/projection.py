"""W_O as a matrix of numbers: the matrix of a layer's output projection, however its weights are stored.

A quantised or wrapped projection is dequantised where its weight supports that, else applied to unit vectors. A
projection that is no matrix, because it rounds its input too, is refused.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from perturbkv.devices import dtype_name

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
    """Return whether a projection is an `nn.Linear` with an unquantised weight, and no other forward put on it."""
    weight: Any = getattr(projection, "weight", None)
    if type(projection) is not nn.Linear or "forward" in vars(projection):
        return False
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def read(projection: Any, width: int, dtype: torch.dtype) -> Float[Tensor, "d_model head_d_value"]:
    """Return a projection's matrix in the layout of `nn.Linear.weight`; `width` is the length of its input vectors.

    A matrix that is not plain is computed anew by every call.
    """
    if is_plain(projection):
        return cast("Tensor", projection.weight.detach())
    if type(projection) is Conv1D:  # GPT-2's linear layer, whose weight is transposed
        return cast("Tensor", projection.weight.detach().T.contiguous())
    weight: Any = getattr(projection, "weight", None)
    if _has_dequantize(weight) and not list(projection.children()):  # one that wraps no other modules
        values = weight.dequantize().detach()  # the values, as a subclass itself cannot be detached while inferring
        if values.is_floating_point() and values.shape == weight.shape:
            return cast("Tensor", values.to(dtype).contiguous())
    return _matrix_from_unit_vectors(projection, width, dtype).to(dtype).contiguous()


def check(projection: Any, width: int, dtype: torch.dtype) -> None:
    """Raise NoMatrixError unless a projection equals a product with the matrix that `read` returns."""
    if is_plain(projection):
        return
    try:
        with torch.inference_mode():
            deviation, loss = _deviations(projection, width, dtype)
    except (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, ImportError) as error:
        raise NoMatrixError(
            f"cannot be read as a matrix ({' '.join(str(error).split())[:200] or type(error).__name__})"
        ) from error
    if not (deviation <= _MAX_ERROR and loss <= _MAX_LOSS):
        raise NoMatrixError(
            "is no fixed matrix: what it does depends on its input's size, as where activations are quantised beside "
            "the weights"
        )


def check_outputs(
    projection: Any, inputs: Float[Tensor, "token head_d_value"], outputs: Float[Tensor, "token d_model"]
) -> None:
    """Raise NoMatrixError unless outputs in a forward pass are the product of their inputs with the matrix of `read`.

    A bias, which all tokens have, is left out with their means.
    """
    x, y = (rows.float() - rows.float().mean(dim=0) for rows in (inputs, outputs))
    expected = x @ read(projection, inputs.shape[1], inputs.dtype).float().T
    if y.shape != expected.shape or not (y - expected).norm() <= _MAX_ERROR * expected.norm():
        raise NoMatrixError("is no fixed matrix: what it does in a text depends on more than its input")


def describe(projection: Any) -> str:
    """Return a projection's class and its weight's type in words, such as `Linear4bit of uint8`."""
    weight: Any = getattr(projection, "weight", None)
    dtype = getattr(weight, "dtype", None)
    weight_type = (
        "no weight" if dtype is None else type(weight).__name__ if _has_dequantize(weight) else dtype_name(dtype)
    )
    return f"{type(projection).__name__} of {weight_type}"


def _deviations(projection: Any, width: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return a projection's error on random vectors, and the lost share of faint components beside a large one.

    Both are relative to the product with the matrix in float32.
    """
    matrix = read(projection, width, dtype).float()
    drawn = torch.randn(_ROWS, width, generator=torch.Generator().manual_seed(0)).to(matrix.device, dtype)
    expected = drawn.float() @ matrix.T
    deviation = (_apply_without_bias(projection, drawn).float() - expected).norm() / expected.norm()
    faint = drawn.sign() * _FAINT_SIZE
    faint[:, 0] = 0
    loud = torch.zeros_like(faint)
    loud[:, 0] = 1
    expected = faint.float() @ matrix.T
    passed = _apply_without_bias(projection, faint + loud).float() - loud.float() @ matrix.T
    return float(deviation), float(((passed * expected).sum() / expected.square().sum() - 1).abs())


def _apply_without_bias(projection: Any, rows: Tensor) -> Tensor:
    """Return a projection's outputs for rows of input vectors, without hooks and with a zero bias.

    Subtracting the bias from the output would leave its rounding.
    """
    if (bias := getattr(projection, "bias", None)) is None:
        return cast("Tensor", projection.forward(rows))
    saved = bias.detach().clone()
    bias.detach().zero_()
    try:
        return cast("Tensor", projection.forward(rows))
    finally:
        bias.detach().copy_(saved)


def _matrix_from_unit_vectors(projection: Any, width: int, dtype: torch.dtype) -> Tensor:
    """Return a projection's matrix, computed by applying the projection to every unit vector."""
    device = next(iter([*projection.parameters(), *projection.buffers()])).device
    with torch.inference_mode():
        return _apply_without_bias(projection, torch.eye(width, dtype=dtype, device=device)).T


def _has_dequantize(weight: Any) -> bool:
    """Return whether a weight is a tensor whose own class defines `dequantize`."""
    return getattr(type(weight), "dequantize", Tensor.dequantize) is not Tensor.dequantize
