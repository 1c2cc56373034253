"""Free memory, and the errors for too little of it and for a GPU that fails.

The system kills a process that takes more than there is without a message. So a size that is known to be too large is
refused before it is allocated; a failed allocation becomes a NoMemoryError of one line, a failed GPU a DeviceError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.errors import DeviceError, NoMemoryError

if TYPE_CHECKING:
    import torch

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with a container's memory limit, in both versions of Linux' control groups."""
_MESSAGES = re.compile(
    r"(?:you tried to allocate|Tried to allocate|Unable to allocate) ([\d.]+) ?(bytes|[KMGTPE]?i?B)"
    r"|(Storage size calculation overflowed)|(Cannot allocate memory)|(failed to map segment)",
    re.IGNORECASE,
)
"""Messages of failed allocations: of torch on a CPU and on a GPU, of NumPy, of the system and of its loader."""
_DEVICE_MESSAGES = re.compile(r"(?:CUDA|HIP)(?: driver)? error|CUBLAS_STATUS|cuDNN error|NCCL error")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_TO_IMPORT = 3 * 2**29
"""Bytes of address space that importing torch, transformers and SciPy takes, rounded up."""
ADVICE = (
    "shorter prompts (--length, --max-tokens), fewer configurations at once (--max-memory), a smaller --chunk-mib or "
    "--dtype take less"
)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that a process can still allocate on a GPU, or in this machine's memory for any other device.

    On the machine swap counts, and the limits of process and container apply. A GPU that shares the machine's memory
    gets what the machine has, including the page cache.
    """
    import psutil
    import torch

    if device.type == "cuda" and not torch.cuda.get_device_properties(device).is_integrated:
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    resident = psutil.Process().memory_info().rss
    swap = 0
    with suppress(OSError):  # in a container that does not show it
        swap = psutil.swap_memory().free
    machine = psutil.virtual_memory().available + swap
    limits = [limit - resident for limit in (*_process_limits(), *_container_limits())]
    return max(0, int(min([machine, *limits])))


def _process_limits() -> Iterator[int]:
    """Yield this process's memory limits in bytes, if the system sets any."""
    with suppress(ImportError):
        import resource

        soft = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
        yield from (limit for limit in soft if limit != resource.RLIM_INFINITY)


def _container_limits() -> Iterator[int]:
    """Yield the container's memory limits in bytes, if it has any."""
    for path in _LIMITS:
        with suppress(OSError):
            if (text := path.read_text().strip()).isdigit():
                yield int(text)


def check_address_space() -> None:
    """Raise NoMemoryError where the process's limit (ulimit -v) is too small to import what measures.

    Below it the libraries fail in code of their own, where some wait for memory forever.
    """
    limit = min(_process_limits(), default=_TO_IMPORT)
    if limit < _TO_IMPORT:
        raise NoMemoryError(
            f"measuring takes {format_size(_TO_IMPORT)} of address space at least, and this process may have "
            f"{format_size(limit)}; type ulimit -v unlimited"
        )


def check(needed: int, device: torch.device, what: str, instead: str) -> None:
    """Raise NoMemoryError unless `needed` bytes are free on the device.

    `what` begins the message, such as "the weights need"; `instead` ends it with advice.
    """
    available = free_bytes(device)
    if needed > available:
        raise NoMemoryError(
            f"{what} {format_size(needed)}, and {format_size(available)} are free on {device.type}; {instead}"
        )


@contextmanager
def translate_allocation_errors(advice: str = ADVICE) -> Iterator[None]:
    """Turn a failed allocation inside into a NoMemoryError that ends with `advice`, a failed GPU into a DeviceError.

    Works as a decorator too. Other errors pass unchanged.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        match = _MESSAGES.search(str(error))
        if match is None and _DEVICE_MESSAGES.search(str(error)):
            raise DeviceError(
                f"the GPU or its driver failed ({str(error).strip().splitlines()[0][:200]}); where a run keeps "
                "finished samples, the same command goes on with them"
            ) from None
        if match is None and not isinstance(error, MemoryError):
            raise
        wanted = f": {_requested_size(match)} wanted" if match and match[1] else ""
        where = " on the GPU" if "CUDA" in str(error) else ""
        raise NoMemoryError(f"there is not enough memory{where}{wanted}; {advice}") from None


def _requested_size(match: re.Match[str]) -> str:
    """Return the size in an allocation error's message, with its unit."""
    return format_size(int(float(match[1]))) if match[2].lower() == "bytes" else f"{match[1]} {match[2]}"


def format_size(size: int) -> str:
    """Return a size in bytes as text, such as `121.5 GiB`."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{size} bytes" if power == 0 else f"{size / 2 ** (10 * power):.1f} {_UNITS[power]}"
