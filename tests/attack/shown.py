"""Where foreign words come out: the commands that show them, and what is wrong with how they do."""

from __future__ import annotations

import csv
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perturbkv.trace import FailedSample, Trace
from tests.attack.odd_rows import LONG
from tests.attack.odd_words import obeyed, shows
from tests.attack.readers import EVICTION, PLUGIN, Shop
from tests.attack.running import Outcome
from tests.support import prompts
from tests.support.traces import run_config

Flaw = Callable[[Outcome, Path, str], str | None]
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def kept(outcome: Outcome) -> str | None:
    """What is wrong with any command's streams: a crash, a hang, or anything that a terminal obeys."""
    said = outcome.out + outcome.err
    if outcome.hung:
        return "still running"
    if "Traceback" in said or "Exception ignored" in said:
        return f"traceback: {outcome.err.strip().splitlines()[-1:]}"
    return obeyed(said)


@dataclass(frozen=True)
class Place:
    """One place where a word comes in and comes out.

    `prepare` makes files with it and gives the command line, `flaw` says what is wrong with the outcome; `takes` tells
    which words can be there at all.
    """

    prepare: Callable[[Shop, Path, str], tuple[str, ...]]
    flaw: Flaw
    takes: Callable[[str], bool] = lambda word: True


def _is_shown_whole(word: str) -> bool:
    """Of a prompt only its beginning and its end are shown."""
    return len(word) < 300


def _on_screen(*codes: int) -> Flaw:
    """Shown as text, with one of these exit codes."""

    def flaw(outcome: Outcome, folder: Path, word: str) -> str | None:
        if found := kept(outcome):
            return found
        if outcome.code not in codes:
            return f"exit code {outcome.code}: {outcome.err[-300:]!r}"
        return None if shows(outcome.out + outcome.err, word) else f"{word[:40]!r} is not in {outcome.out[-300:]!r}"

    return flaw


def _refused(outcome: Outcome, folder: Path, word: str) -> str | None:
    """One line that shows the word, whole or its beginning."""
    if found := kept(outcome):
        return found
    if outcome.code != 2 or outcome.err.strip().count("\n") or not outcome.err.startswith("error: "):
        return f"exit code {outcome.code}: {outcome.err[-300:]!r}"
    shown = word[:12] if len(word) > 100 else word
    return None if shows(outcome.err, shown) else f"{word[:40]!r} is not in {outcome.err[-300:]!r}"


def _either(outcome: Outcome, folder: Path, word: str) -> str | None:
    """Whatever a name means to what reads it."""
    return _refused(outcome, folder, word) if outcome.code == 2 else _on_screen(0, 1)(outcome, folder, word)


def _nowhere(found: str) -> Any:
    msg = f"{found} in JSON"
    raise ValueError(msg)


def _strict(find: Callable[[Any], Any]) -> Flaw:
    """JSON without NaN, in which the word stands as it is."""

    def flaw(outcome: Outcome, folder: Path, word: str) -> str | None:
        if "Traceback" in outcome.err or outcome.hung or outcome.code not in (0, 1):
            return f"exit code {outcome.code}: {outcome.err[-300:]!r}"
        try:
            document = json.loads(outcome.out, parse_constant=_nowhere)
        except ValueError as error:
            return f"no strict JSON: {error}"
        return None if find(document) == word else f"JSON holds {str(find(document))[:60]!r}"

    return flaw


def _csv(outcome: Outcome, folder: Path, word: str) -> str | None:
    if flaw := kept(outcome) or (f"exit code {outcome.code}: {outcome.err[-300:]!r}" if outcome.code else None):
        return flaw
    found = {path.name: _cells(path) for path in folder.glob("*.csv")}
    if set(found) != {"t.csv", "t.tokens.csv"}:
        return f"left {sorted(found)}"
    for name, rows in found.items():
        for cell in {cell for row in rows[1:] for cell in row}:
            if cell.startswith(_FORMULA) and not _number(cell):
                return f"{name} holds {cell[:60]!r}"
        if not {row[0].removeprefix("'") for row in rows[1:]} <= {word, word.removeprefix("'")}:
            return f"{name} holds other ids: {rows[1][0][:60]!r}"
    return None


def _cells(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.reader(stream))


