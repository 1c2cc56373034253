"""The Triton kernel's norms against those of a float64 loop, at every head size and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from perturbkv.scoring.value_norms import projected_value_norms
from perturbkv.selfcheck.checks import Check

HEAD_SIZES = (64, 80, 96, 128, 256)
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
SHAPES = {"one entry": (2, 2, 1, 130), "grouped by 3": (6, 2, 35, 130), "multi-query, two tiles": (4, 1, 257, 130)}
"""Query heads, key/value heads, entries, d_model: tiles are left uneven and crossed; one d_model, one compilation."""
_RULE = "relative error of every norm; sums are in float32, and half precision's products are exact there"


def check(device: torch.device) -> list[Check]:
    """The worst norm of every head size and dtype. Raises ConfigError where the device does not run the kernel."""
    return [
        Check(
            f"Triton norms, {str(dtype).removeprefix('torch.')}, heads of {d_head}",
            max(_worst(*shape, d_head, dtype, device) for shape in SHAPES.values()),
            bound,
            _RULE,
        )
        for dtype, bound in BOUNDS.items()
        for d_head in HEAD_SIZES
    ]


def _worst(
    heads: int, kv_heads: int, entries: int, d_model: int, d_head: int, dtype: torch.dtype, device: torch.device
) -> float:
    generator = torch.Generator().manual_seed(d_head + entries)
    value = torch.randn(kv_heads, entries, d_head, generator=generator).to(device, dtype)
    w_o = torch.randn(d_model, heads * d_head, generator=generator).to(device, dtype)
    expected = loop(value, w_o)
    found = projected_value_norms(value, w_o, kernel="triton").double().cpu()
    return float(((found - expected).abs() / expected).max())


def loop(value: Tensor, w_o: Tensor) -> Tensor:
    """METHOD, Notation: each row of V times W_O^h, its absolute components summed, in float64 on the CPU."""
    d_head, value, w_o = value.shape[-1], value.double().cpu(), w_o.double().cpu()
    heads = w_o.shape[1] // d_head
    slices = [w_o[:, head * d_head : (head + 1) * d_head].T for head in range(heads)]
    group = heads // len(value)
    return torch.stack([(value[head // group] @ part).abs().sum(dim=-1) for head, part in enumerate(slices)])
