"""`perturbkv doctor bench`: the cost of measuring and the savings of evicting, as ratios within one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from perturbkv.analyses.pairing import plural
from perturbkv.cli import console
from perturbkv.cli.command_line import typed_options
from perturbkv.cli.options import JsonOption
from perturbkv.cli.planned_run import default_output
from perturbkv.cli.saving import new_file
from perturbkv.configs import option as numbers
from perturbkv.errors import ConfigError
from perturbkv.models.aliases import DEFAULT

if TYPE_CHECKING:
    from perturbkv.benchmark.rows import Change, Report, Row, Target

_OWN_SHAPES = {"norms-time", "norms-memory", "triton-time", "triton-rate", "cuda-24", "cuda-decode"}
"""Rows with their own model, prompt and dtype."""
_OWN_LENGTHS = {"quality-12", "startup-help", "startup-figure"}
"""Rows with their own prompt."""


OnlyOption = Annotated[list[str] | None, Option(metavar="NAME", help="A row's name", show_default="every row")]


def bench(
    context: typer.Context,
    model: Annotated[str, Option("--model", "-m", metavar="NAME", help="Model to run")] = DEFAULT,
    tokens: Annotated[int, Option(metavar="N", help="Prompt length; growth is from half of it to twice")] = 4096,
    repeats: Annotated[int, Option(metavar="N", help="Timings of each row, in turns; medians count")] = 3,
    only: OnlyOption = None,
    dtype: Annotated[str, Option(metavar="NAME", help="auto, float32, bfloat16, float16")] = "auto",
    device: Annotated[str, Option(metavar="NAME", help="Device of all rows but those of a GPU")] = "cpu",
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="PATH", help="Where the JSON goes", show_default="runs/<time>-bench.json"),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what measuring costs.

    Every row: time, memory, growth, start-up, value norms, writing, generating; those of a GPU where there is one. A
    row whose process fails says why, and the command exits with 1 when the others are done.

    Each value is a ratio of two things measured in the same run, in turns.
    """
    if context.invoked_subcommand is not None:
        _check_nothing_typed(context)
        return
    from perturbkv.models import sources

    sources.check_name(model)
    numbers.check_number("--tokens", tokens, numbers.LONGEST_PROMPT)
    from perturbkv.benchmark import suite
    from perturbkv.benchmark.rows import find_targets

    targets, settings = find_targets(only or []), suite.Settings(model, tokens, repeats, dtype, device)
    _check_effects(context, {target.name for target in targets})
    _run(suite, settings, targets, _output_path(output, "bench"), overwrite, as_json)


def scale(
    model: Annotated[str, Option("--model", "-m", metavar="NAME", help="Model to run")] = DEFAULT,
    samples: Annotated[int, Option(metavar="N", help="Samples of the longest runs; fewer take less time")] = 10_000,
    repeats: Annotated[int, Option(metavar="N", help="Timings of workers, in turns; medians count")] = 3,
    only: OnlyOption = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="PATH", help="Where the JSON goes", show_default="runs/<time>-scale.json"),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure runs of thousands of samples.

    Workers, Ray, coordinating, merging. Workers sleep instead of measuring, but for one row: so two cores carry eight
    of them. Each value is a ratio within one run, or milliseconds; start-up is not in it, but in the JSON. A row whose
    process fails says why, and the command exits with 1 when the others are done.
    """
    from perturbkv.models import sources

    sources.check_name(model)
    from perturbkv.benchmark import many_samples
    from perturbkv.benchmark.rows import SCALE, find_targets

    targets, settings = find_targets(only or [], SCALE), many_samples.Settings(model, samples, repeats)
    _run(many_samples, settings, targets, _output_path(output, "scale"), overwrite, as_json)


def report(
    tokens: Annotated[int, Option(metavar="N", help="Prompt length of the traces that are made for it")] = 1500,
    repeats: Annotated[int, Option(metavar="N", help="Timings of each row; medians count")] = 5,
    only: OnlyOption = None,
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="PATH", help="Where the JSON goes", show_default="runs/<time>-report.json"),
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the file")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the pages of `perturbkv report`.

    Their size, and the time of the first paint and of a change of choice, for traces made here. Times are those of
    headless Chromium, where it is installed.
    """
    from perturbkv.benchmark import report_pages
    from perturbkv.benchmark.rows import REPORT, find_targets

    targets, settings = find_targets(only or [], REPORT), report_pages.Settings(tokens, repeats)
    _run(report_pages, settings, targets, _output_path(output, "report"), overwrite, as_json)


