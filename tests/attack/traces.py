"""Traces that were spoilt: each is refused in one line, or read as if nothing had been done to it.

One spoilt file goes to one reader. Right is exit code 2 with one line, the file as it was and nothing beside it; or the
very output, and the very tables, that the whole file gives, but for the digest of the file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.attack import trace_bytes, trace_edits
from tests.attack.running import Case, Outcome, flaw_of_refusal, run
from tests.support.changed import without_sums
from tests.support.folders import model_folder

COUNT = 1000
_NAME = "t.h5"
_RUN = ("--model", "../model", "--budget", "40", "--window", "8", "--save", "outputs", "--steps", "3", "--json")
_PROMPTS = ("--dataset", "../prompts.jsonl", "--samples", "2")
_TRACE = ("trace", *_RUN, *_PROMPTS, "-o", _NAME)
_NEEDLE = ("needle", *_RUN, "--lengths", "300", "--depths", "0,1", "--haystack", "noise", "--max-new-tokens", "3",
           "--compare", "snapkv:attention,two-stage", "--format", "svg", "-o")  # fmt: skip
_LOOK = ("--json", "-o", "out", "--format", "svg")


@dataclass(frozen=True)
class Reader:
    """A command line that reads the file, or a script; `of_needle` tells whose trace it takes."""

    argv: tuple[str, ...]
    of_needle: bool = False
    module: str = "perturbkv.cli.main"


READERS = (
    Reader(("list", _NAME, "--json")),
    Reader((_NAME,), module="tests.attack.trace_reading"),
    Reader(("heads", _NAME, *_LOOK)),
    Reader(("tokens", _NAME, "--json")),
    Reader(("layers", _NAME, *_LOOK)),
    Reader(("export", _NAME, "-o", "t.csv", "--json")),
    Reader(_TRACE),
    Reader((_NAME,), True, "tests.attack.trace_reading"),
    Reader(("bound-tightness", _NAME, *_LOOK)),
    Reader(("assumption", _NAME, *_LOOK)),
    Reader(("list", _NAME, "--json"), True),
    Reader(("ablation", _NAME, *_LOOK)),
    Reader(("horizon", _NAME, *_LOOK)),
    Reader(("needle", _NAME, *_LOOK), True),
)
_QUICK = tuple(reader for reader in READERS if not set(reader.argv) & {"--format", "trace"})
"""Those that draw nothing, and so give their whole answer in a moment."""
_FEW = 100
"""Cases for which no needle trace is made and nothing is drawn: each reader's own answer costs a second or more."""


def cases(workshop: Path, seed: int, count: int) -> Iterator[Case]:
    """So many spoilt files, of every kind as many of a hundred as of the thousand."""
    bench = _Bench(workshop)
    readers, quick = (READERS, _QUICK) if count >= _FEW else (_QUICK[:4], _QUICK[:4])
    kinds = [spoil for table in (trace_bytes.SPOILS, trace_edits.ALONE, trace_edits.SUMMED)
             for spoil, often in table.items() for _ in range(often)]  # fmt: skip
    order = np.random.default_rng(seed).permutation(len(kinds))
    for number in range(count):
        place = int(order[number % len(kinds)])
        draw = np.random.default_rng([seed, number])
        chosen = readers if draw.integers(3) else quick
        yield bench.case(kinds[place], chosen[number % len(chosen)], number, draw)


