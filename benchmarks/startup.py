"""Processor seconds of commands that should start at once, over those of importing a library that they need."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from perturbkv.errors import PerturbkvError

_COMMAND = "import sys; from perturbkv.cli.start import main; main()"
_TRACE = ("--samples", "2", "--length", "300", "--budget", "64")


def startup_seconds(model: str, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return command -> its processor seconds, and those of its reference import, per turn.

    `help` is `perturbkv -h` compared with `import numpy`; `figure` is `perturbkv heads` of a finished trace, which is
    made first, compared with `import matplotlib.pyplot`. Raises PerturbkvError where a process fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.h5"
        _processor_seconds(_COMMAND, "trace", "--model", model, *_TRACE, "--output", str(trace))
        figure = ("heads", str(trace), "--format", "png", "--overwrite")
        work = {
            "help": ((_COMMAND, "-h"), ("import numpy",)),
            "figure": ((_COMMAND, *figure), ("import matplotlib.pyplot",)),
        }
        spent: dict[str, dict[str, list[float]]] = {name: {"command": [], "import": []} for name in work}
        for _ in range(repeats):
            for name, (command, library) in work.items():
                spent[name]["command"].append(_processor_seconds(*command))
                spent[name]["import"].append(_processor_seconds(*library))
    return spent


def _processor_seconds(code: str, *arguments: str) -> float:
    """Return the user and system seconds of a Python process. Raises PerturbkvError where it fails."""
    command = [sys.executable, "-c", code, *arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise PerturbkvError(f"the benchmark's process '{' '.join(arguments) or code}' failed: {lines[-1]}")
    return used.ru_utime + used.ru_stime
