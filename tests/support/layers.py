"""One layer of random queries, keys and values, as a score sees it."""

from __future__ import annotations

from typing import Any

import torch

from perturbkv.scoring.layer_view import LayerView
from perturbkv.theory import Softmax

SCALE = 0.4


def layer_view(
    heads: int,
    kv_heads: int,
    n: int,
    seed: int,
    window: int = 5,
    d_key: int = 6,
    d_value: int = 6,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    **given: Any,
) -> LayerView:
    """`d_model` 10, float64; `given` replaces what is drawn."""
    draw = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    queries, keys, values, projection = (
        made(heads, n, d_key),
        made(kv_heads, n, d_key),
        made(kv_heads, n, d_value),
        made(10, heads * d_value),
    )
    slices = projection.T.reshape(heads, d_value, 10)
    norms = (values.repeat_interleave(heads // kv_heads, dim=0) @ slices).abs().sum(dim=-1)
    held = {"queries": queries, "keys": keys, "values": values, "norms": norms, "projection": projection}
    where = {"softmax": Softmax(SCALE, cap, sinks), "layer": 0, "layers": 1, "sample": "s", "window": window,
             "position": n}  # fmt: skip
    return LayerView(**held | where | given)
