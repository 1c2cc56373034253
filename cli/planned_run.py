"""A run on this machine: its plan from the options as typed, its folder, its progress, how to go on after Ctrl-C.

With several data sets each has a plan and a trace of its own, measured by one model. With `--shard` one share of a run
is measured.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perturbkv.cli import console
from perturbkv.cli.choices import check_distinct, split_names
from perturbkv.cli.data_options import DataOptions
from perturbkv.cli.options import RunOptions
from perturbkv.cli.run_time import with_time_notes
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, InterruptedRunError
from perturbkv.escaping import escape_line

if TYPE_CHECKING:
    from perturbkv.configs.run import Shard
    from perturbkv.datasets.prompts import Prompts
    from perturbkv.engines.engine_choice import AnsweringEngine
    from perturbkv.models.loading import ModelFiles
    from perturbkv.pipeline.run.plan import Plan
    from perturbkv.pipeline.run.running import Engine, Progress
    from perturbkv.pipeline.run.sharding import ShardDone
    from perturbkv.storage.run.shards import Command


_OPTION = "--shard"
_MOST_NAMED = 3
"""Most data sets in the name of a folder."""


def run_shard(options: RunOptions, planned: Plan, engine: Engine, path: Path, progress: Progress) -> Path | ShardDone:
    """Measure what is missing of a trace, or of the requested shard. Raises PerturbkvErrors."""
    from perturbkv.pipeline.run.running import run_to_file
    from perturbkv.pipeline.run.sharding import run_shard

    overwrite, wait = options.overwrite, options.wait
    if options.parsed_shard is None:
        return run_to_file(planned, engine, path, overwrite=overwrite, wait=wait, progress=progress)
    command = shard_command(sys.argv[1:])
    return run_shard(planned, engine, path, options.parsed_shard, command=command, overwrite=overwrite, wait=wait,
                     progress=progress)  # fmt: skip


def shard_command(arguments: Sequence[str]) -> Command:
    """Return the command line with its shard left open, so that it can be printed for another one."""
    from perturbkv.storage.run.shards import Command

    words: list[str | None] = ["perturbkv"]
    for word in arguments:
        if word.startswith(f"{_OPTION}="):
            words += [_OPTION, None]
        else:
            words.append(None if words[-1] == _OPTION else word)
    return Command(tuple(words), str(Path.cwd()))


def require_complete(results: Sequence[Path | ShardDone], as_json: bool) -> list[Path]:
    """Return the traces where all are complete; else print the shards that were measured, and end the command.

    It exits with 1 where samples failed.
    """
    shards = [one for one in results if not isinstance(one, Path)]
    if not shards:
        return [one for one in results if isinstance(one, Path)]
    if as_json:
        console.print_json({"shards": [describe(one) for one in shards]})
    else:
        for one in shards:
            console.say(str(one))
    for reason in (reason for one in shards for reason in one.failures.values()):
        console.note(f"failed: {reason}")
    raise typer.Exit(1 if any(one.failures for one in shards) else 0)


def describe(one: ShardDone) -> dict[str, Any]:
    """Return a measured shard as a JSON document, with the numbers of all shards that are done."""
    return {
        "trace": str(one.trace),
        **shard_document(one.shard, one.samples, one.configs),
        "failed": dict(one.failures),
        "done": [shard.number for shard in one.done],
    }


def shard_document(shard: Shard, samples: Sequence[str], configs: int) -> dict[str, Any]:
    """Return a shard, its samples and its number of configurations as a JSON document."""
    return {"shard": str(shard), "by": shard.by, "of": shard.count, "samples": list(samples), "configs": configs}


def run_folder(options: DataOptions, output: Path | None, datasets: Sequence[str] = ()) -> Path:
    """Return --output, or runs/<time>-<model>-<dataset>, with the names or the number of several data sets."""
    if output is not None:
        return output
    names = datasets or [options.dataset]
    dataset = "-".join(map(slug, names)) if len(names) <= _MOST_NAMED else f"{len(names)}-datasets"
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{slug(options.model)}-{slug(dataset)}"


def slug(name: str) -> str:
    """Return the name of a model or data set as part of a file name; a path becomes its stem."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", Path(name).stem if "/" in name else name).strip("-")


def each_dataset(run: RunOptions) -> list[RunOptions]:
    """Return a run per data set. Raises ConfigError for none, and for a repeated one."""
    names = [run.dataset] if Path(run.dataset).is_file() else split_names(run.dataset)
    if not names:
        msg = f"--dataset takes names of data sets, separated by commas; got '{run.dataset}'"
        raise ConfigError(msg)
    return [dataclasses.replace(run, dataset=name) for name in check_distinct("--dataset", names)]


def dataset_paths(folder: Path, runs: Sequence[RunOptions]) -> list[Path]:
    """Return the path of each data set's trace. Raises ConfigError where two would be the same."""
    names = [slug(Path(one.dataset).stem if Path(one.dataset).is_file() else one.dataset) for one in runs]
    for name in names:
        if names.count(name) > 1:
            both = " and ".join(one.dataset for one, other in zip(runs, names, strict=True) if other == name)
            msg = f"expected data sets of different names, got {both}, both for {folder / name}; rename a file"
            raise ConfigError(msg)
    return [folder / name / "trace.h5" for name in names]


def warn_of_gaps(planned: Sequence[Plan], name: str) -> None:
    """Print a note on each budget that no table will show, and the data sets whose prompts are too short for it."""
    plan_budgets = [dict.fromkeys(str(config.budget) for config in one.run.configs) for one in planned]
    for budget in dict.fromkeys(budget for budgets in plan_budgets for budget in budgets):
        short = [one.run.dataset for one, budgets in zip(planned, plan_budgets, strict=True) if budget not in budgets]
        if short:
            console.note(
                f"b={budget} stands in no table of {name}, as not all data sets have it: prompts of {', '.join(short)} "
                "are too short; give data sets of longer prompts a run of their own, or --budget, or lower --window"
            )


