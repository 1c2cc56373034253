"""`make attack`: each part in full, a line for it and for each case that did not hold; exit code 1 if any did not."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.attack.parts import NAMES, part
from tests.attack.running import attack


def main() -> int:
    """Run the parts that are asked for and return the exit code."""
    options = argparse.ArgumentParser(prog="python -m tests.attack")
    options.add_argument("parts", nargs="*", help="which parts; all where none is named")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--count", type=int, help="cases of each part")
    asked = options.parse_args()
    return max([_run(name, asked.seed, asked.count) for name in asked.parts or NAMES], default=0)


def _run(name: str, seed: int, count: int | None) -> int:
    """One part; 1 where a case did not hold."""
    start, tried, broken = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as workshop:
        for case in part(name).cases(Path(workshop), seed, count or part(name).COUNT):
            tried += 1
            if flaw := attack(case):
                broken += 1
                print(f"  {name}: {case.name}: {flaw}", flush=True)
    print(f"{name}: {tried - broken} of {tried} held, {time.monotonic() - start:.0f} s", flush=True)
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
