"""A run from its options: its plan, its folder, measuring with progress, and how to resume after Ctrl-C.

With several data sets each has a plan and a trace of its own, measured by one model. With `--shard` one shard of a run
is measured.

A run's time is estimated from its operations and a rate measured in a moment. The estimate counts the operations of
prefill, attention and decoding, and multiplies those of the prefill by what measuring added to it in cost.md. It leaves
out loading the weights and reading the data: it is right within a factor of two or so, which is why it is rounded.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from perturbkv.cli import console
from perturbkv.cli.choices import check_distinct, split_names
from perturbkv.cli.data_options import DataOptions
from perturbkv.cli.options import RunOptions
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Shape
from perturbkv.display import plural
from perturbkv.errors import ConfigError, InterruptedRunError
from perturbkv.escaping import escape_line

if TYPE_CHECKING:
    from perturbkv.configs.run import Shard
    from perturbkv.datasets.prompts import Prompts
    from perturbkv.engines.engine_choice import AnsweringEngine
    from perturbkv.models.loading import ModelFiles
    from perturbkv.pipeline.run.plan import Plan
    from perturbkv.pipeline.run.running import Progress
    from perturbkv.pipeline.run.sharding import ShardDone

_MOST_NAMED_DATASETS = 3
"""Most data sets in the name of a folder."""


def shard_document(shard: Shard, samples: Sequence[str], configs: int) -> dict[str, Any]:
    """Return a shard, its samples and its number of configurations as a JSON document."""
    return {"shard": str(shard), "by": shard.by, "of": shard.count, "samples": list(samples), "configs": configs}


def run_folder(options: DataOptions, output: Path | None, datasets: Sequence[str] = ()) -> Path:
    """Return --output, or runs/<time>-<model>-<dataset>; more than three data sets are named by their number.

    A number follows where a run of the same second has that folder.
    """
    if output is not None:
        return output
    names = datasets or [options.dataset]
    dataset = "-".join(map(slug, names)) if len(names) <= _MOST_NAMED_DATASETS else f"{len(names)}-datasets"
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{slug(options.model)}-{slug(dataset)}"
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    paths = (Path("runs") / f"{name}{number}" for number in numbers)
    return next(path for path in paths if not path.exists())


def slug(name: str) -> str:
    """Return the name of a model or data set in a form for file names; a path becomes its stem."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", Path(name).stem if "/" in name else name).strip("-")


def split_datasets(run: RunOptions) -> list[RunOptions]:
    """Return a run's options per data set of --dataset. Raises ConfigError for no data set or a repeated one."""
    names = [run.dataset] if Path(run.dataset).is_file() else split_names(run.dataset)
    if not names:
        raise ConfigError(f"--dataset takes names of data sets, separated by commas; got '{run.dataset}'")
    return [dataclasses.replace(run, dataset=name) for name in check_distinct("--dataset", names)]


def dataset_paths(folder: Path, runs: Sequence[RunOptions]) -> list[Path]:
    """Return the trace path of each run, named after its data set. Raises ConfigError where two paths are equal."""
    datasets = [run.dataset for run in runs]
    names = [slug(Path(dataset).stem if Path(dataset).is_file() else dataset) for dataset in datasets]
    for name in names:
        if names.count(name) > 1:
            both = " and ".join(dataset for dataset, other in zip(datasets, names, strict=True) if other == name)
            raise ConfigError(
                f"expected data sets of different names, got {both}, both for {folder / name}; rename a file"
            )
    return [folder / name / "trace.h5" for name in names]


def warn_of_missing_budgets(plans: Sequence[Plan], name: str) -> None:
    """Print a note on every budget omitted from the analysis `name`, with the data sets too short for it."""
    budgets_of = [dict.fromkeys(str(config.budget) for config in plan.run.configs) for plan in plans]
    for budget in dict.fromkeys(budget for budgets in budgets_of for budget in budgets):
        short = [plan.run.dataset for plan, budgets in zip(plans, budgets_of, strict=True) if budget not in budgets]
        if short:
            console.note(
                f"b={budget} stands in no table of {name}, as not all data sets have it: prompts of {', '.join(short)} "
                "are too short; give data sets of longer prompts a run of their own, or --budget, or lower --window"
            )


def make_trace(options: RunOptions, planned: Plan, path: Path) -> Path:
    """Measure the missing samples of a trace and finish its file; weights are loaded only if samples are missing.

    Exits the command after a shard of an incomplete trace. Raises PerturbkvErrors; finished samples are kept.
    """
    return make_traces([options], [planned], [path])[0]


