"""Functions that run in processes of their own, the seconds of a call, and the machine."""

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

from perturbkv.devices import dtype_name, synchronise
from perturbkv.errors import PerturbkvError
from perturbkv.models.loading import pick_device, pick_dtype

Result = dict[str, Any]
"""The measurements of a process, as a JSON object."""


def in_process(
    module: str,
    work: str,
    arguments: Mapping[str, Any],
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Result:
    """Return the result of `module.work(**arguments)` from a new process, whose command begins with `prefix`.

    `environment` adds environment variables. Raises PerturbkvError where the process fails.
    """
    command = [*prefix, sys.executable, "-m", module, work, json.dumps(arguments)]
    return run_json(command, f"the benchmark's process '{work}'", environment)


def print_result(work: Mapping[str, Callable[..., Result]]) -> None:
    """Print the result of the work that `in_process` asked this process for."""
    name, arguments = sys.argv[1:]
    sys.stdout.write(json.dumps(work[name](**json.loads(arguments))) + "\n")


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


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call, including its work on the device."""
    gc.collect()
    synchronise(device)
    start = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - start


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
