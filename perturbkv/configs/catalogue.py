"""Classes known by name: the files of a folder, what was registered, what installed packages bring, and single files.

Names are known before anything is imported. A class of a user's own file is written `my_file.py:MyScore`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast

from perturbkv.configs.plugins import OURS, class_of_file, loaded, of_file
from perturbkv.errors import ConfigError, PluginError, UnknownNameError

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_Class = TypeVar("_Class")


class Catalogue(Generic[_Class]):
    """The classes of one kind.

    Args:
        kind: `score` or `policy`.
        package: whose modules hold one each, named as the class is with `_` for `-`.
        base: gives the class that all of them inherit, imported when it is first needed.
        besides: modules of the package that hold none.
        refused: names that something else has.
    """

    def __init__(
        self, kind: str, package: str, base: Callable[[], type[_Class]], besides: Iterable[str] = (),
        refused: Callable[[], Iterable[str]] = tuple,
    ) -> None:  # fmt: skip
        self.kind, self.package, self.base = kind, package, base
        self.besides, self.refused = tuple(besides), refused
        self.added: dict[str, type[_Class]] = {}

    def names(self) -> list[str]:
        """Of all classes, ours first, those that were registered last; nothing is imported."""
        return list(dict.fromkeys([*self._files(), *installed(f"{OURS}{self._group}"), *self.added]))

    def info(self, name: str) -> type[_Class]:
        """The class. Raises UnknownNameError with the known names, the nearest first, and PluginError."""
        if name in self.added:
            return self.added[name]
        if of_file(name):
            return self._of_kind(class_of_file(name), name)
        if name in self._files():
            return self._ours(name)
        if entry := installed(f"{OURS}{self._group}").get(name):
            return self._of_kind(loaded(entry), name)
        raise UnknownNameError(name, self.kind, self.names())

    def register(self, given: type[_Class], taken: Iterable[str]) -> type[_Class]:
        """Add a class. Raises ConfigError for what is none, or where its name is taken."""
        name = getattr(given, "name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in self.refused():
            msg = (
                f"expected a {self.kind}'s name of small letters, digits, '-' and '_' that no selection has, got "
                f"{name!r}"
            )
            raise ConfigError(msg)
        found = self._of_kind(given, name, ConfigError)
        if name in taken:
            msg = f"a {self.kind} named '{name}' is registered already; choose another name"
            raise ConfigError(msg)
        self.added[name] = found
        return found

    @property
    def _group(self) -> str:
        return {"policy": "policies"}.get(self.kind, f"{self.kind}s")

    def _files(self) -> list[str]:
        return _modules(self.package, self.besides)

    def _ours(self, name: str) -> type[_Class]:
        return cast("type[_Class]", _class_of(f"{self.package}.{name.replace('-', '_')}", name))

    def _of_kind(self, found: object, name: str, error: type[ConfigError | PluginError] = PluginError) -> type[_Class]:
        """The class, checked. Raises the error for what is none of this kind."""
        base = self.base()
        if not (inspect.isclass(found) and issubclass(found, base) and "__dataclass_params__" in vars(found)):
            msg = f"expected '{name}' to be a subclass of {base.__name__} that is a frozen dataclass, got {found!r}"
            raise error(msg)
        if bare := [field.name for field in dataclasses.fields(cast("Any", found)) if "option" not in field.metadata]:
            msg = (
                f"{self.kind} '{name}': expected {bare[0]} to be an option(default, 'what it does'), got a plain field"
            )
            raise error(msg)
        if flaw := getattr(found, "flaw", str)():
            msg = f"{self.kind} '{name}': {flaw}"
            raise error(msg)
        return found


@functools.cache
def _modules(package: str, besides: tuple[str, ...]) -> list[str]:
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return [module.name.replace("_", "-") for module in pkgutil.iter_modules(folders) if module.name not in besides]


@functools.cache
def _class_of(module: str, name: str) -> type:
    """The class of this name in a module of ours."""
    held = vars(importlib.import_module(module)).values()
    (found,) = (one for one in held if inspect.isclass(one) and vars(one).get("name") == name)
    return found


@functools.cache
def installed(group: str) -> dict[str, EntryPoint]:
    """What installed packages bring, by name."""
    return {entry.name: entry for entry in entry_points(group=group)}
