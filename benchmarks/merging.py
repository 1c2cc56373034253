"""A process that merges shards as `perturbkv merge` does: `python -m benchmarks.merging TRACE`.

It prints its seconds and its peak bytes as JSON; this module imports no torch.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from perturbkv.storage.run.shard_merging import merge_shards


def process_bytes(field: str) -> int:
    """Return this process's bytes by proc(5) field, VmRSS (current) or VmHWM (peak); without proc the peak."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Reset this process's peak bytes on Linux, so that loading does not count (proc(5), clear_refs)."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def main(path: Path) -> None:
    """Merge the shards of a trace; print seconds and peak bytes as JSON."""
    start = time.perf_counter()
    merge_shards(path)
    result = {"seconds": time.perf_counter() - start, "peak": process_bytes("VmHWM")}
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
