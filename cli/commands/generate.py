"""`perturbkv generate`: a model's answers from its full cache and from evicted ones."""

from __future__ import annotations

import dataclasses
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
from perturbkv.analyses.names import distinct_names
from perturbkv.cli import console, option_refusals
from perturbkv.cli.command_line import show_options, with_options, without_options
from perturbkv.cli.options import DEFAULT_SELECTIONS, MaxNewTokensOption, MetricOption, RunOptions, SelectionOption
from perturbkv.cli.planned_run import plan, run_folder
from perturbkv.cli.session import print_failures
from perturbkv.configs.cache_contents import PAGES_READ
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.display import plural
from perturbkv.errors import ConfigError, FailedRunError, InterruptedRunError
from perturbkv.escaping import escape_line
from perturbkv.storage import json_lines
from perturbkv.storage.answers_file import FILE, is_answers_row
from perturbkv.storage.output import OutputFolder, resumable_file, translate_os_errors
from perturbkv.user_files import FileKind

if TYPE_CHECKING:
    from perturbkv.datasets.encode import Prompt
    from perturbkv.pipeline.run.plan import Plan


_SHOWN = 400
"""Most characters of an answer in a table; the file has all."""


def show_sample(row: Mapping[str, Any], configs: Sequence[EvictionConfig]) -> None:
    """Print a sample: accepted answers, the answer from every cache, and the relative perturbation per compression.

    `row` is the sample's line in the file of answers.
    """
    console.say(f"\n{escape_line(row['sample'])} · {row['prompt_tokens']:,} tokens", bold=True)
    full, expected, metric = row["full"], row.get("answers"), row.get("metric")
    names = dict(zip(row["evicted"], distinct_names(configs), strict=True))
    rows = [("expected", "", "", "", shorten(" | ".join(expected)))] if expected else []
    rows.append(("full cache", "", "", _score_text(full), shorten(full["text"])))
    for label, answer in row["evicted"].items():
        same = sum(1 for pair in zip(answer["tokens"], full["tokens"], strict=False) if pair[0] == pair[1])
        rows.append(
            (
                names[label],
                text.cache_share(answer.get("held_share", math.nan)) + _bytes_text(answer),
                f"{same} of {len(full['tokens'])}",
                _score_text(answer),
                shorten(answer["text"]),
            )
        )
    columns = ["cache", "#held /\nfull", "#same\ntokens", f"#{metric},\n0 to 1", "answer"]
    if not metric:
        columns, rows = [*columns[:3], columns[4]], [(*one[:3], one[4]) for one in rows]  # type: ignore[misc]
    console.print_table("", columns, rows)
    for label in row["evicted"]:
        relative = [one["relative"] for one in row["compressions"] if one["config"] == label]
        if relative:
            listed = ", ".join(f"{value:.2f}" for value in relative)
            console.say(f"{names[label]}: {plural(len(relative), 'compression')}, Σ L / Σ ‖o_h‖₁: {listed}")


def _bytes_text(answer: Mapping[str, Any]) -> str:
    """Return a line with a quantised cache's share of the full cache's bytes; empty for other caches."""
    return f"\n{text.cache_share(answer['bytes_share'])} of bytes" if "bytes_share" in answer else ""


def _score_text(answer: Mapping[str, Any]) -> str:
    """Return the score of an answer as text; empty without a score."""
    score = answer.get("score")
    return "" if score is None else f"{score:.3f}"


def shorten(answer: str) -> str:
    """Return an answer as one line, cut after 400 characters and followed by the number of omitted characters.

    An empty answer becomes "(nothing)".
    """
    line = " ".join(answer.split()) or "(nothing)"
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}… ({len(line) - _SHOWN:,} more characters)"


_KIND = FileKind("a file of answers", ConfigError, 2 * 2**30, "move it away, or give --overwrite or another --output")


@show_options("compress_every", "compress_over")
@without_options("isolated_every", "text", "steps", "save", "effect_gradient", "prompts", "kept", "shard", "shard_by")
@with_options
def generate(
    run: RunOptions,
    selection: SelectionOption = None,
    max_new_tokens: MaxNewTokensOption = None,
    metric: MetricOption = "",
    divergence: Annotated[
        bool, Option("--divergence", help="Also read the full cache's answer from every cache: KL, token by token")
    ] = False,
) -> None:
    """Answer from the full and the evicted caches; compare.

    Greedily, beside the accepted answers and graded from 0 to 1.
    generation.jsonl holds the run, then one line per sample: token ids, text and score of every answer, what its cache
    held, and with --compress-every or --compress-over the perturbation of each compression. A killed run goes on with
    the next sample.
    perturbkv quality --divergence looks at the file.
    """
    run.check_inputs()
    path = run_folder(run, run.output) / FILE
    if not (run.dry_run or run.overwrite):
        _check_same_run(run, path)
    configs = run.configs(selection or DEFAULT_SELECTIONS)
    option_refusals.check_effects("generate", configs, run)
    from perturbkv.datasets.prompts import metrics_of
    from perturbkv.pipeline.answers.generation import check_answer_options

    check_answer_options(configs, max_new_tokens)
    output = OutputFolder(path.parent, run.overwrite, run.wait)
    if not run.dry_run:
        output.claim(resumable_file(path), writer=path)
    planned = plan(dataclasses.replace(run, steps=1), configs, generate=max_new_tokens, metric=metric, scored=False)
    if run.dry_run:
        from perturbkv.cli import dry_run

        dry_run.show([planned], run.as_json, None)
        return
    metrics_of(planned.prompts)
    header = {"run": json.loads(planned.run.to_json()), "divergence": divergence}
    failed: dict[str, str] = {}
    with output.claim(resumable_file(path), writer=path):
        rows = _answer_samples(run, planned, path, header, failed)
    if not rows:
        raise FailedRunError(str(path), failed)
    if run.as_json:
        document = {**header, "run": run_object(planned.run), "file": str(path), "samples": rows, "failed": failed}
        console.print_json(document)
    else:
        _show_answers(rows, planned.run, path)
    print_failures(failed)
    if failed:
        raise typer.Exit(1)


