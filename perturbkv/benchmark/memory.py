"""What the system says of this process's memory; imports no torch."""

from __future__ import annotations

import resource
from pathlib import Path


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
