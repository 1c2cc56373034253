"""What a tensor consists of: quantised ones hold values, scales and more in tensors of their own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor


def parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that hold a tensor's numbers, each with its name: itself, or those inside a subclass of torch's."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield name, tensor.detach()
        return
    for inside in flatten()[0]:
        yield from parts(f"{name}.{inside}", getattr(tensor, inside))