class _Bench:
    """The whole traces, what each reader says of them, and a folder for every case."""

    def __init__(self, workshop: Path) -> None:
        self.workshop = workshop
        model_folder(workshop / "model")
        line = "The quick brown fox jumps over the lazy dog. "
        rows = [json.dumps({"id": f"p{place}", "prompt": f"{place} " + line * 2}) for place in range(2)]
        (workshop / "prompts.jsonl").write_text("\n".join(rows))
        self._whole: dict[bool, bytes] = {}
        self._said: dict[Reader, dict[str, str]] = {}

    def _content(self, reader: Reader) -> bytes:
        """The whole trace that the reader takes."""
        needle = reader.of_needle
        if needle not in self._whole:
            made = ((*_NEEDLE, "out"), "out/trace.h5") if needle else (_TRACE, _NAME)
            self._whole[needle] = self._made(*made)
        return self._whole[needle]

    def _made(self, argv: tuple[str, ...], name: str) -> bytes:
        folder = self.workshop / f"whole-{argv[0]}"
        folder.mkdir()
        done = run(argv, folder, limit=120)
        assert done.code == 0, done
        return (folder / name).read_bytes()

    def case(self, spoil: Callable[..., Any], reader: Reader, number: int, draw: np.random.Generator) -> Case:
        """One spoilt file before one reader."""
        expected = self._expected(reader)
        folder = self._folder(f"case-{number}", self._content(reader))
        stripped = _spoil(folder / _NAME, spoil, draw)
        before = (folder / _NAME).read_bytes()
        name = f"{number} {spoil.__name__}{' without sums' * stripped}: {reader.argv[0]}"

        def fine(outcome: Outcome) -> str | None:
            flaw = _flaw(outcome, folder, before, expected)
            shutil.rmtree(folder)
            return flaw

        return Case(name, folder, reader.argv, fine, module=reader.module)

    def _folder(self, name: str, content: bytes) -> Path:
        folder = self.workshop / name
        folder.mkdir()
        (folder / _NAME).write_bytes(content)
        return folder

    def _expected(self, reader: Reader) -> dict[str, str]:
        """What the reader says and leaves of the whole file."""
        if reader not in self._said:
            content = self._content(reader)
            folder = self._folder(f"expected-{len(self._said)}", content)
            done = run(reader.argv, folder, limit=120, module=reader.module)
            assert done.code == 0, (reader, done)
            self._said[reader] = _answer(done, folder, content)
        return self._said[reader]


def _spoil(path: Path, spoil: Callable[..., Any], draw: np.random.Generator) -> bool:
    """Spoil the file; whether its sums were taken away too."""
    if spoil in trace_bytes.SPOILS:
        path.write_bytes(spoil(path.read_bytes(), draw))
        return False
    stripped = spoil in trace_edits.ALONE and bool(draw.integers(2))
    shutil.copy(path, path.with_name("whole.h5"))
    with h5py.File(path, "r+", track_order=True) as file:
        if stripped:
            without_sums(file)
        spoil(file, draw)
    return stripped


def _answer(outcome: Outcome, folder: Path, content: bytes) -> dict[str, str]:
    """What was said and the tables that were left, no digest in it."""
    digest = hashlib.sha256(content).hexdigest()[:12]
    tables = {path.name: path.read_text(errors="replace") for path in sorted(folder.glob("*.csv"))}
    return {name: text.replace(digest, "DIGEST") for name, text in ({"said": outcome.out} | tables).items()}


def _flaw(outcome: Outcome, folder: Path, before: bytes, expected: dict[str, str]) -> str | None:
    """What is wrong with what a reader made of a spoilt file."""
    if (folder / _NAME).read_bytes() != before:
        return "the file was written over"
    if outcome.code != 0 or outcome.hung:
        return flaw_of_refusal(outcome) or _flaw_of_line(outcome)
    if "Traceback" in outcome.err:
        return "a traceback, and exit code 0"
    found = _answer(outcome, folder, before)
    for name, text in expected.items():
        if found.get(name) != text:
            return f"{name}: other numbers: {_difference(text, found.get(name, 'nothing'))}"
    return None


def _flaw_of_line(outcome: Outcome) -> str | None:
    """A refusal names the file; `trace` may have told what it finds there before."""
    said = outcome.err.strip().splitlines()
    notes = [line for line in said[:-1] if "going on" not in line]
    return None if not notes and _NAME in said[-1] else f"not one line that names the file: {said[:3]}"


def _difference(expected: str, found: str) -> str:
    """Where two texts part."""
    place = next((place for place, (one, two) in enumerate(zip(expected, found, strict=False)) if one != two), 0)
    return f"expected …{expected[max(place - 30, 0) : place + 30]!r}…, got …{found[max(place - 30, 0) : place + 30]!r}…"
