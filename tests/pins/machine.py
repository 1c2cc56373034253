"""What the commands about this machine say whatever its load: checks, ties, rows and their bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pins.running import leaves, run, tiny_model


def record(folder: Path) -> dict[str, Any]:
    """Check what a CPU can check."""
    model = tiny_model(folder / "model", max_position_embeddings=4096)
    small = ["--model", model, "--samples", 1, "--length", 300, "--entries", 64, "--placed", model]
    ran = run("doctor", "selfcheck", "--device", "cpu", *small, "--json", "-o", folder / "selfcheck.json")
    told = ran.document()
    found: dict[str, Any] = {
        "doctor/keys": sorted(run("doctor", "--json").document()),
        "doctor selfcheck/code": ran.code,
    }
    found |= leaves({name: told[name] for name in ("checks", "ties")}, "doctor selfcheck", folder)
    for row in told.get("bench", told)["rows"]:
        told_of = [row["bound"], row["at_least"], row["what"], row["verdict"]]
        found[f"doctor selfcheck/rows/{row['name']}"] = told_of
    return found
