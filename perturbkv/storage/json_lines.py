"""Files of one JSON object a line, which grow as results come: a killed run loses no more than its last line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from perturbkv.storage.atomic_files import clear_leftovers, write_whole
from perturbkv.user_files import FileKind, parse_json
from perturbkv.visible import in_json

Document = dict[str, Any]


def read(path: Path, kind: FileKind) -> list[Document]:
    """The objects of all lines; a last one that a killed process left unfinished is passed over.

    Raises the error of `kind` where the first line, or one that others follow, is no object.
    """
    return parsed(path, kind.read_text(path), kind)


def parsed(path: Path, text: str, kind: FileKind) -> list[Document]:
    """The same of a file's text, for who needs that too. Raises as `read`."""
    found = [of_line(line) for line in text.split("\n") if line.strip()]
    if len(found) > 1 and found[-1] is None:
        found.pop()
    if broken := [place for place, one in enumerate(found, start=1) if one is None]:
        raise kind.refusal(path, f"a line {broken[0]} that is no JSON object")
    return [one for one in found if one is not None]


def write(path: Path, documents: Iterable[Mapping[str, Any]]) -> None:
    """The file with these lines alone, whole or not at all."""
    text = "".join(map(line, documents))
    clear_leftovers(path)
    write_whole(path, lambda stream: stream.write(text.encode()))


def append(path: Path, document: Mapping[str, Any]) -> None:
    """One line more, on the disk when this returns."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(line(document))
        stream.flush()
        os.fsync(stream.fileno())


def line(document: Mapping[str, Any]) -> str:
    """An object as a line of its file."""
    return in_json(json.dumps(document, ensure_ascii=False, allow_nan=False)) + "\n"


def of_line(text: str) -> Document | None:
    """A line's object; None for one that a killed run left unfinished."""
    try:
        document = parse_json(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
