"""Precision of stored entries and correction for evicted ones: their options, and the bits that they take.

A cache in full precision has 16 bits a number, whatever dtype a run computes in: all byte counts use that unit. The
correction follows METHOD, the split of an evicted output: `o − ô = (1 − S)(μ_gone − μ_kept)`, so that `ô + (1 −
Ŝ)(μ̂_gone − ô)`, with a stored mean and a predicted mass, recovers part of the loss. It amounts to attention with one
more entry per query head.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from perturbkv.configs.choice import UNNAMED, Choice, parse, split_outside_brackets
from perturbkv.configs.number_formats import (
    BLOCK,
    CODES,
    FULL_BITS,
    GROUP,
    INTEGER,
    KEYS,
    KINDS,
    VALUES,
    Code,
    CodeOption,
    LayersOption,
    NumberFormat,
    check_layers,
    format_of,
    layer_codes,
    shortest_code,
)
from perturbkv.configs.option import Option, complete_choice
from perturbkv.errors import ConfigError, UnknownNameError
from perturbkv.user_files import MIB, FileKind, is_path

FULL, QUANTISE = "full", "quantise"
PRECISIONS = {
    FULL: "16 bits a number, as the model's own cache",
    QUANTISE: "what is kept before the window in few bits: integers as KIVI's, fp8, rotated codebooks, q8_0, q4_0",
}
_AS_BITS, _ALL_LAYERS = "bits", "none"
PRECISION_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    FULL: {},
    QUANTISE: {
        "bits": CodeOption(
            4,
            "of a stored number: 16, 8, 4, 2, 4-channel, 4-token (integers, keys by channel and values by token unless "
            "named), fp8, fp8-tensor, rotated-1, -2, -3, -4, -8, q8_0, q4_0",
        ),
        KEYS: CodeOption(_AS_BITS, "likewise, of keys; 16 where only values are given", omitted=True),
        VALUES: CodeOption(_AS_BITS, "likewise, of values; 16 where only keys are given", omitted=True),
        "group": Option(GROUP, "integers that share a scale and a minimum", low=1),
        "fill": Option(0, "head size d_h of a model, for which b counts bytes: as many entries as b of 16 bits take"),
        "by_layer": LayersOption(
            _ALL_LAYERS, "decoder layers with bits of their own: '0, 29: 16; 3-6: keys=8'", omitted=True
        ),
    },
}
_MASS_BITS = 32
"""Bits of a log-mass."""
_RULES = FileKind("rules of precision as text", ConfigError, MIB, "one a line: keys=4, values=2, then layers 0, 29: 16")
_OTHER_FORMS = "or bits alone, 4 or fp8; rules, 'keys=4, values=2; layers 0, 29: 16'; or a file of rules"
_LAYER_RULE = re.compile(r"layers?\s+(.*)")


def as_precision(precision: Choice | str) -> Choice:
    """Return a choice unchanged, or that of a text: `quantise(keys=4)`, rules, or the name of a file of rules.

    Rules stand in lines or between semicolons: one for all layers, `keys=4, values=2`, without which these have 16
    bits, and any for some, `layers 0, 29: 16`. Raises UnknownNameError for a choice of another name, ConfigError for
    other rules, two rules for all layers, and a file that cannot be read.
    """
    choice = precision if isinstance(precision, Choice) else _parse_rules(str(precision))
    if choice.name not in PRECISIONS:
        raise UnknownNameError(choice.name, "precision", PRECISIONS, _OTHER_FORMS)
    return choice


def _parse_rules(precision: str) -> Choice:
    """Return the choice that a text, or the file of its name, denotes. Raises ConfigError as `as_precision`."""
    text = _RULES.read_text(Path(precision).expanduser()) if _is_file(precision) else precision
    parts = [part.strip() for part in split_outside_brackets(text.replace("\n", ";"), ";") if part.strip()]
    of_layers = [found[1] for part in parts if (found := _LAYER_RULE.fullmatch(part))]
    general = [part for part in parts if not _LAYER_RULE.fullmatch(part)]
    if len(general) > 1 or not parts:
        raise ConfigError(f"expected one rule for all layers in a precision, got '{'; '.join(general)}'")
    choice = _parse_general(general[0]) if general else Choice(FULL)
    if not of_layers:
        return choice
    options = {"bits": FULL_BITS} if choice.name == FULL else choice.options
    rules = [str(options["by_layer"])] if "by_layer" in options else []
    return Choice(QUANTISE, {**options, "by_layer": "; ".join([*rules, *of_layers])})


def _is_file(text: str) -> bool:
    """Return whether a precision's text is the name of a file: one that exists, or that ends in .txt."""
    if text in CODES or text.partition("(")[0].strip() in PRECISIONS:
        return False
    path = Path(text).expanduser()
    return text.endswith(".txt") or (is_path(path) and path.is_file())


