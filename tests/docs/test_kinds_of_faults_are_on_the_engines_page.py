"""The how-to on engines lists every kind of fault of a dump, with its meaning."""

from __future__ import annotations

from pathlib import Path

from perturbkv.analyses.audit.dump_verdict import DUMP_FAULTS

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "engines.md"


def test_every_kind_has_its_row() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    kinds = [row for row in rows if row.split("`")[1] in DUMP_FAULTS]
    assert kinds == [f"| `{kind}` | {meaning} |" for kind, meaning in DUMP_FAULTS.items()]
