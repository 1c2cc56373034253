"""Merging shards in a process without torch, as `perturbkv merge` does: `python -m perturbkv.benchmark.merging TRACE`.

It prints seconds, and the most bytes that the process had, as JSON.

What the system says of this process's memory; imports no torch.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from perturbkv.storage.run.joining import join


def process_bytes(field: str) -> int:
    """VmRSS, what the process has now, or VmHWM, the most that it had; where there is no proc(5), the most."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """Linux: forget the peak that came before, such as the loading's (proc(5), clear_refs)."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def main(path: Path) -> None:
    """Join the shards beside a trace to be."""
    start = time.perf_counter()
    join(path)
    told = {"seconds": time.perf_counter() - start, "peak": process_bytes("VmHWM")}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
