"""`perturbkv trace`: measure, and leave a trace file.

From a sweep file and what was typed to one run: the typed options win, then the file's, then the defaults.

The environment (PERTURBKV_DATA_DIR) stands between file and defaults. Paths in a file are relative to the folder in
which the command runs, as on the command line.
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
from perturbkv.cli.command_line import telling, with_options
from perturbkv.cli.commands.head_scores import measure_head_scores
from perturbkv.cli.options import RARE, RunOptions
from perturbkv.cli.planned_run import make_trace, plan, run_folder
from perturbkv.cli.session import say_failures
from perturbkv.cli.sweep_file import Entries, Entry, Key, SweepFile, read
from perturbkv.configs.choice import as_choice, parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import check_configurations
from perturbkv.configs.run import RunConfig
from perturbkv.errors import BudgetError, ConfigError, DatasetError, ModelError, PerturbkvError
from perturbkv.selection import compatibility
from perturbkv.selection import grid as spread
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
"""A budget that goes with every window."""
_OWN_GRID = "lists make every combination; what differs takes a mapping of its own under 'grids'"
_ABOUT: Mapping[type[PerturbkvError], str] = {ModelError: "model", DatasetError: "dataset"}


@dataclass(frozen=True)
class Sweep:
    """The run that a file and a command line describe together.

    Attributes:
        file: what of the file counts: its keys but for those that were typed.
        run: options of the run; its choices of how to evict are the command line's alone.
        configs: every configuration, in the order of the trace's `config` dimension.
    """

    file: SweepFile
    run: RunOptions
    configs: tuple[EvictionConfig, ...]

    def plan(self) -> Plan:
        """The run, checked against its model and prompts. Raises PerturbkvErrors, with the line to blame if known."""
        try:
            return plan(self.run, self.configs)
        except PerturbkvError as error:
            raise _blamed_late(self.file, error) from None


def resolve(path: Path, run: RunOptions, selections: list[str], typed: frozenset[str]) -> Sweep:
    """What a sweep file asks for. Raises ConfigErrors that name file, line and key.

    `run` and `selections` are the command line's and the defaults. `typed` names the options that the user wrote there:
    each replaces the file's key as a whole, in every grid too.
    """
    file = read(path).without(typed)
    check_configurations(_count(file))
    for entry in file.entries():
        _check_alone(entry)
    options = {name: _option(entry) for name, entry in file.options.items() if entry.key.of_run}
    wanted = dataclasses.replace(run, **options)
    return Sweep(file, wanted, _configs(file, wanted, selections))


def _option(entry: Entry) -> Any:
    return list(entry.values) if entry.key.many else entry.values[0]


def _configs(file: SweepFile, run: RunOptions, selections: list[str]) -> tuple[EvictionConfig, ...]:
    """Every grid's combinations, one grid after the other."""
    given = {**run.choices(), "selection": selections}
    made: list[EvictionConfig] = []
    for own in file.grids:
        entries = {**file.options, **own}
        choices = {**given, **{name: entry.values for name, entry in entries.items() if entry.key.sweeps}}
        parsed = [_made(combination, entries, run.cache) for combination in combinations(choices)]
        check_written_options(parsed)
        grid = [one.config for one in parsed]
        _check_used(own, run, grid)
        made += grid
    _check_used(file.options, run, made)
    return unique(made)


def _count(file: SweepFile) -> int:
    """Combinations of all grids, as far as the file alone makes them."""
    grids = ({**file.options, **own} for own in file.grids)
    return sum(math.prod(len(one.values) for one in grid.values() if one.key.sweeps) for grid in grids)


def _check_used(entries: Entries, run: RunOptions, configs: list[EvictionConfig]) -> None:
    """Raise ConfigError for a key that makes no difference to the configurations that it is for."""
    for entry in entries.values():
        if reason := option_refusals.reason_without_effect("trace", entry.key.field, run, configs):
            raise entry.place.refusal(reason)


def _made(combination: dict[str, Any], entries: Entries, cache: str) -> ParsedConfig:
    try:
        made = parse_configuration(**combination)
    except BudgetError as error:  # each value alone is right: budget and window do not go together
        raise _blamed(("budget", "window", "preset", "policy"), combination, entries, error, _OWN_GRID) from None
    try:
        compatibility.check(made.config, cache)
    except ConfigError as error:
        config = made.config
        fits = config.selection.name in registry.info(config.policy.name).selections
        own = config.policy.name == as_choice(combination["policy"]).name
        first = ("policy",) if fits and own else ("selection", "policy")
        raise _blamed((*first, "cache"), combination, entries, error, "" if fits else _OWN_GRID) from None
    return made


