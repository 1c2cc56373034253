"""`perturbkv list FILE`: what a trace, a file of prompts or a file of answers holds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from perturbkv.cli import console
from perturbkv.cli.options import JsonOption
from perturbkv.display import plural
from perturbkv.errors import ConfigError
from perturbkv.escaping import escape_line

if TYPE_CHECKING:
    from perturbkv.storage.trace.trace_file import Description


JSON_LINES = (".jsonl", ".json")
_OTHERS = {
    "searches": "searches for the best kept sets, which `python studies/regret.py` reads and goes on with",
    "swap": "the measurements of `perturbkv patching`, which the same command goes on with",
}
"""A key of the first line of a file of results -> what the file holds."""
_ENDS, _MOST_REFUSALS = 120, 5
"""Characters shown of a prompt's beginning and end, and refused rows shown."""


def describe_file(
    file: Annotated[
        Path, Argument(metavar="FILE", help="A trace, a .jsonl of prompts, or of answers", show_default=False)
    ],
    as_json: JsonOption = False,
) -> None:
    """Show what a trace, or a file of prompts or answers, holds.

    Of a trace: run, samples, variables and provenance. Of a .jsonl of prompts: its rows and fields, and what a run
    would refuse. Of a .jsonl that generate wrote: its run and how many answers.
    """
    if file.suffix in JSON_LINES:
        describe_json_lines(file, as_json)
    else:
        _describe_trace(file, as_json)


def describe_json_lines(path: Path, as_json: bool) -> None:
    """Print what a .jsonl file holds. Raises DatasetError where it is neither prompts nor answers."""
    header = _first_line(path)
    if other := next((what for key, what in _OTHERS.items() if isinstance(header.get(key), dict)), None):
        raise ConfigError(f"expected a trace, prompts or answers at {path}, got {other}")
    if isinstance(header.get("run"), dict):
        _describe_answers(path, as_json)
    else:
        _describe_prompts(path, as_json)


def _first_line(path: Path) -> Mapping[str, Any]:
    """Return the JSON object of a file's first line; empty where that is none. Raises DatasetError for no such file."""
    from perturbkv.datasets.jsonl import FILE
    from perturbkv.storage.json_lines import parse_line

    first = next(filter(str.strip, FILE.read_text(path).split("\n")), "")
    return parse_line(first) or {}


def _describe_prompts(path: Path, as_json: bool) -> None:
    """Print rows, fields, lengths and refused rows of a file of prompts, and the ends of the first prompt."""
    from perturbkv.datasets.jsonl import describe

    found = describe(path)
    first, lengths = None, None
    if found.first is not None:
        first = found.first.prompt
        characters = found.characters
        lengths = {"least": min(characters), "median": median(characters), "most": max(characters)}
    if as_json:
        console.print_json(
            {
                "path": str(path),
                "kind": "prompts",
                "rows": found.rows,
                "fields": dict(found.fields),
                "characters": lengths,
                "with_answers": found.graded,
                "first_prompt": first and {"characters": len(first), "begins": first[:_ENDS], "ends": first[-_ENDS:]},
                "refused": list(found.refusals),
            }
        )
        return
    fields = ", ".join(
        f"{escape_line(name)}{'' if count == found.rows else f' ({count:,})'}" for name, count in found.fields.items()
    )
    rows = [
        ("rows", f"{found.rows:,}, of which a run would refuse {len(found.refusals) or 'none'}"),
        ("fields", fields),
        ("accepted answers", f"in {plural(found.graded, 'row')}"),
    ]
    if first is not None and lengths is not None:
        rows.append(("characters", "{least:,} to {most:,}, median {median:,.0f}".format(**lengths)))
        rows.append(("first prompt", f"{len(first):,} characters, as the model gets it but for the chat template"))
        whole = len(first) <= 2 * _ENDS
        shown = [("", first)] if whole else [("begins", first[:_ENDS]), ("ends", first[-_ENDS:])]
        rows += [(name, escape_line(text)) for name, text in shown]
    console.print_table(f"{path}: prompts", ["", ""], rows)
    for refusal in itertools.islice(found.refusals, _MOST_REFUSALS):
        console.say(escape_line(f"refused: {refusal.removeprefix(f'{path}, ')}"))
    if (more := len(found.refusals) - _MOST_REFUSALS) > 0:
        console.say(f"refused: {plural(more, 'more row')}; --json lists all")
    if first is not None:
        console.say(f"perturbkv list datasets {path} --show prints a prompt as the model sees it, in tokens")


