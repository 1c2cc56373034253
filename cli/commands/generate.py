"""`perturbkv generate`: a model's answers from its full cache and from evicted ones."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from perturbkv.analyses import text
from perturbkv.analyses.json_values import provenance_object, run_object
from perturbkv.analyses.pairing import plural, short_names
from perturbkv.cli import console, option_refusals
from perturbkv.cli.command_line import with_options
from perturbkv.cli.options import MetricOption, RunOptions
from perturbkv.cli.planned_run import plan, run_folder
from perturbkv.cli.session import say_failures
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError, FailedRunError, InterruptedRunError
from perturbkv.escaping import escape_line
from perturbkv.storage import json_lines
from perturbkv.storage.answers_file import FILE, is_row
from perturbkv.storage.output import Lock, OutputFolder, resumable, translate_os_errors
from perturbkv.user_files import FileKind

if TYPE_CHECKING:
    from perturbkv.datasets.encode import Prompt
    from perturbkv.pipeline.run.plan import Plan


_SHOWN = 400
"""Characters of an answer in a table; the file has all."""


def show(row: Mapping[str, Any], configs: Sequence[EvictionConfig]) -> None:
    """One sample: what was expected, every answer, and how far each compression moved the attention output."""
    console.say(f"\n{escape_line(row['sample'])} · {row['prompt_tokens']:,} tokens", bold=True)
    full, expected, metric = row["full"], row.get("answers"), row.get("metric")
    names = dict(zip(row["evicted"], short_names(configs), strict=True))
    rows = [("expected", "", "", "", shown(" | ".join(expected)))] if expected else []
    rows.append(("full cache", "", "", _score(full), shown(full["text"])))
    for label, made in row["evicted"].items():
        same = sum(1 for pair in zip(made["tokens"], full["tokens"], strict=False) if pair[0] == pair[1])
        alike = f"{same} of {len(full['tokens'])}"
        rows.append(
            (
                names[label] or "evicted",
                text.cache_share(made.get("held_share", math.nan)) + _bytes(made),
                alike,
                _score(made),
                shown(made["text"]),
            )
        )
    columns = ["cache", "#held /\nfull", "#same\ntokens", f"#{metric},\n0 to 1", "answer"]
    if not metric:
        columns, rows = [*columns[:3], columns[4]], [(*one[:3], one[4]) for one in rows]  # type: ignore[misc]
    console.table("", columns, rows)
    for label in row["evicted"]:
        moved = [one["relative"] for one in row["compressions"] if one["config"] == label]
        if moved:
            listed = ", ".join(f"{value:.2f}" for value in moved)
            console.say(f"{names[label] or 'evicted'}: {plural(len(moved), 'compression')}, Σ L / Σ ‖o_h‖₁: {listed}")


def _bytes(made: Mapping[str, Any]) -> str:
    """What a cache of few bits takes of the full one's bytes, on a line of its own."""
    return f"\n{text.cache_share(made['bytes_share'])} of bytes" if "bytes_share" in made else ""


def _score(made: Mapping[str, Any]) -> str:
    score = made.get("score")
    return "" if score is None else f"{score:.3f}"


def shown(text: str) -> str:
    """A text in one line, its end left out where it is long."""
    line = " ".join(text.split()) or "(nothing)"
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}… ({len(line) - _SHOWN:,} more characters)"


_KIND = FileKind("a file of answers", ConfigError, 2 * 2**30, "move it away, or give --overwrite or another --output")


@with_options
def generate(
    run: RunOptions,
    selection: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="How entries are selected", show_default="attention, two-stage"),
    ] = None,
    max_new_tokens: Annotated[
        int | None, Option(metavar="N", help="Tokens of an answer at most", show_default="the dataset's, else 64")
    ] = None,
    compress_every: Annotated[
        int | None,
        Option(metavar="N", help="Compress again whenever a cache holds more than this"),
    ] = None,
    metric: MetricOption = "",
    divergence: Annotated[
        bool, Option("--divergence", help="Also read the full cache's answer from every cache: KL, token by token")
    ] = False,
) -> None:
    """Answer from the full and the evicted caches; compare.

    Greedily, all caches in one batch, beside the accepted answers and graded from 0 to 1.
    generation.jsonl holds the run, then one line per sample: token ids, text and score of every answer, what its cache
    held, and with --compress-every the perturbation of each compression. A killed run goes on with the next sample.
    perturbkv quality --divergence and --judge look at the file.
    """
    from perturbkv.pipeline.answers.generation import check_asked, check_memory
    from perturbkv.pipeline.answers.grading import metrics_of

    configs = run.configs(selection or ["attention", "two-stage"])
    option_refusals.check("generate", run, configs)
    check_asked(configs, max_new_tokens, compress_every)
    path = run_folder(run, run.output) / FILE
    output = OutputFolder(path.parent, run.overwrite, run.wait)
    if not run.dry_run:
        output.claim(resumable(path), writer=path)
    planned = plan(run, configs, generate=max_new_tokens, metric=metric, scored=False)
    check_memory(planned)
    if run.dry_run:
        from perturbkv.cli import dry_run

        dry_run.show(planned, run.as_json, None)
        return
    metrics_of(planned.prompts)
    header = {"run": json.loads(planned.run.to_json()), "compress_every": compress_every,
              "divergence": divergence}  # fmt: skip
    failed: dict[str, str] = {}
    with output.claim(resumable(path), writer=path) as lock:
        rows = _answered(run, planned, path, header, failed, lock)
    if not rows:
        raise FailedRunError(str(path), failed)
    if run.as_json:
        document = {**header, "run": run_object(planned.run), "file": str(path), "samples": rows, "failed": failed}
        console.print_json(document)
    else:
        _show(rows, planned.run.configs, compress_every, path)
    say_failures(failed)
    if failed:
        raise typer.Exit(1)


