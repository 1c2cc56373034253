"""`perturbkv list datasets`: the data sets, the wording of one, and its prompts as the model sees them.

A prompt is shown by the text of its first and last tokens, and of those around the cut and the question.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from perturbkv.cli import console
from perturbkv.cli.commands.described_files import describe_json_lines
from perturbkv.cli.commands.generate import shorten
from perturbkv.cli.data_options import DataOptions
from perturbkv.cli.options import JsonOption
from perturbkv.cli.planned_run import encode_prompts
from perturbkv.display import plural
from perturbkv.errors import ConfigError
from perturbkv.escaping import escape_line
from perturbkv.models.aliases import DEFAULT

if TYPE_CHECKING:
    from perturbkv.datasets.encode import Prompt
    from perturbkv.datasets.ruler.tasks import Task
    from perturbkv.datasets.wording import Wording


_AROUND = 20
"""Tokens shown before and after a cut, or the beginning of the question, in the middle of a prompt."""
Decode = Callable[[list[int]], str]


def describe_prompt(prompt: Prompt, decode: Decode, ends: int) -> dict[str, Any]:
    """Return a prompt as a JSON document: numbers of tokens, answers, and the text of `ends` tokens at each end."""
    tokens, question = len(prompt.token_ids), prompt.question_tokens
    return {
        "sample": prompt.sample_id,
        "tokens": tokens,
        "cut_tokens": prompt.cut_tokens,
        "cut_after": prompt.cut_index,
        "context_tokens": tokens - question,
        "question_tokens": question,
        "control_tokens": prompt.control_tokens,
        "answers": list(prompt.answers),
        "pieces": shown_pieces(prompt, decode, ends),
    }


def shown_pieces(prompt: Prompt, decode: Decode, ends: int) -> list[dict[str, Any]]:
    """Return the shown texts of a prompt and the marks between them, in order, as JSON objects.

    The marks are `hidden` (tokens of the prompt that are not shown), `cut` (tokens that were cut out of the prompt) and
    `question` (the beginning of the question).
    """
    tokens, split = len(prompt.token_ids), len(prompt.token_ids) - prompt.question_tokens
    marks = {
        index: name for index, name in ((prompt.cut_index, "cut"), (split, "question")) if index and index < tokens
    }
    pieces: list[dict[str, Any]] = []
    previous_end = 0
    for first, end in _shown_ranges(tokens, ends, list(marks)):
        if first > previous_end:
            pieces.append({"mark": "hidden", "tokens": first - previous_end})
        borders = [first, *(index for index in sorted(marks) if first < index < end), end]
        for start, stop in itertools.pairwise(borders):
            if start in marks:
                pieces.append({"mark": marks[start], "tokens": prompt.cut_tokens if marks[start] == "cut" else None})
            pieces.append({"first": start, "end": stop, "text": decode(list(prompt.token_ids[start:stop]))})
        previous_end = end
    return pieces


def _shown_ranges(tokens: int, ends: int, marks: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ranges [first, end) of shown tokens: `ends` at both ends of the prompt and 20 around each mark."""
    wanted = [(0, ends), *((mark - _AROUND, mark + _AROUND) for mark in marks), (tokens - ends, tokens)]
    merged: list[tuple[int, int]] = []
    for first, end in sorted((max(first, 0), min(end, tokens)) for first, end in wanted):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def show_prompt(document: Mapping[str, Any]) -> None:
    """Print a prompt from its JSON document: its numbers, then its shown texts and marks."""
    console.say(f"\nsample {escape_line(document['sample'])}", bold=True)
    division = f"{document['context_tokens']:,} | {document['question_tokens']:,}"
    cut = f"{document['cut_tokens']:,} behind token {document['cut_after']:,}" if document["cut_tokens"] else "none"
    rows = [
        ("tokens", f"{document['tokens']:,}"),
        ("cut in the middle", cut),
        ("context | question", division if document["question_tokens"] else "no question of its own"),
        ("accepted answers", shorten(" | ".join(document["answers"])) if document["answers"] else "none"),
    ]
    if document["control_tokens"]:
        rows.append(("special tokens", f"{plural(document['control_tokens'], 'control token')} inside the text"))
    console.print_table("", ["", ""], rows)
    for piece in document["pieces"]:
        console.say(piece["text"] if "text" in piece else f"── {_mark_text(piece)} ──", bold="mark" in piece)


def _mark_text(mark: Mapping[str, Any]) -> str:
    """Return the sentence printed for a mark in a prompt: hidden tokens, a cut, or the start of the question."""
    if mark["mark"] == "hidden":
        return f"{mark['tokens']:,} more tokens, not shown"
    if mark["mark"] == "cut":
        return f"cut here: the model does not see the {mark['tokens']:,} tokens that stood here"
    return "context above, question below"