def make_trace(options: RunOptions, planned: Plan, path: Path) -> Path:
    """Run what is missing of a trace and finish its file; the weights are loaded only where something is missing.

    With --shard the command ends here unless the trace is complete. Raises the errors of `measure`.
    """
    return make_traces([options], [planned], [path])[0]


def make_traces(
    runs: Sequence[RunOptions], planned: Sequence[Plan], paths: Sequence[Path], folder: Path | None = None
) -> list[Path]:
    """Run what is missing of several traces with one model; `folder` is the --output that they share.

    With --shard the command ends here unless all are complete. Raises the errors of `measure`.
    """
    if folder is None:
        return require_complete([measure(runs[0], planned[0], paths[0])], runs[0].as_json)
    from perturbkv.engines import engine_choice

    with engine_choice.open_engine(runs[0].engine_config, planned) as engine:
        traces = [
            measure(run, one, path, engine=engine, folder=folder)
            for run, one, path in zip(runs, planned, paths, strict=True)
        ]
    return require_complete(traces, runs[0].as_json)


def measure(
    options: RunOptions, planned: Plan, path: Path, *, engine: AnsweringEngine | None = None, folder: Path | None = None
) -> Path | ShardDone:
    """Run what is missing of a trace, or of the requested shard of it.

    `engine` measures, by default one that is chosen for this run. `folder` is the --output of a run of several traces,
    with which the run can be resumed. Raises PerturbkvErrors; finished samples survive all of them.
    """
    from perturbkv.engines import engine_choice

    what = "samples" if folder is None else f"{planned.run.dataset}: samples"
    chosen = engine_choice.open_engine(options.engine_config, [planned]) if engine is None else nullcontext(engine)
    try:
        with chosen as measuring, console.progress(escape_line(what), status=measuring.alive) as bar:
            return run_shard(options, planned, measuring, path, with_time_notes(bar.update, planned))
    except InterruptedRunError as error:
        output = folder or (path if path == options.output else path.parent)
        msg = (
            f"interrupted: {error.kept} of {error.total} samples are kept beside {path}; "
            f"run the same command with --output {output} to go on"
        )
        raise InterruptedRunError(error.kept, error.total, path, msg) from None


def encode_prompts(options: DataOptions, tokenizer: Any, positions: int | None = None, metric: str = "") -> Prompts:
    """Load and encode the data set for a model of `positions` positions; None: they are not checked.

    `metric` grades answers instead of the data set's own.

    Raises DatasetError and ConfigError for whatever is wrong with the data.
    """
    from perturbkv.datasets.prompts import load

    return load(
        options.dataset, tokenizer, samples=options.samples, seed=options.seed, data_dir=options.data_dir,
        lengths=options.lengths, depths=options.depths, haystack=options.haystack, max_tokens=options.max_tokens,
        chat_template=options.chat_template, positions=positions, metric=metric,
    )  # fmt: skip


def plan_all(
    runs: Sequence[RunOptions],
    configs: Sequence[EvictionConfig],
    leave_out_unfit: bool = False,
    generate: int | None = 0,
    metric: str = "",
    files: ModelFiles | None = None,
) -> list[Plan]:
    """Return a plan per data set, with one model. Raises PerturbkvErrors, those of unknown names first."""
    from perturbkv.datasets.dataset_registry import check_name

    for one in runs:
        check_name(one.dataset)
    plans: list[Plan] = []
    for one in runs:
        opened = plans[0].files if plans else files
        plans.append(plan(one, configs, leave_out_unfit, generate, metric, files=opened))
    return plans


def plan(
    options: RunOptions,
    configs: Sequence[EvictionConfig],
    leave_out_unfit: bool = False,
    generate: int | None = 0,
    metric: str = "",
    scored: bool = True,
    files: ModelFiles | None = None,
) -> Plan:
    """Return the plan of a run, checked in everything that needs no weights. Raises PerturbkvErrors.

    `leave_out_unfit`: a budget that some prompt makes no larger than the window is left out instead of refused.
    `generate`: tokens generated from every cache; None: as many as the dataset says. `metric`: that grades answers
    instead of the data set's own. `scored`: whether prompts whose answers nothing grades are refused.
    `files`: the model, where it was opened for another run already.
    """
    if options.shard is not None and options.output is None:
        msg = "expected --output with --shard, got none; name the place that all shards of the run share"
        raise ConfigError(msg)
    from perturbkv.cache import entries
    from perturbkv.configs.run import Settings
    from perturbkv.datasets import dataset_registry as datasets
    from perturbkv.engines import engine_choice
    from perturbkv.models.loading import open_model, pick_dtype
    from perturbkv.pipeline.run.plan import Placement
    from perturbkv.pipeline.run.plan import plan as plan_run
    from perturbkv.scoring import head_scores, value_norms
    from perturbkv.selection import compatibility
    from perturbkv.selection.policies import registry as policies
    from perturbkv.selection.resolved_config import resolve

    datasets.check_name(options.dataset)
    resources, device = options.resources, engine_choice.pick_run_device(options.engine_config, options.device)
    placement = Placement(pick_dtype(options.dtype, device), device, options.device_map)
    value_norms.check_kernel(resources.norm_kernel, device)
    files = files or open_model(options.model, options.seed, options.revision or "")
    entries.check_positions(map(resolve, configs), files.config, files.name)
    needed = [config.policy.name for config in configs if policies.info(config.policy.name).needs_scores]
    scores = head_scores.read_required(
        options.head_scores, files.config, needed[0] if needed else None, compatibility.describe_compatible_choices()
    )
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
