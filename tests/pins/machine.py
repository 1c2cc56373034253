"""What the commands about this machine say whatever its load: checks, ties, rows of the benchmark and their bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pins.running import gone, leaves, run, tiny_model


def record(folder: Path) -> dict[str, Any]:
    """Check what a CPU can check, and clock one row of the benchmark, twice, to compare its files."""
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
    return found if gone("doctor bench") else found | _bench(folder, model)


def _bench(folder: Path, model: Path) -> dict[str, Any]:
    """A row's verdict is the load's."""
    file = folder / "bench.json"
    row = ["--model", model, "--tokens", 1100, "--repeats", 1, "--only", "writing-24"]
    told = run("doctor", "bench", *row, "--json", "-o", file).document()
    found: dict[str, Any] = {"doctor bench/keys": sorted(told)}
    for row in told["rows"]:
        found[f"doctor bench/rows/{row['name']}"] = [row["bound"], row["at_least"], row["what"]]
    ran = run("doctor", "bench", "compare", file, file, "--json")
    return {**found, "doctor bench compare/code": ran.code, "doctor bench compare/keys": sorted(ran.document())}
