"""Moving numbers to a device, and between devices, without waiting for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_CACHE_BYTES = 8 * 2**20
"""On a CPU, data that fits in the processor's cache is reused there, and its memory is not fetched anew."""


def working_bytes(device: torch.device, most: int) -> int:
    """Return the bytes of a step's working memory on a device, at most `most`."""
    return min(most, _CACHE_BYTES) if device.type == "cpu" else most


def on_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers of the host as a tensor on `device`."""
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def stack_on(device: torch.device, tensors: Iterable[Tensor], dim: int = 0) -> Tensor:
    """Return tensors of several devices, stacked on one."""
    return torch.stack([tensor.to(device, non_blocking=True) for tensor in tensors], dim=dim)
