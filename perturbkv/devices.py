"""Asynchronous copies to and between devices, sizes of working memory, products in full precision, names of types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_CACHE_BYTES = 8 * 2**20
"""Working memory on a CPU, in bytes: as much as fits in the processor's cache."""


def working_bytes(device: torch.device, most: int) -> int:
    """Return the bytes of working memory to use at once on a device: `most`, limited to `_CACHE_BYTES` on a CPU."""
    return min(most, _CACHE_BYTES) if device.type == "cpu" else most


def block_bytes(device: torch.device) -> int:
    """Return the bytes of a block of a long loop: a 64th of a GPU's memory, or what fits in a processor's cache."""
    return torch.cuda.get_device_properties(device).total_memory // 64 if device.type == "cuda" else _CACHE_BYTES


def synchronise(device: torch.device) -> None:
    """Wait until a CUDA device has finished its work; return at once for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type: `float32`."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def full_precision() -> Iterator[None]:
    """Multiply float32 in float32 inside, even where the process allows TF32 or bfloat16; works as a decorator too."""
    libraries: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # type: ignore[attr-defined]
    before = [library.fp32_precision for library in libraries]
    for library in libraries:
        library.fp32_precision = "ieee"
    try:
        yield
    finally:
        for library, precision in zip(libraries, before, strict=True):
            library.fp32_precision = precision


def copy_to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor on a device, as `dtype` if one is given; the tensor itself where it is so already.

    A copy to a GPU is asynchronous. The host waits for a copy from one, whose numbers it may read at once.
    """
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")


def to_device(numbers: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers, or nested lists of them, as a new tensor on a device; the copy to a GPU is asynchronous.

    `dtype` is torch's own choice where it is None.
    """
    return copy_to_device(torch.tensor(numbers, dtype=dtype), device)


def move_to_first_device(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors, of which there is at least one, all on the device of the first."""
    found = list(tensors)
    return [copy_to_device(tensor, found[0].device) for tensor in found]


def stack_on_device(device: torch.device, tensors: Iterable[Tensor], dim: int = 0) -> Tensor:
    """Return tensors from several devices, stacked along `dim` on one device."""
    return torch.stack([copy_to_device(tensor, device) for tensor in tensors], dim=dim)
