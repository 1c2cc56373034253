"""The layout of a trace file: format, axes, variables, smallest size and checksums.

Checksums are CRC-32. HDF5's own checksums detect a changed chunk but not a moved one, and cover only the addresses of
texts. So every variable along `sample` has a checksum for each sample, every other one a single checksum, over its
numbers as they are in the file: little-endian, the last axis fastest; texts in UTF-8, each followed by a NUL.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.schema import VARIABLES, Variable

FORMAT, FORMAT_VERSION = "perturbkv-trace", 4
AXES = {
    "sample": "sample id",
    "config": "eviction configuration",
    "step": "decode step",
    "layer": "decoder layer",
    "head": "query head",
    "answer_token": "place in a generated answer",
    "d_head": "component of a head's output",
    "d_model": "component of a hidden state",
    "key": "position of a cache entry",
    "kept_byte": "place in kept_code",
    "prompt_entry": "place in prompt_token",
    "lost_entry": "place among the evicted entries that add most",
}
"""Axis of a file -> the meaning of its coordinate."""
FLAGS = {
    "failure": Variable((), "1", "why the sample failed; empty where it is complete", "str"),
    "complete": Variable((), "1", "1 where every number of the sample is there", "uint8"),
}
"""Variables of a file beyond those of a trace: the state of each sample."""
STORED = {**VARIABLES, **FLAGS}


def least_bytes(sizes: Mapping[str, int], names: set[str]) -> int:
    """Return a lower bound of a trace file's bytes: those of its prompts' tokens, which are uncompressed."""
    variables = [
        variable for name, variable in VARIABLES.items() if name in names and variable.in_rows and name != "kept_code"
    ]
    return sum(
        math.prod(sizes[axis] for axis in variable.axes) * np.dtype(variable.dtype).itemsize for variable in variables
    )


CHECKSUM = "crc32"
"""Name of the attribute with checksums: on a variable those of its numbers, on the file those of all texts."""


def checksum_of(block: NDArray[Any], before: int = 0) -> int:
    """Return the CRC-32 of a block of numbers or texts, continued from the CRC-32 `before`."""
    if block.dtype.kind in "OU":
        return zlib.crc32("".join(f"{text}\0" for text in block.flat).encode(), before)
    return zlib.crc32(np.ascontiguousarray(block, dtype=block.dtype.newbyteorder("<")).data, before)


def checksums_agree(sums: NDArray[np.uint32] | None, numbers: NDArray[Any], where: Any, name: str) -> bool:
    """Return whether numbers read at the index `where` of a variable match the stored checksums.

    True where there are no checksums, and for a part of a variable that has a single one.
    """
    if sums is None:
        return True
    if name not in STORED or STORED[name].axes[0] != "sample":
        return where != () or (len(sums) == 1 and checksum_of(numbers) == sums[0])
    if where == ():
        blocks = [numbers[index : index + 1] for index in range(len(numbers))]
        return len(sums) == len(blocks) and all(
            checksum_of(block) == expected for block, expected in zip(blocks, sums, strict=True)
        )
    return not isinstance(where, int) or (where < len(sums) and checksum_of(numbers) == sums[where])


def checksum_text(units: str, long_name: str) -> str:
    """Return a variable's unit and meaning joined into one text for its checksum."""
    return f"{units}\0{long_name}"


def checksum_document(attributes: Mapping[str, str], texts: Mapping[str, str]) -> str:
    """Return the checksums of the file's attributes and of the variables' units and meanings, as JSON text."""
    return json.dumps({"attributes": _text_checksums(attributes), "variables": _text_checksums(texts)}, sort_keys=True)


def first_difference(document: str, attributes: Mapping[str, str], texts: Mapping[str, str]) -> str | None:
    """Return the name of the first attribute or variable with a missing or changed text; None if all are intact.

    `document` is the text of `checksum_document`; texts without a checksum in it are ignored. Raises ValueError for
    any other document.
    """
    checksums = json.loads(document)
    if not isinstance(checksums, dict) or checksums.keys() != {"attributes", "variables"}:
        raise ValueError("no checksums")
    for kind, values in (("attributes", attributes), ("variables", texts)):
        sums = _text_checksums(values)
        for name, expected in checksums[kind].items():
            if sums.get(name) != expected:
                return str(name)
    return None


def _text_checksums(texts: Mapping[str, str]) -> dict[str, int]:
    """Return name -> CRC-32 of the text of that name."""
    return {name: zlib.crc32(text.encode()) for name, text in texts.items()}