def _parse_general(text: str) -> Choice:
    """Return the precision of a rule for all layers: a choice, a code, or options such as `keys=4, values=2`."""
    if text not in CODES and (text.partition("(")[0].strip() in PRECISIONS or "=" not in text):
        return parse(text)
    choice = parse(f"{QUANTISE}({text})")
    return Choice(QUANTISE, {name if name != UNNAMED else "bits": value for name, value in choice.options.items()})


def complete_precision(precision: Choice | str) -> Choice:
    """Return a precision with all its options: `bits` where keys and values are alike, else `keys` and `values`.

    Where one of these alone is given, without bits, the other has 16 bits. Raises UnknownNameError for an unknown name
    or code, ConfigError for a wrong option and as `as_precision`.
    """
    choice = as_precision(precision)
    if "bits" not in choice.options and len(choice.options.keys() & {*KINDS}) == 1:
        choice = Choice(choice.name, {**choice.options, "bits": FULL_BITS})
    complete = complete_choice(choice, f"precision '{choice.name}'", PRECISION_OPTIONS[choice.name])
    if choice.name == FULL:
        return complete
    if {"bits", *KINDS} <= choice.options.keys():
        raise ConfigError("bits of precision 'quantise' has no effect beside keys and values; leave it out")
    others = complete.drop(["bits", *KINDS])
    if others.options.get("fill") and "by_layer" in others.options:
        raise ConfigError(
            "fill of precision 'quantise' takes layers that are alike, got layers of their own; use fill=0"
        )
    codes = {kind: shortest_code(code, kind) for kind, code in general_codes(complete).items()}
    shown = {"bits": codes[KEYS]} if codes[KEYS] == codes[VALUES] else codes
    return Choice(QUANTISE, {**shown, **others.options}, others.defaults)


def general_codes(precision: Choice) -> dict[str, Code]:
    """Return the codes of keys and values in the layers without a rule."""
    bits = precision.options.get("bits", FULL_BITS)  # of full precision, which has no options
    own = {kind: precision.options.get(kind, _AS_BITS) for kind in KINDS}
    return {kind: bits if code == _AS_BITS else code for kind, code in own.items()}


@functools.cache
def number_formats(precision: Choice, layer: int | None = None) -> tuple[NumberFormat, NumberFormat]:
    """Return the formats of keys and of values in a decoder layer; None: in the layers without a rule."""
    codes = general_codes(precision)
    if layer is not None and "by_layer" in precision.options:
        codes |= layer_codes(precision["by_layer"]).get(layer, {})
    return format_of(codes[KEYS], KEYS), format_of(codes[VALUES], VALUES)


def all_formats(precision: Choice) -> set[NumberFormat]:
    """Return the formats that keys or values of any layer have."""
    ruled = layer_codes(precision["by_layer"]) if "by_layer" in precision.options else {}
    return {each for layer in (None, *ruled) for each in number_formats(precision, layer)}


def bits_text(precision: Choice) -> str:
    """Return the bits of a stored number's code: `4`, `4/2` of keys and values, `4/2, by layer`."""
    bits = [str(each.bits) for each in number_formats(precision)]
    return "/".join(dict.fromkeys(bits)) + (", by layer" if "by_layer" in precision.options else "")


def stored_bits(
    precision: Choice, lengths: Sequence[int], window: int, d_key: int, d_value: int, layer: int | None = None
) -> int:
    """Return the bits of the keys and values of kept sets of these lengths, including scales, minima and norms.

    `window` of each set's entries are stored in 16 bits in any precision. `layer` is the decoder layer; None: one
    without a rule.
    """
    counts = [max(0, length - window) for length in lengths]
    formats, group = number_formats(precision, layer), int(precision.options.get("group", GROUP))
    full_bits = FULL_BITS * (d_key + d_value) * (sum(lengths) - sum(counts))
    return full_bits + sum(
        each.stored_bits(counts, width, group) for each, width in zip(formats, (d_key, d_value), strict=True)
    )