def _answered(
    run: RunOptions, planned: Plan, path: Path, header: dict[str, Any], failed: dict[str, str], lock: Lock
) -> list[dict[str, Any]]:
    """Every sample's answers in the run's order, those of an earlier run of the same kind among them."""
    from perturbkv.pipeline.run.running import provenance

    about = provenance_object(provenance(planned))
    begun, rows = _open(path, header, about, run.overwrite)
    try:
        with translate_os_errors(path):
            _generate(run, planned, path, rows, header, failed, lock)
            return _in_order(planned, path, begun, rows)
    except KeyboardInterrupt:
        raise InterruptedRunError(len(rows), len(planned.prompts), path) from None


def _in_order(planned: Plan, path: Path, begun: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as the run has its samples; the file too, whose lines came as workers were done."""
    place = {name: index for index, name in enumerate(planned.prompts.ids)}
    ordered = sorted(rows, key=lambda row: place.get(row["sample"], len(place)))
    if ordered != rows:
        json_lines.write(path, [begun, *ordered])
    return ordered


def _show(
    rows: list[dict[str, Any]], configs: tuple[EvictionConfig, ...], compress_every: int | None, path: Path
) -> None:
    for row in rows:
        show(row, configs)
    held = [made.get("held_share", 0.0) for row in rows for made in row["evicted"].values()]
    console.say(text.cache_share_note(held, compress_every))
    if names := dict.fromkeys(config.policy.name for config in configs if config.reads_pages):
        console.say(f"{', '.join(names)}: {text.READ_NOTE}")
    console.say(f"written to {path}, every answer whole")


def _open(
    path: Path, header: dict[str, Any], about: dict[str, Any], overwrite: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The file's first line, and the samples that the same run has finished already; a new file where there is none.

    Raises ConfigError where the file is of another run, or none of ours.
    """
    there = os.path.lexists(path) and not overwrite
    first, *others = _KIND.read_text(path).split("\n") if there else [""]
    begun = json_lines.parse_line(first)
    rows = [row for row in map(json_lines.parse_line, others) if row is not None]
    if there and (begun is None or _asked(begun) != header):
        msg = f"{path} is of another run; give --overwrite or another --output"
        raise ConfigError(msg)
    if strange := [row for row in rows if not is_row(row)]:
        raise _KIND.refusal(path, f"a line that is no answers of ours, {str(strange[0])[:40]}")
    if rows:
        console.note(f"{plural(len(rows), 'sample')} of {header['run']['samples']} there already; going on")
    first_line = begun or {**header, "made_with": about}
    json_lines.write(path, [first_line, *rows])
    return first_line, rows


def _asked(document: dict[str, Any]) -> dict[str, Any]:
    """A file's first line as this version says it: choices that its writer did not know have their defaults."""
    try:
        run = RunConfig.from_json(json.dumps(document.get("run", {})))
    except ConfigError:
        return {}
    beside = {"compress_every": document.get("compress_every"), "divergence": document.get("divergence", False)}
    return {"run": json.loads(run.to_json()), **beside}


def _generate(
    run: RunOptions,
    planned: Plan,
    path: Path,
    rows: list[dict[str, Any]],
    header: dict[str, Any],
    failed: dict[str, str],
    lock: Lock,
) -> None:
    """Answer the prompts that `rows` lack, one line each as soon as it is there; `failed` gets those given up."""
    from perturbkv.engines import choosing
    from perturbkv.pipeline.answers.answered import Answered
    from perturbkv.pipeline.answers.generation import AnswerOptions

    names = {row["sample"] for row in rows}
    todo = [prompt for prompt in planned.prompts if prompt.sample_id not in names]
    if not todo:
        return

    def done(prompt: Prompt, made: Answered) -> None:
        lock.check()
        json_lines.append(path, made.row)
        rows.append(made.row)
        bar.one_more()

    def given_up(prompt: Prompt, why: str) -> None:
        failed[prompt.sample_id] = why
        bar.one_more()

    asked = AnswerOptions(header["compress_every"], header["divergence"])
    with (
        choosing.engine(run.engine_config, [planned]) as engine,
        console.progress("samples", len(planned.prompts), len(rows), engine.alive) as bar,
    ):
        engine.answer(planned, asked, todo, done, given_up)
