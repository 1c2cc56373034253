"""Rows of a jsonl file, the second of which holds what a field should not; with those that only look odd."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.attack.odd_files import DEEP, DIGITS
from tests.attack.odd_words import WORDS

LONG = "The quick brown fox jumps over the lazy dog. " * 4
_FIRST = json.dumps({"id": "first", "prompt": LONG})
_WRONG_TEXTS: dict[str, Any] = {"null": None, "a number": 3, "true": True, "a list": ["a"], "an object": {"a": 1}}
_WRONG_LISTS: dict[str, Any] = {
    "a text": "a",
    "a number": 3,
    "null": None,
    "a list of numbers": [1],
    "mixed": ["a", None],
}
_WRONG_IDS: dict[str, Any] = {
    "null": None,
    "a fraction": 1.5,
    "true": True,
    "a list": ["a"],
    "an object": {"a": 1},
    "NUL": "a\0b",
    "half a surrogate pair": "\ud800",
    "the other half": "x\udfff",
    "100 kB": "x" * 100_000,
    "again": "first",
}


@dataclass(frozen=True)
class Rows:
    """Lines of a file, whether its second is refused, and what is said of it."""

    lines: tuple[str | bytes, ...]
    wrong: bool = True
    words: str = "rows.jsonl, line 2"


def _row(**fields: Any) -> Rows:
    return Rows((_FIRST, json.dumps(fields)))


def _fields(name: str, values: dict[str, Any], **others: Any) -> dict[str, Rows]:
    return {f"{name} is {what}": _row(**{**others, name: value}) for what, value in values.items()}


ROWS: dict[str, Rows] = {
    **_fields("id", _WRONG_IDS, prompt=LONG),
    **_fields("_id", {**_WRONG_IDS, "again": 1.0, "null": {}}, context=LONG, input="Who?"),
    **_fields("prompt", _WRONG_TEXTS, id="a"),
    **_fields("answer_prefix", _WRONG_TEXTS, prompt=LONG),
    **_fields("context", _WRONG_TEXTS, input="Who?"),
    **_fields("input", _WRONG_TEXTS, context=LONG),
    **_fields("answers", _WRONG_LISTS, prompt=LONG),
    **_fields("all_classes", {"a text": "a", "numbers": [1]}, context=LONG, input="Who?", dataset="trec"),
    "prompt is half a surrogate pair": _row(prompt=f"{LONG}\ud83d"),
    "answers hold half a surrogate pair": _row(prompt=LONG, answers=["\ude00"]),
    "prompt is missing": _row(text="x"),
    "only odd keys": _row(**{"\x1b[2J": 1, "\ud800": 2, "[bold]": 3, "\u202e": 4}),
    "prompt is empty": _row(prompt=""),
    "prompt is white": _row(prompt=" \n\t\u00a0"),
    "context and input are empty": _row(context="", input=""),
    "trec without input": _row(context=LONG, dataset="trec"),
    "a deep value": Rows((_FIRST, f'{{"prompt": "x", "more": {"[" * DEEP}{"]" * DEEP}}}')),
    "a deep object": Rows((_FIRST, '{"a":' * DEEP + "1" + "}" * DEEP)),
    "id of 5,000 digits": Rows((_FIRST, f'{{"prompt": "x", "id": {DIGITS}}}')),
    "a value of 5,000 digits": Rows((_FIRST, f'{{"prompt": {json.dumps(LONG)}, "more": {DIGITS}}}')),
    "NaN beside": Rows((_FIRST, f'{{"prompt": {json.dumps(LONG)}, "more": NaN}}'), False),
    "-Infinity beside": Rows((_FIRST, f'{{"prompt": {json.dumps(LONG)}, "more": [-Infinity]}}'), False),
    "id is NaN": Rows((_FIRST, '{"prompt": "x", "id": NaN}')),
    "raw control characters": Rows((_FIRST, b'{"prompt": "a\x01b"}')),
    "raw NUL": Rows((_FIRST, b'{"prompt": "a\x00b"}')),
    "no JSON": Rows((_FIRST, "prompt: x")),
    "two objects": Rows((_FIRST, '{"prompt": "x"} {"prompt": "y"}')),
    "half a row": Rows((_FIRST, '{"prompt": "x')),
    "5 MB, a prompt": Rows((_FIRST, json.dumps({"prompt": "word " * 1_000_000})), words="'1' has 5000000 tokens"),
    "10 MB, no prompt": _row(more="word " * 2_000_000),
    "10 MB of brackets": Rows((_FIRST, "[" * 10_000_000)),
    "a million keys": _row(**{f"key{number}": number for number in range(200_000)}),
    "numbers as ids": Rows((json.dumps({"id": 1, "prompt": LONG}), json.dumps({"id": "2", "prompt": LONG})), False),
    "an id of 30 digits": Rows((_FIRST, f'{{"prompt": {json.dumps(LONG)}, "id": {"7" * 30}}}'), False),
    "a key twice": Rows((_FIRST, f'{{"prompt": 3, "prompt": {json.dumps(LONG)}}}'), False),
    "NUL in the prompt": Rows((_FIRST, json.dumps({"prompt": f"{LONG}\0"})), False),
    "blank lines between": Rows((_FIRST, "", " \t", json.dumps({"prompt": LONG})), False),
    "white around": Rows((_FIRST, f"  {json.dumps({'prompt': LONG})}\t"), False),
    "answers that grade": Rows((_FIRST, json.dumps({"prompt": LONG, "answers": ["12"]})), False),
    **{
        f"an id that is {what}": Rows((_FIRST, json.dumps({"prompt": LONG, "id": word})), False)
        for what, word in WORDS.items()
    },
}
