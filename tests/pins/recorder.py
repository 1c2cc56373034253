"""One recorder, run in a process of its own: `python -m tests.pins.recorder NAME TREE FOLDER OUT`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import perturbkv


def main() -> None:
    """Record into an empty folder, from the tree that is meant, and write the values as JSON."""
    name, tree, folder, out = sys.argv[1:]
    found = Path(perturbkv.__file__).resolve()
    if not found.is_relative_to(Path(tree).resolve()):
        raise RuntimeError(f"expected perturbkv from {tree}, got {found}")
    module, _, part = name.partition("-")
    record = importlib.import_module(f"tests.pins.{module}").record
    recorded = record(Path(folder), *filter(None, [part]))
    Path(out).write_text(json.dumps(recorded, indent=0, ensure_ascii=False, sort_keys=True))


if __name__ == "__main__":
    main()
