"""Prints the table of kernels and waits in docs/explanation/gpu.md: `python -m tests.rehearsal`."""

from __future__ import annotations

import sys
from typing import Any

import perturbkv as pk
from perturbkv.selection.policies import registry
from tests.rehearsal.models import counted
from tests.rehearsal.pretend_gpu import Rehearsal
from tests.rehearsal.test_samples_on_gpus_that_are_not_there import answered, traced

KINDS: dict[str, dict[str, Any]] = {
    "in few bits": {"precision": "quantise(bits=4)"},
    "corrected": {"correction": "corrected"},
    "snapkv(positions=in-cache)": {"policy": "snapkv(positions=in-cache)"},
}


def row(name: str, choices: dict[str, Any], compress: bool = False) -> str:
    """Return a table's row: kernels of a layer and of a configuration, waits, and those of more of both."""
    chosen = {"window": 8, "selection": "attention", **choices}
    one, five = (pk.grid(budgets, **chosen) for budgets in (48, (48, 40, 44, 52, 56)))
    scores = ((1.0, 2.0, 3.0, 4.0),)

    def of(configs: Any, layers: int) -> Rehearsal:
        needed = scores * layers if registry.policy_class(configs[0].policy.name).needs_scores else ()
        measure = answered(configs, 9, compress_over=30) if compress else traced(configs, head_scores=needed)
        return counted(measure, layers)

    alone, deep, many = of(one, 1), of(one, 3), of(five, 1)
    cells = (
        (deep.launches.total() - alone.launches.total()) // 2,
        (many.launches.total() - alone.launches.total()) // 4,
        alone.waits.total(),
        deep.waits.total() - alone.waits.total(),
        many.waits.total() - alone.waits.total(),
    )
    return f"| {name} | " + " | ".join(f"{cell:,}" for cell in cells) + " |"


def main() -> None:
    """Print the table."""
    head = (
        "",
        "kernels a layer",
        "for another configuration",
        "waits",
        "for two more layers",
        "for four more configurations",
    )
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name in registry.names():
        selections = registry.policy_class(name).selections
        lines.append(
            row(name, {"policy": name, "selection": "attention" if "attention" in selections else selections[0]})
        )
    lines += [row(name, choices) for name, choices in KINDS.items()]
    lines.append(row("answers, compressed again", {}, compress=True))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
