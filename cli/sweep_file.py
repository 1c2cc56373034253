"""A sweep file (YAML) as it is read: every key and every value with its line, nothing combined yet.

Values are read from their text as the command line reads them, never built by YAML: `1e-3` is a number although YAML
1.1 takes it for text, `010` is ten, `none` is a word, and no tag makes an object.

Which keys a sweep file takes, and how the text of each becomes a value: the long options of `perturbkv trace`.

They are read off `RunOptions`, so that an option that is added there is a key at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from perturbkv.cli.command_line import options
from perturbkv.cli.options import RunOptions
from perturbkv.configs import option as numbers
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.option import check_configurations
from perturbkv.errors import ConfigError, PerturbkvError, UnknownNameError
from perturbkv.selection import grid
from perturbkv.selection.grid import FIELDS
from perturbkv.user_files import MIB, FileKind

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
        return self.field in FIELDS or self.field in grid.known_options()

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
            numbers.check_number("the number", found)
        return found


def known_keys() -> dict[str, Key]:
    """Every key by its spellings, words joined by '-'."""
    hints = get_type_hints(RunOptions)
    found = {"selection": Key("selection", str, many=True)}
    for name, option in grid.known_options().items():
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


_FILE = FileKind("a sweep file (YAML)", ConfigError, MIB)
_GRIDS = Key("grids", None)
_TAG = "tag:yaml.org,2002:"
_NULL = _TAG + "null"
_PLAIN = tuple(_TAG + name for name in ("str", "int", "float", "bool", "timestamp"))
_EXAMPLE = "such as 'budget: [128, 256]'"


@dataclass(frozen=True)
class Place:
    """Where something stands: what every error begins with."""

    path: Path
    line: int
    key: str = ""

    def refusal(self, problem: object) -> ConfigError:
        """The error that names file, line and key."""
        return ConfigError(": ".join(filter(None, (f"{self.path}:{self.line}", self.key, str(problem)))))

    @contextmanager
    def named(self) -> Iterator[None]:
        """Whatever is refused inside is refused for what stands here. Raises ConfigError."""
        try:
            yield
        except PerturbkvError as error:
            raise self.refusal(error) from error


@dataclass(frozen=True)
class Entry:
    """One key of a file with its values, at least one, and the place of each."""

    key: Key
    place: Place
    values: tuple[Any, ...]
    places: tuple[Place, ...]

    def place_of(self, value: Any) -> Place:
        """Where one of the values stands; the key's own place where it is none of them."""
        return next((place for one, place in zip(self.values, self.places, strict=True) if one == value), self.place)


Entries = Mapping[str, Entry]
"""Entries by field of `RunOptions`."""


@dataclass(frozen=True)
class SweepFile:
    """The options of a file, and the grids that they are completed for: one that names nothing where it lists none."""

    options: Entries
    grids: tuple[Entries, ...] = ({},)

    def without(self, fields: frozenset[str]) -> SweepFile:
        """The file as if it named none of these options, in no grid either."""

        def kept(entries: Entries) -> Entries:
            return {name: entry for name, entry in entries.items() if name not in fields}

        return SweepFile(kept(self.options), tuple(map(kept, self.grids)))

    def entries(self) -> list[Entry]:
        """Every entry, those of the grids last."""
        return [entry for entries in (self.options, *self.grids) for entry in entries.values()]


def read(path: Path) -> SweepFile:
    """A sweep file. Raises ConfigError, which names line and key, where it is none."""
    keys = known_keys()
    root = _composed(path)
    if root is None:
        msg = f"{path}: expected a mapping of options, {_EXAMPLE}, got an empty file"
        raise ConfigError(msg)
    found = _pairs(root, Place(path, _line(root)), {**keys, _GRIDS.field: _GRIDS})
    grids = [(place, node) for key, place, node in found if key is _GRIDS]
    options = _entries([one for one in found if one[0] is not _GRIDS])
    return SweepFile(options, _grids(*grids[0], keys)) if grids else SweepFile(options)


