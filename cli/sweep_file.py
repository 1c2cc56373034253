"""Sweep files (YAML): options of a run, and grids of choices of how to evict.

The keys are the long options of `perturbkv trace`, derived from `RunOptions`: an option added there is a key at once.
YAML gives every value as text, which is parsed as the command line parses it: `1e-3` is a number, `010` is ten, `none`
is a word, and no tag makes an object. Choices are then those of `perturbkv.grid`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from perturbkv.cli.choices import check_distinct
from perturbkv.cli.command_line import option_fields
from perturbkv.cli.options import RunOptions
from perturbkv.configs import option as numbers
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.option import check_configurations
from perturbkv.errors import ConfigError, PerturbkvError, UnknownNameError
from perturbkv.selection import grid
from perturbkv.user_files import MIB, FileKind

_COMMAND_LINE_ONLY = ("shard", "shard_by", "overwrite", "wait", "dry_run", "as_json")
"""Options that do not describe the measurement, and are refused in a file."""
_SHARED = "seed"
"""The choice that is an option of the run too, with a single value: data and weights use it."""
_GRIDS = "grids"
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_READERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("a whole number", int),
    float: ("a number", float),
    bool: ("true or false", lambda text: _BOOLEANS[text.lower()]),
    str: ("text", str),
    Path: ("a path", lambda text: Path(text).expanduser()),  # no shell has expanded it
}


@dataclass(frozen=True)
class Key:
    """A key of a sweep file.

    Attributes:
        field: its field of `RunOptions`, or the name of a choice of how to evict.
        kind: the type of a value.
        many: whether the command line takes several values.
    """

    field: str
    kind: Any
    many: bool = False

    @property
    def is_choice(self) -> bool:
        """True if the key is a choice of how to evict, which may differ between configurations."""
        return self.field in grid.FIELDS or self.field in grid.known_options()

    def parse(self, text: Any) -> Any:
        """Return the value of a text, parsed as on the command line. Raises ConfigError for anything else."""
        expected, read = _READERS[self.kind]
        if not isinstance(text, str):
            raise ConfigError(f"expected {expected}, got {_describe(text)}")
        if self.field == "budget":
            return Budget.parse(text)
        try:
            value = read(text)
        except (ValueError, KeyError, RuntimeError):  # RuntimeError: an unknown user's home
            raise ConfigError(f"expected {expected}, got '{text}'") from None
        if self.kind in (int, float):
            numbers.check_number("the number", value)
        return value

    def parse_all(self, value: Any, takes_list: bool) -> tuple[Any, ...]:
        """Return the values of a text or list. Raises ConfigError for an empty list, or one that is not taken."""
        if isinstance(value, list) and not takes_list:
            where = f"; lists of it stand under '{_GRIDS}'" if self.is_choice else ""
            raise ConfigError(f"expected {_READERS[self.kind][0]}, got a list{where}")
        if value == []:
            raise ConfigError("expected a value or a list of them, got an empty list")
        texts = value if isinstance(value, list) else [value]
        check_configurations(len(texts))
        return tuple(check_distinct(self.field, [self.parse(text) for text in texts]))


def known_keys() -> dict[str, Key]:
    """Return spelling -> key for all keys of a sweep file; the spellings have hyphens."""
    hints = get_type_hints(RunOptions)
    keys = {"selection": Key("selection", str, many=True)}
    for name, option in grid.known_options().items():
        keys[name.replace("_", "-")] = Key(name, type(option.default), many=True)
    for name, annotated in option_fields(RunOptions).items():
        if name not in _COMMAND_LINE_ONLY:
            hint = hints[name]
            (kind,) = [one for one in get_args(hint) if one is not NoneType] if NoneType in get_args(hint) else [hint]
            many = get_origin(kind) is list
            key = Key(name, get_args(kind)[0] if many else kind, many)
            declared = [each for one in annotated.__metadata__ for each in (one.default, *(one.param_decls or ()))]
            long = [each.partition("/")[0].removeprefix("--") for each in declared if str(each).startswith("--")]
            keys |= dict.fromkeys(long or [name.replace("_", "-")], key)  # as declared, or as Typer derives it
    return keys


@contextmanager
def prefix_errors(name: object) -> Iterator[None]:
    """Turn a PerturbkvError within the block into a ConfigError that begins with the name of a file or a key."""
    try:
        yield
    except PerturbkvError as error:
        raise ConfigError(f"{name}: {error}") from error


Values = Mapping[str, tuple[Any, ...]]
"""Field of `RunOptions`, or choice -> its values."""


@dataclass(frozen=True)
class SweepFile:
    """The content of a sweep file.

    Attributes:
        options: option of the run -> its value.
        choices: choice of how to evict -> its values, for every grid that does not have it.
        grids: the grids, one behind the other; a file without grids has an empty one.
    """

    options: Mapping[str, Any]
    choices: Values
    grids: tuple[Values, ...]

    def count(self) -> int:
        """Return the number of combinations of all grids."""
        return sum(math.prod(map(len, {**self.choices, **one}.values())) for one in self.grids)


_FILE = FileKind("a sweep file (YAML)", ConfigError, MIB)


def read(path: Path, typed_options: frozenset[str]) -> SweepFile:
    """Return the content of a sweep file without the keys that were typed. Raises ConfigError, with the file's name."""
    text = _FILE.read_text(path)
    with prefix_errors(path):
        document, keys = _load_yaml(text), known_keys()
        _check_mapping(document)
        grids = document.pop(_GRIDS, None)
        entries = _parse_mapping(document, {**keys, _GRIDS: Key(_GRIDS, str)}, typed_options, "")
        options = {
            key.field: list(values) if key.many else values[0]
            for key, values in entries.items()
            if not key.is_choice or key.field == _SHARED
        }
        choices = {key.field: values for key, values in entries.items() if key.is_choice}
        if grids is None:
            return SweepFile(options, choices, ({},))
        with prefix_errors(_GRIDS):
            return SweepFile(options, choices, _parse_grids(grids, keys, typed_options))


