"""`perturbkv trace`: measure, and leave a trace file.

From a sweep file and what was typed to one run: the typed options win, then the file's, then the defaults.

The environment (PERTURBKV_DATA_DIR) stands between file and defaults. Paths in a file are relative to the folder in
which the command runs, as on the command line.

`perturbkv head-scores`: which heads look at the sentence that holds the answer, for the policy headkv.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from perturbkv.cli import console, dry_run, option_effects
from perturbkv.cli.option_routing import telling, with_options
from perturbkv.cli.options import HIDDEN, JsonOption, RunOptions
from perturbkv.cli.planned_run import make_trace, plan, run_folder
from perturbkv.cli.saving import claimed, reachable
from perturbkv.cli.sweep_file import Entries, Entry, Key, SweepFile, read
from perturbkv.configs.choice import as_choice
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import check_configurations
from perturbkv.configs.run import RunConfig
from perturbkv.errors import BudgetError, ConfigError, DatasetError, ModelError, PerturbkvError
from perturbkv.models.aliases import DEFAULT
from perturbkv.selection import compatibility
from perturbkv.selection import grid as spread
from perturbkv.selection.grid import FIELDS, Asked, asked, check_told, combinations, configuration, unique
from perturbkv.selection.policies import registry

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
        asked = [_made(combination, entries, run.cache) for combination in combinations(choices)]
        check_told(asked)
        grid = [one.config for one in asked]
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
        if reason := option_effects.idle("trace", entry.key.field, run, configs):
            raise entry.place.refusal(reason)


def _made(combination: dict[str, Any], entries: Entries, cache: str) -> Asked:
    try:
        made = asked(**combination)
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
                spread.check_options(entry.key.field, value)
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


@telling(*HIDDEN)
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

    Every configuration is measured from one prefill per sample, into one HDF5 file. A killed run goes on where it
    stopped when the same command is given the same --output.
    """
    selections = selection or ["attention", "two-stage"]
    if config is None:
        configs = run.configs(selections)
        option_effects.check("trace", run, configs)
        planning: Callable[[], Plan] = partial(plan, run, configs)
    else:
        sweep = resolve(config, run, selections, run.typed)
        option_effects.check("trace", sweep.run, sweep.configs)
        run, planning = sweep.run, sweep.plan
    if run.dry_run:
        dry_run.show(planning(), run.as_json, run_folder(run, run.output), run.part)
        return
    target = run_folder(run, run.output)
    path = reachable(target if target.suffix in HDF5 else target / "trace.h5", run.wait)
    made = make_trace(run, planning(), path)
    if run.as_json:
        console.print_json(describe(made))
    if report_run(made, run.as_json):
        raise typer.Exit(1)


def report_run(path: Path, as_json: bool) -> int:
    """Say what a finished trace holds, on stdout unless that is for JSON; returns how many samples failed."""
    from perturbkv.storage.trace.trace_file import read_trace

    finished = read_trace(path)
    if not as_json:
        console.say(f"{path}: {len(finished.sample_ids)} samples, {len(finished.run.configs)} configurations")
    say_failures(dict(finished.failures))
    return len(finished.failures)


def describe(path: Path) -> dict[str, Any]:
    """The same as JSON has it."""
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


def say_failures(failures: dict[str, str]) -> None:
    """One line per failed sample on stderr."""
    for reason in failures.values():
        console.note(f"failed: {reason}")


_SHOWN = 10


