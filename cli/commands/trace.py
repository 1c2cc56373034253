"""`perturbkv trace`: measure, and write a trace file.

A sweep file and the command line make one run: options on the command line win, then those of the file, then the
environment (PERTURBKV_DATA_DIR), then the defaults. Paths in a file are relative to the folder in which the command
runs, as on the command line.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from perturbkv.cli import console, dry_run, option_refusals
from perturbkv.cli.command_line import show_options, with_options
from perturbkv.cli.commands.head_scores import measure_head_scores
from perturbkv.cli.options import DEFAULT_SELECTIONS, RARE, RunOptions, SelectionOption
from perturbkv.cli.planned_run import check_other_run, make_trace, plan, run_folder
from perturbkv.cli.session import print_failures
from perturbkv.cli.sweep_file import Entries, Entry, Key, SweepFile, read
from perturbkv.configs.choice import as_choice, parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import check_configurations
from perturbkv.configs.run import RunConfig
from perturbkv.errors import BudgetError, ConfigError, DatasetError, ModelError, PerturbkvError
from perturbkv.selection import compatibility, grid
from perturbkv.selection.grid import (
    FIELDS,
    ParsedConfig,
    check_written_options,
    combinations,
    configuration,
    parse_configuration,
    unique,
)
from perturbkv.selection.policies import registry
from perturbkv.storage.output import OutputFolder

if TYPE_CHECKING:
    from perturbkv.pipeline.run.plan import Plan


_WHOLE = Budget(1.0)
"""A budget that is valid with every window."""
_OWN_GRID = "lists make every combination; what differs takes a mapping of its own under 'grids'"
_KEY_OF_ERROR: Mapping[type[PerturbkvError], str] = {ModelError: "model", DatasetError: "dataset"}


@dataclass(frozen=True)
class Sweep:
    """A run that a sweep file and a command line describe together.

    Attributes:
        file: the file without the keys that the command line replaces.
        run: the options of the run; its eviction choices are those of the command line alone.
        configs: every configuration, in the order of the trace's `config` dimension.
    """

    file: SweepFile
    run: RunOptions
    configs: tuple[EvictionConfig, ...]

    def plan(self) -> Plan:
        """Return the plan of the run. Raises PerturbkvErrors, with the line of the file where possible."""
        try:
            return plan(self.run, self.configs)
        except PerturbkvError as error:
            raise _locate_by_message(self.file, error) from None


def resolve(path: Path, run: RunOptions, selections: list[str], typed_options: frozenset[str]) -> Sweep:
    """Return the run of a sweep file and the command line. Raises ConfigErrors that name file, line and key.

    `run` and `selections` hold the command line's values and the defaults. Each of the `typed_options`, those given on
    the command line, replaces its key of the file as a whole, in every grid too.
    """
    file = read(path).without(typed_options)
    check_configurations(_count_combinations(file))
    for entry in file.entries():
        _check_values(entry)
    options = {name: _option_value(entry) for name, entry in file.options.items() if entry.key.is_run_option}
    wanted = dataclasses.replace(run, **options)
    return Sweep(file, wanted, _sweep_configs(file, wanted, selections))


def _option_value(entry: Entry) -> Any:
    """Return the value of an entry for its option in `RunOptions`: a list if the option takes several values."""
    return list(entry.values) if entry.key.many else entry.values[0]


def _sweep_configs(file: SweepFile, run: RunOptions, selections: list[str]) -> tuple[EvictionConfig, ...]:
    """Return the configurations of all grids, in the order of the file. Raises ConfigError for keys without effect."""
    defaults = {**run.choices(), "selection": selections}
    configs: list[EvictionConfig] = []
    for grid_entries in file.grids:
        entries = {**file.options, **grid_entries}
        choices = {
            **defaults,
            **{name: entry.values for name, entry in entries.items() if entry.key.is_eviction_choice},
        }
        requests = [_resolve_combination(combination, entries, run.cache) for combination in combinations(choices)]
        check_written_options(requests)
        grid_configs = [request.config for request in requests]
        _check_effects(grid_entries, run, grid_configs)
        configs += grid_configs
    _check_effects(file.options, run, configs)
    return unique(configs)


def _count_combinations(file: SweepFile) -> int:
    """Return the number of combinations of all grids, from the file's values alone."""
    grids = ({**file.options, **grid_entries} for grid_entries in file.grids)
    return sum(
        math.prod(len(entry.values) for entry in entries.values() if entry.key.is_eviction_choice) for entries in grids
    )


