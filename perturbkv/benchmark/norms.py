"""Time and memory of the value norms, beside a loop over heads and a matrix product of the same device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perturbkv.benchmark.subprocesses import Result, peak, seconds
from perturbkv.models.loading import pick_device
from perturbkv.scoring.value_norms import projected_value_norms


def loop_norms(value: Tensor, w_o: Tensor) -> Tensor:
    """ν head by head: every head's projections are written, then summed."""
    kv_heads, _, d_head = value.shape
    group = w_o.shape[1] // (kv_heads * d_head)
    return torch.stack(
        [
            (value[head // group] @ w_o[:, head * d_head : (head + 1) * d_head].T).abs().sum(dim=-1)
            for head in range(kv_heads * group)
        ]
    )


_NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"ours": projected_value_norms, "loop": loop_norms}


def _layer(entries: int, d_model: int, heads: int, kv_heads: int, dtype: str, device: str) -> tuple[Tensor, Tensor]:
    place, d_head = pick_device(device), d_model // heads
    generator = torch.Generator(place).manual_seed(0)
    made: dict[str, Any] = {"generator": generator, "device": place, "dtype": getattr(torch, dtype)}
    return torch.randn(kv_heads, entries, d_head, **made), torch.randn(d_model, d_model, **made) / d_model**0.5


@torch.inference_mode()
def norms(repeats: int, **shapes: Any) -> Result:
    """Seconds of ν and of the loop, in turns; the rate of the same device's matrix product, and of ν's."""
    value, w_o = _layer(**shapes)
    found: dict[str, list[float]] = {name: [] for name in _NORMS}
    for turn in range(repeats + 1):
        for name, compute in _NORMS.items():
            spent = seconds(lambda compute=compute: compute(value, w_o), value.device)  # type: ignore[misc]
            found[name] += [spent] if turn else []
    square = torch.randn_like(w_o)
    product = min(seconds(lambda: w_o @ square, value.device) for _ in range(repeats + 1))
    operations = 2 * value.shape[1] * w_o.numel()
    return {
        "seconds": found,
        "matmul_rate": 2 * len(w_o) ** 3 / product,
        "rate": [operations / spent for spent in found["ours"]],
    }


@torch.inference_mode()
def norms_peak(which: str, **shapes: Any) -> Result:
    """Bytes that ν (`ours`) or the loop takes beside inputs and result."""
    value, w_o = _layer(**shapes)
    before, most = peak(lambda: _NORMS[which](value, w_o), value.device)
    return {"extra": most - before}