def compare(
    old: Annotated[Path, Argument(help="JSON of the earlier run", show_default=False)],
    new: Annotated[Path, Argument(help="JSON of the later run", show_default=False)],
    tolerance: Annotated[float, Option(metavar="X", help="Share by which a value may become worse")] = 0.1,
    as_json: JsonOption = False,
) -> None:
    """Compare two files of the benchmark.

    Exits with 1 where a row became worse by more than the tolerance.
    """
    from perturbkv.benchmark.rows import compare, read, setting_differences

    numbers.check_number("--tolerance", tolerance)
    before, after = read(old), read(new)
    changes, others = compare(before, after, tolerance), setting_differences(before, after)
    if as_json:
        console.print_json({"changes": [asdict(change) for change in changes], "differences": others})
    else:
        rows = [
            (change.name, _value_text(change.old), _value_text(change.new), _change_text(change)) for change in changes
        ]
        console.table(f"{old} and {new}, tolerance {tolerance:.0%}", ["row", "#old", "#new", ""], rows)
        for other in others:
            console.note(f"not measured alike: {other}")
    regressed = [change.name for change in changes if change.regressed]
    if regressed:
        console.note(f"{plural(len(regressed), 'row')} worse by more than {tolerance:.0%}: {', '.join(regressed)}")
        raise typer.Exit(1)


def _check_nothing_typed(context: typer.Context) -> None:
    """Raise ConfigError for an option typed before a subcommand, where it has no effect."""
    for name in sorted(typed_options(context)):
        option, command = name.removeprefix("as_"), context.invoked_subcommand
        raise ConfigError(
            f"--{option} has no effect on doctor bench {command}; leave it out, or write it behind {command} if it "
            "takes it"
        )


def _check_effects(context: typer.Context, names: set[str]) -> None:
    """Raise ConfigError for a typed option that has no effect on any of the named rows."""
    for name in ("model", "tokens", "dtype"):
        own = _OWN_SHAPES | _OWN_LENGTHS if name == "tokens" else _OWN_SHAPES
        if name in typed_options(context) and names <= own:
            raise ConfigError(
                f"--{name} has no effect on {', '.join(sorted(names))}, of shapes of their own; leave it out"
            )


def _output_path(output: Path | None, name: str) -> Path:
    """Return --output, or by default runs/<time>-<name>.json."""
    return output or default_output(name, ".json")


def _run(suite: Any, settings: Any, targets: Sequence[Target], path: Path, overwrite: bool, as_json: bool) -> None:
    """Run a benchmark suite, given as a module; write and print its report; exit with 1 if a row failed."""
    with new_file(path, overwrite) as temporary, console.progress("groups", suite.group_count(settings)) as bar:
        report: Report = suite.measure(settings, targets, lambda name: bar.advance())
        temporary.write_text(console.as_json(report.to_dict()), encoding="utf-8")
    if as_json:
        console.print_json(report.to_dict())
    else:
        _show_report(report)
        console.say(f"written to {path}")
    if report.failed:
        raise typer.Exit(1)


def _show_report(report: Report) -> None:
    """Print a report: the machine, a table of its rows, the reasons of failed rows."""
    versions = ", ".join(f"{name} {value}" for name, value in report.machine.items() if name != "device")
    console.say(f"{report.machine['device']}: {versions}")
    settings = report.settings
    length = f"{settings['tokens']:,} tokens" if "tokens" in settings else plural(settings["samples"], "sample")
    title = ", ".join(filter(None, (settings.get("model", ""), length, plural(settings["repeats"], "repeat"))))
    rows = [
        (row.target.name, row.target.what, _bound_text(row), _value_text(row.value), row.verdict())
        for row in report.rows
    ]
    console.table(title, ["row", "what", "#bound", "#value", ""], rows)
    for reason in dict.fromkeys(row.reason for row in report.rows if row.reason):
        names = ", ".join(row.target.name for row in report.rows if row.reason == reason)
        console.say(f"{names}: {reason}")


def _bound_text(row: Row) -> str:
    """Return a row's bound as text: ≤ or ≥, then the number."""
    return f"{'≥' if row.target.at_least else '≤'} {row.target.bound:g}"


def _value_text(value: float | None) -> str:
    """Return a value as text, a dash for None."""
    return "–" if value is None else f"{value:.3f}"


def _change_text(change: Change) -> str:
    """Return a row's change as text, such as `12% worse (!)`, marked if it regressed."""
    if change.worse is None:
        return "not in both"
    word = "worse" if change.worse > 0 else "better"
    return f"{abs(change.worse):.0%} {word}{' (!)' if change.regressed else ''}"
