"""Columns of results, declared once with name, meaning, unit and format: the source of JSON, tables and their docs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import product
from typing import Any, ClassVar, Generic, Self, TypeVar, dataclass_transform, overload

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.json_values import config_columns, json_value
from perturbkv.analyses.names import fold
from perturbkv.analyses.stats.intervals import OptionalInterval
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table

Value = TypeVar("Value")
AnyRecord = TypeVar("AnyRecord")
_KEY = "column"
_NAME_WIDTH, _NARROW_NAME_WIDTH = 24, 18
"""Letters per line of a name in a table's first column, and of one beside six or more columns."""
_MOST_BESIDE = 3
"""Most columns of a table whose intervals stand beside their numbers; of more they stand below."""
_MOST_WIDE = 5
"""Most columns beside a first column of full width."""


@dataclass(frozen=True)
class Column:
    """The declaration of a number, name or array of a result.

    Attributes:
        meaning: one phrase, as the JSON reference and `--explain` print it.
        unit: such as `share`, `nat`, `L1`, `tokens`; empty for a ratio, a count or a name.
        key: its name in JSON, where that is not the attribute's.
        dims: axes of an array, outermost first.
        heading: its heading in a table; `#` in front aligns it to the right.
        text: formats a value, with its interval where there is one.
        numbers: returns a data frame's cells of a value that is a record: end of the column's name -> number, with ""
            for the column of the attribute's own name.
        json: whether JSON holds it.
        interval: returns the interval of a record's value; by default its attribute `<name>_interval`, if it has one.
    """

    meaning: str
    unit: str = ""
    key: str = ""
    dims: tuple[str, ...] = ()
    heading: str = ""
    text: Callable[..., str] | None = None
    numbers: Callable[[Any], Mapping[str, Any]] | None = None
    json: bool = True
    interval: Callable[[Any], OptionalInterval] | None = None

    def cell(self, value: Any, interval: Any = None, separator: str = " ") -> str:
        """Return a value as the text of a table cell; a dash for None. `separator` stands before an interval."""
        if value is None:
            return "–"
        if isinstance(value, float | np.floating):
            write = self.text or (text.percent if self.unit == "share" else text.decimal)
            return write(float(value), interval).replace(" [", f"{separator}[").replace(" (", f"{separator}(")
        if self.text is not None:
            return self.text(value)
        return f"{value:,}" if isinstance(value, int) else str(value)


