"""Measure what measuring costs, or compare two such files: `make bench`, `python -m benchmarks compare OLD NEW`.

Screens and JSON are written as commands write theirs, by `perturbkv.cli.console`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import many_samples, report_pages, rows, suite
from perturbkv.cli import console
from perturbkv.errors import ConfigError, PerturbkvError
from perturbkv.selfcheck.rows import Report, Row, Target

SUITES: Mapping[str, tuple[Any, tuple[Target, ...]]] = {
    "cost": (suite, rows.TARGETS),
    "scale": (many_samples, rows.SCALE),
    "report": (report_pages, rows.REPORT),
}
"""What can be measured -> its module and its rows."""
_SETTINGS = {"model": str, "tokens": int, "samples": int, "repeats": int, "dtype": str, "device": str}


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 where a row failed or became worse, 2 for bad input."""
    asked = parse(words)
    try:
        if asked.what == "compare":
            return compare(asked.files[0], asked.files[1], asked.tolerance)
        return measure(asked)
    except PerturbkvError as error:
        console.note(f"error: {error}")
        return 2


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed command line; leave with 2 for what it does not take."""
    parser = argparse.ArgumentParser("python -m benchmarks", description="Measure what measuring costs.")
    parser.add_argument("what", nargs="?", default="cost", choices=[*SUITES, "compare"], help="[cost]")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="with compare: the earlier, the later")
    for name, kind in _SETTINGS.items():
        parser.add_argument(f"--{name}", type=kind, help="a setting of the rows, where they have it")
    parser.add_argument("--only", action="append", default=[], metavar="ROW", help="measure this row; repeatable")
    parser.add_argument("--output", "-o", type=Path, metavar="PATH", help="[runs/<time>-<what>.json]")
    parser.add_argument("--overwrite", action="store_true", help="replace the file")
    parser.add_argument("--tolerance", type=float, default=0.1, help="with compare: share of a value that is no loss")
    asked = parser.parse_args(words)
    if len(asked.files) != (2 if asked.what == "compare" else 0):
        parser.error(f"expected two files with compare and none with {', '.join(SUITES)}, got {len(asked.files)}")
    return asked


def measure(asked: argparse.Namespace) -> int:
    """Measure a suite; write and print its report. Returns 1 where a row failed that this machine could measure."""
    module, targets = SUITES[asked.what]
    settings = {name: getattr(asked, name) for name in _SETTINGS if getattr(asked, name) is not None}
    for name in settings.keys() - {field.name for field in dataclasses.fields(module.Settings)}:
        raise ConfigError(f"--{name} has no effect on {asked.what}; leave it out")
    path = asked.output or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{asked.what}.json"
    if path.exists() and not asked.overwrite:
        raise ConfigError(f"expected a new file, got {path}, which exists; add --overwrite, or choose another --output")
    path.parent.mkdir(parents=True, exist_ok=True)
    chosen = rows.find_targets(asked.only, targets)
    report: Report = module.measure(module.Settings(**settings), chosen, lambda name: console.note(f"done: {name}"))
    path.write_text(console.as_json(report.to_dict()), encoding="utf-8")
    table = [
        (row.target.name, row.target.what, _bound(row), _number(row.value), row.reason or row.verdict())
        for row in report.rows
    ]
    console.say(", ".join(f"{name} {value}" for name, value in {**report.machine, **report.settings}.items()))
    console.print_table(asked.what, ["row", "what", "#bound", "#value", ""], table)
    console.say(f"written to {path}")
    return int(bool(report.unmeasured_rows(*rows.EXCUSES)))


def compare(old: Path, new: Path, tolerance: float) -> int:
    """Print how every row changed between two files; return 1 where one is worse by more than a share `tolerance`.

    A row that is not measured in both has not become worse.
    """
    before, after = _read(old), _read(new)
    table, regressed = [], []
    for name in dict.fromkeys([*before["rows"], *after["rows"]]):
        was, now = (document["rows"].get(name, {}).get("value") for document in (before, after))
        # a larger value is better only where the bound is to be exceeded; a row that is gone is read in the other file
        sign = -1 if after["rows"].get(name, before["rows"].get(name))["at_least"] else 1
        worse = sign * (now - was) / abs(was) if was and now is not None else None
        regressed += [name] if worse is not None and worse > tolerance else []
        change = "not in both" if worse is None else f"{abs(worse):.0%} {'worse' if worse > 0 else 'better'}"
        table.append((name, _number(was), _number(now), change + " (!)" * (name in regressed)))
    console.print_table(f"{old} and {new}, tolerance {tolerance:.0%}", ["row", "#old", "#new", ""], table)
    for part in ("machine", "settings"):
        for name in dict.fromkeys([*before[part], *after[part]]):
            first, second = before[part].get(name), after[part].get(name)
            if first != second:
                console.note(f"not measured alike: {name}: {first} and {second}")
    return int(bool(regressed))


def _read(path: Path) -> dict[str, Any]:
    """Return the document of a file, its rows by name. Raises ConfigError for a file that is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        return {**document, "rows": {row["name"]: row for row in document["rows"]}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"expected a benchmark's JSON at {path}, got {error}; make bench writes one") from None


def _bound(row: Row) -> str:
    """Return a row's bound as text: ≤ or ≥, then the number."""
    return f"{'≥' if row.target.at_least else '≤'} {row.target.bound:g}"


def _number(value: float | None) -> str:
    """Return a value as text, a dash for None."""
    return "–" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    sys.exit(main())
