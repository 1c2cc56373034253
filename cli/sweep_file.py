"""Reader of sweep files (YAML): every key and value with its line; `commands.trace` combines them.

Values are parsed from their text as the command line parses them, never built by YAML: `1e-3` is a number although YAML
1.1 takes it for text, `010` is ten, `none` is a word, and no tag makes an object.

The keys are the long options of `perturbkv trace`, derived from `RunOptions`: an option added there is a key at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from perturbkv.cli.command_line import option_fields
from perturbkv.cli.options import RunOptions
from perturbkv.configs import option as numbers
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.option import check_configurations
from perturbkv.errors import ConfigError, PerturbkvError, UnknownNameError
from perturbkv.selection import grid
from perturbkv.selection.grid import FIELDS
from perturbkv.user_files import MIB, FileKind

_COMMAND_LINE_ONLY = ("shard", "shard_by", "overwrite", "wait", "dry_run", "as_json")
"""Options that do not describe the measurement, and are refused in a file."""
_SHARED_OPTION = "seed"
"""The eviction choice that is an option of the run too, with a single value: data and weights use it."""
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
        field: its field of `RunOptions`, or `selection`.
        kind: the type of a value.
        many: the command line takes several values.
    """

    field: str
    kind: Any
    many: bool = False

    @property
    def is_eviction_choice(self) -> bool:
        """True if the key is a choice of how to evict, which may differ between configurations."""
        return self.field in FIELDS or self.field in grid.known_options()

    @property
    def is_run_option(self) -> bool:
        """True if the key is an option of the whole run; the seed is both a run option and an eviction choice."""
        return not self.is_eviction_choice or self.field == _SHARED_OPTION

    @property
    def takes_list(self) -> bool:
        """True if the key takes a list of values at the top level of the file."""
        return self.many or not self.is_run_option

    @property
    def expected(self) -> str:
        """The description of a valid value of the key, for error messages."""
        return "tokens (128) or a fraction (0.05)" if self.field == "budget" else _READERS[self.kind][0]

    @property
    def list_advice(self) -> str:
        """The advice in the error message on a list where a single value is expected."""
        if self.is_eviction_choice:
            return "data and weights have this seed too; lists of seeds stand under 'grids'"
        return "lists are for choices of how to evict"

    def parse(self, text: str) -> Any:
        """Return the value of a text, parsed as on the command line. Raises ConfigError for invalid text."""
        if self.field == "budget":
            return Budget.parse(text)
        try:
            value = _READERS[self.kind][1](text)
        except (ValueError, KeyError, RuntimeError):  # RuntimeError: an unknown user's home
            raise ConfigError(f"expected {self.expected}, got '{text}'") from None
        if self.kind in (int, float):
            numbers.check_number("the number", value)
        return value


def known_keys() -> dict[str, Key]:
    """Return spelling -> key for all keys of a sweep file; the spellings have hyphens."""
    hints = get_type_hints(RunOptions)
    keys = {"selection": Key("selection", str, many=True)}
    for name, option in grid.known_options().items():
        keys[name.replace("_", "-")] = Key(name, type(option.default), many=True)
    for name, annotated in option_fields(RunOptions).items():
        if name not in _COMMAND_LINE_ONLY:
            keys |= dict.fromkeys(_spellings(name, annotated), _make_key(name, hints[name]))
    return keys


def _make_key(field: str, hint: Any) -> Key:
    """Return the key of a field of `RunOptions` with this type hint."""
    (kind,) = [one for one in get_args(hint) if one is not NoneType] if NoneType in get_args(hint) else [hint]
    many = get_origin(kind) is list
    return Key(field, get_args(kind)[0] if many else kind, many)


def _spellings(field: str, annotated: Any) -> list[str]:
    """Return an option's long names without `--`: the declared names, or the name that Typer derives from the field."""
    declared = [name for option in annotated.__metadata__ for name in (option.default, *(option.param_decls or ()))]
    long = [name.partition("/")[0].removeprefix("--") for name in declared if str(name).startswith("--")]
    return long or [field.replace("_", "-")]


