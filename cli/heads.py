"""`perturbkv heads`: which heads does a selection help, and by how much (paper, figure 2)."""

from __future__ import annotations

import json
from itertools import groupby
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from perturbkv.cli import console, dry_run
from perturbkv.cli.options import (
    DEFAULT_COMPARE,
    RunOptions,
    TraceArgument,
    parse_compare,
    with_run_options,
)
from perturbkv.cli.saving import FormatOption, save_figure
from perturbkv.cli.trace import say_failures
from perturbkv.cli.tracing import make_trace, plan, run_folder

if TYPE_CHECKING:
    from perturbkv.analyses.heads import HeadComparison, HeadKind
    from perturbkv.trace import Trace


@with_run_options
def heads(
    run: RunOptions,
    trace: TraceArgument = None,
    compare: Annotated[
        str, Option(help="Baseline and treatments: selections, or policy:selection, separated by commas.")
    ] = DEFAULT_COMPARE,
    step: Annotated[int, Option(help="Which decode step is looked at.")] = 0,
    figure_format: FormatOption = None,
) -> None:
    """Compare selections head by head: perturbation isolated and propagated, heads improved, tied and worsened."""
    names = parse_compare(compare)
    if trace is None:
        planned = plan(run, run.configs(names))
        if run.dry_run:
            dry_run.show(planned, run.as_json)
            return
        folder = run_folder(run)
        path = make_trace(run, planned, folder / "trace.h5")
    else:
        path, folder = trace, run.output or trace.parent
    finished, results = _compare(path, names, step)
    folder.mkdir(parents=True, exist_ok=True)
    figures = _draw(results, folder, figure_format or ["png", "svg"])
    summary = _summary(finished, results, figures)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n")
    _print(finished, results, summary, folder, run.as_json)
    if finished.failures:
        raise typer.Exit(1)


def _compare(path: Path, names: list[str], step: int) -> tuple[Trace, list[HeadComparison]]:
    from perturbkv.analyses.heads import summarise
    from perturbkv.analyses.pairing import pairs
    from perturbkv.store import read_trace

    finished = read_trace(path)
    found = [pair for treatment in names[1:] for pair in pairs(finished.run, names[0], treatment)]
    order = list(dict.fromkeys(baseline for baseline, _ in found))
    found.sort(key=lambda pair: order.index(pair[0]))
    return finished, [summarise(finished, *pair, step=step) for pair in found]


def _draw(results: list[HeadComparison], folder: Path, formats: list[str]) -> list[str]:
    from perturbkv.figures.heads import draw

    paths: list[str] = []
    for number, result in enumerate(results):
        selection = result.treatment.split(" ")[0].partition(":")[2]
        stem = "heads" if len(results) == 1 else f"heads-{number + 1}-{selection}"
        paths += save_figure(draw(result), result.identity, folder / stem, formats)
    return paths


def _summary(finished: Trace, results: list[HeadComparison], figures: list[str]) -> dict[str, object]:
    return {
        "analysis": "heads",
        "trace": finished.source,
        "trace_digest": finished.digest,
        "run": json.loads(finished.run.to_json()),
        "failed": dict(finished.failures),
        "comparisons": [result.to_dict() for result in results],
        "figures": figures,
    }


def _print(
    finished: Trace, results: list[HeadComparison], summary: dict[str, object], folder: Path, as_json: bool
) -> None:
    if as_json:
        console.print_json(summary)
    else:
        words = " · random weights" if finished.run.random_weights else ""
        console.say(
            f"{finished.run.model} · {finished.run.dataset} · {int(finished.ok.sum())} samples{words}", bold=True
        )
        for baseline, compared in groupby(results, key=lambda result: result.baseline):
            _print_group(baseline, list(compared))
        console.say(f"written to {folder}")
    say_failures(dict(finished.failures))


def _print_group(baseline: str, results: list[HeadComparison]) -> None:
    """One table per baseline: two rows per treatment."""
    console.say(f"\nbaseline {baseline}")
    columns = ["treatment", "", "#heads\n+ / = / −", "#share\nbetter", "#L1 over\nbaseline's"]
    rows = [
        row
        for result in results
        for row in (
            [_treatment(result), *_row("isolated", result.isolated)],
            [_flagged(result), *_row("propagated", result.propagated)],
        )
    ]
    console.table("", columns, rows)
    console.say(_caption(results[0]))


def _treatment(result: HeadComparison) -> str:
    """The treatment in as few words as tell it from its baseline."""
    (policy, selection), other = (label.split(" ")[0].split(":") for label in (result.treatment, result.baseline))
    return selection if policy == other[0] else f"{policy}:{selection}"


def _flagged(result: HeadComparison) -> str:
    return f"  σ ≤ 0.5: {int(result.flagged.sum())}"


def _row(kind: str, measured: HeadKind) -> list[str]:
    ratio, interval = 1 - measured.total_reduction, measured.total_reduction_interval
    ends = None if interval is None else (1 - interval[1], 1 - interval[0])
    return [
        kind,
        f"{measured.improved_count}/{measured.tied_count}/{measured.worsened_count}",
        f"{100 * measured.improved_share:.0f} %" + _interval(measured.improved_share_interval, 100, 0),
        "–" if isnan(ratio) else f"{ratio:.2f}" + _interval(ends, 1, 2),
    ]


def _interval(interval: tuple[float, float] | None, factor: float, digits: int) -> str:
    if interval is None:
        return ""
    return f" [{factor * interval[0]:.{digits}f}, {factor * interval[1]:.{digits}f}]"


def _caption(result: HeadComparison) -> str:
    several = result.propagated.improved_share_interval is not None
    words = "In brackets: 95 % bootstrap intervals over samples. " if several else "One sample: no intervals. "
    floor = result.propagated.floor_relative_median
    return (
        f"{words}+ / = / −: heads better, tied, worse than the baseline. L1 is summed over heads. "
        f"σ ≤ 0.5: how many heads are no evidence for Theorem 3. Noise floor: {floor:.1e} of ‖o_h‖₁ (median)."
    )
