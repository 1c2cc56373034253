"""What a trace file holds: its format, its axes, its variables, and the least room that they take.

CRC-32 of what a trace file holds, sample by sample: numbers that were changed by whatever means are found.

HDF5's own sums tell whether a chunk is the one that was written, not whether it lies where it was, and of texts they
sum the address alone. Every variable along `sample` has a sum for each sample, every other one a single sum, over its
numbers as they lie in the file: little-endian, the last axis fastest; texts in UTF-8, each with a NUL behind it.
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
"""Axis of a file -> what its coordinate is."""
FLAGS = {
    "failure": Variable((), "1", "why the sample failed; empty where it is complete", "str"),
    "complete": Variable((), "1", "1 where every number of the sample is there", "uint8"),
}
"""Variables that a file has beside those of a trace: the state of each sample."""
STORED = {**VARIABLES, **FLAGS}


def least_bytes(sizes: Mapping[str, int], names: set[str]) -> int:
    """Bytes that a trace's file takes at least: those of the prompts' tokens, which are stored uncompressed."""
    rows = [
        variable for name, variable in VARIABLES.items() if name in names and variable.in_rows and name != "kept_code"
    ]
    return sum(math.prod(sizes[axis] for axis in one.axes) * np.dtype(one.dtype).itemsize for one in rows)


CHECKSUM = "crc32"
"""The attribute of a variable that has its sums, and that of the file that has the texts'."""


def checksum_of(block: NDArray[Any], before: int = 0) -> int:
    """The sum of numbers or texts; of those `before`, where these follow them."""
    if block.dtype.kind in "OU":
        return zlib.crc32("".join(f"{text}\0" for text in block.flat).encode(), before)
    return zlib.crc32(np.ascontiguousarray(block, dtype=block.dtype.newbyteorder("<")).data, before)


def checksums_agree(sums: NDArray[np.uint32] | None, numbers: NDArray[Any], where: Any, name: str) -> bool:
    """Whether numbers that were read at `where` of a variable have its sums.

    True where there are no sums, and where a part was read of what has but one.
    """
    if sums is None:
        return True
    if name not in STORED or STORED[name].axes[0] != "sample":
        return where != () or (len(sums) == 1 and checksum_of(numbers) == sums[0])
    if where == ():
        blocks = [numbers[place : place + 1] for place in range(len(numbers))]
        return len(sums) == len(blocks) and all(
            checksum_of(block) == one for block, one in zip(blocks, sums, strict=True)
        )
    return not isinstance(where, int) or (where < len(sums) and checksum_of(numbers) == sums[where])


def checksum_words(units: str, long_name: str) -> str:
    """What a variable says of itself, as one text to be summed."""
    return f"{units}\0{long_name}"


def checksum_document(attributes: Mapping[str, str], texts: Mapping[str, str]) -> str:
    """Sums of the file's own attributes, and of what each variable says of itself, as JSON."""
    return json.dumps({"attributes": _of_texts(attributes), "variables": _of_texts(texts)}, sort_keys=True)


def differing_checksums(held: str, attributes: Mapping[str, str], texts: Mapping[str, str]) -> str | None:
    """The first attribute or variable that `document` summed otherwise, or that is gone; None where none is.

    What was not summed is passed over. Raises ValueError where `held` is no such document.
    """
    told = json.loads(held)
    if not isinstance(told, dict) or told.keys() != {"attributes", "variables"}:
        msg = "no sums"
        raise ValueError(msg)
    for kind, found in (("attributes", attributes), ("variables", texts)):
        sums = _of_texts(found)
        for name, expected in told[kind].items():
            if sums.get(name) != expected:
                return str(name)
    return None


def _of_texts(texts: Mapping[str, str]) -> dict[str, int]:
    return {name: zlib.crc32(text.encode()) for name, text in texts.items()}
