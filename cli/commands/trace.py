"""`perturbkv trace`: measure, and write a trace file.

A sweep file and the command line make one run: options on the command line win, then those of the file, then the
environment (PERTURBKV_DATA_DIR), then the defaults. Paths in a file are relative to the folder in which the command
runs, as on the command line.

`--head-scores PATH` without the policy headkv measures no trace, but what this policy reads: each head's attention on
the answer's sentence.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from perturbkv.cli import console, dry_run, option_refusals
from perturbkv.cli.command_line import show_options, with_options
from perturbkv.cli.options import DEFAULT_SELECTIONS, RARE, RunOptions, SelectionOption
from perturbkv.cli.planned_run import make_trace, plan, run_folder
from perturbkv.cli.saving import new_file
from perturbkv.cli.session import print_failures
from perturbkv.cli.sweep_file import prefix_errors, read
from perturbkv.configs.choice import parse
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import check_configurations
from perturbkv.errors import ConfigError
from perturbkv.selection.grid import expand_grid, unique
from perturbkv.storage.output import OutputFolder


def resolve_sweep(
    path: Path, run: RunOptions, selections: list[str], typed_options: frozenset[str]
) -> tuple[RunOptions, tuple[EvictionConfig, ...]]:
    """Return the run's options and its configurations, in the order of the trace, of a sweep file and a command line.

    `run` and `selections` hold the command line's values and the defaults. Each of the `typed_options`, those given on
    the command line, replaces its key of the file as a whole, in every grid too. Raises ConfigErrors that name the
    file.
    """
    file = read(path, typed_options)
    with prefix_errors(path):
        check_configurations(file.count())
        run = dataclasses.replace(run, **file.options)
        run.check_inputs()
        defaults = {**run.choices(), "selection": selections}
        configs: list[EvictionConfig] = []
        for choices in file.grids:
            own = expand_grid({**defaults, **file.choices, **choices}, run.cache)
            _check_effects(choices, run, own)
            configs += own
        _check_effects([*file.options, *file.choices], run, configs)
        return run, unique(configs)


def _check_effects(names: Iterable[str], run: RunOptions, configs: Sequence[EvictionConfig]) -> None:
    """Raise ConfigError for a key of a sweep file without effect on any configuration."""
    for name in names:
        with prefix_errors(name.replace("_", "-")):
            if reason := option_refusals.reason_without_effect("trace", name, run, configs):
                raise ConfigError(reason)


HDF5_SUFFIXES = (".h5", ".hdf5")
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

    From one prefill per sample; a killed run goes on with the same command.
    """
    reads_scores = any(parse(name).name == "headkv" for name in run.policy or [])
    if run.head_scores is not None and config is None and not reads_scores:
        _measure_head_scores(run)
        return
    selections = selection or DEFAULT_SELECTIONS
    if config is None:
        run.check_inputs()
        configs = run.configs(selections)
    else:
        run, configs = resolve_sweep(config, run, selections, run.typed_options)
    option_refusals.check_effects("trace", configs, run)
    if run.dry_run:
        dry_run.show([plan(run, configs)], run.as_json, run_folder(run, run.output), run.parsed_shard)
        return
    target = run_folder(run, run.output)
    path = target if target.suffix in HDF5_SUFFIXES else target / "trace.h5"
    OutputFolder(path.parent, wait=run.wait).claim(writer=path)
    path = make_trace(run, plan(run, configs), path)
    if run.as_json:
        console.print_json(trace_document(path))
    if print_trace(path, run.as_json):
        raise typer.Exit(1)


def print_trace(path: Path, as_json: bool) -> int:
    """Print a finished trace's size, unless stdout is for JSON, and its failed samples; return their number."""
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


_SHOWN_HEADS = 10
_SAMPLES, _LENGTH, _SEED = 8, 1000, 1
"""Prompts, tokens of each, and the seed, from which head scores are measured where the user says nothing else."""
_OF_HEAD_SCORES = frozenset({
    "head_scores", "model", "revision", "dataset", "samples", "length", "haystack", "seed", "dtype", "device",
    "overwrite", "as_json",
})  # fmt: skip
"""Options that have an effect on the measurement of head scores."""


