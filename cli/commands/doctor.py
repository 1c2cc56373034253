"""`perturbkv doctor`: versions, devices, the embedded model and folders.

`doctor selfcheck` compares the code for GPUs with its reference, and measures its speed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from perturbkv.cli import console
from perturbkv.cli.options import DEFAULT_SELECTIONS, JsonOption, RunOptions
from perturbkv.configs import option
from perturbkv.display import plural
from perturbkv.errors import ConfigError
from perturbkv.storage.atomic_files import write_atomically
from perturbkv.storage.output import OutputFile, OutputFolder

if TYPE_CHECKING:
    import torch

    from perturbkv.analyses.heads.half_precision import Ties
    from perturbkv.selfcheck.checks import Check
    from perturbkv.selfcheck.rows import Report

_LIBRARIES = ("torch", "transformers", "numpy", "h5py", "h5netcdf", "matplotlib", "pyarrow", "gguf", "accelerate")


def doctor(context: typer.Context, as_json: JsonOption = False) -> None:
    """Report versions, devices, folders; selfcheck."""
    if context.invoked_subcommand is not None:
        return
    import torch
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    from perturbkv.models import user_cache
    from perturbkv.models.aliases import EMBEDDED, INSTALL_EMBEDDED
    from perturbkv.models.gguf import read_header
    from perturbkv.models.loading import pick_device
    from perturbkv.models.sources import embedded_gguf
    from perturbkv.models.stored_weights import gguf_storage
    from perturbkv.scoring.value_norms import triton_unavailable_reason

    embedded = f"missing: {INSTALL_EMBEDDED}"
    if path := embedded_gguf():
        embedded = f"{EMBEDDED}: {gguf_storage(read_header(path)).detail}; {path}"
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    reason = triton_unavailable_reason(pick_device("auto"))
    models, (entries, size) = len(list(Path(HF_HUB_CACHE).glob("models--*"))), user_cache.usage()
    converted = f"{plural(entries, 'model')}, {size / 2**20:,.0f} MiB; may be deleted"
    data = os.environ.get("PERTURBKV_DATA_DIR")
    findings = {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
        "CUDA devices": ", ".join(cuda) or "none: runs use the CPU",
        "CPU threads": str(torch.get_num_threads()),
        "norm kernel": f"chunked ({reason})" if reason else "triton",
        "embedded model": embedded,
        "hub cache": f"{HF_HUB_CACHE} ({models} models){', offline' if HF_HUB_OFFLINE else ''}",
        "converted models": f"{user_cache.cache_folder()} ({converted})",
        "data folder": data or "PERTURBKV_DATA_DIR is not set: LongBench comes from the hub",
    }
    if as_json:
        console.print_json(findings)
        return
    console.print_table("doctor", ["what", "found"], list(findings.items()))


FORMAT = 1
_MOST_ENTRIES = 2**20
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

    The compact cache, the Triton kernel, samples of every policy, layers over several GPUs; then the table of ties in
    half precision, and the GPU's speed, the longest rows last. The file is written anew after each of them, so
    that a run that is cut off keeps what it found. Exits with 1 where something is not equal, or could not be checked.
    """
    import torch

    from perturbkv.models.loading import pick_device

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            "doctor selfcheck needs a CUDA device, this machine has none; --device cpu checks what a CPU can"
        )
    place, path, trained = pick_device(device), output or Path("runs/gpu.json"), _ties_model(model)
    _check_sizes(samples, length, entries)
    findings = _SelfCheck(device, time.monotonic())
    with OutputFolder(path.parent, overwrite).claim(OutputFile(path), writer=path):
        for _ in findings.measure(place, entries, placed, partial(_measure_ties, trained, samples, length, device)):
            document = console.as_json(findings.to_dict())
            write_atomically(path, lambda stream, text=document: stream.write(text.encode()))  # type: ignore[misc]
    if as_json:
        console.print_json(findings.to_dict())
    else:
        findings.print_tables()
        console.say(f"written to {path}, after {time.monotonic() - findings.start:.0f} s")
    if not findings.equal:
        raise typer.Exit(1)


def _check_sizes(samples: int, length: int, entries: int) -> None:
    """Raise ConfigError for invalid numbers of samples, tokens or entries, before any check runs."""
    from perturbkv.datasets.dataset_registry import DatasetOptions

    DatasetOptions(samples, lengths=(length,))
    option.check_number("--entries", entries, _MOST_ENTRIES)
    if entries < 1:
        raise ConfigError(f"--entries must be at least 1, got {entries}")


