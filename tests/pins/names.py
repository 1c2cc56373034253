"""The public names: what there is, which parameters each takes with which defaults, which fields a class has."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import perturbkv as pk
from tests.pins.running import plain


def record(folder: Path) -> dict[str, Any]:
    """Name every public name and every public attribute of the public classes."""
    found: dict[str, Any] = {"names": [f"pk.{name}" for name in dir(pk)], "version": pk.__version__}
    hide = plain(folder)
    for name in found["names"]:
        public = getattr(pk, name.removeprefix("pk."))
        if callable(public):
            found |= _parameters(name, public, hide)
        if inspect.isclass(public):
            found[f"{name}/bases"] = [one.__name__ for one in public.__mro__]
            found[f"{name}/attributes"] = [f"{name}.{one}" for one in dir(public) if not one.startswith("_")]
            for attribute in found[f"{name}/attributes"]:
                member = getattr(public, attribute.rpartition(".")[2])
                if inspect.isroutine(member):
                    found |= _parameters(attribute, member, hide)
                else:
                    found[f"{attribute}/kind"] = type(member).__name__
        if dataclasses.is_dataclass(public):
            found[f"{name}/fields"] = [f"{name}.{one.name}: {one.type}" for one in dataclasses.fields(public)]
        found[f"{name}/doc"] = (inspect.getdoc(public) or "").partition("\n")[0]
    return found


def _parameters(name: str, public: Any, hide: Any) -> dict[str, Any]:
    """Every parameter with its kind and its default."""
    try:
        asked = inspect.signature(public).parameters.values()
    except (TypeError, ValueError):
        return {}
    found: dict[str, Any] = {f"{name}/parameters": [f"{name}({one.name}) {one.kind.name}" for one in asked]}
    for one in asked:
        if one.default is not inspect.Parameter.empty:
            told = repr(one.default)
            found[f"{name}({one.name})/default"] = "object" if "0x" in told else hide(told)
    return found
