"""Merging shards in a process without torch, as `perturbkv merge` does: `python -m perturbkv.benchmark.merging TRACE`.

It prints seconds, and the most bytes that the process had, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from perturbkv.benchmark.memory import process_bytes
from perturbkv.storage.run.joining import join


def main(path: Path) -> None:
    """Join the shards beside a trace to be."""
    start = time.perf_counter()
    join(path)
    told = {"seconds": time.perf_counter() - start, "peak": process_bytes("VmHWM")}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
