"""The benchmark's processes: of work that is named, without a network, and the peak memory of a call."""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.merging import process_bytes, reset_peak
from perturbkv.selfcheck import rows as measured
from perturbkv.selfcheck.rows import Result

_EXACT_PEAK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Settings with which glibc returns freed memory at once, so that the peak of a process counts used memory alone."""
_ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""Beginning of a command that runs another one with the loopback as its only network (unshare(1))."""


def run_process(work: str, *, exact_peak: bool = False, prefix: Sequence[str] = (), **arguments: Any) -> Result:
    """Return the result of `work.<work>(**arguments)` from a new process, whose command begins with `prefix`.

    Raises PerturbkvError where the process fails.
    """
    return measured.run_process("benchmarks.work", work, arguments, prefix, _EXACT_PEAK if exact_peak else None)


def no_network_prefix() -> tuple[str, ...]:
    """Return the command prefix that leaves a program only the loopback network; empty if the system forbids it."""
    try:
        subprocess.run([*_ALONE, "true"], capture_output=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ()
    return _ALONE


def measure_memory(work: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Return the memory in bytes before a call and at its peak, of the GPU or of the process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = int(torch.cuda.memory_allocated(device))
        work()
        return before, int(torch.cuda.max_memory_allocated(device))
    reset_peak()
    before = process_bytes("VmRSS")
    work()
    return before, process_bytes("VmHWM")
