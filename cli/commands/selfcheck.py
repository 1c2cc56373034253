"""`perturbkv doctor selfcheck`: GPU code compared with its reference, and its speed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from perturbkv.cli import console
from perturbkv.cli.options import DEFAULT_SELECTIONS, JsonOption, RunOptions
from perturbkv.cli.saving import new_file
from perturbkv.configs import option
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from perturbkv.analyses.heads.half_precision import Ties
    from perturbkv.benchmark.rows import Report
    from perturbkv.selfcheck.checks import Check

FORMAT = 1
_MOST_ENTRIES = 2**20
GPU_ROWS = ("triton-time", "triton-rate", "cuda-24", "cuda-decode")
_HALVES = ("bfloat16", "float16")


def selfcheck(
    device: Annotated[str, Option(metavar="NAME", help="Device that is checked; cpu checks what a CPU can")] = "cuda",
    model: Annotated[
        str | None,
        Option(metavar="NAME", help="Trained model for ties", show_default="the embedded one, if any"),
    ] = None,
    samples: Annotated[int, Option(metavar="N", help="Needle prompts for the table of ties")] = 4,
    length: Annotated[int, Option(metavar="N", help="Tokens of each needle prompt")] = 1000,
    entries: Annotated[int, Option(metavar="N", help="Entries of the cache that is checked")] = 1024,
    placed: Annotated[
        str, Option(metavar="NAME", help="Random model that --device-map auto lays out")
    ] = "random:smollm2-135m",
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="PATH", help="The JSON file", show_default="runs/gpu.json")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file")] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Compare what runs on a GPU with its reference.

    The compact cache, the Triton kernel, layers over several GPUs; then the table of ties in half precision, and the
    benchmark's rows of a GPU. Exits with 1 where something is not equal, or could not be checked.
    """
    place, path, trained = _find_device(device), output or Path("runs/gpu.json"), _ties_model(model)
    _check_sizes(samples, length, entries)
    start = time.monotonic()
    with new_file(path, overwrite) as temporary:
        checks = [check for group in _run_checks(place, entries, placed) for check in group]
        ties = _measure_ties(trained, samples, length, device)
        bench = _run_bench(place)
        document = _document(checks, ties, bench, device, time.monotonic() - start)
        temporary.write_text(console.as_json(document), encoding="utf-8")
    if as_json:
        console.print_json(document)
    else:
        _print_tables(checks, document)
        console.say(f"written to {path}, after {document['seconds']:.0f} s")
    if not document["equal"]:
        raise typer.Exit(1)


def _find_device(name: str) -> torch.device:
    """Return the device with this name. Raises ConfigError for CUDA on a machine without a GPU."""
    import torch

    from perturbkv.models.loading import pick_device

    if name.startswith("cuda") and not torch.cuda.is_available():
        msg = "doctor selfcheck needs a CUDA device, this machine has none; --device cpu checks what a CPU can"
        raise ConfigError(msg)
    return pick_device(name)


def _check_sizes(samples: int, length: int, entries: int) -> None:
    """Raise ConfigError for invalid numbers of samples, tokens or entries, before any check runs."""
    from perturbkv.datasets.dataset_registry import DatasetOptions

    DatasetOptions(samples, lengths=(length,))
    option.check_number("--entries", entries, _MOST_ENTRIES)
    if entries < 1:
        msg = f"--entries must be at least 1, got {entries}"
        raise ConfigError(msg)


def _ties_model(model: str | None) -> str:
    """Return the model for the table of ties: the user's, or the embedded model; empty if there is no model.

    Raises ConfigError for random weights: they are drawn anew in every dtype, so that the verdicts would differ.
    """
    from perturbkv.models.aliases import DEFAULT
    from perturbkv.models.sources import embedded_gguf

    if model is None:
        return DEFAULT if embedded_gguf() else ""
    if model.startswith("random:"):
        msg = f"expected a trained model for the table of ties, got {model}, whose weights differ by dtype"
        raise ConfigError(msg)
    return model


