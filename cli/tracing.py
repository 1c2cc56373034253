"""A planned run on this machine: its folder, its progress on the terminal, and how to go on after Ctrl-C."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.cli import console
from perturbkv.cli.data_options import DataOptions
from perturbkv.cli.options import RunOptions
from perturbkv.errors import InterruptedRunError

if TYPE_CHECKING:
    from perturbkv.pipeline.plan import Plan


def run_folder(options: DataOptions, output: Path | None) -> Path:
    """`--output`, or runs/<time>-<model>-<dataset>."""
    if output is not None:
        return output
    names = [Path(name).stem if "/" in name else name for name in (options.model, options.dataset)]
    slug = "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-") for name in names)
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{slug}"


def make_trace(options: RunOptions, planned: Plan, path: Path) -> Path:
    """Run what is missing of a trace and finish its file; the weights are loaded only where something is.

    Raises PerturbkvErrors; finished samples survive all of them.
    """
    from perturbkv.engines.here import Here
    from perturbkv.pipeline.run import run_to_file

    try:
        with console.progress("samples") as bar:
            return run_to_file(planned, Here(), path, overwrite=options.overwrite, progress=bar.at)
    except InterruptedRunError as error:
        again = path if path == options.output else path.parent
        msg = (
            f"interrupted: {error.kept} of {error.total} samples are kept beside {path}; "
            f"run the same command with --output {again} to go on"
        )
        raise InterruptedRunError(error.kept, error.total, path, msg) from None
