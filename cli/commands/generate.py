"""`perturbkv generate`: a model's answers from its full cache and from evicted ones."""

from __future__ import annotations

import dataclasses
import json
import math
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
from perturbkv.errors import FailedRunError, InterruptedRunError
from perturbkv.escaping import escape_line
from perturbkv.storage.answers_file import FILE, is_answers_row
from perturbkv.storage.json_lines import open_sample_lines
from perturbkv.storage.output import OutputFolder, resumable_file

if TYPE_CHECKING:
    from perturbkv.datasets.encode import Prompt
    from perturbkv.pipeline.answers.answer_rows import AnsweredPrompt
    from perturbkv.pipeline.run.plan import Plan
    from perturbkv.storage.json_lines import SampleLines


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
        if relative := [one["relative"] for one in row["compressions"] if one["config"] == label]:
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

    Answers are greedy, shown beside the accepted ones, and graded from 0 to 1.
    generation.jsonl holds the run, then one line per sample: token ids, text and score of every answer, what its cache
    held, and with --compress-every or --compress-over the perturbation of each compression. A killed run goes on with
    the next sample.
    perturbkv quality --divergence looks at the file.
    """
    run.check_inputs()
    path = run_folder(run, run.output) / FILE
    configs = run.configs(selection or DEFAULT_SELECTIONS)
    option_refusals.check_effects("generate", configs, run)
    from perturbkv.datasets.prompts import metrics_of
    from perturbkv.pipeline.answers.generation import check_answer_options
    from perturbkv.pipeline.run.running import provenance

    check_answer_options(configs, max_new_tokens)
    if not run.dry_run:
        OutputFolder(path.parent, wait=run.wait).claim(resumable_file(path), writer=path)
    planned = plan(dataclasses.replace(run, steps=1), configs, generate=max_new_tokens, metric=metric, scored=False)
    if run.dry_run:
        from perturbkv.cli import dry_run

        dry_run.show([planned], run.as_json, None)
        return
    metrics_of(planned.prompts)
    header = {"run": json.loads(planned.run.to_json()), "divergence": divergence}
    made_with = provenance_object(provenance(planned))
    with open_sample_lines(path, header, run.overwrite, run.wait, made_with, is_answers_row) as lines:
        failed = _answer_missing(run, planned, lines, divergence)
        lines.sort(planned.prompts.ids)
    if not lines.rows:
        raise FailedRunError(str(path), failed)
    if run.as_json:
        document = {"run": run_object(planned.run), "divergence": divergence, "file": str(path), "samples": lines.rows}
        console.print_json({**document, "failed": failed})
    else:
        _show_answers(lines.rows, planned.run, path)
    print_failures(failed)
    if failed:
        raise typer.Exit(1)


def _show_answers(rows: list[dict[str, Any]], run: RunConfig, path: Path) -> None:
    """Print the answers to all samples, and notes on the contents of the caches."""
    for row in rows:
        show_sample(row, run.configs)
    shares = [answer.get("held_share", 0.0) for row in rows for answer in row["evicted"].values()]
    console.say(text.cache_share_note(shares, run.compressed_again))
    if names := dict.fromkeys(config.policy.name for config in run.configs if config.reads_pages):
        console.say(f"{', '.join(names)}: {PAGES_READ.note}")
    console.say(f"written to {path}, every answer whole")


def _answer_missing(run: RunOptions, planned: Plan, lines: SampleLines, divergence: bool) -> dict[str, str]:
    """Answer the prompts without a line, and add a line for each; return failed sample -> reason.

    Raises InterruptedRunError after a Ctrl-C.
    """
    from perturbkv.engines import engine_choice

    failed: dict[str, str] = {}
    todo = [prompt for prompt in planned.prompts if prompt.sample_id not in lines.sample_ids]
    if lines.rows:
        console.note(f"{plural(len(lines.rows), 'sample')} of {len(planned.prompts)} there already; going on")
    if not todo:
        return failed

    def on_answer(prompt: Prompt, answer: AnsweredPrompt) -> None:
        lines.add(answer.row)
        bar.advance()

    def on_failure(prompt: Prompt, reason: str) -> None:
        failed[prompt.sample_id] = reason
        bar.advance()

    try:
        with (
            engine_choice.open_engine(run.engine_config, [planned]) as engine,
            console.progress("samples", len(planned.prompts), len(lines.rows), engine.describe_workers) as bar,
        ):
            engine.answer(planned, divergence, todo, on_answer, on_failure)
    except KeyboardInterrupt:
        raise InterruptedRunError(len(lines.rows), len(planned.prompts), lines.path or Path()) from None
    return failed
