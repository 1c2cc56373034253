"""Every text file that a command reads, as everything that it should not be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.attack.odd_documents import DOCUMENTS
from tests.attack.odd_files import RIGHT, WRONG, Make
from tests.attack.odd_rows import ROWS
from tests.attack.odd_words import obeyed
from tests.attack.readers import READERS, Shop, named, open_shop
from tests.attack.running import Case, Outcome, flaw_of_refusal

_DAMAGED = 80
_MOST = 2**20


@dataclass(frozen=True)
class Kind:
    """One kind of case, made only when it is its turn."""

    name: str
    make: Callable[[Shop, Path], tuple[str, ...]]
    fine: Callable[[Outcome], str | None]


def cases(workshop: Path, seed: int, count: int) -> Iterator[Case]:
    """Files × what lies there, rows × what they hold, and damaged files by chance; in an order of the seed."""
    draw = random.Random(seed)
    kinds = [*_files(), *_rows(), *_documents(), *_damaged(draw, _DAMAGED)]
    draw.shuffle(kinds)
    shop = open_shop(workshop)
    for number, kind in enumerate(kinds[:count]):
        folder = workshop / f"case-{number}"
        folder.mkdir()
        argv = kind.make(shop, folder)
        yield Case(kind.name, folder, argv, _leaving_alone(folder, kind.fine))


def _leaving_alone(folder: Path, fine: Callable[[Outcome], str | None]) -> Callable[[Outcome], str | None]:
    """As `fine`; and whoever is refused finds every file as it was."""
    before = _held(folder)

    def flaw(outcome: Outcome) -> str | None:
        changed = outcome.code != 0 and _held(folder) != before
        return fine(outcome) or ("refused, but a file is another now" if changed else None)

    return flaw


def _held(folder: Path) -> dict[str, bytes]:
    """What lies in the folder's files of some size."""
    files = (path for path in folder.rglob("*") if not path.is_symlink() and path.is_file())
    return {str(path): path.read_bytes() for path in files if path.stat().st_size < _MOST}


def refused(*words: str) -> Callable[[Outcome], str | None]:
    """One line, which holds these words and nothing that a terminal obeys; or an audit's verdict `unreadable`."""

    def flaw(outcome: Outcome) -> str | None:
        if outcome.code == 2 and outcome.out.startswith("unreadable") and not outcome.left and not outcome.err:
            return obeyed(outcome.out)
        found = flaw_of_refusal(outcome) or obeyed(outcome.err)
        if found:
            return found
        if outcome.err.strip().count("\n"):
            return f"more than one line: {outcome.err!r}"
        lacking = [word for word in words if word not in outcome.err]
        return f"says nothing of {lacking[0]}: {outcome.err[:300]!r}" if lacking else None

    return flaw


def read(outcome: Outcome) -> str | None:
    """Exit code 0, nothing but text."""
    if outcome.hung:
        return "still running"
    if "Traceback" in outcome.err + outcome.out:
        return f"traceback: {outcome.err.strip().splitlines()[-1]}"
    return f"exit code {outcome.code}: {outcome.err[-300:]!r}" if outcome.code else obeyed(outcome.out + outcome.err)


def either(*words: str) -> Callable[[Outcome], str | None]:
    """Read, or refused."""
    return lambda outcome: refused(*words)(outcome) if outcome.code else read(outcome)


def _files() -> Iterator[Kind]:
    for name, reader in READERS.items():
        for what, put in WRONG.items():
            if what not in reader.takes:
                yield Kind(f"{name}: {what}", _with(reader.prepare, put), refused(*named(reader)))
        for what, put in RIGHT.items():
            if what in reader.forms:
                yield Kind(f"{name}: {what}", _with(reader.prepare, put), read)


def _with(prepare: Callable[[Shop, Path, Make], tuple[str, ...]], put: Make) -> Any:
    return lambda shop, folder: prepare(shop, folder, put)


def _rows() -> Iterator[Kind]:
    for name, row in ROWS.items():
        yield Kind(f"row: {name}", _with_rows(row.lines), refused(row.words) if row.wrong else read)


def _with_rows(lines: Sequence[str | bytes]) -> Callable[[Shop, Path], tuple[str, ...]]:
    def make(shop: Shop, folder: Path) -> tuple[str, ...]:
        content = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines)
        (folder / "rows.jsonl").write_bytes(content)
        return "trace", "--dataset", "rows.jsonl", "-o", "out", *shop.small

    return make


def _damaged(draw: random.Random, count: int) -> Iterator[Kind]:
    """Right files of which some bytes are others: read or refused, in one line."""
    names = [name for name, reader in READERS.items() if reader.forms]
    for number in range(count):
        name = draw.choice(names)
        reader, seed = READERS[name], draw.random()
        yield Kind(f"{name}: damaged, {number}", _with(reader.prepare, _damage(seed)), either())


def _damage(seed: float) -> Make:
    def put(path: Path, right: bytes) -> None:
        draw, content = random.Random(seed), bytearray(right)
        for _ in range(draw.randint(1, 6)):
            place = draw.randrange(len(content))
            match draw.randrange(4):
                case 0:
                    content[place] = draw.randrange(256)
                case 1:
                    del content[place : place + draw.randint(1, 8)]
                case 2:
                    content[place:place] = draw.choice(_TOKENS).encode()
                case 3:
                    content[place:place] = content[: draw.randint(1, 30)]
            content = content or bytearray(b" ")
        path.write_bytes(content)

    return put


_TOKENS = ("null", "NaN", "[", "]", "{", '"', ":", ",", "\\", "-1", "1e999", "\x00", "\\ud800", "true", "\n", "\t", "é")


def _documents() -> Iterator[Kind]:
    for name, (wrong, right) in DOCUMENTS.items():
        reader = READERS[name]
        for what, content in wrong.items():
            yield Kind(f"{name}: {what}", _with(reader.prepare, _written(content)), refused(*named(reader)))
        for what, content in right.items():
            yield Kind(f"{name}: {what}", _with(reader.prepare, _written(content)), read)


def _written(content: bytes) -> Make:
    return lambda path, right: _only(path.write_bytes(content))


def _only(written: int) -> None:
    """Forget how much it was."""


COUNT = sum(1 for kinds in (_files(), _rows(), _documents()) for _ in kinds) + _DAMAGED
