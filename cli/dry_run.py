"""Dry runs: samples, tokens, configurations, memory and time of a run, without loading its weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perturbkv import memory
from perturbkv.analyses.json_values import config_object
from perturbkv.cli import console
from perturbkv.cli.planned_run import estimate_seconds, format_duration, shard_document
from perturbkv.configs import layer_types
from perturbkv.configs.resources import Shape
from perturbkv.display import plural
from perturbkv.escaping import escape_line

if TYPE_CHECKING:
    from perturbkv.configs.run import Shard
    from perturbkv.pipeline.run.plan import Plan

_MIB = 2**20
_STAGES = {"prefill": "prefill", "layer": "a layer's sums", "decoding": "decoding", "backward": "backward pass"}
"""Stage of a sample, as `footprint.Memory` names it -> as it is printed."""


def show(
    plans: Sequence[Plan],
    as_json: bool,
    folder: Path | None,
    shard: Shard | None = None,
    by_dataset: bool = False,
    compares_sums: bool = False,
    margin: float | None = None,
) -> None:
    """Print the plans of runs, or of a shard of them.

    Args:
        plans: one per run.
        as_json: print JSON: a list `runs` with `by_dataset`, else one document of the only plan.
        folder: receives their traces; None for runs without a trace.
        shard: the part of each run that is measured.
        by_dataset: whether the runs are of several data sets.
        compares_sums: tell the smallest effect that the samples can show in a ratio of sums.
        margin: δ, where equivalence of such sums is asked, too.
    """
    documents = [describe(plan, folder, shard) for plan in plans]
    if compares_sums:
        from perturbkv.analyses.stats.equivalence import smallest_effect

        for document in documents:
            document["smallest_effect"] = smallest_effect(document["samples"], margin).to_dict()
    if as_json:
        console.print_json({"runs": documents} if by_dataset else documents[0])
        return
    for plan, document in zip(plans, documents, strict=True):
        _show_plan(plan, document)


def _show_plan(planned: Plan, document: dict[str, Any]) -> None:
    """Print a plan as tables; `document` is the plan as `describe` returns it."""
    batches, most, bound = document["batches"], document["batch_mib"], document["batch_bound_mib"]
    rows = [
        (
            "model",
            f"{escape_line(planned.run.model)} ({document['model_parameters']:,} parameters, {planned.run.dtype})",
        ),
        ("dataset", escape_line(planned.run.dataset)),
        ("samples", f"{document['samples']}, {document['tokens_min']} to {document['tokens_max']} tokens"),
        *([("this shard", _shard_text(document["shard"]))] if document["shard"] else []),
        ("cut in the middle", f"{document['cut_samples']} samples"),
        *([("layers", told)] if (told := layer_types.describe_measured(document["measured_layers"])) else []),
        ("scenario", planned.run.scenario),
        ("decode steps", str(planned.run.steps)),
        ("weights", f"{document['weights_mib']:,.0f} MiB"),
        ("full cache", f"{document['full_cache_mib']:,.1f} MiB for the longest sample"),
        ("evicted caches", f"{document['evicted_caches_mib']:,.1f} MiB for the longest sample, all configurations"),
        (
            "decoded",
            f"in {plural(batches, 'batch', 'batches')} of at most {most:,.0f} MiB; {bound:,.0f} MiB allowed",
        ),
        *_effect_rows(document["smallest_effect"]),
        ("time", f"{format_duration(estimate_seconds(planned))} in one process, by a quick estimate"),
        *_memory_rows(document),
    ]
    console.print_table("dry run: nothing was computed", ["", ""], rows)
    kept_rows = [
        (kept["config"]["label"], f"{kept['entries']}{' asked for' if config.is_external else ''}")
        for kept, config in zip(document["kept"], planned.run.configs, strict=True)
    ]
    console.print_table("configurations", ["configuration", "#entries kept"], kept_rows)


def _effect_rows(document: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the table rows on the smallest effect, from its JSON document; none for None."""
    if document is None:
        return []
    if document["better_below"] is None:
        return [("smallest effect", "none: fewer than 5 samples have no interval")]
    from perturbkv.analyses import text

    below, above = (text.decimal(document[name]) for name in ("better_below", "worse_above"))
    power = "four of five runs show it where prompts spread by"
    rows = [("smallest effect", f"a sum {below} or {above} times the other's: {power} {document['spread']:g}")]
    if document["margin"] is not None:
        equal = f"equal sums: {power} at most {document['equivalent_spread']:.2g} (docs/explanation/statistics.md)"
        rows.append((f"within {100 * document['margin']:.4g} %", equal))
    return rows