def _run_checks(device: torch.device, entries: int, placed: str) -> Iterator[list[Check]]:
    """Yield the checks of one group at a time; a note is printed when a group begins."""
    from perturbkv.selfcheck import checks, equality

    sizes = equality.Sizes(entries)
    work = {
        **{f"{layout} cache": partial(equality.check_layout, device, sizes, layout) for layout in equality.LAYOUTS},
        "Triton norms": partial(checks.check_kernel, device),
        "--device-map auto": partial(checks.check_placement, placed, device, 256),
    }
    for name, check in work.items():
        console.note(name)
        yield checks.run_check(name, "", check)


def _measure_ties(model: str, samples: int, length: int, device: str) -> list[tuple[str, Ties]]:
    """Return (dtype, comparison of its verdicts with float32's) pairs, from needle prompts; none without a model."""
    if not model:
        console.note("ties: there is no trained model; give one with --model")
        return []
    import dataclasses

    from perturbkv.analyses.heads.half_precision import compare
    from perturbkv.cli.planned_run import make_trace, plan
    from perturbkv.storage.trace.trace_file import read_trace

    options, traces = RunOptions(model=model, samples=samples, length=[str(length)], device=device), {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("float32", *_HALVES):
            console.note(f"ties: {dtype}")
            run = dataclasses.replace(options, dtype=dtype)
            planned = plan(run, run.configs(DEFAULT_SELECTIONS))
            traces[dtype] = read_trace(make_trace(run, planned, Path(folder) / f"{dtype}.h5"))
        return [
            (dtype, ties)
            for dtype in _HALVES
            for ties in compare(traces["float32"], traces[dtype], *DEFAULT_SELECTIONS)
        ]


def _run_bench(device: torch.device) -> Report:
    """Return the report of the benchmark's rows of a GPU."""
    from perturbkv.benchmark import rows, suite

    console.note("bench")
    return suite.measure(suite.Settings(device=str(device)), rows.find_targets(GPU_ROWS))


def _document(
    checks: list[Check], ties: list[tuple[str, Ties]], bench: Report, device: str, seconds: float
) -> dict[str, Any]:
    """Return the command's JSON document, with checks, ties and benchmark report."""
    from perturbkv.benchmark.subprocesses import machine

    return {
        "format": FORMAT,
        "machine": dict(machine(device, "auto")),
        "seconds": seconds,
        "equal": all(check.equal or not check.needed for check in checks) and not bench.failed,
        "checks": [check.to_dict() for check in checks],
        "ties": [{"dtype": dtype, **one.to_dict()} for dtype, one in ties],
        "bench": bench.to_dict(),
    }


def _print_tables(checks: list[Check], document: dict[str, Any]) -> None:
    """Print tables of checks, ties and benchmark rows."""
    rows = [
        (check.name, "–" if check.distance is None else f"{check.distance:.1e}", f"{check.bound:.1e}", _verdict(check))
        for check in checks
    ]
    console.table(document["machine"]["device"], ["check", "#distance", "#bound", ""], rows)
    ties = [
        (
            one["dtype"],
            f"{one['kind']} {one['distance']}",
            f"{one['by_difference']['decided']:,}",
            _percent(one["by_difference"]["share"]),
        )
        for one in document["ties"]
    ]
    console.table("ties", ["dtype", "measure", "#heads decided", "#float32's verdict"], ties)
    bench = [
        (row["name"], "–" if row["value"] is None else f"{row['value']:.3f}", row["verdict"])
        for row in document["bench"]["rows"]
    ]
    console.table("bench", ["row", "#value", ""], bench)


def _verdict(check: Check) -> str:
    """Return a check's verdict as text: equal, NOT EQUAL, or the reason why it was not run."""
    return check.reason or ("equal" if check.equal else "NOT EQUAL")


def _percent(share: float | None) -> str:
    """Return a share in percent as text, a dash where there is none."""
    return "–" if share is None else f"{share:.1%}"
