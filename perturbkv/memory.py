"""Free memory, and the error where it does not suffice.

The system ends a process that takes more than there is without a message, so that a size that is known to be too large
is refused before it is allocated; a failed allocation becomes a NoMemoryError of one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from perturbkv.errors import NoMemoryError

if TYPE_CHECKING:
    import torch

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""A container's memory limit, in both versions of Linux' control groups."""
_MESSAGES = re.compile(
    r"(?:you tried to allocate|Tried to allocate|Unable to allocate) ([\d.]+) ?(bytes|[KMGTPE]?i?B)"
    r"|(Storage size calculation overflowed)|(Cannot allocate memory)",
    re.IGNORECASE,
)
"""Messages of torch on a CPU and on a GPU, of NumPy and of the system."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
LOWER = (
    "shorter prompts (--length, --max-tokens), fewer configurations at once (--max-memory), a smaller --chunk-mib or "
    "--dtype take less"
)


def free(device: torch.device) -> int:
    """Return the bytes that a process may still allocate on a GPU, or on this machine.

    On the machine swap counts, and the limits of process and container apply. A GPU that shares the machine's memory
    gets what the machine has, including the page cache.
    """
    import torch

    if device.type == "cuda" and not torch.cuda.get_device_properties(device).is_integrated:
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    held = psutil.Process().memory_info()
    swap = 0
    with suppress(OSError):  # of a container that does not show it
        swap = psutil.swap_memory().free
    machine = psutil.virtual_memory().available + swap
    limits = [limit - held.rss for limit in (*_process(), *_container())]
    return max(0, int(min([machine, *limits])))


def _process() -> Iterator[int]:
    """Yield this process's memory limits, where the system has such."""
    with suppress(ImportError):
        import resource

        soft = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
        yield from (limit for limit in soft if limit != resource.RLIM_INFINITY)


def _container() -> Iterator[int]:
    for path in _LIMITS:
        with suppress(OSError):
            if (text := path.read_text().strip()).isdigit():
                yield int(text)


def check(needed: int, device: torch.device, what: str, instead: str) -> None:
    """Raise NoMemoryError unless `needed` bytes are free; `what` needs them, `instead` is what to do."""
    there = free(device)
    if needed > there:
        msg = f"{what} {said(needed)}, and {said(there)} are free on {device.type}; {instead}"
        raise NoMemoryError(msg)


@contextmanager
def told(lower: str = LOWER) -> Iterator[None]:
    """Raise NoMemoryError for a failed allocation inside the block; `lower` is what to do.

    Works as a decorator too. Every other error passes.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        found = _MESSAGES.search(str(error))
        if found is None and not isinstance(error, MemoryError):
            raise
        wanted = f": {_requested_size(found)} wanted" if found and found[1] else ""
        where = " on the GPU" if "CUDA" in str(error) else ""
        msg = f"there is not enough memory{where}{wanted}; {lower}"
        raise NoMemoryError(msg) from None


def _requested_size(found: re.Match[str]) -> str:
    """Return the size in words, torch's bytes in a readable unit."""
    return said(int(float(found[1]))) if found[2].lower() == "bytes" else f"{found[1]} {found[2]}"


def said(size: int) -> str:
    """Return a size in words, such as `121.5 GiB`."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{size} bytes" if power == 0 else f"{size / 2 ** (10 * power):.1f} {_UNITS[power]}"
