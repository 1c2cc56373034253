"""What the commands about this machine say whatever its load: checks, ties, rows of the benchmark and their bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pins.running import leaves, run, tiny_model


def record(folder: Path) -> dict[str, Any]:
    """Check what a CPU can check, and clock one row of the benchmark, twice, to compare its files."""
    model = tiny_model(folder / "model", max_position_embeddings=4096)
    small = ["--model", model, "--samples", 1, "--length", 300, "--entries", 64, "--placed", model]
    ran = run("selfcheck", "--device", "cpu", *small, "--json", "-o", folder / "selfcheck.json")
    told = ran.document()
    found: dict[str, Any] = {"selfcheck/code": ran.code, **leaves(told["checks"], "selfcheck/checks", folder)}
    found |= leaves(told["ties"], "selfcheck/ties", folder)
    for row in told["bench"]["rows"]:
        found[f"selfcheck/rows/{row['name']}"] = [row["bound"], row["at_least"], row["what"], row["verdict"]]
    ran = run("bench", "--model", model, "--tokens", 1100, "--repeats", 1, "--only", "writing-24", "--json",
              "-o", folder / "bench.json")  # fmt: skip
    told = ran.document()
    found["bench/keys"] = sorted(told)
    for row in told["rows"]:
        found[f"bench/rows/{row['name']}"] = [row["bound"], row["at_least"], row["what"]]  # its verdict is the load's
    found["doctor/keys"] = sorted(run("doctor", "--json").document())
    ran = run("bench", "compare", folder / "bench.json", folder / "bench.json", "--json")
    found["bench compare/code"] = ran.code
    found["bench compare/keys"] = sorted(ran.document())
    return found
