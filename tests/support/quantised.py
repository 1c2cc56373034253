"""Home-made quantised projections: what the packages' own do, in a few lines each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perturbkv.trace import Trace

Rounding = Callable[[Tensor], Tensor]


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers to 127 and a scale for every row."""
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def to_int8(rows: Tensor) -> Tensor:
    """As dynamic quantisation rounds activations: by the largest of each row."""
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-9) / 127
    return (rows / scale).round() * scale


def to_float8(rows: Tensor) -> Tensor:
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-9) / 448
    return (rows / scale).to(torch.float8_e4m3fn).to(rows.dtype) * scale


def to_fixed_int8(rows: Tensor) -> Tensor:
    """As static quantisation does: one scale for all inputs, larger ones cut off."""
    return (rows / 0.05).round().clamp(-127, 127) * 0.05


def to_bfloat16(rows: Tensor) -> Tensor:
    return rows.bfloat16().to(rows.dtype)


class Int8Linear(nn.Module):
    """Stores a linear module's weights in int8; `rounding` is what happens to its input."""

    def __init__(self, linear: nn.Linear, rounding: Rounding | None = None) -> None:
        super().__init__()
        values, scale = rounded(linear.weight.detach())
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)
        self.bias = linear.bias
        self.rounding = rounding

    @property
    def matrix(self) -> Tensor:
        return self.get_buffer("values") * self.get_buffer("scale")

    def forward(self, rows: Tensor) -> Tensor:
        return nn.functional.linear(rows if self.rounding is None else self.rounding(rows), self.matrix, self.bias)


class Adapted(nn.Linear):
    """A plain matrix with a low-rank one beside it, as an adapter that is not merged."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = linear.weight
        generator = torch.Generator().manual_seed(0)
        self.down = nn.Parameter(torch.randn(2, linear.in_features, generator=generator))
        self.up = nn.Parameter(torch.randn(linear.out_features, 2, generator=generator))
        self.dropout = nn.Dropout(0.5)

    @property
    def matrix(self) -> Tensor:
        return self.weight + self.up @ self.down

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows) + self.dropout(rows) @ self.down.T @ self.up.T


class Int8Tensor(Tensor):
    """A float tensor that holds int8 inside and knows what it stands for, as torchao's and quanto's do."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    def dequantize(self) -> Tensor:
        return self.values * self.scale

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            return function(args[0], args[1].dequantize(), *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        raise NotImplementedError(f"{function} of quantised weights")


def assert_within_noise(found: Trace, expected: Trace) -> None:
    """Perturbations no further apart than rounding takes two runs of one model; they themselves are far above it.

    The largest floor of a layer's heads counts: one head's is a single draw.
    """
    floors = found.arrays["noise_floor"] + expected.arrays["noise_floor"]
    reach = 2 * floors.max(axis=-1, keepdims=True)[:, None]
    for name in ("perturbation_isolated", "perturbation_propagated"):
        assert (np.abs(found.arrays[name] - expected.arrays[name]) <= reach).all(), name
        assert np.median(expected.arrays[name] / reach) > 1000


def in_int8(model: Any, rounding: Rounding | None = None) -> Any:
    """A copy of a model with all its layers' matrices in int8."""
    return _replaced(model, lambda linear: Int8Linear(linear, rounding))


def dequantised(model: Any) -> Any:
    """A copy of such a model with the same numbers as plain floats."""

    def plain(module: Int8Linear) -> nn.Linear:
        linear = nn.Linear(*reversed(module.matrix.shape), bias=module.bias is not None)
        linear.weight, linear.bias = nn.Parameter(module.matrix), module.bias
        return linear

    return _replaced(model, plain)


def _replaced(model: Any, change: Callable[[Any], nn.Module]) -> Any:
    found = copy.deepcopy(model)
    for layer in found.model.layers:
        for name, module in list(layer.named_modules()):
            if type(module) in (nn.Linear, Int8Linear):
                layer.set_submodule(name, change(module))
    return found
