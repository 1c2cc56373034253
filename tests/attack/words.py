"""Odd words in every file that is read, on every screen and in every file that is written."""

from __future__ import annotations

import csv
import json
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from perturbkv.trace import FailedSample, Trace
from tests.attack.case import Case, Flaw, Outcome, answers, crashed, refused
from tests.attack.materials import EVICTION_CODE, MODEL, PROMPTS, RUN, SCORE_CODE, SMALL, TEXT, TRACE, WORDS
from tests.support import prompts
from tests.support.traces import run_config

COUNT = 900
"""More than there are: `make attack` tries all."""
Expected = Callable[[str, Outcome, Path], Flaw]
"""What is wrong with how a word came out."""


def contains(text: str, word: str) -> bool:
    """Return whether the word's visible parts stand in the text in this order; what is escaped between may differ."""
    at, text = 0, "".join(text.split()).replace("\\'", "'").replace("\\\\", "\\")
    for part in filter(None, re.split(r"[^\x21-\x7e]+", word)):
        at = text.find(part, at) + len(part)
        if at < len(part):
            return False
    return True


def _screen(*codes: int) -> Expected:
    """Expect the word on the screen, with one of these exit codes."""

    def flaw(word: str, outcome: Outcome, folder: Path) -> Flaw:
        text = outcome.out + outcome.err
        wrong = f"exit code {outcome.code}: {text[-300:]!r}" if outcome.code not in codes else None
        return (
            crashed(outcome) or wrong or (None if contains(text, word) else f"{word[:40]!r} is not in {text[-300:]!r}")
        )

    return flaw


def _refused(word: str, outcome: Outcome, folder: Path) -> Flaw:
    """Expect one line that shows the word, or the beginning of a long one."""
    if flaw := refused(alone=True)(outcome, folder):
        return flaw
    shown = word[:12] if len(word) > 100 else word
    return None if contains(outcome.err, shown) else f"{shown[:40]!r} is not in {outcome.err[-300:]!r}"


def _any(word: str, outcome: Outcome, folder: Path) -> Flaw:
    """Expect an answer, or one line; figures are XML."""
    for path in (folder / "out").glob("*.svg"):
        try:
            ET.parse(path)
        except ET.ParseError as error:
            return f"{path.name} is no XML: {error}"
    return refused(alone=True)(outcome, folder) if outcome.code == 2 else crashed(outcome)


def _json(find: Callable[[Any], Any]) -> Expected:
    """Expect JSON without NaN, in which the word stands as it is."""

    def no_constant(name: str) -> Any:
        raise ValueError(name)

    def flaw(word: str, outcome: Outcome, folder: Path) -> Flaw:
        if "Traceback" in outcome.err or outcome.hung or outcome.code not in (0, 1):
            return f"exit code {outcome.code}: {outcome.err[-300:]!r}"
        try:
            found = find(json.loads(outcome.out, parse_constant=no_constant))
        except ValueError as error:
            return f"no strict JSON: {error}"
        return None if found == word else f"JSON holds {str(found)[:60]!r}"

    return flaw


def _csv(word: str, outcome: Outcome, folder: Path) -> Flaw:
    """Expect the word in tables, in which no cell is a formula."""
    tables = {}
    for path in folder.glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as stream:
            tables[path.name] = list(csv.reader(stream))[1:]
    if flaw := answers(outcome, folder) or (
        None if set(tables) == {"t.csv", "t.tokens.csv"} else f"left {set(tables)}"
    ):
        return flaw
    for name, rows in tables.items():
        formulas = [
            cell
            for row in rows
            for cell in row
            if cell.startswith(("=", "+", "-", "@", "\t", "\r")) and not _number(cell)
        ]
        if formulas or not {row[0].removeprefix("'") for row in rows} <= {word, word.removeprefix("'")}:
            return f"{name} holds {formulas[:1]}, its ids begin with {rows[0][0][:60]!r}"
    return None


