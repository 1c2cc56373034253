"""Formats of stored numbers by name, the bits that they take, and rules for single layers. No torch here.

A code is written as a number of bits or as a format's name, `4`, `fp8`, `rotated-3`, for keys and for values apart.
Rules for layers are written `0, 29: 16; 3-6: keys=8`: decoder layers, then a code for both kinds or for either.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perturbkv.configs.layer_types import format_layers
from perturbkv.configs.option import Option
from perturbkv.errors import ConfigError, UnknownNameError

FULL_BITS = 16
KEYS, VALUES = "keys", "values"
KINDS = (KEYS, VALUES)
WHOLE, INTEGER = "16", "integer"
BLOCK = 32
"""Components of a block of llama.cpp's formats."""
GROUP = 32
"""Numbers that share a scale and a minimum, where nothing else is said."""
_OWN_AXIS = {KEYS: "channel", VALUES: "token"}
"""Axis of integers where none is named, as KIVI has it (https://arxiv.org/abs/2402.02750)."""


@dataclass(frozen=True)
class NumberFormat:
    """A format of stored numbers.

    Attributes:
        kind: `integer`, `fp8`, `rotated`, `q8_0`, `q4_0`, or `16` for numbers as they are.
        bits: of a number's code.
        scaled: what has a scale of its own: groups of a `channel` or of a `token`, a `head`, a `tensor`, a `vector` or
            a `block` of 32 components; empty without scales.
    """

    kind: str
    bits: int
    scaled: str = ""

    def stored_bits(self, counts: Sequence[int], width: int, group: int) -> int:
        """Return the bits of kept sets of `counts` entries with `width` components, their scales included.

        Scales, minima and norms are 16-bit floats, those of fp8 32-bit floats, as in vLLM. The codebook of `rotated`
        follows from its bits and the map from its seed, so that neither is stored.
        """
        rows = sum(counts)
        numbers_beside = {
            "": 0,
            "channel": 2 * width * sum(math.ceil(count / group) for count in counts),
            "token": 2 * rows * math.ceil(width / group),
            "head": 2 * sum(count > 0 for count in counts),
            "tensor": 2 * (rows > 0),
            "vector": rows,
            "block": rows * math.ceil(width / BLOCK),
        }
        return self.bits * rows * width + 16 * numbers_beside[self.scaled]


FORMATS: Mapping[str, NumberFormat] = {
    WHOLE: NumberFormat(WHOLE, FULL_BITS),
    **{f"{bits}-{axis}": NumberFormat(INTEGER, bits, axis) for axis in _OWN_AXIS.values() for bits in (8, 4, 2)},
    "fp8": NumberFormat("fp8", 8, "head"),
    "fp8-tensor": NumberFormat("fp8", 8, "tensor"),
    **{f"rotated-{bits}": NumberFormat("rotated", bits, "vector") for bits in (8, 4, 3, 2, 1)},
    "q8_0": NumberFormat("q8_0", 8, "block"),
    "q4_0": NumberFormat("q4_0", 4, "block"),
}
CODES = (WHOLE, "8", "4", "2", *(name for name in FORMATS if name != WHOLE))
"""How codes are written: integers of 8, 4 or 2 bits have each kind's own axis where none is named."""
Code = int | str


def format_of(code: Code, kind: str) -> NumberFormat:
    """Return the format that a code denotes for keys or for values."""
    return FORMATS.get(f"{code}-{_OWN_AXIS[kind]}") or FORMATS[str(code)]


def shortest_code(code: Code, kind: str) -> Code:
    """Return a code as it is printed for keys or for values: without the axis that the kind has anyway."""
    return as_code(str(code).removesuffix(f"-{_OWN_AXIS[kind]}"), kind)


def as_code(value: Any, name: str) -> Code:
    """Return a code that a user wrote, numbers of bits as integers. Raises UnknownNameError, which tells its `name`."""
    if isinstance(value, bool) or not isinstance(value, int | str) or str(value) not in CODES:
        raise UnknownNameError(str(value), name, CODES, "see `perturbkv list policies quantise`")
    return int(value) if str(value).isdecimal() else value


