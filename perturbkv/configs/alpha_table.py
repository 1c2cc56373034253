"""Tables of α, the share of stage 1, per layer or per head, read from a file (METHOD: Select). No torch here."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from perturbkv.configs.layer_types import format_layers, measured_layers
from perturbkv.configs.option import Option
from perturbkv.errors import ConfigError
from perturbkv.escaping import escape_line
from perturbkv.user_files import MIB, FileKind

GLOBAL, LAYER, HEAD = "global", "layer", "head"
BY = (GLOBAL, LAYER, HEAD)
_SHAPES = {GLOBAL: "a number", LAYER: "a list of a number per layer", HEAD: "a list of numbers per head for each layer"}
_FILE = FileKind("shares of stage 1 as JSON", ConfigError, 16 * MIB, "studies/alpha.py writes them")
_SEPARATOR, _DIGITS = "@", 8


@dataclass(frozen=True)
class AlphaTable:
    """A table of stage-1 shares: one number, one per layer, or one per head.

    Its text is `name@digest`, so that two files of one name are two choices. The same table under another name is
    another choice too, as a trace identifies configurations by their text; one run does not accept both.

    Attributes:
        name: file name, without its folder.
        by: `global`, `layer` or `head`.
        shares: (layer, head) α in [0, 1]: one row where `by` is global; one number per row unless `by` is head.
        layers: the measured decoder layers of the rows; may be left out where `by` is global.

    Raises ConfigError for a share outside [0, 1], another shape, and a name with invisible characters.
    """

    name: str
    by: str
    shares: tuple[tuple[float, ...], ...]
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if escape_line(self.name) != self.name or {'"', "'"} <= set(self.name):
            name = escape_line(self.name)
            raise ConfigError(f"expected a file's name of visible characters and one kind of quote, got '{name}'")
        wrong = [share for row in self.shares for share in row if not 0 <= share <= 1]
        if wrong:
            raise ConfigError(f"expected every alpha of {self.name} in [0, 1], got {wrong[0]}")
        rows = 1 if self.by == GLOBAL else len(self.layers)
        if len(self.shares) != rows or not rows or not all(self.shares) or len({*map(len, self.shares)}) != 1:
            got = ", ".join(sorted({str(len(row)) for row in self.shares}))
            raise ConfigError(
                f"expected alpha of {self.name} to be {_SHAPES[self.by]}, for its {len(self.layers)} layers; got "
                f"{len(self.shares)} × {got or 0}"
            )

    @property
    def digest(self) -> str:
        """First digits of the SHA-256 of the table's content, independent of its name."""
        return hashlib.sha256(json.dumps([self.by, self.shares, self.layers]).encode()).hexdigest()[:_DIGITS]

    @property
    def mean(self) -> float:
        """Mean of all shares."""
        return statistics.mean(share for row in self.shares for share in row)

    def kept_set_shares(self, layer: int | None, sets: int) -> tuple[float, ...]:
        """Return α of each of the `sets` kept sets of a layer.

        A kept set that heads or layers share has the mean of their α. The mean of equal shares is that share, bit for
        bit.

        Args:
            layer: index among the measured layers; None where all of them share their kept sets.
            sets: number of kept sets, a divisor of the number of heads.
        """
        if layer is None:
            by_layer = [self.kept_set_shares(index, sets) for index in range(len(self.shares))]
            return tuple(map(statistics.mean, zip(*by_layer, strict=True)))
        row = self.shares[0 if self.by == GLOBAL else layer]
        if len(row) == 1:
            return row * sets
        if len(row) == sets:
            return row
        group = len(row) // sets
        return tuple(statistics.mean(row[first : first + group]) for first in range(0, len(row), group))

    def check(self, layers: Sequence[int], heads: int) -> None:
        """Raise ConfigError for a model with other measured layers or another number of query heads."""
        expected, got = [f"layers {format_layers(layers)}"], [f"layers {format_layers(self.layers)}"]
        if self.by == HEAD:
            expected, got = [*expected, f"{heads} heads"], [*got, f"{len(self.shares[0])} heads"]
        if expected != got and (self.layers or self.by != GLOBAL):
            raise ConfigError(
                f"alpha={self.name}: expected shares of {' and '.join(expected)}, as the model has them, got those of "
                f"{' and '.join(got)}; choose this model's: python studies/alpha.py"
            )

    def to_document(self) -> dict[str, Any]:
        """Return the table as a JSON object, the form stored in files and runs."""
        first = [row[0] for row in self.shares]
        shapes: Mapping[str, Any] = {GLOBAL: first[0], LAYER: first, HEAD: [list(row) for row in self.shares]}
        return {"by": self.by, "alpha": shapes[self.by], **({"layers": list(self.layers)} if self.layers else {})}

    @classmethod
    def from_document(cls, document: Any, name: str) -> Self:
        """Return the table in a JSON object of `to_document`, called `name`; a key `about` is passed over.

        Raises ConfigError for any other value.
        """
        if not isinstance(document, dict) or document.get("by") not in BY:
            got = type(document).__name__ if not isinstance(document, dict) else repr(document.get("by"))[:40]
            raise ConfigError(f'expected {{"by": "{"|".join(BY)}", "alpha": …, "layers": […]}} in {name}, got {got}')
        if strange := sorted(document.keys() - {"by", "alpha", "layers", "about"}):
            raise ConfigError(f"expected by, alpha, layers and about in {name}, got '{escape_line(strange[0])[:40]}'")
        by, layers = document["by"], document.get("layers", [])
        if not isinstance(layers, list) or not all(_is_number(int, layer) and layer >= 0 for layer in layers):
            raise ConfigError(f"expected layers of {name} to be decoder layers such as [0, 1], got {str(layers)[:40]}")
        return cls(name, by, _parse_rows(by, document.get("alpha"), name), tuple(layers))

    def __str__(self) -> str:
        return f"{self.name}{_SEPARATOR}{self.digest}"