def head_scores(
    model: Annotated[str, Option("--model", "-m", metavar="NAME", help="As for the other commands")] = DEFAULT,
    revision: Annotated[str, Option(metavar="NAME", help="Branch, tag or commit", show_default="the newest")] = "",
    samples: Annotated[int, Option(metavar="N", help="Needle prompts")] = 8,
    length: Annotated[list[int] | None, Option(metavar="N", help="Tokens of a prompt", show_default="1000")] = None,
    haystack: Annotated[str, Option(metavar="NAME", help="prose or noise")] = "prose",
    seed: Annotated[int, Option(metavar="N", help="Of the prompts")] = 1,
    dtype: Annotated[str, Option(metavar="NAME", help="auto, float32, bfloat16, float16")] = "auto",
    device: Annotated[str, Option(metavar="NAME", help="auto, cpu, cuda, cuda:1, …")] = "auto",
    output: Annotated[Path, Option("--output", "-o", metavar="PATH", help="The JSON file")] = Path("head-scores.json"),
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file")] = False,
    as_json: JsonOption = False,
) -> None:
    """Score heads by their attention on the answer's sentence.

    While the model answers; the file is for --head-scores of the policy headkv. As HeadKV's released detection: the
    model's own greedy answer, right answers only, a distractor beside the needle; but on needle's prompts, so that
    scores are not those of the released files.
    """
    with claimed(output, overwrite) as beside:
        asked = (model, revision, samples, tuple(length or (1000,)), haystack, seed, dtype, device)
        layers, scores, right = _measure(*asked)
        beside.write_text(_text(scores, layers))
    named = zip(layers, scores, strict=True)
    ranked = sorted(((score, layer, head) for layer, row in named for head, score in enumerate(row)), reverse=True)
    if as_json:
        names = {f"{layer}-{head}": score for score, layer, head in ranked}
        console.print_json({"model": model, "samples": samples, "right": right, "file": str(output), "scores": names})
        return
    total = sum(score for score, _, _ in ranked) or 1.0
    rows = [(f"{layer}-{head}", f"{score:.4f}", f"{100 * score / total:.1f} %") for score, layer, head in ranked]
    console.table(f"{model}: heads that look at the answer", ["layer-head", "#score", "#of all"], rows[:_SHOWN])
    console.say(
        "Score: attention on the answer's sentence while the model answers, over tokens of sentence and answer; mean "
        f"of the {right} of {samples} prompts that were answered right. All {len(ranked)} heads: {output}"
    )


def _measure(
    model: str, revision: str, samples: int, lengths: tuple[int, ...], haystack: str, seed: int, dtype: str, device: str
) -> tuple[tuple[int, ...], list[list[float]], int]:
    """The measured layers, a row of scores for each, and how many prompts were answered right."""
    from perturbkv.datasets import dataset_registry as datasets
    from perturbkv.datasets.encode import check_length, check_vocabulary, encode
    from perturbkv.datasets.needle import distracted
    from perturbkv.models.loading import load_weights, open_model, pick_device, pick_dtype
    from perturbkv.pipeline.answers.answer_heads import Evidence
    from perturbkv.pipeline.answers.answer_heads import head_scores as measured

    place = pick_device(device)
    files = open_model(model, seed, revision)
    asked = dataclasses.replace(datasets.DatasetOptions(samples, seed, haystack=haystack), lengths=lengths)
    template = bool(files.tokenizer.chat_template)
    prompts = [
        Evidence(encode(sample, files.tokenizer, chat_template=template, max_tokens=None), sentence)
        for plain in datasets.load("needle", asked, files.tokenizer).samples
        for sample, sentence in [distracted(plain, seed)]
    ]
    positions = int(files.config.max_position_embeddings)
    asked_for = itertools.cycle([length for length in lengths for _ in asked.depths])
    for one, length in zip(prompts, asked_for, strict=False):
        check_vocabulary(one.prompt, int(files.config.vocab_size), files.name)
        check_length(one.prompt, positions, len(one.prompt.answers[0]) + 1, length)
    adapter = load_weights(files, pick_dtype(dtype, place), place, seed)
    with console.progress("prompts", len(prompts)) as bar:
        found = measured(adapter, prompts, bar.one_more)
    return adapter.layer_indices, found.scores.tolist(), found.right


def _text(scores: list[list[float]], layers: tuple[int, ...]) -> str:
    from perturbkv.scoring.head_scores import as_json

    return as_json(scores, layers)