@dataclass(frozen=True)
class CodeOption(Option):
    """An option for a code."""

    def convert(self, value: Any, name: str, owner: str = "") -> Any:
        """Return the default, or the code. Raises UnknownNameError."""
        return value if isinstance(value, str) and value == self.default else as_code(value, name)


@dataclass(frozen=True)
class LayersOption(Option):
    """An option for rules of layers."""

    def convert(self, value: Any, name: str, owner: str = "") -> Any:
        """Return the rules as they are printed. Raises ConfigError, UnknownNameError."""
        if value in (None, self.default):
            return self.default
        return "; ".join(
            f"{format_layers(layers)}: {_codes_text(codes)}" for layers, codes in _parse_layer_rules(str(value))
        )


Codes = Mapping[str, Code]
"""`keys`, `values` -> the code of that kind."""


@functools.cache
def layer_codes(rules: str) -> Mapping[int, Codes]:
    """Return decoder layer -> its codes, for the layers that rules name. Raises ConfigError, UnknownNameError."""
    return {layer: codes for layers, codes in _parse_layer_rules(rules) for layer in layers}


_LAYERS = re.compile(r"\s*\d{1,4}\s*(-\s*\d{1,4}\s*)?(,\s*\d{1,4}\s*(-\s*\d{1,4}\s*)?)*")


def _parse_layer_rules(text: str) -> list[tuple[list[int], Codes]]:
    """Return the rules as (ascending layers, codes) pairs. Raises ConfigError for a layer that is in two of them."""
    rules: list[tuple[list[int], Codes]] = []
    for part in text.split(";"):
        numbers, colon, codes = part.partition(":")
        if not (colon and _LAYERS.fullmatch(numbers)):
            raise ConfigError(f"expected rules of layers such as '0, 29: 16; 3-6: keys=8', got '{part.strip()}'")
        rules.append((_parse_layers(numbers), _parse_codes(codes)))
    layers = [layer for some, _ in rules for layer in some]
    if twice := [layer for layer in layers if layers.count(layer) > 1]:
        raise ConfigError(f"expected one rule for a layer, got two for layer {twice[0]} in '{text}'")
    return rules


def _parse_layers(text: str) -> list[int]:
    """Return the layers of a text such as `0, 3-6`."""
    ends = [[int(number) for number in part.split("-")] for part in text.split(",")]
    if backwards := next((part for part in ends if part[-1] < part[0]), None):
        raise ConfigError(f"expected layers such as {backwards[-1]}-{backwards[0]}, got {backwards[0]}-{backwards[-1]}")
    return sorted(layer for part in ends for layer in range(part[0], part[-1] + 1))


def _parse_codes(text: str) -> Codes:
    """Return the codes of a rule: one for both kinds, or `keys=…` and `values=…`. Raises ConfigError otherwise."""
    if "=" not in text:
        return {kind: shortest_code(as_code(text.strip(), "bits"), kind) for kind in KINDS}
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    codes = {name.strip(): code.strip() for name, code in pairs}
    if len(codes) < len(pairs) or not codes.keys() <= {*KINDS}:
        raise ConfigError(f"expected a rule of layers to give a code, or keys=… and values=…, got '{text.strip()}'")
    return {kind: shortest_code(as_code(codes[kind], kind), kind) for kind in KINDS if kind in codes}


def _codes_text(codes: Codes) -> str:
    """Return the codes of a rule as they are written."""
    if len(codes) == len(KINDS) and len({*codes.values()}) == 1:
        return str(codes[KEYS])
    return ", ".join(f"{kind}={code}" for kind, code in codes.items())


def check_layers(precision: str, rules: str, layers: Iterable[int], model: str) -> None:
    """Raise ConfigError for a rule of a layer that is not among the `layers` whose entries a model stores."""
    known = sorted(layers)
    if missing := sorted(layer_codes(rules).keys() - {*known}):
        raise ConfigError(
            f"precision '{precision}' has a rule for layer {missing[0]}, and model '{model}' stores measured entries "
            f"in layers {format_layers(known)}"
        )