def _shard_text(document: dict[str, Any]) -> str:
    """Return a shard's name and its numbers of samples and configurations as text."""
    samples, configs = plural(len(document["samples"]), "sample"), plural(document["configs"], "configuration")
    return f"{document['shard']}: {samples}, {configs} of each"


def _memory_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return table rows on needed and free memory and disk, on whether the run fits, and on advice to make it fit."""
    needed, free = (_size(document[name]) for name in ("memory_mib", "memory_free_mib"))
    stages = ", ".join(
        f"{what} {_size(document[f'{name}_mib'])}" for name, what in _STAGES.items() if document[f"{name}_mib"]
    )
    rows = [
        ("scores and norms", f"{_size(document['statistics_mib'])} of all layers"),
        ("one stage at a time", stages),
        ("memory", f"{needed} at most; {free} free on {document['device']}"),
    ]
    if document["trace_mib"]:
        trace, journal, disk = (_size(document[f"{name}_mib"]) for name in ("trace", "journal", "disk_free"))
        rows.append(("trace", f"about {trace} on disk, {journal} of journal until it is whole; {disk} free"))
    advice = f"; each of these alone would: {'; '.join(document['advice'])}" if document["advice"] else ""
    return [*rows, ("fits", "yes" if document["fits"] else f"no{advice}")]


def _size(mib: float) -> str:
    """Return a size in MiB as text."""
    return memory.format_size(int(mib * _MIB))


def describe(planned: Plan, folder: Path | None, shard: Shard | None = None) -> dict[str, Any]:
    """Return the plan of a run, or of a shard of it, as a JSON document; sizes are in MiB.

    `folder` receives the trace; None: no trace is written.
    """
    run, batches = planned.run, planned.batches
    lengths = [len(prompt.token_ids) for prompt in planned.prompts]
    parameters = planned.files.parameters()
    weights = planned.files.weights_bytes(planned.placement.dtype)
    shape = Shape.from_config(planned.files.config, planned.placement.dtype.itemsize, weights)
    from perturbkv.pipeline.run import footprint

    needed, memory_free = footprint.estimate_footprint(planned), footprint.free_memory(planned)
    trace, journal, disk_free = (needed.trace, sum(needed.journal), _disk_free(folder)) if folder else (0, 0, 0)
    longest, own_shard = max(lengths), None
    if shard is not None:
        samples, configs = shard.select(planned.prompts.ids, run.configs)
        own_shard = shard_document(shard, samples, len(configs))
    compressed = max(len(prompt.parts(run.scenario)[0]) for prompt in planned.prompts)
    return {
        "model": run.model,
        "model_parameters": parameters,
        "measured_layers": layer_types.format_measured(planned.files.config),
        "dataset": run.dataset,
        "samples": len(lengths),
        "shard": own_shard,
        "tokens_min": min(lengths),
        "tokens_max": longest,
        "cut_samples": planned.prompts.cut_count,
        "scenario": run.scenario,
        "compressed_tokens_max": compressed,
        "steps": run.steps,
        "smallest_effect": None,
        "weights_mib": weights / _MIB,
        "full_cache_mib": shape.full_cache_bytes(longest) / _MIB,
        "evicted_caches_mib": sum(shape.kept_bytes(eviction, compressed) for eviction in run.configs) / _MIB,
        "batches": len(batches.indices),
        "batch_mib": batches.largest_bytes / _MIB,
        "batch_bound_mib": batches.bound_bytes / _MIB,
        "kept": [
            {"config": config_object(eviction), "entries": eviction.kept_entries(compressed)}
            for eviction in run.configs
        ],
        "device": planned.placement.device.type,
        "statistics_mib": needed.memory.statistics / _MIB,
        **{f"{stage}_mib": getattr(needed.memory, stage) / _MIB for stage in _STAGES},
        "memory_mib": needed.memory.total / _MIB,
        "memory_free_mib": memory_free / _MIB,
        "trace_mib": trace / _MIB,
        "journal_mib": journal / _MIB,
        "disk_free_mib": disk_free / _MIB,
        "fits": needed.memory.total <= memory_free and trace + journal <= disk_free,
        "advice": footprint.suggest_options(planned, disk_free if folder else needed.disk, memory_free),
    }


def _disk_free(folder: Path) -> int:
    """Return the free bytes of the disk of a folder; the folder can be missing."""
    path = folder.absolute()
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free