def _measure_head_scores(run: RunOptions) -> None:
    """Measure head scores on needle prompts, write them to the file of --head-scores, and print the highest, or JSON.

    The method is that of HeadKV's released detection: the model's own greedy answer, right answers only, a distractor
    beside the needle. The prompts are ours, so that the scores are not those of the released files. Raises
    PerturbkvErrors.
    """
    from perturbkv.scoring.head_scores import as_json

    output = _head_scores_path(run)
    run.check_inputs()
    samples = _SAMPLES if run.samples is None else run.samples
    with new_file(output, run.overwrite) as temporary:
        layers, scores, right = _score_heads(run, samples)
        temporary.write_text(as_json(scores, layers))
    rows = zip(layers, scores, strict=True)
    ranked = sorted(((score, layer, head) for layer, row in rows for head, score in enumerate(row)), reverse=True)
    if run.as_json:
        names = {f"{layer}-{head}": score for score, layer, head in ranked}
        document = {"model": run.model, "samples": samples, "right": right, "file": str(output), "scores": names}
        console.print_json(document)
        return
    total = sum(score for score, _, _ in ranked) or 1.0
    cells = [(f"{layer}-{head}", f"{score:.4f}", f"{100 * score / total:.1f} %") for score, layer, head in ranked]
    console.print_table(
        f"{run.model}: heads that look at the answer", ["layer-head", "#score", "#of all"], cells[:_SHOWN_HEADS]
    )
    console.say(
        "Score: attention on the answer's sentence while the model answers, over tokens of sentence and answer; mean "
        f"of the {right} of {samples} prompts that were answered right. All {len(ranked)} heads: {output}"
    )


def _head_scores_path(run: RunOptions) -> Path:
    """Return the path of --head-scores. Raises ConfigError for an option without effect, and for an existing file."""
    assert run.head_scores is not None
    for name in sorted(run.typed_options - _OF_HEAD_SCORES):
        raise ConfigError(
            f"{option_refusals.option_flag(name)} has no effect here: --head-scores needs --policy headkv to be read; "
            "without it scores are measured, and no trace; leave one of them out"
        )
    if run.dataset != "needle":
        raise ConfigError(f"head scores are measured on needle's prompts; leave --dataset out, got '{run.dataset}'")
    if run.head_scores.exists() and not run.overwrite:
        raise ConfigError(
            f"expected no file at {run.head_scores}, got one; --policy headkv reads it, --overwrite measures it again"
        )
    return run.head_scores


def _score_heads(run: RunOptions, samples: int) -> tuple[tuple[int, ...], list[list[float]], int]:
    """Return the measured layers, the scores [layer][head], and the number of correctly answered prompts."""
    from perturbkv.datasets import dataset_registry as datasets
    from perturbkv.datasets.encode import check_length, check_vocabulary, encode
    from perturbkv.datasets.needle import add_distraction
    from perturbkv.models.loading import load_weights, open_model, pick_device, pick_dtype
    from perturbkv.pipeline.answers.answer_heads import Evidence, head_scores

    device = pick_device(run.device)
    seed = run.seed if "seed" in run.typed_options else _SEED
    files = open_model(run.model, seed, run.revision or "")
    options = datasets.DatasetOptions(samples, seed, haystack=run.haystack)
    options = dataclasses.replace(options, lengths=run.lengths or (_LENGTH,))
    template = bool(files.tokenizer.chat_template)
    prompts = [
        Evidence(encode(sample, files.tokenizer, chat_template=template, max_tokens=None), sentence)
        for plain in datasets.load("needle", options, files.tokenizer).samples
        for sample, sentence in [add_distraction(plain, seed)]
    ]
    positions = int(files.config.max_position_embeddings)
    lengths = itertools.cycle([length for length in options.lengths for _ in options.depths])
    for one, length in zip(prompts, lengths, strict=False):
        check_vocabulary(one.prompt, int(files.config.vocab_size), files.name)
        check_length(one.prompt, positions, len(one.prompt.answers[0]) + 1, length)
    adapter = load_weights(files, pick_dtype(run.dtype, device), device, seed)
    with console.progress("prompts", len(prompts)) as bar:
        scores, right = head_scores(adapter, prompts, bar.advance)
    return adapter.layer_indices, scores.tolist(), right
