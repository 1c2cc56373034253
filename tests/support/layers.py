"""One layer of random queries, keys and values, as a score sees it."""

from __future__ import annotations

from typing import Any

import torch

from perturbkv.scoring.layer_view import LayerView

SCALE = 0.4


def layer_view(heads: int, kv_heads: int, n: int, seed: int, window: int = 5, **given: Any) -> LayerView:
    """`d_head` 6, `d_model` 10, float64; `given` replaces what is drawn."""
    draw = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    queries, keys, values, projection = (
        made(heads, n, 6),
        made(kv_heads, n, 6),
        made(kv_heads, n, 6),
        made(10, heads * 6),
    )
    slices = projection.T.reshape(heads, 6, 10)
    norms = (values.repeat_interleave(heads // kv_heads, dim=0) @ slices).abs().sum(dim=-1)
    held = {"queries": queries, "keys": keys, "values": values, "norms": norms, "projection": projection}
    where = {"scale": SCALE, "layer": 0, "layers": 1, "sample": "s", "window": window}
    return LayerView(**held | where | given)