def _number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _figures(word: str, outcome: Outcome, folder: Path) -> Flaw:
    """Expect figures that show the word, and are called by it."""
    if flaw := answers(outcome, folder) or _any(word, outcome, folder):
        return flaw
    for path in (folder / "out").glob("*.svg"):
        root = ET.parse(path).getroot()
        title = "".join(one.text or "" for one in root.iter() if one.tag.endswith("}title"))
        if not contains(title, word) or not contains("".join(root.itertext()), word[:40]):
            return f"{path.name} does not show {word[:40]!r}, it is called {title[:80]!r}"
    pdfs = [path.read_bytes() for path in (folder / "out").glob("*.pdf")]
    return None if pdfs and all(pdf.startswith(b"%PDF") and b"/Title" in pdf for pdf in pdfs) else "no PDF with a title"


def _figures_or_refused(word: str, outcome: Outcome, folder: Path) -> Flaw:
    return (_refused if outcome.code == 2 else _figures)(word, outcome, folder)


def _error_in_json(word: str, outcome: Outcome, folder: Path) -> Flaw:
    return None if json.loads(outcome.out)["error"] else "no error"


# How a word gets there: each takes the word and the case's folder last.
def _trace(failed: bool, word: str, folder: Path) -> None:
    """Write a trace whose sample, model, dataset, tokens and attributes are called so."""
    pieces = ("The", " cat", "", "é", word, "\n\n", " sat", ".", " Who?")
    samples = [prompts.sample(word, pieces), *([FailedSample("f", f"why {word}")] if failed else [])]
    attributes = {"perturbkv_version": "1", "device_name": word, "warnings": word, f"x{word[:30]}": "odd"}
    Trace.from_samples(run_config(len(samples), model=word, dataset=word), samples, attributes).save(folder / "t.h5")


def _row(make: Callable[[str], dict[str, Any]], word: str, folder: Path) -> None:
    (folder / "rows.jsonl").write_text(json.dumps({"id": "a", "prompt": TEXT, **make(word)}) + "\n")


def _file(suffix: str, content: bytes | None, word: str, folder: Path) -> None:
    """Write a file of that name, or link to the prompts or the model."""
    path = folder / f"{word}{suffix}"
    if content is None:
        path.symlink_to((folder / (PROMPTS if suffix else MODEL)).resolve())
    else:
        path.write_bytes(content)


def _nothing(word: str, folder: Path) -> None:
    """Leave the folder empty."""


@dataclass(frozen=True)
class Entry:
    """A way for a word into the program: what is put into the folder, the command, and how the word comes out."""

    spoil: Callable[[str, Path], None]
    argv: tuple[str, ...]
    expected: Expected
    takes: Callable[[str], bool] = lambda word: True


def _is_a_name(word: str) -> bool:
    return "/" not in word and len(word.encode()) < 200