def _parse_grids(grids: Any, keys: Mapping[str, Key], typed_options: frozenset[str]) -> tuple[Values, ...]:
    """Return choice -> values of every grid. Raises ConfigError for anything but a list of mappings of choices."""
    if not isinstance(grids, list) or not grids:
        raise ConfigError(f"expected a list of mappings, such as '- {{policy: adakv}}', got {_describe(grids)}")
    check_configurations(len(grids))
    choices = {name: key for name, key in keys.items() if key.is_choice}
    parsed = []
    for mapping in grids:
        _check_mapping(mapping)
        entries = _parse_mapping(mapping, choices, typed_options, "options of the whole run stand outside the grids")
        parsed.append({key.field: values for key, values in entries.items()})
    return tuple(parsed)


def _parse_mapping(
    mapping: Mapping[str, Any], keys: Mapping[str, Key], typed_options: frozenset[str], hint: str
) -> dict[Key, tuple[Any, ...]]:
    """Return key -> values of a mapping, without the options that were typed.

    `hint` is added to the error for a name that is not among the spellings of `keys`. Raises ConfigError, with the key.
    """
    entries: dict[Key, tuple[Any, ...]] = {}
    for name, value in mapping.items():
        spelling = name.replace("_", "-")
        if spelling not in keys:
            raise UnknownNameError(name, "key", keys, hint)
        key = keys[spelling]
        with prefix_errors(name):
            if key in entries:
                raise ConfigError("expected every key once, got it twice")
            # a choice may have a list, the seed in a grid alone: outside it is the run's too
            single = not key.many and (not key.is_choice or (key.field == _SHARED and _GRIDS in keys))
            entries[key] = key.parse_all(value, not single)
    return {key: values for key, values in entries.items() if key.field not in typed_options}


def _load_yaml(text: str) -> Any:
    """Return the mappings, lists and texts of YAML. Raises ConfigError for invalid YAML, and for a repeated key."""
    import yaml

    class Loader(yaml.BaseLoader):  # type: ignore[misc]
        """A loader that makes texts of all values, and refuses a key that a mapping has twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [name.value for name, _ in node.value if name.id == "scalar"]
            if len(set(names)) < len(names):
                twice = next(name for index, name in enumerate(names) if name in names[:index])
                raise ConfigError(f"{twice}: expected every key once, got it twice")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.MarkedYAMLError as error:
        problem = f"{error.problem} in line {error.problem_mark.line + 1}" if error.problem_mark else str(error)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
    except RecursionError:
        problem = "lists or mappings lie too deep in one another"
    raise ConfigError(f"expected YAML, got text that cannot be read as YAML: {problem}")


def _check_mapping(value: Any) -> None:
    """Raise ConfigError for anything but a mapping with a key."""
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"expected a mapping of options, such as 'budget: [128, 256]', got {_describe(value)}")


def _describe(value: Any) -> str:
    """Return a value of a file in words, for error messages: `'text'`, a list, an empty mapping, nothing."""
    if isinstance(value, str):
        return f"'{value}'"
    kind = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else "nothing"
    return kind if value or value is None else kind.replace("a ", "an empty ")