def _number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _figures(outcome: Outcome, folder: Path, word: str) -> str | None:
    if flaw := kept(outcome) or (f"exit code {outcome.code}: {outcome.err[-300:]!r}" if outcome.code else None):
        return flaw
    for path in sorted((folder / "out").glob("*.svg")):
        try:
            root = ET.parse(path).getroot()
        except ET.ParseError as error:
            return f"{path.name} is no XML: {error}"
        told = "".join(one.text or "" for one in root.iter() if one.tag.endswith("}title"))
        if not shows(told, word):
            return f"{path.name} is called {told[:80]!r}"
        if not shows("".join(root.itertext()), word[:40]):
            return f"{path.name} does not show {word[:40]!r}"
    for path in (folder / "out").glob("*.pdf"):
        if not (path.read_bytes().startswith(b"%PDF") and b"/Title" in path.read_bytes()):
            return f"{path.name} is no PDF with a title"
    return None if list((folder / "out").glob("*.pdf")) else "no figure"


def _trace(folder: Path, word: str, failed: bool = False) -> str:
    pieces = ("The", " cat", "", "é", word, "\n\n", " sat", ".", " Who?")
    samples = [prompts.sample(word, pieces), *([FailedSample("f", f"why {word}")] if failed else [])]
    attrs = {"perturbkv_version": "1", "device_name": word, "warnings": word, f"x{word[:30]}": "odd"}
    made = Trace.of(run_config(len(samples), model=word, dataset=word), samples, attrs)
    return str(made.save(folder / "t.h5").name)


def _of_trace(*argv: str, failed: bool = False) -> Callable[[Shop, Path, str], tuple[str, ...]]:
    def prepare(shop: Shop, folder: Path, word: str) -> tuple[str, ...]:
        return argv[0], _trace(folder, word, failed), *argv[1:]

    return prepare


