"""Places where results cannot go, and files of somebody else that lie where they would: every command that writes."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.attack.materials import Materials, copied
from tests.attack.places import ANYWAY, PLACES, PRECIOUS
from tests.attack.rights import without_rights, without_room
from tests.attack.running import Case, Outcome, flaw_of_refusal
from tests.support.judges import planted_judge


@dataclass(frozen=True)
class Command:
    """A command that writes: what it is asked, and what it leaves, into a folder or as the one file that is named."""

    argv: tuple[str, ...]
    suffix: str = ""
    option: str = "--output"
    leaves: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(self.argv[:2])


_TINY = ("--model", "model", "--dataset", "prompts.jsonl", "--samples", "2", "--budget", "24", "--window", "8")
_FIGURES = ("--format", "png")
_JUDGED = ("judgements.jsonl", "quality-judge.json", "quality-judge.png")
COMMANDS = (
    Command(("trace", *_TINY), leaves=("trace.h5",)),
    Command(("trace", *_TINY), suffix=".h5"),
    Command(("heads", *_TINY, *_FIGURES), leaves=("trace.h5", "heads.png", "summary.json")),
    Command(("heads", "trace.h5", *_FIGURES), leaves=("heads.png", "summary.json")),
    Command(("layers", "trace.h5", "--per-sample", *_FIGURES), leaves=("layers.png", "layers-samples.png")),
    Command(("assumption", "trace.h5", *_FIGURES), leaves=("assumption.png", "summary.json")),
    Command(("bound-tightness", "trace.h5", *_FIGURES), leaves=("bound-tightness.png", "summary.json")),
    Command(("generate", *_TINY, "--max-new-tokens", "2"), leaves=("generation.jsonl",)),
    Command(
        ("quality", *_TINY, "--compare", "attention", "--max-new-tokens", "2", *_FIGURES),
        leaves=("prompts/trace.h5", "quality.png", "quality.tex", "quality.md", "quality.csv", "summary.json"),
    ),
    Command(
        ("quality", "generation.jsonl", "--divergence", *_FIGURES),
        leaves=("quality-divergence.json", "quality-divergence.png"),
    ),
    Command(("quality", "generation.jsonl", "--judge", planted_judge("length"), *_FIGURES), leaves=_JUDGED),
    Command(
        ("audit", "kept.py:everything", "--situation", "single", "--no-loss", *_TINY[:4], "--samples", "1", *_FIGURES),
        leaves=("audit.json", "audit.png"),
    ),
    Command(("export", "trace.h5"), suffix=".csv"),
    Command(("export", "trace.h5"), suffix=".parquet"),
    Command(("trace", "--model", "model", "--length", "256", "--samples", "1"), suffix=".json", option="--head-scores"),
    Command(("doctor", "bench", "--only", "norms-time", "--tokens", "1025", "--repeats", "1"), suffix=".json"),
    Command(("doctor", "selfcheck", "--device", "cpu", "--model", "model"), suffix=".json"),
)

Fine = Callable[[Outcome], str | None]


def _kept(path: Path, fine: Fine = flaw_of_refusal) -> Fine:
    """`fine`, and the file is what it was."""
    content = path.read_bytes() if path.is_file() else None

    def flaw(outcome: Outcome) -> str | None:
        changed = None if content is None else not path.is_file() or path.read_bytes() != content
        return fine(outcome) or ("somebody else's file was replaced" if changed else None)

    return flaw


def works(outcome: Outcome) -> str | None:
    """What is wrong with an outcome that should be a result, or one line."""
    if outcome.code == 0 and "Traceback" not in outcome.err and not outcome.hung:
        return None
    return flaw_of_refusal(outcome)


FOREIGN: dict[str, bytes] = {
    "text": PRECIOUS,
    "bytes": bytes(range(256)),
    "JSON of another": b'{"name": "mine", "values": [1, 2]}\n',
    "a JSON list": b"[1, 2, 3]\n",
    "JSON with our keys": b'{"trace": 3, "trace_digest": [], "analyses": {"heads": 7}, "run": [], "format": {}}\n',
}


@dataclass(frozen=True)
class _Try:
    """A case that is not made yet."""

    name: str
    make: Callable[[Path], tuple[Sequence[str], Fine]]
    before: Callable[[], None] | None = None


def _in_a_bad_place(command: Command, place: str, more: Sequence[str] = ()) -> _Try:
    def make(folder: Path) -> tuple[Sequence[str], Fine]:
        target = PLACES[place](folder, command.suffix)
        notes = next(folder.rglob("notes.txt"), folder / "notes.txt")
        return [*command.argv, command.option, target, *more], _kept(notes)

    return _Try(f"{command.name} into {place} {' '.join(more)}", make)


def _foreign_in_the_way(command: Command, name: str, kind: str) -> _Try:
    def make(folder: Path) -> tuple[Sequence[str], Fine]:
        path = folder / "out" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(FOREIGN[kind])
        output = "out" if command.leaves else f"out/{name}"
        return [*command.argv, command.option, output], _kept(path)

    return _Try(f"{command.name} over {kind} in {name}", make)


def _folder_in_the_way(command: Command, name: str, more: Sequence[str]) -> _Try:
    def make(folder: Path) -> tuple[Sequence[str], Fine]:
        path = folder / "out" / name / "notes.txt"
        path.parent.mkdir(parents=True)
        path.write_bytes(PRECIOUS)
        return [*command.argv, command.option, "out", *more], _kept(path)

    return _Try(f"{command.name} over a folder {name} {' '.join(more)}", make)


def _journal_in_the_way(command: Command, kind: str) -> _Try:
    def make(folder: Path) -> tuple[Sequence[str], Fine]:
        journal = folder / "out" / "trace.h5.journal"
        path = journal / "notes.txt" if kind == "folder" else journal
        path.parent.mkdir(parents=True)
        path.write_bytes(PRECIOUS)
        return [*command.argv, command.option, "out", "--overwrite"], _kept(path)

    return _Try(f"{command.name} over somebody else's journal, a {kind}", make)


def _without(command: Command, what: str, before: Callable[[], None], fine: Fine) -> _Try:
    def make(folder: Path) -> tuple[Sequence[str], Fine]:
        (folder / "out").mkdir(mode=0o555)
        return [*command.argv, command.option, f"out/out{command.suffix}"], fine

    return _Try(f"{command.name} without {what}", make, before)


def _odd_name(command: Command, name: str) -> _Try:
    def make(folder: Path) -> tuple[Sequence[str], Fine]:
        return [*command.argv, command.option, name + command.suffix if name.strip("./") else name], works

    return _Try(f"{command.name} named {name!r}", make)


ODD_NAMES = ("", ".", "..", "a\nb", "[bold]", "-", "ünïcode", os.fsdecode(b"\xff\xfe"), " ", "a/../b", "x" * 200)


def _all() -> list[_Try]:
    tries = [_in_a_bad_place(command, place) for command in COMMANDS for place in PLACES]
    tries += [_in_a_bad_place(command, place, ["--overwrite"]) for command in COMMANDS for place in ANYWAY]
    own = [(command, f"t{command.suffix}") for command in COMMANDS if command.suffix]
    named = [(command, name) for command in COMMANDS for name in command.leaves]
    tries += [_foreign_in_the_way(command, name, kind) for command, name in [*own, *named] for kind in FOREIGN]
    tries += [_folder_in_the_way(command, name, more) for command, name in named for more in ([], ["--overwrite"])]
    traced = [command for command in COMMANDS if "trace.h5" in command.leaves]
    tries += [_journal_in_the_way(command, kind) for command in traced for kind in ("file", "folder")]
    tries += [_without(command, "the right to write", without_rights, flaw_of_refusal) for command in COMMANDS]
    quick = [command for command in COMMANDS if command.argv[0] != "doctor"]
    unpaid = [
        command for command in quick if "--judge" not in command.argv
    ]  # what a judge said is kept before all else
    tries += [_without(command, "room", without_room, works) for command in unpaid]
    return tries + [_odd_name(command, name) for command in quick for name in ODD_NAMES]


COUNT = 300


def cases(workshop: Path, seed: int, count: int) -> Iterator[Case]:
    """So many of some 600, each in a folder of its own with a copy of model, prompts and trace."""
    materials = Materials(workshop / "materials")
    chosen = random.Random(seed).sample(_all(), count)
    for number, one in enumerate(chosen):
        folder = workshop / f"case-{number}"
        copied(materials, folder)
        argv, fine = one.make(folder)
        yield Case(one.name, folder, tuple(argv), fine, before=one.before)
        shutil.rmtree(folder)