_WHOLE, _FAILED = partial(_trace, False), partial(_trace, True)
_SVG, _ALL = ("--format", "svg", "-o", "out"), ("--format", "svg", "--format", "pdf", "-o", "out")
_SHOW = ("list", "datasets", "rows.jsonl", "--show", "--model", MODEL)
_GENERATE = ("generate", "--dataset", "rows.jsonl", "--max-new-tokens", "2", "-o", "out", *SMALL)
_ID = partial(_row, lambda word: {"id": word})
ENTRIES = {
    "a trace": Entry(_WHOLE, ("list", "t.h5"), _screen(0)),
    "a trace with a failure": Entry(_FAILED, ("list", "t.h5"), _screen(0)),
    "sample ids in JSON": Entry(_WHOLE, ("list", "t.h5", "--json"), _json(lambda found: found["sample_ids"][0])),
    "attributes in JSON": Entry(_WHOLE, ("list", "t.h5", "--json"), _json(lambda found: found["attrs"]["device_name"])),
    "failures in JSON": Entry(_FAILED, ("heads", "t.h5", "--json", *_SVG),
                              _json(lambda found: found["failed"]["f"].removeprefix("why "))),
    "figures of a trace": Entry(_WHOLE, ("heads", "t.h5", "--format", "png", *_ALL), _figures),
    "heads with a failure": Entry(_FAILED, ("heads", "t.h5", *_SVG), _screen(1)),
    "tokens": Entry(_WHOLE, ("tokens", "t.h5"), _screen(0)),
    "tokens in JSON": Entry(_WHOLE, ("tokens", "t.h5", "--json"),
                            _json(lambda found: found["run"]["model"] if "run" in found else found["sample"])),
    "CSV": Entry(_WHOLE, ("export", "t.h5", "-o", "t.csv"), _csv),
    "a prompt": Entry(partial(_row, lambda word: {"prompt": f"{word} {TEXT}"}), _SHOW, _screen(0),
        lambda word: len(word) < 300),
    "a prompt's id": Entry(_ID, _SHOW, _screen(0)),
    "answers": Entry(partial(_row, lambda word: {"answers": [word[:300]]}), _SHOW, _any),
    "a prompt in JSON": Entry(_ID, (*_SHOW, "--json"), _json(lambda found: found["samples"][0]["sample"])),
    "answers beside": Entry(partial(_row, lambda word: {"answers": [word[:300]], "id": word}), _GENERATE, _screen(0)),
    "answers in JSON": Entry(partial(_row, lambda word: {"answers": [word]}), (*_GENERATE, "--json"),
                             _json(lambda found: found["samples"][0]["answers"][0])),
    "a model's folder": Entry(partial(_file, "", None), ("heads", "--model", "./WORD", *RUN[2:], *_ALL),
        _figures_or_refused,
                              _is_a_name),
    "a dataset's file": Entry(partial(_file, ".jsonl", None),
        ("heads", "--dataset", "./WORD.jsonl", "--samples", "1", *SMALL, *_ALL),
                              _figures_or_refused, _is_a_name),
    "a policy's file": Entry(partial(_file, ".py", SCORE_CODE), ("heads", "--policy", "./WORD.py:Peak", *RUN, *_ALL),
        _any,
                             _is_a_name),
    "an eviction's file": Entry(partial(_file, ".py", EVICTION_CODE),
                                ("audit", "./WORD.py:evict", "--model", MODEL, "--dataset", PROMPTS, "--samples", "1",
                                    "--no-loss",
                                 "--situation", "single", "--steps", "1", *_SVG), _any, _is_a_name),
    "--model": Entry(_nothing, ("trace", "--model=x WORD"), _refused),
    "--dataset": Entry(_nothing, ("trace", "--dataset=x WORD"), _refused),
    "--policy": Entry(_nothing, ("trace", "--policy=WORD"), _any),
    "--budget": Entry(_nothing, ("trace", "--budget=x WORD"), _refused),
    "--sample": Entry(_nothing, ("tokens", TRACE, "--sample=WORD"), _any),
    "--compare": Entry(_nothing, ("heads", TRACE, "--compare=attention,WORD"), _any),
    "a command": Entry(_nothing, ("x WORD",), _refused),
    "an option": Entry(_nothing, ("heads", "--x WORD"), _any, lambda word: "=" not in word),
    "a path": Entry(_nothing, ("list", "x WORD"), _refused, lambda word: "//" not in word),
    "an error in JSON": Entry(_nothing, ("list", "--json", "xWORD"), _error_in_json),
}  # fmt: skip


def cases(shared: Path, seed: int) -> Iterator[Case]:
    """Yield entries × words."""
    for name, entry in ENTRIES.items():
        for what, word in WORDS.items():
            if entry.takes(word):
                argv = tuple(text.replace("WORD", word) for text in entry.argv)
                expected, spoil = partial(entry.expected, word), partial(entry.spoil, word)
                yield Case(f"{name}: {what}", argv, expected, spoil, f"words in {name}")
