"""A planned run on this machine: its folder, its progress on the terminal, and how to go on after Ctrl-C.

`--shard`: measure one share of a run, and say how far the others are.

From options as typed to the library's plan of a run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perturbkv.cli import console
from perturbkv.cli.data_options import DataOptions
from perturbkv.cli.options import RunOptions
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, InterruptedRunError
from perturbkv.escaping import line

if TYPE_CHECKING:
    from perturbkv.configs.run import Shard
    from perturbkv.datasets.prompts import Prompts
    from perturbkv.engines.choosing import Measuring
    from perturbkv.models.loading import ModelFiles
    from perturbkv.pipeline.run.plan import Plan
    from perturbkv.pipeline.run.running import Engine, Progress
    from perturbkv.pipeline.run.sharding import ShardDone
    from perturbkv.storage.run.shards import Command


_OPTION = "--shard"


def run_shard(options: RunOptions, planned: Plan, engine: Engine, path: Path, progress: Progress) -> Path | ShardDone:
    """Measure what is missing of a trace, or of the shard that is asked for. Raises PerturbkvErrors."""
    from perturbkv.pipeline.run.running import run_to_file
    from perturbkv.pipeline.run.sharding import run_shard

    overwrite, wait = options.overwrite, options.wait
    if options.part is None:
        return run_to_file(planned, engine, path, overwrite=overwrite, wait=wait, progress=progress)
    command = typed(sys.argv[1:])
    return run_shard(planned, engine, path, options.part, command=command, overwrite=overwrite, wait=wait,
                     progress=progress)  # fmt: skip


def typed(arguments: Sequence[str]) -> Command:
    """The command line, so that it can be told for another shard."""
    from perturbkv.storage.run.shards import Command

    words: list[str | None] = ["perturbkv"]
    for word in arguments:
        if word.startswith(f"{_OPTION}="):
            words += [_OPTION, None]
        else:
            words.append(None if words[-1] == _OPTION else word)
    return Command(tuple(words), str(Path.cwd()))


def whole_or_left(made: Sequence[Path | ShardDone], as_json: bool) -> list[Path]:
    """The traces, where all are whole; else what was measured of the others is told, and the command ends.

    It exits with 1 where samples failed.
    """
    left = [one for one in made if not isinstance(one, Path)]
    if not left:
        return [one for one in made if isinstance(one, Path)]
    if as_json:
        console.print_json({"shards": [describe(one) for one in left]})
    else:
        for one in left:
            console.say(str(one))
    for reason in (reason for one in left for reason in one.failures.values()):
        console.note(f"failed: {reason}")
    raise typer.Exit(1 if any(one.failures for one in left) else 0)


def describe(one: ShardDone) -> dict[str, Any]:
    """What was measured, and how far the others are."""
    return {
        "trace": str(one.trace),
        **share(one.shard, one.samples, one.configs),
        "failed": dict(one.failures),
        "done": [shard.number for shard in one.done],
    }


def share(shard: Shard, samples: Sequence[str], configs: int) -> dict[str, Any]:
    """What a shard measures."""
    return {"shard": str(shard), "by": shard.by, "of": shard.count, "samples": list(samples), "configs": configs}


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
    return whole_or_left([measure(options, planned, path)], options.as_json)[0]


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
            return run_shard(options, planned, measuring, path, bar.at)
    except InterruptedRunError as error:
        again = folder or (path if path == options.output else path.parent)
        msg = (
            f"interrupted: {error.kept} of {error.total} samples are kept beside {path}; "
            f"run the same command with --output {again} to go on"
        )
        raise InterruptedRunError(error.kept, error.total, path, msg) from None


def encode_prompts(options: DataOptions, tokenizer: Any, positions: int | None = None, metric: str = "") -> Prompts:
    """Load the dataset and encode it for a model of so many positions, None where that does not matter.

    `metric` grades answers instead of the data set's own.

    Raises DatasetError and ConfigError for all that is wrong with the data.
    """
    from perturbkv.datasets.prompts import load

    return load(
        options.dataset, tokenizer, samples=options.samples, seed=options.seed, data_dir=options.data_dir,
        lengths=options.lengths, depths=options.depths, haystack=options.haystack, max_tokens=options.max_tokens,
        chat_template=options.chat_template, positions=positions, metric=metric,
    )  # fmt: skip


def plan(
    options: RunOptions,
    configs: Sequence[EvictionConfig],
    leave_out_unfit: bool = False,
    generate: int | None = 0,
    metric: str = "",
    scored: bool = True,
    files: ModelFiles | None = None,
) -> Plan:
    """Check everything that can be checked without the weights. Raises PerturbkvErrors.

    `leave_out_unfit`: a budget that some prompt makes no larger than the window is left out instead of refused.
    `generate`: tokens generated from every cache; None: as many as the dataset says. `metric`: that grades answers
    instead of the data set's own. `scored`: whether prompts whose answers nothing grades are refused.
    `files`: the model, where it was opened for another run already.
    """
    if options.shard is not None and options.output is None:
        msg = "expected --output with --shard, got none; name the place that all shards of the run share"
        raise ConfigError(msg)
    from perturbkv.cache import entries
    from perturbkv.datasets import dataset_registry as datasets
    from perturbkv.engines import choosing
    from perturbkv.models.loading import open_model, pick_dtype
    from perturbkv.pipeline.run.plan import Placement, Settings
    from perturbkv.pipeline.run.plan import plan as plan_run
    from perturbkv.scoring import head_scores, value_norms
    from perturbkv.selection import compatibility
    from perturbkv.selection.policies import registry as policies

    datasets.check_name(options.dataset)
    resources, device = options.resources, choosing.device(options.spread, options.device)
    placement = Placement(pick_dtype(options.dtype, device), device, options.device_map)
    value_norms.check_kernel(resources.norm_kernel, device)
    files = files or open_model(options.model, options.seed, options.revision or "")
    entries.check_positions(configs, files.config, files.name)
    needed = [config.policy.name for config in configs if policies.info(config.policy.name).needs_scores]
    scores = head_scores.given(options.head_scores, files.config, needed[0] if needed else None, compatibility.works())
    settings = Settings(
        steps=options.step_count,
        scenario=options.scenario,
        cache=options.cache,
        save=tuple(options.save or ()),
        generate=generate,
        head_scores=scores,
        text=options.text,
        kept=options.kept,
        scored=scored,
        leave_out_unfit=leave_out_unfit,
    )
    prompts = encode_prompts(options, files.tokenizer, int(files.config.max_position_embeddings), metric)
    return plan_run(files, placement, prompts, configs, settings, resources)