def _of_rows(*argv: str, **fields: Callable[[str], Any]) -> Callable[[Shop, Path, str], tuple[str, ...]]:
    def prepare(shop: Shop, folder: Path, word: str) -> tuple[str, ...]:
        row = {"id": "a", "prompt": LONG, **{name: make(word) for name, make in fields.items()}}
        (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
        more = ("--model", str(shop.model)) if argv[:2] == ("list", "datasets") else shop.small
        return *argv, *more

    return prepare


def _of_option(*argv: str) -> Callable[[Shop, Path, str], tuple[str, ...]]:
    def prepare(shop: Shop, folder: Path, word: str) -> tuple[str, ...]:
        return tuple(str(shop.trace) if one == "TRACE" else one.replace("WORD", word) for one in argv)

    return prepare


def _model(shop: Shop, folder: Path, word: str) -> tuple[str, ...]:
    (folder / word).symlink_to(shop.model)
    given = "--dataset", str(shop.prompts), "--samples", "1", "--budget", "24", "--window", "8"
    return "heads", "--model", f"./{word}", *given, "--format", "svg", "--format", "pdf", "-o", "out"


def _dataset(shop: Shop, folder: Path, word: str) -> tuple[str, ...]:
    (folder / f"{word}.jsonl").write_bytes(shop.prompts.read_bytes())
    return "heads", "--dataset", f"./{word}.jsonl", *shop.small, "--format", "svg", "--format", "pdf", "-o", "out"


def _policy(shop: Shop, folder: Path, word: str) -> tuple[str, ...]:
    (folder / f"{word}.py").write_bytes(PLUGIN)
    return "heads", "--policy", f"./{word}.py:Peak", *shop.run, "--format", "svg", "--format", "pdf", "-o", "out"


def _eviction(shop: Shop, folder: Path, word: str) -> tuple[str, ...]:
    (folder / f"{word}.py").write_bytes(EVICTION)
    given = ("--model", str(shop.model), "--dataset", str(shop.prompts), "--samples", "1", "--no-loss")
    return (
        "audit",
        f"./{word}.py:evict",
        *given,
        "--situation",
        "single",
        "--steps",
        "1",
        "--format",
        "svg",
        "-o",
        "out",
    )


def _names_a_file(word: str) -> bool:
    return "/" not in word and len(word.encode()) < 200


def _figures_or_refused(outcome: Outcome, folder: Path, word: str) -> str | None:
    return _refused(outcome, folder, word) if outcome.code == 2 else _figures(outcome, folder, word)


def _loose(outcome: Outcome, folder: Path, word: str) -> str | None:
    """Shown or refused; svg files are XML."""
    flaw = kept(outcome) or (_refused(outcome, folder, "") if outcome.code == 2 else None)
    for path in (folder / "out").glob("*.svg"):
        try:
            ET.parse(path)
        except ET.ParseError as error:
            return f"{path.name} is no XML: {error}"
    return flaw


_SHOW = ("list", "datasets", "rows.jsonl", "--show")
_ANSWER = ("generate", "--dataset", "rows.jsonl", "--max-new-tokens", "2", "-o", "out")


def places() -> dict[str, Place]:
    """Where words come in and come out."""
    return {
        "info of a trace": Place(_of_trace("list"), _on_screen(0)),
        "info of a trace with a failure": Place(_of_trace("list", failed=True), _on_screen(0)),
        "info in JSON": Place(_of_trace("list", "--json"), _strict(lambda told: told["sample_ids"][0])),
        "attributes in JSON": Place(_of_trace("list", "--json"), _strict(lambda told: told["attrs"]["device_name"])),
        "failures in JSON": Place(
            _of_trace("heads", "--json", "-o", "out", "--format", "svg", failed=True),
            _strict(lambda told: told["failed"]["f"].removeprefix("why ")),
        ),
        "figures of a trace": Place(
            _of_trace("heads", "-o", "out", "--format", "svg", "--format", "pdf", "--format", "png"), _figures
        ),
        "heads of a trace with a failure": Place(
            _of_trace("heads", "-o", "out", "--format", "svg", failed=True), _on_screen(1)
        ),
        "tokens of a trace": Place(_of_trace("tokens"), _on_screen(0)),
        "tokens in JSON": Place(
            _of_trace("tokens", "--json"),
            _strict(lambda told: told["run"]["model"] if "run" in told else told["sample"]),
        ),
        "CSV": Place(_of_trace("export", "-o", "t.csv"), _csv),
        "a prompt": Place(_of_rows(*_SHOW, prompt=lambda word: f"{word} {LONG}"), _on_screen(0), _is_shown_whole),
        "a prompt's id": Place(_of_rows(*_SHOW, id=lambda word: word), _on_screen(0)),
        "answers shown": Place(_of_rows(*_SHOW, answers=lambda word: [word[:300]]), _loose),
        "a prompt in JSON": Place(
            _of_rows(*_SHOW, "--json", id=lambda word: word), _strict(lambda told: told["samples"][0]["sample"])
        ),
        "answers": Place(_of_rows(*_ANSWER, answers=lambda word: [word[:300]], id=lambda word: word), _on_screen(0)),
        "answers in JSON": Place(
            _of_rows(*_ANSWER, "--json", answers=lambda word: [word]),
            _strict(lambda told: told["samples"][0]["answers"][0]),
        ),
        "a model's folder": Place(_model, _figures_or_refused, _names_a_file),
        "a dataset's file": Place(_dataset, _figures_or_refused, _names_a_file),
        "a policy's file": Place(_policy, _loose, _names_a_file),
        "an eviction's file": Place(_eviction, _loose, _names_a_file),
        "--model": Place(_of_option("trace", "--model=x WORD"), _refused),
        "--dataset": Place(_of_option("trace", "--dataset=x WORD"), _refused),
        "--policy": Place(_of_option("trace", "--policy=WORD"), _loose),
        "--budget": Place(_of_option("trace", "--budget=x WORD"), _refused),
        "--sample": Place(_of_option("tokens", "TRACE", "--sample=WORD"), _loose),
        "--compare": Place(_of_option("heads", "TRACE", "--compare=attention,WORD"), _loose),
        "a command": Place(_of_option("x WORD"), _refused),
        "an option": Place(_of_option("heads", "--x WORD"), _loose, lambda word: "=" not in word),
        "a trace's path": Place(_of_option("list", "x WORD"), _refused, lambda word: "//" not in word),
        "an error in JSON": Place(
            _of_option("list", "--json", "xWORD"),
            lambda outcome, folder, word: None if json.loads(outcome.out)["error"] else "no error",
        ),
    }
