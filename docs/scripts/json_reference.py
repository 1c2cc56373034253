"""Write the sections of docs/reference/json.md that follow from the columns which results declare."""

from __future__ import annotations

import importlib
import pkgutil
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perturbkv import analyses
from perturbkv.analyses import text
from perturbkv.analyses.columns import Derived, Record
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.intervals import Estimate, Interval
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig

PAGE = Path(__file__).resolve().parents[1] / "reference" / "json.md"
_PLAIN: Mapping[Any, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "boolean",
    Any: "any",
    object: "any",
    Budget: "number",
    EvictionConfig: "configuration",
    Estimate: "estimate",
    types.NoneType: "null",
}
_BEGIN, _END = "<!-- sections of results: made by docs/scripts/json_reference.py -->", "<!-- end of these sections -->"


def sections() -> str:
    """Return the sections of all results, each followed by those of the records that it holds."""
    written: set[type[Record]] = set()
    return "\n".join(part for kind in _results() for part in _section(kind, written, command=True))


def page(before: str) -> str:
    """Return the page with its made sections replaced."""
    start, end = before.index(_BEGIN) + len(_BEGIN), before.index(_END)
    return f"{before[:start]}\n\n{sections()}\n{before[end:]}"


def _results() -> list[type[Result]]:
    for module in pkgutil.walk_packages(analyses.__path__, f"{analyses.__name__}."):
        importlib.import_module(module.name)
    return sorted(dict.fromkeys(kind for kind in _subclasses(Result) if "SECTION" in vars(kind)), key=_heading)


def _heading(kind: type[Record]) -> str:
    """Return the heading of a class: its own, or its name in words."""
    return str(vars(kind).get("SECTION") or _words(kind))


def _words(kind: type[Record]) -> str:
    """Return the name of a class in words."""
    return " ".join(re.findall("[A-Z][a-z]*", kind.__name__)).lower()


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from _subclasses(child)


def _section(kind: type[Record], written: set[type[Record]], command: bool = False) -> Iterator[str]:
    """Yield the section of a class, with its base's before it and those of the records that it holds behind it.

    `command`: it is a whole document's.
    """
    if kind in written:
        return
    written.add(kind)
    base = None if command else next(_documented(kind), None)
    if base:
        yield from _section(base, written)
    yield f"{'##' if command else '###'} {_heading(kind)}\n"
    if inherited := kind.DOCUMENT if command and issubclass(kind, Result) else base and _heading(base):
        yield f"All keys of `{inherited}`, and:\n"
    parts = [part for part in _results() if command and part is not kind and _heading(part) == _heading(kind)]
    written.update(parts)
    nested = [part for part in parts if part.KEY]
    rows = [row for one in (kind, *parts) if one not in nested for row in _rows(one, base)]
    yield _table(
        [*rows, *(f"| `{one.KEY}` | {_words(one)} | With `--{one.KEY}`: {_first_line(one)} |" for one in nested)]
    )
    for part in nested:
        yield f"### {_words(part)}\n"
        yield _table(_rows(part))
    for one in (kind, *parts):
        hints = _hints(one)
        for inner in _records([hints[name] for name, declared in one.columns().items() if declared.json]):
            yield from _section(inner, written)


def _table(rows: Iterable[str]) -> str:
    return "\n".join(["| key | type | what |", "|---|---|---|", *rows]) + "\n"


def _rows(kind: type[Record], base: type[Record] | None = None) -> Iterator[str]:
    """Yield a row per key of a class, without those of a base that has a section of its own."""
    hints = _hints(kind)
    for name, declared in kind.columns().items():
        if declared.json and not (base and name in base.columns()):
            unit = f", in {declared.unit}" if declared.unit not in ("", "share") else ""
            axes = f"({', '.join(declared.dims)}) " if declared.dims else ""
            described = f"{_type(hints[name], declared.dims)} | {text.capitalise(f'{axes}{declared.meaning}')}{unit}"
            yield f"| `{declared.key or name}` | {described} |"


def _first_line(kind: type[Record]) -> str:
    return (kind.__doc__ or "").partition("\n")[0].removesuffix(".")


def _documented(kind: type[Record]) -> Iterator[type[Record]]:
    """Yield the classes that a record extends and that have a section of their own, the nearest first."""
    yield from (parent for parent in kind.__mro__[1:] if issubclass(parent, Record) and vars(parent).get("SECTION"))


def _hints(kind: type[Record]) -> dict[str, Any]:
    """Return the type of every column."""
    computed = {name: value for one in kind.__mro__ for name, value in vars(one).items() if isinstance(value, Derived)}
    hints = {name: typing.get_type_hints(value.compute) for name, value in computed.items()}
    returned = {name: own["return"] for name, own in hints.items() if own}
    declared = {name: _held(hint) for name, hint in typing.get_type_hints(kind).items()}
    return {**declared, **returned}


def _held(hint: Any) -> Any:
    """Return the type inside ClassVar[Derived[type]], of a column that is another's attribute; others as they are."""
    (inside, *_) = typing.get_args(hint) or (None,)
    return typing.get_args(inside)[0] if typing.get_origin(inside) is Derived else hint


def _records(hints: Sequence[Any]) -> Iterator[type[Record]]:
    """Yield the records inside some types."""
    for hint in hints:
        if isinstance(hint, type) and issubclass(hint, Record):
            yield hint
        yield from _records(typing.get_args(hint))


def _type(hint: Any, dims: tuple[str, ...] = ()) -> str:
    """Return a type as the page writes it."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        kinds = [part for part in inside if part is not types.NoneType]
        return "any" if len(kinds) > 1 else " or ".join(_type(part, dims) for part in inside)
    if origin is Interval or hint is Interval:
        return "band" if inside and inside[0] is not float else "interval"
    if origin is np.ndarray:
        kind = np.dtype(typing.get_args(inside[1])[0]).kind
        return "list of " * len(dims) + {"b": "boolean", "i": "integer", "u": "integer", "f": "number"}[kind]
    if origin in (list, tuple) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return f"list of {_type(inside[0], dims)}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"map of {_type(inside[1], dims)}"
    return _heading(hint) if isinstance(hint, type) and issubclass(hint, Record) else _PLAIN[hint]


if __name__ == "__main__":
    PAGE.write_text(page(re.sub(r"\r\n", "\n", PAGE.read_text())))