_FILE = FileKind("a sweep file (YAML)", ConfigError, MIB)
_GRIDS = Key("grids", None)
_TAG = "tag:yaml.org,2002:"
_NULL = _TAG + "null"
_MERGE = _TAG + "merge"
"""The tag of the key `<<`, which is an unknown one."""
_PLAIN = tuple(_TAG + name for name in ("str", "int", "float", "bool", "timestamp"))
_EXAMPLE = "such as 'budget: [128, 256]'"


@dataclass(frozen=True)
class Location:
    """A line of a sweep file and the key in it, with which every error message begins."""

    path: Path
    line: int
    key: str = ""

    def error(self, problem: object) -> ConfigError:
        """Return a ConfigError with the message `problem` after file, line and key."""
        return ConfigError(": ".join(filter(None, (f"{self.path}:{self.line}", self.key, str(problem)))))

    @contextmanager
    def locate_errors(self) -> Iterator[None]:
        """Turn every PerturbkvError within the block into a ConfigError that names file, line and key."""
        try:
            yield
        except PerturbkvError as error:
            raise self.error(error) from error


@dataclass(frozen=True)
class Entry:
    """A key of a sweep file with its values, at least one, and the location of each value."""

    key: Key
    location: Location
    values: tuple[Any, ...]
    locations: tuple[Location, ...]

    def locate(self, value: Any) -> Location:
        """Return the first location of a value; for a value not in the entry, the key's location."""
        return next((at for one, at in zip(self.values, self.locations, strict=True) if one == value), self.location)


Entries = Mapping[str, Entry]
"""Field of `RunOptions` -> entry."""


@dataclass(frozen=True)
class SweepFile:
    """The content of a sweep file: its options and its grids, each grid being completed by the options.

    A file without grids has one empty grid.
    """

    options: Entries
    grids: tuple[Entries, ...] = ({},)

    def without(self, fields: frozenset[str]) -> SweepFile:
        """Return the content without the options `fields`, which are removed from the top level and from all grids."""

        def remaining(entries: Entries) -> Entries:
            """Return the entries without these options."""
            return {name: entry for name, entry in entries.items() if name not in fields}

        return SweepFile(remaining(self.options), tuple(map(remaining, self.grids)))

    def entries(self) -> list[Entry]:
        """Return all entries of the file: top-level entries first, then the entries of the grids."""
        return [entry for entries in (self.options, *self.grids) for entry in entries.values()]


def read(path: Path) -> SweepFile:
    """Return the content of a sweep file. Raises ConfigError, with line and key, for an invalid file."""
    root = _parse_yaml(path)
    if root is None:
        raise ConfigError(f"{path}: expected a mapping of options, {_EXAMPLE}, got an empty file")
    keys = known_keys()
    pairs = _parse_mapping(root, Location(path, _line(root)), {**keys, _GRIDS.field: _GRIDS})
    grids = [(location, node) for key, location, node in pairs if key is _GRIDS]
    options = _parse_entries([one for one in pairs if one[0] is not _GRIDS])
    return SweepFile(options, _parse_grids(*grids[0], keys)) if grids else SweepFile(options)


def _parse_yaml(path: Path) -> Any:
    """Return a file's YAML syntax tree; None for an empty file. Raises ConfigError for invalid YAML."""
    import yaml

    text = _FILE.read_text(path)
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, problem = (mark.line + 1 if mark else 1), ", ".join(filter(None, (error.context, error.problem)))
    except yaml.reader.ReaderError as error:
        line, problem = text.count("\n", 0, error.position) + 1, error.reason
    except RecursionError:
        line, problem = 1, "lists or mappings lie too deep in one another"
    raise Location(path, line).error(f"expected YAML, got text that cannot be read as YAML: {problem}")


def _parse_grids(location: Location, node: Any, keys: Mapping[str, Key]) -> tuple[Entries, ...]:
    """Return the entries of every grid, parsed from the value of the key `grids` at a location."""
    if node.id != "sequence" or not node.value or _is_tagged(node):
        got = "an empty list" if node.id == "sequence" and not node.value else _describe(node)
        raise location.error(f"expected a list of mappings, such as '- {{policy: adakv}}', got {got}")
    with location.locate_errors():
        check_configurations(len(node.value))
    choices = {name: key for name, key in keys.items() if key.is_eviction_choice}
    grids = [_parse_mapping(one, Location(location.path, _line(one), location.key), choices) for one in node.value]
    return tuple(_parse_entries(pairs, in_grid=True) for pairs in grids)


