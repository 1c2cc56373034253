"""CRC-32 of what a trace file holds, sample by sample: numbers that were changed by whatever means are found.

HDF5's own sums tell whether a chunk is the one that was written, not whether it lies where it was, and of texts they
sum the address alone. Every variable along `sample` has a sum for each sample, every other one a single sum, over its
numbers as they lie in the file: little-endian, the last axis fastest; texts in UTF-8, each with a NUL behind it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.storage.trace.layout import STORED

NAME = "crc32"
"""The attribute of a variable that has its sums, and that of the file that has the texts'."""


def of(block: NDArray[Any], before: int = 0) -> int:
    """The sum of numbers or texts; of those `before`, where these follow them."""
    if block.dtype.kind in "OU":
        return zlib.crc32("".join(f"{text}\0" for text in block.flat).encode(), before)
    return zlib.crc32(np.ascontiguousarray(block, dtype=block.dtype.newbyteorder("<")).data, before)


def agree(sums: NDArray[np.uint32] | None, numbers: NDArray[Any], where: Any, name: str) -> bool:
    """Whether numbers that were read at `where` of a variable have its sums.

    True where there are no sums, and where a part was read of what has but one.
    """
    if sums is None:
        return True
    if name not in STORED or STORED[name].axes[0] != "sample":
        return where != () or (len(sums) == 1 and of(numbers) == sums[0])
    if where == ():
        blocks = [numbers[place : place + 1] for place in range(len(numbers))]
        return len(sums) == len(blocks) and all(of(block) == one for block, one in zip(blocks, sums, strict=True))
    return not isinstance(where, int) or (where < len(sums) and of(numbers) == sums[where])


def words(units: str, long_name: str) -> str:
    """What a variable says of itself, as one text to be summed."""
    return f"{units}\0{long_name}"


def document(attributes: Mapping[str, str], texts: Mapping[str, str]) -> str:
    """Sums of the file's own attributes, and of what each variable says of itself, as JSON."""
    return json.dumps({"attributes": _of_texts(attributes), "variables": _of_texts(texts)}, sort_keys=True)


def differing(held: str, attributes: Mapping[str, str], texts: Mapping[str, str]) -> str | None:
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
