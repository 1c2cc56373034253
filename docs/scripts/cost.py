"""The table of explanation/cost.md, from the benchmark's JSON: `python docs/scripts/cost.py docs/bench/cpu.json`."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def main() -> None:
    """Print the machine, the table, and where the sweeps spend their seconds."""
    report = json.loads(Path(sys.argv[1]).read_text())
    lines = [", ".join(f"{name} {value}" for name, value in report["machine"].items()), "", *_table(report["rows"]), ""]
    lines += [_phases(row) for row in report["rows"] if "phases" in row["details"]]
    print("\n".join(lines))


def _table(rows: Sequence[Row]) -> list[str]:
    head = ["| row | what | to reach | measured | |", "|---|---|---|---|---|"]
    return head + [
        f"| `{row['name']}` | {row['what']} | {_bound(row)} | {_value(row)} | {row['verdict']} |" for row in rows
    ]


def _bound(row: Row) -> str:
    return f"{'≥' if row['at_least'] else '≤'} {row['bound']:g}"


def _value(row: Row) -> str:
    """Return the ratio, and medians of the seconds that it was made of."""
    if row["value"] is None:
        return "–"
    spent, base = (row["details"].get(name) for name in ("seconds", "base_seconds"))
    both = f" ({_median(spent)} / {_median(base)} s)" if spent and base else ""
    return f"{row['value']:.4g}{both}"


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f}"


def _phases(row: Row) -> str:
    spent = dict(row["details"]["phases"])
    spent["prefill"] -= spent["scores"] + spent["norms"]
    listed = ", ".join(f"{name} {seconds:.2f}" for name, seconds in spent.items())
    return f"{row['name']}: {listed}"


if __name__ == "__main__":
    main()
