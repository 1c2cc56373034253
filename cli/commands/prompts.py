"""A prompt as the model sees it: its first and last tokens as text, and what lies around the cut and the question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perturbkv.analyses.naming import counted
from perturbkv.cli import console
from perturbkv.cli.commands.answers import shown
from perturbkv.visible import line

if TYPE_CHECKING:
    from perturbkv.datasets.encode import Prompt

_AROUND = 20
"""Tokens shown before and after a cut or the question's beginning, where they lie in the middle."""
Decode = Callable[[list[int]], str]


def describe(prompt: Prompt, decode: Decode, ends: int) -> dict[str, Any]:
    """The prompt in numbers and pieces of text: `ends` tokens of its beginning and as many of its end."""
    tokens, question = len(prompt.token_ids), prompt.question_tokens
    return {
        "sample": prompt.sample_id,
        "tokens": tokens,
        "cut_tokens": prompt.cut_tokens,
        "cut_after": prompt.cut_place,
        "context_tokens": tokens - question,
        "question_tokens": question,
        "control_tokens": prompt.control_tokens,
        "answers": list(prompt.answers),
        "pieces": pieces(prompt, decode, ends),
    }


def pieces(prompt: Prompt, decode: Decode, ends: int) -> list[dict[str, Any]]:
    """Texts of tokens `first` up to `end`, and between them marks: `hidden`, `cut` and `question`.

    A text ends where a mark stands; what is hidden stands in the prompt, what is cut does not.
    """
    tokens, split = len(prompt.token_ids), len(prompt.token_ids) - prompt.question_tokens
    marks = {place: name for place, name in ((prompt.cut_place, "cut"), (split, "question")) if place}
    places = {place: name for place, name in marks.items() if place < tokens}
    found: list[dict[str, Any]] = []
    reached = 0
    for first, end in _windows(tokens, ends, list(places)):
        if first > reached:
            found.append({"mark": "hidden", "tokens": first - reached})
        for start, stop in _split(first, end, sorted(places)):
            if start in places:
                found.append({"mark": places[start], "tokens": prompt.cut_tokens if places[start] == "cut" else None})
            found.append({"first": start, "end": stop, "text": decode(list(prompt.token_ids[start:stop]))})
        reached = end
    return found


def _windows(tokens: int, ends: int, places: Sequence[int]) -> list[tuple[int, int]]:
    """What is shown: both ends and what lies around each place, those that touch as one."""
    wanted = [(0, ends), *((place - _AROUND, place + _AROUND) for place in places), (tokens - ends, tokens)]
    merged: list[tuple[int, int]] = []
    for first, end in sorted((max(first, 0), min(end, tokens)) for first, end in wanted):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


def _split(first: int, end: int, places: Sequence[int]) -> list[tuple[int, int]]:
    borders = [first, *(place for place in places if first < place < end), end]
    return list(zip(borders, borders[1:], strict=False))


def show(document: Mapping[str, Any]) -> None:
    """One prompt: its numbers, then its text with its marks."""
    console.say(f"\nsample {line(document['sample'])}", bold=True)
    cut = f"{document['cut_tokens']:,} behind token {document['cut_after']:,}" if document["cut_tokens"] else "none"
    rows = [
        ("tokens", f"{document['tokens']:,}"),
        ("cut in the middle", cut),
        ("context | question", _parts(document)),
        ("accepted answers", shown(" | ".join(document["answers"])) if document["answers"] else "none"),
    ]
    if document["control_tokens"]:
        rows.append(("special tokens", f"{counted(document['control_tokens'], 'control token')} inside the text"))
    console.table("", ["", ""], rows)
    for piece in document["pieces"]:
        console.say(piece["text"] if "text" in piece else f"── {_told(piece)} ──", bold="mark" in piece)


def _parts(document: Mapping[str, Any]) -> str:
    """Tokens of both; without a question, what a chat template puts behind the text is no context either."""
    if not document["question_tokens"]:
        return "no question of its own"
    return f"{document['context_tokens']:,} | {document['question_tokens']:,}"


def _told(mark: Mapping[str, Any]) -> str:
    if mark["mark"] == "hidden":
        return f"{mark['tokens']:,} more tokens, not shown"
    if mark["mark"] == "cut":
        return f"cut here: the model does not see the {mark['tokens']:,} tokens that stood here"
    return "context above, question below"