def _check_effects(entries: Entries, run: RunOptions, configs: list[EvictionConfig]) -> None:
    """Raise ConfigError, with its line, for a key without effect on any configuration."""
    for entry in entries.values():
        if reason := option_refusals.reason_without_effect("trace", entry.key.field, run, configs):
            raise entry.location.error(reason)


def _resolve_combination(combination: dict[str, Any], entries: Entries, cache: str) -> ParsedConfig:
    """Return the configuration of a combination of choices. Raises ConfigError, with its line, if it is invalid."""
    try:
        request = parse_configuration(**combination)
    except BudgetError as error:  # each value alone is valid: budget and window do not go together
        raise _locate_error(("budget", "window", "preset", "policy"), combination, entries, error, _OWN_GRID) from None
    try:
        compatibility.check(request.config, cache)
    except ConfigError as error:
        config = request.config
        fits = config.selection.name in registry.info(config.policy.name).selections
        own = config.policy.name == as_choice(combination["policy"]).name
        first = ("policy",) if fits and own else ("selection", "policy")
        raise _locate_error((*first, "cache"), combination, entries, error, "" if fits else _OWN_GRID) from None
    return request


def _locate_error(
    names: tuple[str, ...], combination: dict[str, Any], entries: Entries, error: ConfigError, hint: str
) -> ConfigError:
    """Return the error with a hint and the line of the first key among `names` that the file has.

    The error is unchanged where the file has no such key.
    """
    for entry in (entries[name] for name in names if name in entries):
        return entry.locate(combination.get(entry.key.field)).error("; ".join(filter(None, (str(error), hint))))
    return error


def _locate_by_message(file: SweepFile, error: PerturbkvError) -> PerturbkvError:
    """Return the error with the line of the value in its message, or of the key that its type concerns.

    The error is unchanged where the file has no such value or key.
    """
    message = str(error)
    for entry in file.entries():
        for value, location in zip(entry.values, entry.locations, strict=True):
            if _mentions(message, entry.key, value):
                return location.error(message)
    for entry in file.entries():
        if entry.key.field == _KEY_OF_ERROR.get(type(error)):
            return entry.location.error(message)
    return error


def _mentions(message: str, key: Key, value: Any) -> bool:
    """Return whether an error message quotes a key's value: "unknown model 'x'", "budget 0.01 of 99 tokens", a path."""
    option, text = key.field.replace("_", "-"), re.escape(str(value))
    path = rf"|(?<![\w./-]){text}(?![\w./-])" if key.kind is Path else ""
    return re.search(rf"\b{option} ('{text}'|{text}\b){path}", message) is not None


def _check_values(entry: Entry) -> None:
    """Raise ConfigError, with its line, for a value that is invalid regardless of the other options."""
    for value, location in zip(entry.values, entry.locations, strict=True):
        with location.locate_errors():
            if entry.key.is_eviction_choice and entry.key.field not in FIELDS:
                grid.check_option_value(entry.key.field, value)
            elif entry.key.is_eviction_choice:
                configuration(**{entry.key.field: value, "budget": _WHOLE})  # a budget was checked as it was read
            else:
                _check_run_option(entry.key, value)


