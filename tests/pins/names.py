"""The public names: what there is, which parameters each takes with which defaults, which fields a class has."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import perturbkv as pk
from tests.pins.running import plain


def record(folder: Path) -> dict[str, Any]:
    """Name every public name and every public attribute of the public classes."""
    found: dict[str, Any] = {"names": dir(pk), "version": pk.__version__}
    hide = plain(folder)
    for name in dir(pk):
        public = getattr(pk, name)
        if callable(public):
            found |= {f"{name}/{part}": value for part, value in _parameters(public, hide)}
        if inspect.isclass(public):
            found[f"{name}/bases"] = [one.__name__ for one in public.__mro__]
            found[f"{name}/attributes"] = [one for one in dir(public) if not one.startswith("_")]
            for part in found[f"{name}/attributes"]:
                member = getattr(public, part)
                if inspect.isroutine(member):
                    found |= {f"{name}.{part}/{end}": value for end, value in _parameters(member, hide)}
                else:
                    found[f"{name}.{part}/kind"] = type(member).__name__
        if dataclasses.is_dataclass(public):
            found[f"{name}/fields"] = [f"{one.name}: {one.type}" for one in dataclasses.fields(public)]
        found[f"{name}/doc"] = (inspect.getdoc(public) or "").partition("\n")[0]
    return found


def _parameters(public: Any, hide: Any) -> Iterator[tuple[str, Any]]:
    try:
        asked = inspect.signature(public)
    except (TypeError, ValueError):
        return
    yield "parameters", [f"{one.kind.name} {one.name}" for one in asked.parameters.values()]
    for one in asked.parameters.values():
        if one.default is not inspect.Parameter.empty:
            yield f"default of {one.name}", hide(repr(one.default)) if "0x" not in repr(one.default) else "object"