def entries_in_bytes(precision: Choice, budget: int, window: int, most: int) -> int:
    """Return the number of entries, at most `most`, that fit into the bytes of `budget` 16-bit entries.

    For a precision without `fill` it is the budget itself, or `most`. `window` of the entries are stored in 16 bits in
    any precision.
    """
    d_head = int(precision.options.get("fill", 0))
    if not d_head:
        return min(budget, most)
    available = stored_bits(Choice(FULL), [budget], window, d_head, d_head)
    low, high = min(budget, window), most  # of the search by halves: `low` entries fit
    while low < high:
        middle = (low + high + 1) // 2
        fits = stored_bits(precision, [middle], window, d_head, d_head) <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def check_precisions(precisions: Iterable[Choice], layers: Sequence[int], d_key: int, d_value: int, model: str) -> None:
    """Raise ConfigError for a precision that a model cannot have.

    It has a rule for a layer that is not among `layers`, those whose entries the model stores; blocks that its heads
    are no multiple of; or a `fill` that is neither 0 nor the one size of its heads.
    """
    for precision in precisions:
        if "by_layer" in precision.options:
            check_layers(str(precision), precision["by_layer"], layers, model)
        blocks = any(each.scaled == "block" for each in all_formats(precision))
        if blocks and (d_key % BLOCK or d_value % BLOCK):
            raise ConfigError(
                f"precision '{precision}' has blocks of {BLOCK} components, and model '{model}' has keys of {d_key} "
                f"and values of {d_value}"
            )
        fill = precision.options.get("fill", 0)
        if fill and d_key != d_value:
            raise ConfigError(
                f"fill of precision '{precision}' is one size of keys and values, and model '{model}' has keys of "
                f"{d_key} and values of {d_value} components; use 0, where b counts entries"
            )
        if fill not in (0, d_key):
            raise ConfigError(
                f"fill of precision '{precision}' must be the size of a head, {d_key} in model '{model}', or 0, where "
                f"b counts entries; got {fill}"
            )


def has_few_bits(precision: Choice, layer: int) -> bool:
    """Return whether keys or values of a decoder layer are stored in fewer than 16 bits."""
    return any(each.bits < FULL_BITS for each in number_formats(precision, layer))


def has_integers(precision: Choice) -> bool:
    """Return whether anything is stored as integers, which share scales in groups."""
    return any(each.kind == INTEGER for each in all_formats(precision))


NONE, CORRECTED, ORACLE = "none", "corrected", "corrected-oracle"
STORED, LINEAR = "stored", "linear"
CORRECTIONS = {
    NONE: "the output of what is kept, as it is",
    CORRECTED: "one entry per query head stands in for what went: its mean value under the window's mean query",
    ORACLE: "the same mean with the true mass of what went, known by the keys that went: a control, no method",
}
CORRECTION_OPTIONS: Mapping[str, Mapping[str, Option]] = {
    NONE: {},
    CORRECTED: {
        "mass": Option(
            STORED, "of what went: stored under the mean query, or linear in the query at hand", known=(STORED, LINEAR)
        ),
    },
    ORACLE: {},
}


def needs_plain_logits(correction: Choice) -> bool:
    """Return whether a correction holds only where logits are linear in the query, without a soft cap."""
    return correction.options.get("mass") == LINEAR


def correction_bits(correction: Choice, evicted: int, heads: int, d_key: int, d_value: int) -> int:
    """Return the bits of a correction for a kept set with `evicted` evicted entries and `heads` query heads.

    0 where nothing was evicted. Per head a mean value and a log-mass of 32 bits, with `linear` a mean key too; for the
    oracle a mean value per head, and the evicted keys once for all heads.
    """
    if correction.name == NONE or not evicted:
        return 0
    if correction.name == ORACLE:
        return FULL_BITS * (d_value * heads + d_key * evicted)
    components = d_value + d_key if correction["mass"] == LINEAR else d_value
    return heads * (FULL_BITS * components + _MASS_BITS)