def datasets(
    name: Annotated[
        str | None, Argument(help="A data set or .jsonl file to look at; without it all are listed", show_default=False)
    ] = None,
    show: Annotated[bool, Option("--show", help="Print the encoded prompt's ends and where it splits")] = False,
    tokens: Annotated[int, Option(metavar="N", help="Tokens shown of the beginning and of the end")] = 100,
    sample: Annotated[int | None, Option(metavar="N", help="Which sample, from 0")] = None,
    samples: Annotated[int, Option(metavar="N", help="Samples shown, the first ones")] = 1,
    model: Annotated[
        str, Option("--model", "-m", metavar="NAME", help="Model with the tokenizer; no weights are loaded")
    ] = DEFAULT,
    data_dir: Annotated[
        Path | None,
        Option(metavar="PATH", help="LongBench's or RULER's files; PERTURBKV_DATA_DIR", envvar="PERTURBKV_DATA_DIR"),
    ] = None,
    max_tokens: Annotated[int | None, Option(metavar="N", help="Cut longer prompts in the middle")] = None,
    chat_template: Annotated[
        bool | None,
        Option("--chat-template/--no-chat-template", help="Use the model's template", show_default="as in a run"),
    ] = None,
    length: Annotated[
        list[str] | None, Option("--length", "--lengths", metavar="N", help="needle, ruler: tokens of a prompt")
    ] = None,
    depth: Annotated[
        list[str] | None, Option("--depth", "--depths", metavar="X", help="needle: where the fact lies")
    ] = None,
    haystack: Annotated[str, Option(metavar="NAME", help="needle: prose or noise")] = "prose",
    seed: Annotated[int, Option(metavar="N", help="Seed of the data")] = 0,
    as_json: JsonOption = False,
) -> None:
    """List the data sets, or look at one and its prompts.

    Any .jsonl file with `prompt`, a chat's `messages`, or `context` and `question` works too. With a name, show how the
    data set asks and grades; of a file, what it holds. With --show, print prompts as the model sees them, special
    tokens included: what --model, --max-tokens, --chat-template and the others make of them, as in a run.
    """
    from perturbkv.datasets.dataset_registry import all_datasets

    if name is None:
        if show:
            raise ConfigError("--show needs a dataset to look at, such as `perturbkv list datasets needle --show`")
        rows = [
            {"name": row.name, "kind": row.kind, "summary": row.summary, "needs": row.needs} for row in all_datasets()
        ]
        if as_json:
            console.print_json({"datasets": rows})
            return
        console.print_table("datasets", ["name", "kind", "what"], [tuple(row.values())[:3] for row in rows])
        console.say("perturbkv list datasets NAME tells what one needs, how it asks and how it is graded.")
    elif show:
        run = DataOptions(
            model=model, dataset=name, samples=samples if sample is None else sample + 1, seed=seed, data_dir=data_dir,
            length=length, depth=depth, haystack=haystack, max_tokens=max_tokens, chat_template=chat_template,
        )  # fmt: skip
        _show_prompts(run, sample or 0, tokens, as_json)
    else:
        _describe_dataset(name, as_json)


def _describe_dataset(name: str, as_json: bool) -> None:
    """Print kind, summary, needs and wording of a data set, or what a file holds. Raises PerturbkvErrors."""
    from perturbkv.datasets import dataset_registry

    dataset_registry.check_name(name)
    if dataset_registry.is_file(name):
        describe_json_lines(Path(name), as_json)
        return
    info = next(info for info in dataset_registry.all_datasets() if info.name == name)
    document: dict[str, Any] = {"name": name, "kind": info.kind, "summary": info.summary, "needs": info.needs}
    wording = _wording(name)
    if as_json:
        console.print_json(document | (wording.record() if wording else {}))
        return
    rows = [(key, value) for key, value in document.items() if key != "name"]
    console.print_table(name, ["", ""], [*rows, *(_wording_rows(wording) if wording else [])])


def _wording(name: str) -> Wording | Task | None:
    """Return the prompt wording and metric of a LongBench or RULER data set; None for other data sets."""
    from perturbkv.datasets import dataset_registry, wording
    from perturbkv.datasets.ruler import tasks

    if dataset_registry.in_ruler(name):
        return tasks.read(name)
    return wording.read(name) if dataset_registry.in_longbench(name) else None


def _wording_rows(wording: Wording | Task) -> list[tuple[str, str]]:
    """Return table rows on the prompt, answer, metric and chat template of a data set."""
    record = wording.record()
    ends = f", up to the first {' or '.join(map(repr, wording.until))}" if wording.until else ""
    return [
        ("prompt", f"from {record['from']}:\n{wording.template}"),
        ("answer", f"at most {wording.generation_length} tokens{ends}"),
        ("metric", f"{wording.metric}, 0 to 1"),
        ("chat template", "where the tokenizer has one" if record["chat_template"] else "none"),
    ]


def _show_prompts(run: DataOptions, first: int, tokens: int, as_json: bool) -> None:
    """Print the prompts from index `first` on as the model sees them, with their first and last `tokens` tokens."""
    if tokens < 1 or first < 0:
        option, least, got = ("--tokens", 1, tokens) if tokens < 1 else ("--sample", 0, first)
        raise ConfigError(f"{option} must be at least {least}, got {got}")
    run.check_inputs()
    from perturbkv.models.loading import open_model

    tokenizer = open_model(run.model, run.seed, run.revision or "").tokenizer
    encoded = encode_prompts(run, tokenizer)
    documents = [describe_prompt(prompt, tokenizer.decode, tokens) for prompt in encoded[first:]]
    header = {
        "dataset": run.dataset,
        "model": run.model,
        "chat_template": encoded.chat_template,
        "generation_length": encoded.generation_length,
    }
    if as_json:
        console.print_json({**header, "dataset_options": encoded.options, "samples": documents})
        return
    template = "chat template" if encoded.chat_template else "no chat template"
    console.say(escape_line(f"{run.dataset} · as {run.model} sees it · {template}"), bold=True)
    for document in documents:
        show_prompt(document)