def read_table(text: str) -> AlphaTable:
    """Return the table in a file; `text` is the path, or `path@digest` to require a certain digest.

    Raises ConfigError where the file holds no table, or a table of another digest.
    """
    file, separator, digest = text.rpartition(_SEPARATOR)
    has_digest = separator and len(digest) == _DIGITS and not Path(text).expanduser().exists()
    path = Path(file if has_digest else text).expanduser()
    _FILE.check(path)  # no pipe, as each configuration reads it
    table = AlphaTable.from_document(_FILE.read_json(path), path.name)
    if has_digest and table.digest != digest:
        raise ConfigError(f"expected the table {digest} in {path}, got {table.digest}: the file was changed")
    return table


def check_tables(shares: Iterable[float | AlphaTable], model_config: Any) -> None:
    """Raise ConfigError for a table that does not fit the model, or that occurs under two names."""
    names: dict[str, str] = {}
    for table in shares:
        if isinstance(table, AlphaTable):
            table.check(measured_layers(model_config), int(model_config.num_attention_heads))
            if names.setdefault(table.digest, table.name) != table.name:
                raise ConfigError(f"{names[table.digest]} and {table.name} hold one table of alpha; give one of them")


@dataclass(frozen=True)
class AlphaOption(Option):
    """An option for α: a number, or the file of a table."""

    def convert(self, value: Any, name: str, owner: str = "") -> Any:
        """Return a number or a table for α; a text is the path of a table's file.

        Raises ConfigError as `Option.convert` and `read_table`.
        """
        if isinstance(value, AlphaTable):
            return value
        return read_table(value) if isinstance(value, str) else super().convert(value, name, owner)


def _parse_rows(by: str, alpha: Any, name: str) -> tuple[tuple[float, ...], ...]:
    """Return the rows of `AlphaTable.shares` from JSON. Raises ConfigError for a wrong shape or type."""
    rows = [[alpha]] if by == GLOBAL else alpha
    if by == LAYER and isinstance(alpha, list):
        rows = [[share] for share in alpha]
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(_is_number(int | float, share) for share in row) for row in rows
    ):
        raise ConfigError(f"expected alpha of {name} to be {_SHAPES[by]}, got {str(alpha)[:40]}")
    return tuple(tuple(map(float, row)) for row in rows)


def _is_number(kind: Any, value: Any) -> bool:
    """Return whether a value is a number of the type `kind`; excludes booleans, NaN, and numbers from ±2**63 on."""
    return isinstance(value, kind) and not isinstance(value, bool) and abs(value) < 2**63
