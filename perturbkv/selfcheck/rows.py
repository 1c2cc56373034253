"""Rows with a target, each a ratio that one or a few processes measure; those processes, and the report of one run."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from perturbkv.devices import dtype_name, synchronise
from perturbkv.errors import PerturbkvError
from perturbkv.models.loading import pick_device, pick_dtype

FORMAT = 1
NO_GPU = "needs a CUDA device"
"""The reason why a row of a GPU is not measured elsewhere."""


@dataclass(frozen=True)
class Target:
    """The target of a row.

    Attributes:
        name: the row's name.
        what: what is measured, and in which unit unless it is a ratio.
        bound: the value to reach; farther inside the bound is better.
        at_least: True: values from the bound up reach it; False: values up to the bound.
        cuda: whether it is a row of a GPU.
    """

    name: str
    what: str
    bound: float
    at_least: bool = False
    cuda: bool = False

    def is_reached(self, value: float) -> bool:
        """Return whether the value is inside the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(frozen=True)
class Row:
    """A target and its measurement.

    Attributes:
        target: the target.
        value: the ratio; None where it was not measured.
        reason: the reason why it was not measured.
        details: seconds, bytes, phases: the parts of the ratio.
    """

    target: Target
    value: float | None
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def verdict(self) -> str:
        """Return "reached", "falls short" or "not measured"."""
        if self.value is None:
            return "not measured"
        return "reached" if self.target.is_reached(self.value) else "falls short"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        found = {"value": self.value, "verdict": self.verdict(), "reason": self.reason, "details": dict(self.details)}
        return {**asdict(self.target), **found}


@dataclass(frozen=True)
class Report:
    """One run of several rows: machine, settings and rows."""

    machine: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        rows = [row.to_dict() for row in self.rows]
        return {"format": FORMAT, "machine": dict(self.machine), "settings": dict(self.settings), "rows": rows}

    def unmeasured_rows(self, *excuses: str) -> list[str]:
        """Return the names of rows that were not measured, unless for one of the `excuses` or the lack of a GPU."""
        excused = (NO_GPU, *excuses)
        return [row.target.name for row in self.rows if row.value is None and row.reason not in excused]


Values = dict[str, tuple[float, dict[str, Any]]]
"""Row name -> value and details."""
Group = tuple[str, tuple[str, ...], Callable[[], Values]]
"""Rows that are measured together: the group's name, the rows' names, and the function that measures them."""


def run_groups(
    targets: Sequence[Target], groups: Iterable[Group], finished: Callable[[str], None] = lambda name: None
) -> tuple[Row, ...]:
    """Return a row per target, from the groups that have one, measured in turn; call `finished` with their names.

    A row whose process fails has the reason instead of a value, and a row of no group the lack of a GPU.
    """
    names, values, reasons = {target.name for target in targets}, Values(), dict[str, str]()
    for group, row_names, work in groups:
        if names & set(row_names):
            try:
                values |= work()
            except PerturbkvError as error:
                reasons |= dict.fromkeys(row_names, str(error))
            finished(group)
    rows = []
    for target in targets:
        if target.name in values:
            value, details = values[target.name]
            rows.append(Row(target, value, details=details))
        else:
            rows.append(Row(target, None, reasons.get(target.name, NO_GPU)))
    return tuple(rows)


def median_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over turns of seconds / base seconds."""
    return statistics.median(one / other for one, other in zip(seconds, base, strict=True))


def ratio_with_parts(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, dict[str, Any]]:
    """Return the median over turns of seconds / base seconds, and all seconds as a row's details."""
    return median_ratio(seconds, base), {"seconds": list(seconds), "base_seconds": list(base)}


Result = dict[str, Any]
"""The measurements of a process, as a JSON object."""


def run_process(
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
    """Print the result of the work that `run_process` asked this process for."""
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
    return cast("Result", json.loads(finished.stdout.splitlines()[-1]))


def time_call(work: Callable[[], object], device: torch.device) -> float:
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