def _answer_samples(
    run: RunOptions, planned: Plan, path: Path, header: dict[str, Any], failed: dict[str, str]
) -> list[dict[str, Any]]:
    """Return the rows of all samples in the run's order, after answering the samples without a row.

    `failed` gets sample -> reason. Raises InterruptedRunError after a Ctrl-C.
    """
    from perturbkv.pipeline.run.running import provenance

    made_with = provenance_object(provenance(planned))
    first_line, rows = _open_answers(path, header, made_with, run.overwrite)
    try:
        with translate_os_errors(path):
            _answer_missing(run, planned, path, first_line, rows, failed)
            return _sort_rows(planned, path, first_line, rows)
    except KeyboardInterrupt:
        raise InterruptedRunError(len(rows), len(planned.prompts), path) from None


def _sort_rows(
    planned: Plan, path: Path, first_line: dict[str, Any], rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the rows in the order of the run's samples; the file is rewritten if its order differs."""
    index = {name: number for number, name in enumerate(planned.prompts.ids)}
    ordered = sorted(rows, key=lambda row: index.get(row["sample"], len(index)))
    if ordered != rows:
        json_lines.write(path, [first_line, *ordered])
    return ordered


def _show_answers(rows: list[dict[str, Any]], run: RunConfig, path: Path) -> None:
    """Print the answers to all samples, and notes on the contents of the caches."""
    for row in rows:
        show_sample(row, run.configs)
    shares = [answer.get("held_share", 0.0) for row in rows for answer in row["evicted"].values()]
    console.say(text.cache_share_note(shares, run.compressed_again))
    if names := dict.fromkeys(config.policy.name for config in run.configs if config.reads_pages):
        console.say(f"{', '.join(names)}: {PAGES_READ.note}")
    console.say(f"written to {path}, every answer whole")


def _open_answers(
    path: Path, header: dict[str, Any], made_with: dict[str, Any], overwrite: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the first line and the finished rows of a file of answers; unfinished rows are removed from it.

    Without finished rows nothing is written yet: the first answer makes the file. Raises ConfigError where the file is
    of another run, or is no file of answers.
    """
    exists = os.path.lexists(path) and not overwrite
    first, *others = _KIND.read_text(path).split("\n") if exists else [""]
    stored = json_lines.parse_line(first)
    rows = [row for row in map(json_lines.parse_line, others) if row is not None]
    if exists and (stored is None or _stored_header(stored) != header):
        raise _other_run_error(path)
    if invalid := [row for row in rows if not is_answers_row(row)]:
        raise _KIND.refusal(path, f"a line that is no answers of ours, {str(invalid[0])[:40]}")
    if rows:
        console.note(f"{plural(len(rows), 'sample')} of {header['run']['samples']} there already; going on")
        json_lines.write(path, [stored or {}, *rows])
    return stored or {**header, "made_with": made_with}, rows


def _check_same_run(run: RunOptions, path: Path) -> None:
    """Raise ConfigError where a file of answers is of another model, data set, scenario, cache or length.

    What only the opened model and prompts tell is compared when the run begins; this needs no torch.
    """
    if not os.path.lexists(path):
        return
    stored = json_lines.parse_line(_KIND.read_text(path).partition("\n")[0])
    old = _stored_header(stored or {}).get("run")
    same = ("model", "dataset", "scenario", "cache", "max_tokens")
    if old is None or any(old[name] != getattr(run, name) for name in same):
        raise _other_run_error(path)


def _other_run_error(path: Path) -> ConfigError:
    """Return the error for a file of answers of another run."""
    return ConfigError(f"{path} is of another run; give --overwrite or another --output")


def _stored_header(document: dict[str, Any]) -> dict[str, Any]:
    """Return the header of a file of answers from its first line; missing choices get their defaults."""
    try:
        run = RunConfig.from_json(json.dumps(document.get("run", {})))
    except ConfigError:
        return {}
    return {
        "run": json.loads(run.to_json()),
        "divergence": document.get("divergence", False),
    }


def _answer_missing(
    run: RunOptions,
    planned: Plan,
    path: Path,
    first_line: dict[str, Any],
    rows: list[dict[str, Any]],
    failed: dict[str, str],
) -> None:
    """Answer the prompts without a row, and append each row to `rows` and the file; `failed` gets sample -> reason."""
    from perturbkv.engines import engine_choice
    from perturbkv.pipeline.answers.answer_rows import AnsweredPrompt

    names = {row["sample"] for row in rows}
    todo = [prompt for prompt in planned.prompts if prompt.sample_id not in names]
    if not todo:
        return

    def on_answer(prompt: Prompt, answer: AnsweredPrompt) -> None:
        if rows:
            json_lines.append(path, answer.row)
        else:
            json_lines.write(path, [first_line, answer.row])
        rows.append(answer.row)
        bar.advance()

    def on_failure(prompt: Prompt, reason: str) -> None:
        failed[prompt.sample_id] = reason
        bar.advance()

    with (
        engine_choice.open_engine(run.engine_config, [planned]) as engine,
        console.progress("samples", len(planned.prompts), len(rows), engine.describe_workers) as bar,
    ):
        engine.answer(planned, first_line.get("divergence", False), todo, on_answer, on_failure)