def _check_run_option(key: Key, value: Any) -> None:
    """Raise PerturbkvError if a run with this option, and defaults otherwise, would fail before the model is opened."""
    from perturbkv.datasets.dataset_registry import SHORTEST, DatasetOptions
    from perturbkv.datasets.prompts import DEFAULT_SAMPLES

    options: dict[str, Any] = {key.field: [value] if key.many else value}
    run = RunOptions(**options)
    lengths = run.lengths or (SHORTEST,)
    samples = DEFAULT_SAMPLES if run.samples is None else run.samples
    DatasetOptions(samples, lengths=lengths, depths=run.depths, haystack=run.haystack)
    steps, save = run.step_count, tuple(run.save or ())
    RunConfig("", "", (EvictionConfig(_WHOLE),), steps=steps, max_tokens=run.max_tokens, save=save)
    if run.device != "auto":
        from perturbkv.models.loading import pick_device

        pick_device(run.device)


HDF5 = (".h5", ".hdf5")
"""Endings of an --output that is the trace itself and not its folder."""


@show_options(*RARE)
@with_options
def trace(
    run: RunOptions,
    config: Annotated[
        Path | None,
        Option(
            "--config",
            metavar="PATH",
            help="Sweep file (YAML); what is typed replaces its key",
        ),
    ] = None,
    selection: SelectionOption = None,
) -> None:
    """Run a model with full and evicted caches; write a trace.

    From one prefill per sample; a killed run goes on with the same command. --head-scores without the policy headkv
    measures headkv's file, and no trace.
    """
    if run.head_scores is not None and config is None and not _needs_head_scores(run):
        measure_head_scores(run)
        return
    selections = selection or DEFAULT_SELECTIONS
    if config is None:
        run.check_names()
        if run.output is not None and not run.dry_run:
            check_other_run(run, _trace_path(run))
        configs = run.configs(selections)
        option_refusals.check("trace", configs, run)
        make_plan: Callable[[], Plan] = partial(plan, run, configs)
    else:
        sweep = resolve(config, run, selections, run.typed_options)
        option_refusals.check("trace", sweep.configs, sweep.run)
        run, make_plan = sweep.run, sweep.plan
    if run.dry_run:
        dry_run.show([make_plan()], run.as_json, run_folder(run, run.output), run.parsed_shard)
        return
    path = _trace_path(run)
    OutputFolder(path.parent, wait=run.wait).claim(writer=path)
    path = make_trace(run, make_plan(), path)
    if run.as_json:
        console.print_json(trace_document(path))
    if print_trace(path, run.as_json):
        raise typer.Exit(1)


def _trace_path(run: RunOptions) -> Path:
    """Return the path of the run's trace: --output itself, or trace.h5 in it or in a new folder."""
    target = run_folder(run, run.output)
    return target if target.suffix in HDF5 else target / "trace.h5"


def _needs_head_scores(run: RunOptions) -> bool:
    """Return whether a policy of the run reads head scores."""
    return any(parse(name).name == "headkv" for name in run.policy or [])


def print_trace(path: Path, as_json: bool) -> int:
    """Print a finished trace's size, unless stdout is for JSON, and its failed samples; return the failures' number."""
    from perturbkv.storage.trace.trace_file import read_trace

    finished = read_trace(path)
    if not as_json:
        console.say(f"{path}: {len(finished.sample_ids)} samples, {len(finished.run.configs)} configurations")
    print_failures(dict(finished.failures))
    return len(finished.failures)


def trace_document(path: Path) -> dict[str, Any]:
    """Return path, digest, samples and configurations of a finished trace as a JSON document."""
    from perturbkv.analyses.json_values import config_object
    from perturbkv.storage.trace.trace_file import read_trace

    finished = read_trace(path)
    return {
        "trace": str(path),
        "digest": finished.digest,
        "samples": list(finished.sample_ids),
        "failed": dict(finished.failures),
        "configs": [config_object(config) for config in finished.run.configs],
    }