def _composed(path: Path) -> Any:
    """The file's syntax tree, whose nodes know their lines. Raises ConfigError where there is none."""
    import yaml

    text = _FILE.read_text(path)
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, said = (mark.line + 1 if mark else 1), ", ".join(filter(None, (error.context, error.problem)))
    except yaml.reader.ReaderError as error:
        line, said = text.count("\n", 0, error.position) + 1, error.reason
    except RecursionError:
        line, said = 1, "lists or mappings lie too deep in one another"
    msg = f"expected YAML, got text that cannot be read as YAML: {said}"
    raise Place(path, line).refusal(msg)


def _grids(place: Place, node: Any, keys: Mapping[str, Key]) -> tuple[Entries, ...]:
    """The mappings of choices under `grids`."""
    if node.id != "sequence" or not node.value:
        got = "an empty list" if node.id == "sequence" else _said(node)
        msg = f"expected a list of mappings, such as '- {{policy: adakv}}', got {got}"
        raise place.refusal(msg)
    with place.named():
        check_configurations(len(node.value))
    choices = {name: key for name, key in keys.items() if key.sweeps}
    found = [_pairs(one, Place(place.path, _line(one), place.key), choices) for one in node.value]
    return tuple(_entries(pairs, in_grid=True) for pairs in found)


def _pairs(node: Any, place: Place, keys: Mapping[str, Key]) -> list[tuple[Key, Place, Any]]:
    """Each key of a mapping, where it stands, and the tree of its value; every one is known and stands once."""
    if node.id != "mapping":
        msg = f"expected a mapping of options, {_EXAMPLE}, got {_said(node)}"
        raise place.refusal(msg)
    found: dict[str, tuple[Key, Place, Any]] = {}
    for name, value in node.value:
        key, here = _known(name, Place(place.path, _line(name)), keys)
        if key.field in found:
            msg = f"expected every key once, got it in line {found[key.field][1].line} already"
            raise here.refusal(msg)
        found[key.field] = (key, here, value)
    return list(found.values())


def _known(name: Any, place: Place, keys: Mapping[str, Key]) -> tuple[Key, Place]:
    if name.id != "scalar":
        msg = f"expected the name of an option as key, got {_said(name)}"
        raise place.refusal(msg)
    here, spelling = Place(place.path, place.line, name.value), name.value.replace("_", "-")
    if spelling not in keys:
        hint = "" if _GRIDS.field in keys else "options of the whole run stand outside the grids"
        raise here.refusal(UnknownNameError(name.value, "key", keys, hint))
    return keys[spelling], here


def _entries(pairs: list[tuple[Key, Place, Any]], in_grid: bool = False) -> Entries:
    return {key.field: _entry(key, place, node, in_grid or key.lists) for key, place, node in pairs}


def _entry(key: Key, place: Place, node: Any, lists: bool) -> Entry:
    nodes = node.value if node.id == "sequence" else [node]
    if not nodes:
        msg = f"expected {key.expected}, or a list of such, got an empty list"
        raise place.refusal(msg)
    if node.id == "sequence" and not lists:
        msg = f"expected {key.expected}, got a list; {key.instead_of_list}"
        raise place.refusal(msg)
    with place.named():
        check_configurations(len(nodes))
    places = tuple(Place(place.path, _line(one), place.key) for one in nodes)
    values = tuple(_value(key, one, here) for one, here in zip(nodes, places, strict=True))
    first: dict[Any, Place] = {}
    for value, here in zip(values, places, strict=True):
        if value in first:
            msg = f"expected every value once, got {value} in line {first[value].line} already"
            raise here.refusal(msg)
        first[value] = here
    return Entry(key, place, values, places)


def _value(key: Key, node: Any, place: Place) -> Any:
    if node.id != "scalar" or node.tag not in _PLAIN:
        default = "; leave the key out for its default" if node.tag == _NULL else ""
        msg = f"expected {key.expected}, got {_said(node)}{default}"
        raise place.refusal(msg)
    with place.named():
        return key.read(node.value)


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _said(node: Any) -> str:
    """A tree in words."""
    if node.id != "scalar":
        return {"mapping": "a mapping", "sequence": "a list"}[node.id]
    if node.tag == _NULL:
        return "nothing (null)"
    return f"'{node.value}'" if node.tag in _PLAIN else f"'{node.value}' with the tag '{node.tag}'"
