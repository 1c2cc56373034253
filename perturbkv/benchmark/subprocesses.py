"""Functions run in processes of their own, and the time and peak memory of a call."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from perturbkv.benchmark.merging import process_bytes, reset_peak
from perturbkv.devices import dtype_name
from perturbkv.errors import PerturbkvError
from perturbkv.models.loading import pick_device, pick_dtype

Result = dict[str, Any]
"""The measurements of a process, as a JSON object."""
_EXACT_PEAK = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Settings with which glibc returns freed memory at once, so that the peak of a process counts used memory alone."""
_ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""Beginning of a command that runs another one with the loopback as its only network (unshare(1))."""


def in_process(work: str, *, exact_peak: bool = False, prefix: Sequence[str] = (), **arguments: Any) -> Result:
    """Return the result of `work.<work>(**arguments)` from a new process, whose command begins with `prefix`.

    Raises PerturbkvError where the process fails.
    """
    command = [*prefix, sys.executable, "-m", "perturbkv.benchmark.work", work, json.dumps(arguments)]
    return run_json(command, f"the benchmark's process '{work}'", _EXACT_PEAK if exact_peak else {})


def run_json(command: Sequence[str], name: str, environment: Mapping[str, str] | None = None) -> Result:
    """Return the JSON object that a command prints on its last line; `environment` adds environment variables.

    Raises PerturbkvError with `name` and the last line of the command's error output where it fails.
    """
    finished = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | (environment or {})
    )
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines() or ["no message"]
        raise PerturbkvError(f"{name} failed: {lines[-1]}")
    result: Result = json.loads(finished.stdout.splitlines()[-1])
    return result


def no_network_prefix() -> tuple[str, ...]:
    """Return the command prefix that leaves a program only the loopback network; empty if the system forbids it."""
    try:
        subprocess.run([*_ALONE, "true"], capture_output=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ()
    return _ALONE


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, including its work on the device."""
    gc.collect()
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(work: Callable[[], object], device: torch.device) -> tuple[int, int]:
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


def machine(device: str, dtype: str) -> Mapping[str, str]:
    """Return a description of the machine: device, cores, memory, dtype and versions."""
    chosen = pick_device(device)
    return {
        "device": torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "dtype": dtype_name(pick_dtype(dtype, chosen)),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    """Return the name of the CPU on Linux, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