def _parse_mapping(node: Any, location: Location, keys: Mapping[str, Key]) -> list[tuple[Key, Location, Any]]:
    """Return (key, location, syntax tree of the value) per item of a mapping, after checks of the keys."""
    if node.id != "mapping" or not node.value or _is_tagged(node):
        got = "an empty mapping" if node.id == "mapping" and not node.value else _describe(node)
        raise location.error(f"expected a mapping of options, {_EXAMPLE}, got {got}")
    pairs: dict[str, tuple[Key, Location, Any]] = {}
    for name, value in node.value:
        key, here = _parse_key(name, Location(location.path, _line(name)), keys)
        if key.field in pairs:
            raise here.error(f"expected every key once, got it in line {pairs[key.field][1].line} already")
        pairs[key.field] = (key, here, value)
    return list(pairs.values())


def _parse_key(name: Any, location: Location, keys: Mapping[str, Key]) -> tuple[Key, Location]:
    """Return the key named by a syntax tree, and its location. Raises ConfigError for an unknown key."""
    if name.id != "scalar" or name.tag not in (*_PLAIN, _MERGE):
        raise location.error(f"expected the name of an option as key, got {_describe(name)}")
    here, spelling = Location(location.path, location.line, name.value), name.value.replace("_", "-")
    if spelling not in keys:
        hint = "" if _GRIDS.field in keys else "options of the whole run stand outside the grids"
        raise here.error(UnknownNameError(name.value, "key", keys, hint))
    return keys[spelling], here


def _parse_entries(pairs: list[tuple[Key, Location, Any]], in_grid: bool = False) -> Entries:
    """Return the entries of a mapping's items; in a grid every key takes a list."""
    return {key.field: _parse_entry(key, here, node, in_grid or key.takes_list) for key, here, node in pairs}


def _parse_entry(key: Key, location: Location, node: Any, takes_list: bool) -> Entry:
    """Return a key's entry from the syntax tree of its value or list. Raises ConfigError for an invalid tree."""
    nodes = node.value if node.id == "sequence" else [node]
    if node.id == "sequence" and _is_tagged(node):
        raise location.error(f"expected {key.expected}, or a list of such, got {_describe(node)}")
    if not nodes:
        raise location.error(f"expected {key.expected}, or a list of such, got an empty list")
    if node.id == "sequence" and not takes_list:
        raise location.error(f"expected {key.expected}, got a list; {key.list_advice}")
    with location.locate_errors():
        check_configurations(len(nodes))
    locations = tuple(Location(location.path, _line(one), location.key) for one in nodes)
    values = tuple(_parse_value(key, one, here) for one, here in zip(nodes, locations, strict=True))
    first: dict[Any, Location] = {}
    for value, here in zip(values, locations, strict=True):
        if value in first:
            raise here.error(f"expected every value once, got {value} in line {first[value].line} already")
        first[value] = here
    return Entry(key, location, values, locations)


def _parse_value(key: Key, node: Any, location: Location) -> Any:
    """Return the parsed value of a syntax tree. Raises ConfigError for an invalid value."""
    if node.id != "scalar" or node.tag not in _PLAIN:
        default = "; leave the key out for its default" if node.tag == _NULL else ""
        raise location.error(f"expected {key.expected}, got {_describe(node)}{default}")
    with location.locate_errors():
        return key.parse(node.value)


def _line(node: Any) -> int:
    """Return the line of a syntax tree in its file, from 1."""
    return int(node.start_mark.line) + 1


def _is_tagged(node: Any) -> bool:
    """Return whether a mapping or list has a tag, which would make another object of it."""
    return str(node.tag) != {"mapping": f"{_TAG}map", "sequence": f"{_TAG}seq"}.get(node.id)


def _describe(node: Any) -> str:
    """Return a description of a syntax tree for error messages."""
    if node.id != "scalar":
        kind = {"mapping": "a mapping", "sequence": "a list"}[node.id]
        return f"{kind} with the tag '{node.tag}'" if _is_tagged(node) else kind
    if node.tag == _NULL:
        return "nothing (null)"
    return f"'{node.value}'" if node.tag in _PLAIN else f"'{node.value}' with the tag '{node.tag}'"