def column(meaning: str, *, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """Declare a dataclass field as a column with this meaning; `more` are further attributes of `Column`."""
    return dataclasses.field(default=default, metadata={_KEY: Column(meaning, **more)})


def interval(meaning: str = "over samples") -> Any:
    """Declare a field `<name>_interval`, the 95 % interval of the column `<name>`."""
    return column(meaning)


@dataclass_transform(frozen_default=True, field_specifiers=(column, interval, dataclasses.field))
def record(cls: type[AnyRecord]) -> type[AnyRecord]:
    """Make a subclass of `Record` a frozen dataclass whose fields may be columns."""
    return dataclass(frozen=True, repr=False)(cls)


class Derived(Generic[Value]):
    """A column computed from other columns on first access; the docstring of its method is its meaning."""

    def __init__(self, compute: Callable[[Any], Value], meaning: str = "", **more: Any) -> None:
        self.compute = compute
        self.__doc__ = meaning or compute.__doc__
        self.declared: Column = Column(" ".join((self.__doc__ or "").split()).removesuffix("."), **more)

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> Value | Self:
        """Return the value, computed once per object; on the class, the declaration."""
        if instance is None:
            return self
        value = vars(instance)[self.name] = self.compute(instance)  # which Python finds first from now on
        return value


def derived(**more: Any) -> Callable[[Callable[[Any], Value]], Derived[Value]]:
    """Declare a method as a column whose meaning is its docstring; `more` are further attributes of `Column`."""
    return lambda compute: Derived(compute, **more)


def attribute(path: str, meaning: str, **more: Any) -> Derived[Any]:
    """Declare a column that is an attribute of another one, or an element of a pair: `identity.samples`, `pair.0`.

    It has the interval of that attribute, `<attribute>_interval`, if there is one. `more` as of `derived`.
    """
    *owners, last = path.split(".")

    def read(value: Any, name: str) -> Any:
        return value[int(name)] if name.isdigit() else getattr(value, name)

    def interval(instance: Any) -> Any:
        return getattr(reduce(read, owners, instance), f"{last}_interval", None)

    return Derived(lambda instance: reduce(read, (*owners, last), instance), meaning, interval=interval, **more)


class Record:
    """The base of frozen dataclasses whose fields can be columns; fields that are none are left out of JSON.

    >>> @record
    ... class Length(Record):
    ...     metres: float = column("height above the ground", unit="m", heading="#height")
    ...     @derived(unit="ft")
    ...     def feet(self) -> float:
    ...         '''The same in feet.'''
    ...         return 3.28 * self.metres
    >>> Length(2.0).to_dict()
    {'metres': 2.0, 'feet': 6.56}
    >>> table("", [Line("tower", (Length(2.0),))], ["metres"]).rows
    [['tower', '2.00']]
    """

    SECTION: ClassVar[str] = ""
    """Heading of its keys in the JSON reference; empty for the name of the class in words."""

    def __init_subclass__(cls, **declared: Any) -> None:
        """Take class attributes from the keywords of a class: `section="drift"` is SECTION."""
        super().__init_subclass__()
        for name, value in declared.items():
            if not hasattr(cls, name.upper()):
                raise TypeError(f"{cls.__name__} declares '{name}', which no base has")
            setattr(cls, name.upper(), value)

    @classmethod
    def columns(cls) -> Mapping[str, Column]:
        """Return the declared columns by attribute: fields in their order, then derived columns."""
        return _columns(cls)  # type: ignore[arg-type]  # a class is hashable; mypy asks its instances

    def __repr__(self) -> str:
        columns = self.columns().items()
        shown = [f"{name}={getattr(self, name)!s}" for name, declared in columns if declared.json and not declared.dims]
        return f"<{type(self).__name__}: {', '.join(shown)}>"

    def to_dict(self) -> dict[str, Any]:
        """Return every declared column as a JSON value: arrays as nested lists, NaN as None."""
        return {
            declared.key or name: json_value(getattr(self, name))
            for name, declared in self.columns().items()
            if declared.json
        }

    def arrays(self, *dims: str) -> dict[str, Any]:
        """Return attribute -> array for the columns declared with exactly the axes `dims`."""
        return {name: getattr(self, name) for name, declared in self.columns().items() if declared.dims == dims}


@cache
def _columns(cls: type[Record]) -> dict[str, Column]:
    """Return the declared columns of a record class, by attribute."""
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    stored = {field.name: field.metadata[_KEY] for field in fields if _KEY in field.metadata}
    attributes = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return stored | {name: value.declared for name, value in attributes.items() if isinstance(value, Derived)}


@dataclass(frozen=True)
class Line:
    """A line of a table: its name, and the records whose columns it shows."""

    name: str
    records: Sequence[Record]


def table(title: str, lines: Sequence[Line], names: Sequence[str], first: str = "") -> Table:
    """Return a table with a row per line and a column per name, without columns that are empty in every line.

    Args:
        title: above the table.
        lines: names and records.
        names: attributes of the records, in the order of the columns.
        first: heading of the column that holds the lines' names.
    """
    declared = declarations([record for line in lines for record in line.records], names)
    separator = "\n" if len(names) > _MOST_BESIDE else " "
    cells = {name: [_cell_text(line.records, name, separator) for line in lines] for name in names}
    shown = [name for name in names if any(cell not in ("", "–") for cell in cells[name])]
    width = _NARROW_NAME_WIDTH if len(shown) > _MOST_WIDE else _NAME_WIDTH
    rows = [[fold(line.name, width), *(cells[name][row] for name in shown)] for row, line in enumerate(lines)]
    return Table(title, [first, *(declared[name].heading or name for name in shown)], rows)


def declarations(records: Sequence[Record], names: Sequence[str]) -> dict[str, Column]:
    """Return column name -> declaration, from the first record that declares it. Raises KeyError where none does."""
    known = {name: declared for record in reversed(records) for name, declared in record.columns().items()}
    return {name: known[name] for name in names}


def frame_rows(lines: Sequence[Line], names: Sequence[str], first: str) -> list[dict[str, Any]]:
    """Return a data frame's rows as `table` prints them, a row per line with records.

    A row has the line's name in the column `first`, its configuration, and per name the value with the ends of its
    interval, `<name>_low` and `<name>_high`. A line without a name has the one above it.
    """
    rows, last = [], ""
    for line in lines:
        if not line.records:
            continue
        last = line.name or last
        row: dict[str, Any] = {first: last, **_configuration_columns(line.records)}
        for name in names:
            if found := _cell(line.records, name):
                declared, value, ends = found
                limits = {"_low": ends.low, "_high": ends.high} if ends is not None else {}
                numbers = declared.numbers(value) if declared.numbers and value is not None else {"": value, **limits}
                row |= {f"{name}{suffix}": number for suffix, number in numbers.items()}
        rows.append(row)
    return rows


def _configuration_columns(records: Sequence[Record]) -> dict[str, Any]:
    """Return the configuration of a line's first record that has one as data frame columns; empty where none has.

    Of a pair it is the treatment's, beside the baseline's label.
    """
    for one in records:
        sides = [getattr(one, name, None) for name in ("config", "treatment", "baseline")]
        if configs := [side for side in sides if isinstance(side, EvictionConfig)]:
            shown, *others = configs  # the other of a pair is its baseline
            return {**config_columns(shown), **({"baseline": others[-1].label()} if others else {})}
    return {}


def _cell_text(records: Sequence[Record], name: str, separator: str) -> str:
    """Return a column's value and interval as text, from the first record with that column; else an empty string."""
    if found := _cell(records, name):
        declared, value, ends = found
        return declared.cell(value, ends, separator)
    return ""


def _cell(records: Sequence[Record], name: str) -> tuple[Column, Any, OptionalInterval] | None:
    """Return a column's declaration, value and interval, from the first record with that column; None without one."""
    for one in records:
        if declared := one.columns().get(name):
            ends = declared.interval(one) if declared.interval else getattr(one, f"{name}_interval", None)
            return declared, getattr(one, name), ends
    return None


def explanation(declared: Sequence[Column]) -> Table:
    """Return the table that explains columns: heading, meaning and unit of each."""
    rows = [
        [" ".join(column.heading.removeprefix("#").split()), text.capitalise(column.meaning), column.unit]
        for column in declared
    ]
    return Table("what the columns mean", ["column", "meaning", "unit"], rows)


def long_form(labels: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], arrays: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a data frame's rows, one per element of the arrays, which have one shape: labels, coordinates, values.

    Args:
        labels: columns that are the same in all rows.
        axes: name of each axis -> its coordinates.
        arrays: name -> array over these axes.
    """
    shape = tuple(map(len, axes.values()))
    flat = {name: np.broadcast_to(array, shape).reshape(-1).tolist() for name, array in arrays.items()}
    for row, coordinates in enumerate(product(*axes.values())):
        yield {
            **labels,
            **dict(zip(axes, coordinates, strict=True)),
            **{name: values[row] for name, values in flat.items()},
        }