def make_traces(
    runs: Sequence[RunOptions], planned: Sequence[Plan], paths: Sequence[Path], folder: Path | None = None
) -> list[Path]:
    """Measure the missing samples of several traces with one model; `folder` is the --output that they share.

    After a shard of incomplete traces prints the measured shards and exits the command, with 1 where samples failed,
    else 0. Raises PerturbkvErrors; finished samples are kept.
    """
    from perturbkv.engines import engine_choice

    with engine_choice.open_engine(runs[0].engine_config, planned) as engine:
        results = [
            measure(run, plan, path, engine, folder) for run, plan, path in zip(runs, planned, paths, strict=True)
        ]
    shards = [result for result in results if not isinstance(result, Path)]
    if not shards:
        return [result for result in results if isinstance(result, Path)]
    if runs[0].as_json:
        documents = [
            {
                "trace": str(measured.trace),
                **shard_document(measured.shard, measured.samples, measured.configs),
                "failed": dict(measured.failures),
                "done": [complete.number for complete in measured.done],
            }
            for measured in shards
        ]
        console.print_json({"shards": documents})
    else:
        for shard in shards:
            console.say(str(shard))
    for reason in (reason for shard in shards for reason in shard.failures.values()):
        console.note(f"failed: {reason}")
    raise typer.Exit(1 if any(shard.failures for shard in shards) else 0)


def measure(
    options: RunOptions, planned: Plan, path: Path, engine: AnsweringEngine, folder: Path | None = None
) -> Path | ShardDone:
    """Measure the missing samples of a trace, or of the shard that --shard names, with a progress bar.

    `folder` is the --output of a run of several traces, with which the run can be resumed. Raises PerturbkvErrors;
    finished samples are kept.
    """
    from perturbkv.pipeline.run.running import run_to_file
    from perturbkv.pipeline.run.sharding import run_shard

    label = "samples" if folder is None else f"{planned.run.dataset}: samples"
    overwrite, wait, shard = options.overwrite, options.wait, options.parsed_shard
    try:
        with console.progress(escape_line(label), status=engine.describe_workers) as bar:
            progress = with_time_note(bar.update, planned)
            if shard is None:
                return run_to_file(planned, engine, path, overwrite=overwrite, wait=wait, progress=progress)
            return run_shard(planned, engine, path, shard, overwrite=overwrite, wait=wait, progress=progress)
    except InterruptedRunError as error:
        output = folder or (path if path == options.output else path.parent)
        raise InterruptedRunError(
            error.kept,
            error.total,
            path,
            f"interrupted: {error.kept} of {error.total} samples kept beside {path}; "
            f"run the same command with --output {output} to go on",
        ) from None


def encode_prompts(options: DataOptions, tokenizer: Any, positions: int | None = None, metric: str = "") -> Prompts:
    """Return the prompts of the options' data set, encoded for a model of `positions` positions (None: any number).

    `metric` grades the answers in place of the data set's own metric. Raises DatasetError and ConfigError for invalid
    data.
    """
    from perturbkv.datasets.prompts import load

    return load(
        options.dataset, tokenizer, max_tokens=options.max_tokens, chat_template=options.chat_template,
        positions=positions, **options.data_request(metric),
    )  # fmt: skip


def plan_all(
    runs: Sequence[RunOptions],
    configs: Sequence[EvictionConfig],
    leave_out_unfit: bool = False,
    generate: int | None = 0,
    metric: str = "",
    files: ModelFiles | None = None,
) -> list[Plan]:
    """Return a plan per run, all with one model; the other parameters are those of `plan`.

    Raises PerturbkvErrors, those for the request of a data set first.
    """
    from perturbkv.datasets.prompts import resolve_options

    for run in runs:
        resolve_options(run.dataset, **run.data_request(metric))
    plans: list[Plan] = []
    for run in runs:
        opened = plans[0].files if plans else files
        plans.append(plan(run, configs, leave_out_unfit, generate, metric, files=opened))
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
    """Return the plan of a run, after all checks that need no weights. Raises PerturbkvErrors.

    Args:
        options: the run as the user chose it.
        configs: its eviction configurations.
        leave_out_unfit: leave out budgets that some prompt makes no larger than the window, instead of refusing them.
        generate: number of tokens generated from every cache; None: as many as the data set says.
        metric: metric that grades answers in place of the data set's own.
        scored: refuse prompts whose answers no metric grades.
        files: the model, where it is open already.
    """
    if options.shard is not None and options.output is None:
        raise ConfigError("expected --output with --shard, got none; name the place that all shards of the run share")
    from perturbkv.cache import entries
    from perturbkv.configs import cache_contents
    from perturbkv.datasets.prompts import resolve_options, whole_text_steps
    from perturbkv.engines import engine_choice
    from perturbkv.models.loading import open_model, pick_dtype
    from perturbkv.pipeline.run.plan import Placement
    from perturbkv.pipeline.run.plan import plan as plan_run
    from perturbkv.scoring import head_scores, value_norms
    from perturbkv.selection import compatibility
    from perturbkv.selection.policies import registry as policies
    from perturbkv.selection.resolved_config import resolve

    resolve_options(options.dataset, **options.data_request(metric))
    resources, device = options.resources, engine_choice.pick_run_device(options.engine_config, options.device)
    placement = Placement(pick_dtype(options.dtype, device), device, options.device_map)
    value_norms.check_kernel(resources.norm_kernel, device)
    files = files or open_model(options.model, options.seed, options.revision or "")
    entries.check_positions(map(resolve, configs), files.config, files.name)
    needed = [config.policy.name for config in configs if policies.policy_class(config.policy.name).needs_scores]
    scores = head_scores.read_required(
        options.head_scores, files.config, needed[0] if needed else None, compatibility.describe_compatible_choices()
    )
    settings = dataclasses.replace(
        options.settings, generate=generate, head_scores=scores, scored=scored, leave_out_unfit=leave_out_unfit
    )
    prompts = encode_prompts(options, files.tokenizer, int(files.config.max_position_embeddings), metric)
    has_steps = cache_contents.default_steps([config.policy for config in configs]) > 1
    if options.reads_whole_text and options.steps is None and has_steps:
        settings = dataclasses.replace(settings, steps=whole_text_steps(prompts, options.text))
    return plan_run(files, placement, prompts, configs, settings, resources)