def _blamed(
    names: tuple[str, ...], combination: dict[str, Any], entries: Entries, error: ConfigError, hint: str
) -> ConfigError:
    """The error with the line of the first of these keys that the file has; as it was where it has none."""
    for entry in (entries[name] for name in names if name in entries):
        return entry.place_of(combination.get(entry.key.field)).refusal("; ".join(filter(None, (str(error), hint))))
    return error


def _blamed_late(file: SweepFile, error: PerturbkvError) -> PerturbkvError:
    """The error with the line of the value that it names, or that its kind is about; else as it was."""
    said = str(error)
    for entry in file.entries():
        for value, place in zip(entry.values, entry.places, strict=True):
            if _names(said, entry.key, value):
                return place.refusal(said)
    for entry in file.entries():
        if entry.key.field == _ABOUT.get(type(error)):
            return entry.place.refusal(said)
    return error


def _names(said: str, key: Key, value: Any) -> bool:
    """Whether an error speaks of this value: "unknown model 'x'", "budget 0.01 of 99 tokens", a file's path."""
    option, text = key.field.replace("_", "-"), re.escape(str(value))
    path = rf"|(?<![\w./-]){text}(?![\w./-])" if key.kind is Path else ""
    return re.search(rf"\b{option} ('{text}'|{text}\b){path}", said) is not None


def _check_alone(entry: Entry) -> None:
    """Raise ConfigError for each value that is refused whatever the other options are."""
    for value, place in zip(entry.values, entry.places, strict=True):
        with place.named():
            if entry.key.sweeps and entry.key.field not in FIELDS:
                spread.check_option_value(entry.key.field, value)
            elif entry.key.sweeps:
                configuration(**{entry.key.field: value, "budget": _WHOLE})  # a budget was checked as it was read
            else:
                _try_option(entry.key, value)


def _try_option(key: Key, value: Any) -> None:
    """Make everything that options become before a model is opened, of this one and the defaults."""
    from perturbkv.datasets.dataset_registry import SHORTEST, DatasetOptions
    from perturbkv.datasets.prompts import DEFAULT_SAMPLES

    alone: dict[str, Any] = {key.field: [value] if key.many else value}
    run = RunOptions(**alone)
    lengths = run.lengths or (SHORTEST,)
    samples = DEFAULT_SAMPLES if run.samples is None else run.samples
    DatasetOptions(samples, lengths=lengths, depths=run.depths, haystack=run.haystack)
    steps, save = run.step_count, tuple(run.save or ())
    RunConfig("", "", (EvictionConfig(_WHOLE),), steps=steps, max_tokens=run.max_tokens, save=save)
    if run.device != "auto":
        from perturbkv.models.loading import pick_device

        pick_device(run.device)


HDF5 = (".h5", ".hdf5")
"""How the --output ends that is a trace itself, and not its folder."""


@telling(*RARE)
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
    selection: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="How entries are selected", show_default="attention, two-stage"),
    ] = None,
) -> None:
    """Run a model with full and evicted caches; write a trace.

    From one prefill per sample; a killed run goes on when the same command is given the same --output. --head-scores
    without the policy headkv measures headkv's file, and no trace.
    """
    if run.head_scores is not None and config is None and not _needs_head_scores(run):
        measure_head_scores(run)
        return
    selections = selection or ["attention", "two-stage"]
    if config is None:
        configs = run.configs(selections)
        option_refusals.check("trace", run, configs)
        planning: Callable[[], Plan] = partial(plan, run, configs)
    else:
        sweep = resolve(config, run, selections, run.typed)
        option_refusals.check("trace", sweep.run, sweep.configs)
        run, planning = sweep.run, sweep.plan
    if run.dry_run:
        dry_run.show(planning(), run.as_json, run_folder(run, run.output), run.part)
        return
    target = run_folder(run, run.output)
    path = target if target.suffix in HDF5 else target / "trace.h5"
    OutputFolder(path.parent, wait=run.wait).claim(writer=path)
    made = make_trace(run, planning(), path)
    if run.as_json:
        console.print_json(describe(made))
    if report_run(made, run.as_json):
        raise typer.Exit(1)


def _needs_head_scores(run: RunOptions) -> bool:
    """Return whether a policy of the run reads head scores."""
    return any(parse(name).name == "headkv" for name in run.policy or [])


def report_run(path: Path, as_json: bool) -> int:
    """Print what a finished trace holds, on stdout unless that is for JSON; returns how many samples failed."""
    from perturbkv.storage.trace.trace_file import read_trace

    finished = read_trace(path)
    if not as_json:
        console.say(f"{path}: {len(finished.sample_ids)} samples, {len(finished.run.configs)} configurations")
    say_failures(dict(finished.failures))
    return len(finished.failures)


def describe(path: Path) -> dict[str, Any]:
    """Return what a finished trace holds, as JSON has it."""
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
