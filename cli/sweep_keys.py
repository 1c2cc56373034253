"""Which keys a sweep file takes, and how the text of each becomes a value: the long options of `perturbkv trace`.

They are read off `RunOptions`, so that an option that is added there is a key at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from perturbkv.cli.option_routing import options
from perturbkv.cli.options import RunOptions
from perturbkv.configs import numbers
from perturbkv.configs.entry_counts import Budget
from perturbkv.errors import ConfigError
from perturbkv.selection import spread
from perturbkv.selection.grid import FIELDS

_TYPED_ALONE = ("shard", "shard_by", "overwrite", "wait", "dry_run", "as_json")
"""Options that say what to do this time, not what is measured: never in a file."""
_SHARED = "seed"
"""The one choice that is not the eviction's alone: data and weights have it too, and it is one for them."""
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_READERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("a whole number", int),
    float: ("a number", float),
    bool: ("true or false", lambda text: _TRUTH[text.lower()]),
    str: ("text", str),
    Path: ("a path", lambda text: Path(text).expanduser()),  # no shell has looked at the file
}


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        field: its name in `RunOptions`, or `selection`.
        kind: the type of one value.
        many: whether the command line takes several.
    """

    field: str
    kind: Any
    many: bool = False

    @property
    def sweeps(self) -> bool:
        """Whether it is a choice of how to evict, which may differ between configurations."""
        return self.field in FIELDS or self.field in spread.known()

    @property
    def of_run(self) -> bool:
        """Whether it is an option of the whole run; the seed is both."""
        return not self.sweeps or self.field == _SHARED

    @property
    def lists(self) -> bool:
        """Whether a list may stand at the file's top level."""
        return self.many or not self.of_run

    @property
    def expected(self) -> str:
        """What a value is, in words."""
        return "tokens (128) or a fraction (0.05)" if self.field == "budget" else _READERS[self.kind][0]

    @property
    def instead_of_list(self) -> str:
        """What to do where a list is refused."""
        if self.sweeps:
            return "data and weights have this seed too; lists of seeds stand under 'grids'"
        return "lists are for choices of how to evict"

    def read(self, text: str) -> Any:
        """The value that the text stands for, as on the command line. Raises ConfigError where it is none."""
        if self.field == "budget":
            return Budget.parse(text)
        try:
            found = _READERS[self.kind][1](text)
        except (ValueError, KeyError, RuntimeError):  # the last for the home of a user that is not there
            msg = f"expected {self.expected}, got '{text}'"
            raise ConfigError(msg) from None
        if self.kind in (int, float):
            numbers.check("the number", found)
        return found


def known() -> dict[str, Key]:
    """Every key by its spellings, words joined by '-'."""
    hints = get_type_hints(RunOptions)
    found = {"selection": Key("selection", str, many=True)}
    for name, option in spread.known().items():
        found[name.replace("_", "-")] = Key(name, type(option.default), many=True)
    for name, annotated in options(RunOptions).items():
        if name not in _TYPED_ALONE:
            found |= dict.fromkeys(_spellings(name, annotated), _key(name, hints[name]))
    return found


def _key(field: str, hint: Any) -> Key:
    (kind,) = [one for one in get_args(hint) if one is not NoneType] if NoneType in get_args(hint) else [hint]
    many = get_origin(kind) is list
    return Key(field, get_args(kind)[0] if many else kind, many)


def _spellings(field: str, annotated: Any) -> list[str]:
    """The long names of an option: those that are declared, or the one that Typer makes of the field."""
    declared = [name for option in annotated.__metadata__ for name in (option.default, *(option.param_decls or ()))]
    long = [name.partition("/")[0].removeprefix("--") for name in declared if str(name).startswith("--")]
    return long or [field.replace("_", "-")]
