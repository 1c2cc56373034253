"""Kept positions as formats 1 to 3 and their journals have them, a row of numbers, as this version's codes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv import kept_code
from perturbkv.schema import FORMER, KEPT
from perturbkv.storage.merge import Arrays, distinct_places

(POSITIONS,) = FORMER
_BESIDE = ("kept_offset", "kept_count", "prompt_tokens")
"""What has to be known of a sample beside its positions."""


def asked(names: Iterable[str]) -> list[str]:
    """What to read of a sample of a former version, where these variables are wanted."""
    wanted = list(names)
    beside = () if set(KEPT).isdisjoint(wanted) else (POSITIONS, *_BESIDE)
    return list(dict.fromkeys([*(name for name in wanted if name not in KEPT), *beside]))


def with_codes(arrays: Arrays, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Those of the named variables of one sample of a former version, of which what is `asked` was read."""
    found = {**arrays, **(codes(arrays) if POSITIONS in arrays else {})}
    return {name: found[name] for name in names if name in found and name != POSITIONS}


def codes(arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Codes of one sample's positions; heads that shared a place still do."""
    offsets, counts = arrays["kept_offset"], arrays["kept_count"]
    first, place = distinct_places(offsets, counts)
    starts, own = offsets.reshape(-1)[first], counts.reshape(-1)[first]
    positions = arrays[POSITIONS][kept_code.places(starts, own)]
    code, lengths = kept_code.of_positions(positions, own, int(arrays["prompt_tokens"]))
    begins = np.cumsum(lengths) - lengths
    return dict(
        zip(KEPT, (begins[place].reshape(offsets.shape), lengths[place].reshape(offsets.shape), code), strict=True)
    )


def in_rows(samples: Mapping[int, Arrays], shape: tuple[int, ...]) -> dict[str, NDArray[Any]]:
    """Codes of all samples one behind the other, from those of each complete one by its place along `sample`."""
    offsets, lengths = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    rows, filled = [np.zeros(0, dtype=np.uint8)], 0
    for place, one in samples.items():
        offsets[place], lengths[place] = one["kept_offset"] + filled, one["kept_length"]
        rows.append(one["kept_code"])
        filled += len(rows[-1])
    return dict(zip(KEPT, (offsets, lengths, np.concatenate(rows)), strict=True))