_MEASURED_OVER_PLAIN = 1.3
"""Time of a measured prefill over that of a plain one, explanation/cost.md: 1.1 for two configurations, 1.25 for 24."""
_MOST_ROWS, _MOST_WIDTH = 512, 8192
"""Most rows and width of the product that is timed; larger ones run at about its rate."""
_PROBE_S = 0.1
"""Seconds for which that product is repeated."""
WORTH_A_NOTE_S = 10.0
"""Shortest duration that is told, in seconds."""
_DURATIONS = ((90.0, 1.0, "s"), (90 * 60.0, 60.0, "min"), (48 * 3600.0, 3600.0, "h"), (float("inf"), 86400.0, "days"))
"""Seconds below which a unit is used, the unit in seconds, and its name."""


def estimate_seconds(planned: Plan) -> float:
    """Return an estimate of a run's duration in seconds, for all samples in a single process on its device."""
    run, shape = planned.run, Shape.from_config(planned.files.config, 1, 0)
    parameters = planned.files.parameters()
    lengths = [len(prompt.token_ids) for prompt in planned.prompts]
    head = shape.d_key + shape.d_value  # causal: half of QKᵀ and of AV
    attention = (shape.layers + shape.sliding) * shape.heads * head
    prefill = sum(2 * parameters * tokens + attention * tokens**2 for tokens in lengths)
    caches = len(run.configs) + 1
    decoded = len(lengths) * (run.steps + (run.generate or 0)) * caches
    rate = {rows: _operations_per_second(planned, rows) for rows in {_MOST_ROWS, min(caches, _MOST_ROWS)}}
    return _MEASURED_OVER_PLAIN * prefill / rate[_MOST_ROWS] + 2 * parameters * decoded / rate[min(caches, _MOST_ROWS)]


def _operations_per_second(planned: Plan, rows: int) -> float:
    """Return the floating-point operations per second of a projection of about the model's width, on `rows` rows."""
    import torch

    placement = planned.placement
    width = min(Shape.from_config(planned.files.config, 1, 0).d_model, _MOST_WIDTH)
    inputs = torch.ones(rows, width, dtype=placement.dtype, device=placement.device)
    weights = torch.ones(width, 4 * width, dtype=placement.dtype, device=placement.device)

    def multiply() -> None:
        inputs @ weights
        if placement.device.type == "cuda":
            torch.cuda.synchronize(placement.device)

    multiply()
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < _PROBE_S or count < 1:
        multiply()
        count += 1
    return 2 * rows * width * 4 * width * count / elapsed


def format_duration(seconds: float) -> str:
    """Return a duration as rounded text: 'a few seconds', 'about 40 s', 'about 12 min', 'about 3 h'."""
    if seconds < WORTH_A_NOTE_S:
        return "a few seconds"
    unit, name = next((unit, name) for most, unit, name in _DURATIONS if seconds < most)
    return f"about {float(f'{seconds / unit:.2g}'):g} {name}"


def with_time_note(progress: Progress, planned: Plan) -> Progress:
    """Return `progress` with a note on the estimated time, at its first call; less than ten seconds are not told."""
    begun = False

    def update(done: int, total: int) -> None:
        nonlocal begun
        progress(done, total)
        seconds = 0.0 if begun else estimate_seconds(planned) * (total - done) / max(total, 1)
        begun = True
        if seconds >= WORTH_A_NOTE_S:
            console.note(f"{plural(total - done, 'sample')} to measure, {format_duration(seconds)} by a quick estimate")

    return update
