"""A GPU that is not there: tensors that say `cuda:N`, hold a CPU's numbers, and refuse what CUDA refuses.

Every operation is done by the CPU on the numbers that are held, so that results equal the CPU's bit for bit. Counted,
by line of the package, are kernels that a GPU would start (views start none) and waits, for which a host would stand
still until the GPU is done: numbers that it reads, sizes that depend on numbers, and copies to it.

What this cannot see: kernels that CUDA lacks for a type, the rounding of cuBLAS, flash attention and Triton, memory,
races, and speed.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

import perturbkv

_PACKAGE = f"{Path(perturbkv.__file__).parent}/"
_CPU = torch.device("cpu")
_aten = torch.ops.aten
_MOVES = {_aten._to_copy.default, _aten.copy_.default, _aten.lift_fresh.default}
_READS = {_aten._local_scalar_dense.default, _aten.equal.default}
_SIZED_BY_NUMBERS = {
    _aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default, _aten.unique_dim.default,
    _aten.bincount.default,
}  # fmt: skip
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}
_WHOLE = {
    _aten.scaled_dot_product_attention.default, _aten.linear.default, _aten.einsum.default, _aten.matmul.default,
    _aten.rms_norm.default,
}  # fmt: skip
"""Operations that are done as one, as the parts that torch makes of them depend on the device."""
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);
"""
MEMORY = 80 * 2**30


@functools.cache
def _register_guard() -> None:
    """Give a CPU's torch a device guard for CUDA that does nothing, without which it indexes no tensor there."""
    home, library = Path(torch.__file__).parent, Path(tempfile.mkdtemp()) / "guard.so"
    compiler = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{home}/include", "-xc++", "-", f"-L{home}/lib", "-lc10"]
    subprocess.run([*compiler, "-o", str(library)], input=_GUARD, text=True, check=True)
    ctypes.CDLL(str(library))


class PretendTensor(Tensor):
    """A tensor on a device that is not there; `held` is the CPU's tensor with its numbers."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> PretendTensor:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made: PretendTensor = Tensor._make_wrapper_subclass(cls, held.shape, device=device, **layout)
        made.held = held
        return made

    def tolist(self) -> Any:
        """What torch refuses to subclasses."""
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor first"
        )

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{function} of a tensor on a GPU that is not there any more")


class Rehearsal(TorchDispatchMode):
    """Operations on pretended devices.

    Attributes:
        waits: line and operation -> waits for the device.
        launches: line -> kernels started.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()

    def clear(self) -> None:
        """Forget what was counted."""
        self.waits.clear()
        self.launches.clear()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(torch.device, _numbered, (args, kwargs or {}))
        composed = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
        if composed and function not in _WHOLE:
            with self:
                return function.decompose(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        place = self._place(function, args, kwargs, tensors)
        found = _on_cpu(function, args, kwargs)
        if place.type == "cpu":
            return found
        self.launches[_line()] += not function.is_view
        same = {id(tensor.held): tensor for tensor in tensors if isinstance(tensor, PretendTensor)}
        return tree_map_only(Tensor, lambda one: same[id(one)] if id(one) in same else PretendTensor(one, place), found)

    def _place(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> torch.device:
        """The device of an operation's result. Raises what CUDA raises, and counts a wait."""
        devices = list(dict.fromkeys(tensor.device for tensor in tensors))
        gpus = [device for device in devices if device.type == "cuda"]
        if function in _MOVES:
            place = devices[0] if function is _aten.copy_.default else torch.device(kwargs.get("device") or devices[0])
            asynchronous = place.type == "cuda" and (kwargs.get("non_blocking") or args[2:3] == (True,))
            if place.type == "cpu" and devices[-1].type == "cuda" and kwargs.get("non_blocking"):
                raise RuntimeError(
                    f"{function}: a copy to the host that nobody waits for, and that may be read before it is there"
                )
            waits = devices[-1].type != place.type and tensors[-1].numel() > 0 and not asynchronous
        else:
            place = torch.device(kwargs.get("device") or (gpus or [_CPU])[0])
            self._check_devices(function, place, gpus, tensors, kwargs.get("generator"))
            waits = bool(gpus) and _waits(function, args, kwargs, tensors)
        if waits:
            self.waits[f"{_line()} {function}"] += 1
        return _CPU if function in _READS else place

    def _check_devices(
        self, function: Any, place: torch.device, gpus: list[torch.device], tensors: list[Tensor], generator: Any
    ) -> None:
        """Raise RuntimeError for operations on tensors of several devices, and for another device's random numbers."""
        strangers = [tensor for tensor in tensors if tensor.device.type == "cpu"] if gpus else []
        takes_numbers = function in _INDEXING or torch.Tag.pointwise in function.tags
        mixed = any(tensor.ndim for tensor in strangers) or (strangers and not takes_numbers)
        drawn = generator is not None and generator.device.type != place.type
        if len(gpus) > 1 or mixed or drawn:
            raise RuntimeError(
                f"{function}: expected all tensors on one device, got {[tensor.device for tensor in tensors]}"
            )


def _waits(function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> bool:
    """Whether the host waits for an operation on a device's tensors."""
    if function in _READS | _SIZED_BY_NUMBERS:
        return True
    if function is _aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    indices = tensors[1:] if function in _INDEXING else []
    return any(index.dtype == torch.bool or index.device.type == "cpu" for index in indices)


def _numbered(device: torch.device) -> torch.device:
    """A device with its number: that of `cuda` is 0."""
    return torch.device("cuda:0") if device == torch.device("cuda") else device


def _on_cpu(function: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives for the numbers that are held."""
    args, kwargs = tree_map_only(PretendTensor, lambda one: one.held, (args, kwargs))
    kwargs = {name: _CPU if name == "device" else one for name, one in kwargs.items() if name != "pin_memory"}
    if (
        function is _aten.histc.default and not args[0].is_floating_point()
    ):  # a GPU counts whole numbers, a CPU does not
        return function(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    return function(*args, **kwargs)


def _line() -> str:
    """The innermost line of the package that is being run; `transformers` where none is."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.removeprefix(_PACKAGE)}:{frame.f_lineno}" if frame else "transformers"


def as_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of CPU tensors in place of a CUDA kernel, which takes and returns a device's. It refuses several."""

    def call(*args: Any, **kwargs: Any) -> Any:
        devices = {one.device for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        if len(devices) != 1:
            raise RuntimeError(f"{function.__name__}: expected all tensors on one device, got {devices}")
        (device,) = devices
        with _disable_current_modes():
            args, kwargs = tree_map_only(PretendTensor, lambda one: one.held, (args, kwargs))
            found = function(*args, **kwargs)
        return tree_map_only(Tensor, lambda one: PretendTensor(one, device), found)

    return call


@contextmanager
def pretend_gpus(count: int = 1) -> Iterator[Rehearsal]:
    """Inside, this machine has that many GPUs of 80 GiB, without autograd."""
    _register_guard()
    stubs = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "_lazy_init": lambda: None,
        "synchronize": lambda device=None: None,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: mock.Mock(is_integrated=False, total_memory=MEMORY),
    }
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with mock.patch.multiple(torch.cuda, **stubs), torch.inference_mode(), Rehearsal() as rehearsal:
            yield rehearsal
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)
