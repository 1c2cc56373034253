"""A planned run on this machine: its folder, its progress on the terminal, and how to go on after Ctrl-C."""

from __future__ import annotations

import re
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.cli import console, sharding
from perturbkv.cli.data_options import DataOptions
from perturbkv.cli.options import RunOptions
from perturbkv.errors import InterruptedRunError
from perturbkv.visible import line

if TYPE_CHECKING:
    from perturbkv.engines.choosing import Measuring
    from perturbkv.pipeline.run.plan import Plan
    from perturbkv.pipeline.run.sharding import ShardDone


def run_folder(options: DataOptions, output: Path | None) -> Path:
    """`--output`, or runs/<time>-<model>-<dataset>."""
    if output is not None:
        return output
    slugs = "-".join(map(slug, (options.model, options.dataset)))
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{slugs}"


def slug(name: str) -> str:
    """A model or a data set as a part of a file's name; of one that is named by its path the stem."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", Path(name).stem if "/" in name else name).strip("-")


def make_trace(options: RunOptions, planned: Plan, path: Path) -> Path:
    """Run what is missing of a trace and finish its file; the weights are loaded only where something is.

    With --shard the command ends here, unless the trace is whole by then. Raises as `measure`.
    """
    return sharding.whole_or_left([measure(options, planned, path)], options.as_json)[0]


def measure(
    options: RunOptions, planned: Plan, path: Path, *, engine: Measuring | None = None, folder: Path | None = None
) -> Path | ShardDone:
    """Run what is missing of a trace, or of the shard of it that is asked for.

    `engine` measures, by default one that is chosen for this run. `folder` is the --output that goes on with it, where
    that is neither the file nor its folder: of a run of several traces. Raises PerturbkvErrors; finished samples
    survive all of them.
    """
    from perturbkv.engines import choosing

    what = "samples" if folder is None else f"{planned.run.dataset}: samples"
    chosen = choosing.engine(options.spread, [planned]) if engine is None else nullcontext(engine)
    try:
        with chosen as measuring, console.progress(line(what), beside=measuring.alive) as bar:
            return sharding.run(options, planned, measuring, path, bar.at)
    except InterruptedRunError as error:
        again = folder or (path if path == options.output else path.parent)
        msg = (
            f"interrupted: {error.kept} of {error.total} samples are kept beside {path}; "
            f"run the same command with --output {again} to go on"
        )
        raise InterruptedRunError(error.kept, error.total, path, msg) from None
