"""Gradients of a text's log p by differences of the plain model, which reads the whole text without a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray
Moved = Mapping[tuple[int, int], Array]
"""Decoder layer and position -> what is added to the layer's attention output there, a row each (row, d_model)."""
_STENCIL = ((-2, 1 / 12), (-1, -2 / 3), (1, 2 / 3), (2, -1 / 12))
"""Multiples of a small step and their weights: the derivative up to its fourth power."""


@torch.no_grad()
def log_p(model: Any, ids: Sequence[int], predicted: int, moved: Moved) -> Array:
    """(row,): log p of the last `predicted` tokens after all before them, with attention outputs moved."""
    rows = len(next(iter(moved.values())))
    handles = [
        model.model.layers[layer].self_attn.o_proj.register_forward_hook(_adds(position, rows_moved))
        for (layer, position), rows_moved in moved.items()
    ]
    logits = model(torch.tensor([list(ids[:-1])] * rows), use_cache=False).logits[:, -predicted:]
    for handle in handles:
        handle.remove()
    probabilities = logits.double().softmax(dim=-1).numpy()
    return np.array([sum(np.log(row[i, t]) for i, t in enumerate(ids[-predicted:])) for row in probabilities])


def _adds(position: int, moved: Array) -> Any:
    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[:, position] += torch.from_numpy(moved).to(output.dtype)
        return output

    return hook


def derivative(model: Any, ids: Sequence[int], predicted: int, moved: Moved, step: float = 1e-3) -> Array:
    """(row,): the change of log p per unit of what is moved, from four differences."""
    return np.asarray(
        difference(lambda size: log_p(model, ids, predicted, {place: size * one for place, one in moved.items()}), step)
    )


def difference(function: Callable[[float], Any], step: float = 1e-3) -> Any:
    """The derivative of a function at 0, from four differences."""
    return sum(weight * function(times * step) for times, weight in _STENCIL) / step


def gradient(model: Any, ids: Sequence[int], predicted: int, layer: int, position: int) -> Array:
    """(d_model,): ∂ log p / ∂ (attention output of a decoder layer at a position), number by number."""
    return derivative(model, ids, predicted, {(layer, position): np.eye(model.config.hidden_size)})
