"""`make attack`: run each part, with a line for it and for each case that failed; exit code 1 if any did."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.attack.case import attack, sample
from tests.attack.materials import prepare

PARTS = ("outputs", "traces", "models", "options", "texts", "words")
"""Modules with a `COUNT` of cases to try, and `cases(shared, seed)`."""


def part(name: str) -> Any:
    """Import the module of a part."""
    return importlib.import_module(f"tests.attack.{name}")


def main() -> int:
    """Run the parts named on the command line, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which parts; all where none is named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="cases of each part")
    parser.add_argument("--list", action="store_true", help="count the cases and run none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as workshop:
        shared = Path(workshop, "shared") if options.list else prepare(Path(workshop))
        return max([_run(name, shared, options) for name in options.parts or PARTS])


def _run(name: str, shared: Path, options: argparse.Namespace) -> int:
    """Run one part, and return 1 where a case failed."""
    start, module, failed = time.monotonic(), part(name), 0
    every = list(module.cases(shared, options.seed))
    if options.list:
        print(f"{name}: {len(every)} cases of {len({case.kind for case in every})} kinds, {module.COUNT} in a run")
        return 0
    cases = sample(every, options.count or module.COUNT, options.seed)
    for number, case in enumerate(cases):
        if flaw := attack(case, shared.parent / f"{name}-{number}"):
            failed += 1
            print(f"  {name}: {case.name}: {flaw}", flush=True)
    print(f"{name}: {len(cases) - failed} of {len(cases)} passed, {time.monotonic() - start:.0f} s", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