def _describe_answers(path: Path, as_json: bool) -> None:
    """Print the run and the number of answers of a file that `generate` wrote. Raises ConfigError as `read_answers`."""
    from perturbkv.analyses.json_values import provenance_object, run_object
    from perturbkv.storage.answers_file import read_answers

    answers = read_answers(path)
    run, samples = answers.run, [row["sample"] for row in answers.rows]
    if as_json:
        document = {"path": str(path), "kind": "answers", "digest": answers.digest, "run": run_object(run)}
        attrs = provenance_object(answers.made_with)
        console.print_json({**document, "sample_ids": samples, "attrs": attrs})
        return
    rows = [
        (
            "samples",
            f"{len(samples):,}, each answered by the full cache and by {plural(len(run.labels()), 'evicted one')}",
        ),
        ("compressed again", run.compressed_again or "never"),
        *((escape_line(name), escape_line(str(value))) for name, value in sorted(answers.made_with.items())),
    ]
    console.print_table(f"{path}: answers that perturbkv generate wrote", ["", ""], rows)
    console.print_table("configurations", ["config"], [(label,) for label in run.labels()])
    console.say(
        f"perturbkv quality {path} --divergence tells where they leave the full cache's (docs/how-to/answers.md)"
    )


def _describe_trace(trace: Path, as_json: bool) -> None:
    """Print a trace's run, samples, variables and provenance."""
    from perturbkv.analyses.json_values import provenance_object, run_object
    from perturbkv.storage.trace.trace_file import describe

    description = describe(trace)
    if as_json:
        document = {**dataclasses.asdict(description), "attrs": provenance_object(description.attrs)}
        console.print_json({**document, "run": run_object(description.run), "path": str(trace)})
        return
    run = description.run
    counts = f"{len(description.sample_ids)} samples, {len(description.failures)} failed"
    caches = description.caches
    total, padding = caches.get("cache_bytes", 0), caches.get("cache_padding_bytes", 0)
    share = f"{padding / max(total, 1):.1%}"
    facts = [
        ("samples", counts),
        ("text", _stored_text(description, description.with_text)),
        *(
            [("text of answers", _stored_text(description, description.with_answers))]
            if "generated" in description.variables
            else []
        ),
        ("kept positions", _stored_text(description, description.with_kept)),
        *([("evicted caches", f"{total:,} bytes, of which {padding:,} ({share}) are padding")] if caches else []),
        *((escape_line(name), escape_line(value)) for name, value in sorted(description.attrs.items())),
    ]
    console.print_table(str(trace), ["", ""], facts)
    console.print_table("configurations", ["config"], [(label,) for label in run.labels()])
    rows = [
        (
            escape_line(name),
            " ".join(map(escape_line, variable.dims)),
            "×".join(map(str, variable.shape)),
            escape_line(variable.units),
            f"{variable.nbytes:,}",
        )
        for name, variable in description.variables.items()
    ]
    console.print_table("variables", ["name", "axes", "shape", "unit", "#bytes"], rows)
    for reason in description.failures.values():
        console.say(escape_line(f"failed: {reason}"))


def _stored_text(description: Description, samples: Sequence[str]) -> str:
    """Return as text the number of complete samples for which an optional part of a trace is stored.

    `samples` are those for which it is stored.
    """
    stored, complete = len(samples), len(description.sample_ids) - len(description.failures)
    if not stored:
        return "not stored"
    return "stored" if stored == complete else f"stored of {stored} of {complete} samples"