def _ties_model(model: str | None) -> str:
    """Return the model for the table of ties: the user's, or the embedded model; empty if there is no model.

    Raises ConfigError for random weights: they are drawn anew in every dtype, so that the verdicts would differ.
    """
    from perturbkv.models.aliases import DEFAULT
    from perturbkv.models.sources import embedded_gguf

    if model is None:
        return DEFAULT if embedded_gguf() else ""
    if model.startswith("random:"):
        raise ConfigError(f"expected a trained model for the table of ties, got {model}, whose weights differ by dtype")
    return model


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


@dataclass
class _SelfCheck:
    """A self-check and its findings so far.

    Attributes:
        device: the device's name.
        start: when it began, by the monotonic clock.
        finished: whether nothing is left to do.
        checks: comparisons with a reference.
        ties: pairs of a dtype and the comparison of its verdicts with float32's.
        reports: reports of the GPU's speed.
        failed: why the ties were not measured.
    """

    device: str
    start: float
    finished: bool = False
    checks: list[Check] = field(default_factory=list)
    ties: list[tuple[str, Ties]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    failed: str = ""

    def measure(
        self, device: torch.device, entries: int, placed: str, ties: Callable[[], list[tuple[str, Ties]]]
    ) -> Iterator[None]:
        """Check and measure, one thing after the other; yield after each. A note is printed when one begins.

        Args:
            device: the device that is checked.
            entries: number of entries of the cache that is checked.
            placed: name of the model that --device-map auto lays out.
            ties: function that measures the table of ties.
        """
        from perturbkv.selfcheck import checks, equality, gpu_rows, whole_samples

        sizes = equality.Sizes(entries)
        work = {
            **{f"{layout} cache": partial(equality.check_layout, device, sizes, layout) for layout in equality.LAYOUTS},
            "Triton norms": partial(checks.check_kernel, device),
            "samples": partial(whole_samples.check_samples, device),
            "--device-map auto": partial(checks.check_placement, placed, device, tokens=256),
        }
        for name, check in work.items():
            console.note(name)
            self.checks += checks.run_check(name, "", check)
            yield
        try:
            self.ties = ties()
        except Exception as error:  # whatever it is, the GPU's speed does not depend on it
            self.failed = " ".join(str(error).split())[:200] or type(error).__name__
        yield
        for names in gpu_rows.TOGETHER:
            console.note(f"bench: {', '.join(names)}")
            self.reports.append(gpu_rows.measure(device, names))
            yield
        self.finished = True
        yield

    @property
    def equal(self) -> bool:
        """True if everything was done, and every check that the device needs is equal."""
        checked = all(check.equal or not check.needed for check in self.checks)
        return (
            self.finished
            and checked
            and not self.failed
            and not any(report.unmeasured_rows() for report in self.reports)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the command's JSON document, with checks, ties and the report of the GPU's speed."""
        from perturbkv.selfcheck.rows import machine

        bench = self.reports[0].to_dict() if self.reports else {"rows": []}
        return {
            "format": FORMAT,
            "machine": dict(machine(self.device, "auto")),
            "seconds": time.monotonic() - self.start,
            "finished": self.finished,
            "equal": self.equal,
            "checks": [check.to_dict() for check in self.checks],
            "ties": [{"dtype": dtype, **one.to_dict()} for dtype, one in self.ties],
            "ties_failed": self.failed,
            "bench": {**bench, "rows": [row for report in self.reports for row in report.to_dict()["rows"]]},
        }

    def print_tables(self) -> None:
        """Print tables of checks, ties and rows of speed."""
        document = self.to_dict()
        rows = [
            (check.name, "–" if check.distance is None else f"{check.distance:.1e}", f"{check.bound:.1e}",
             _verdict(check))
            for check in self.checks
        ]  # fmt: skip
        console.print_table(document["machine"]["device"], ["check", "#distance", "#bound", ""], rows)
        ties = [
            (
                one["dtype"],
                f"{one['kind']} {one['distance']}",
                f"{one['by_difference']['decided']:,}",
                _percent(one["by_difference"]["share"]),
            )
            for one in document["ties"]
        ]
        console.print_table("ties", ["dtype", "measure", "#heads decided", "#float32's verdict"], ties)
        if self.failed:
            console.say(f"ties: NOT CHECKED: {self.failed}")
        bench = [
            (row["name"], "–" if row["value"] is None else f"{row['value']:.3f}", row["verdict"])
            for row in document["bench"]["rows"]
        ]
        console.print_table("bench", ["row", "#value", ""], bench)


def _verdict(check: Check) -> str:
    """Return a check's verdict as text: equal, NOT EQUAL, or why it was not checked, loud where it is needed."""
    if check.reason:
        return f"NOT CHECKED: {check.reason}" if check.needed else check.reason
    return "equal" if check.equal else "NOT EQUAL"


def _percent(share: float | None) -> str:
    """Return a share in percent as text, a dash where there is none."""
    return "–" if share is None else f"{share:.1%}"
