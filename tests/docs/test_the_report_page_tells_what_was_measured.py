"""docs/how-to/report.md tells the figures of docs/bench/report.json, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.rows import REPORT

DOCS = Path(__file__).resolve().parents[2] / "docs"


def told(row: dict[str, Any]) -> str:
    """A row of the page's table: sizes with one digit, seconds with two."""
    value = f"{row['value']:.1f}" if row["bound"] >= 5 else f"{row['value']:.2f}"
    return f"| {row['what']} | {value} | {row['bound']:g} |"


def test_the_table_is_what_was_measured() -> None:
    measured = json.loads((DOCS / "bench" / "report.json").read_text())["rows"]
    assert [row["name"] for row in measured] == [target.name for target in REPORT]
    lines = (DOCS / "how-to" / "report.md").read_text().splitlines()
    begin = lines.index("| | measured | bound |") + 2
    assert lines[begin : begin + len(measured)] == [told(row) for row in measured]
    assert not lines[begin + len(measured)]
