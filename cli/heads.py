"""`perturbkv heads`: which heads does a selection help, and by how much (paper, figure 2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from perturbkv.cli import console, dry_run
from perturbkv.cli.options import (
    DEFAULT_COMPARE,
    JsonOption,
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
    as_json: JsonOption = False,
) -> None:
    """Compare selections head by head: perturbation isolated and propagated, heads improved, tied and worsened."""
    names = parse_compare(compare)
    if trace is None:
        planned = plan(run, run.configs(names))
        if run.dry_run:
            dry_run.show(planned, as_json)
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
    _print(finished, results, summary, folder, as_json)
    if finished.failures:
        raise typer.Exit(1)


def _compare(path: Path, names: list[str], step: int) -> tuple[Trace, list[HeadComparison]]:
    from perturbkv.analyses.heads import summarise
    from perturbkv.analyses.pairing import pairs
    from perturbkv.store import read_trace

    finished = read_trace(path)
    labels = [pair for treatment in names[1:] for pair in pairs(finished.run, names[0], treatment)]
    return finished, [summarise(finished, *pair, step=step) for pair in labels]


def _draw(results: list[HeadComparison], folder: Path, formats: list[str]) -> list[str]:
    from perturbkv.figures.heads import draw

    paths: list[str] = []
    for number, result in enumerate(results):
        stem = "heads" if len(results) == 1 else f"heads-{number + 1}"
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
        title = f"{finished.run.model} · {finished.run.dataset} · {int(finished.ok.sum())} samples{words}"
        for result in results:
            _print_comparison(title, result)
        console.out.print(f"written to {folder}", highlight=False)
    say_failures(dict(finished.failures))


def _print_comparison(title: str, result: HeadComparison) -> None:
    columns = ["perturbation", "#improved", "#tied", "#worse", "#share improved", "#mean L1", "#reduction"]
    rows = [_row("isolated", result.isolated), _row("propagated", result.propagated)]
    console.out.print(f"\n[bold]{title}[/bold]\nbaseline   {result.baseline}\ntreatment  {result.treatment}")
    console.table("", columns, rows)
    console.out.print(_notes(result), highlight=False)


def _row(kind: str, measured: HeadKind) -> list[str]:
    share, reduction = measured.improved_share, measured.total_reduction
    return [
        kind,
        str(measured.improved_count),
        str(measured.tied_count),
        str(measured.worsened_count),
        _percent(share) + _interval(measured.improved_share_interval),
        f"{measured.baseline_mean.mean():.3g} → {measured.treatment_mean.mean():.3g}",
        _percent(reduction) + _interval(measured.total_reduction_interval),
    ]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _interval(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]"


def _notes(result: HeadComparison) -> str:
    flagged = int(result.flagged.sum())
    floor = result.propagated.floor_relative_median
    return (
        f"σ ≤ 0.5 in {flagged} of {result.flagged.size} heads: no evidence for Theorem 3 there. "
        f"Noise floor: {floor:.1e} of ‖o_h‖₁ (median)."
    )
