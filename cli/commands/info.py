"""`perturbkv info`: what a trace file holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from perturbkv.cli import console
from perturbkv.cli.options import JsonOption
from perturbkv.visible import line

if TYPE_CHECKING:
    from perturbkv.storage.trace.trace_file import Description


def info(
    trace: Annotated[Path, Argument(help="A trace file", show_default=False)], as_json: JsonOption = False
) -> None:
    """Show a trace's run, samples, variables and provenance."""
    from perturbkv.analyses.json_values import provenance_object, run_object
    from perturbkv.storage.trace.trace_file import describe

    description = describe(trace)
    if as_json:
        document = {**dataclasses.asdict(description), "attrs": provenance_object(description.attrs)}
        console.print_json({**document, "run": run_object(description.run), "path": str(trace)})
        return
    run = description.run
    states = f"{len(description.sample_ids)} samples, {len(description.failures)} failed"
    about = [
        ("samples", states),
        ("text", _held(description, description.with_text)),
        *_answers(description),
        ("kept positions", _held(description, description.with_kept)),
        *_caches(description.caches),
        *((line(name), line(value)) for name, value in sorted(description.attrs.items())),
    ]
    console.table(str(trace), ["", ""], about)
    console.table("configurations", ["config"], [(label,) for label in run.labels()])
    rows = [
        (
            line(name),
            " ".join(map(line, variable.dims)),
            "×".join(map(str, variable.shape)),
            line(variable.units),
            f"{variable.nbytes:,}",
        )
        for name, variable in description.variables.items()
    ]
    console.table("variables", ["name", "axes", "shape", "unit", "#bytes"], rows)
    for reason in description.failures.values():
        console.say(line(f"failed: {reason}"))


def _answers(description: Description) -> list[tuple[str, str]]:
    """Whether the text of answers can be read, where there are answers."""
    there = "generated" in description.variables
    return [("text of answers", _held(description, description.with_answers))] if there else []


def _held(description: Description, samples: Sequence[str]) -> str:
    """Of how many samples something can be read from the file that a trace may go without."""
    held, complete = len(samples), len(description.sample_ids) - len(description.failures)
    return "not stored" if not held else "stored" if held == complete else f"stored of {held} of {complete} samples"


def _caches(caches: dict[str, int]) -> list[tuple[str, str]]:
    """What the evicted caches of all samples and configurations held, and how much of it was padding."""
    if not caches:
        return []
    held, padding = caches["cache_bytes"], caches["cache_padding_bytes"]
    return [("evicted caches", f"{held:,} bytes, of which {padding:,} ({padding / max(held, 1):.1%}) are padding")]
