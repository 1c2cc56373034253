"""One sample's part of a trace file, whichever version wrote it, its kept positions checked and as codes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.schema import KEPT
from perturbkv.storage import former_kept
from perturbkv.storage.contents import check_codes, check_positions
from perturbkv.storage.hdf5 import StoredFile
from perturbkv.trace import part_of

CODE = KEPT[2]


def holds(file: StoredFile, name: str) -> bool:
    """Whether a file holds a variable, kept positions as a former version has them too."""
    return name in file or (name in KEPT and is_former(file))


def is_former(file: StoredFile) -> bool:
    """Whether a file has kept positions as formats 1 to 3 have them."""
    return former_kept.POSITIONS in file


def sample_of(file: StoredFile, names: Iterable[str], place: int) -> dict[str, NDArray[Any]]:
    """Those of the named variables that a complete sample has, as in a `SampleTrace`; its bytes alone are read.

    Raises TraceError where its kept positions are none.
    """
    wanted = list(names)
    read = former_kept.asked(wanted) if is_former(file) else wanted
    held = part_of(file.read, [name for name in read if name in file], place)
    if not {CODE, former_kept.POSITIONS}.isdisjoint(held):
        _check(file, held, place)
    return former_kept.with_codes(held, wanted) if is_former(file) else held


def all_codes(file: StoredFile) -> dict[str, NDArray[Any]]:
    """`KEPT` of all samples of a file of a former version, encoded one sample at a time."""
    complete = np.flatnonzero(file.read("complete"))
    return former_kept.in_rows(
        {int(place): sample_of(file, KEPT, int(place)) for place in complete}, file.shape("kept_count")
    )


def _check(file: StoredFile, held: dict[str, NDArray[Any]], place: int) -> None:
    """Of this one sample."""
    told = {name: file.read(name, place)[np.newaxis] for name in ("kept_count", "prompt_tokens")}
    told |= {name: held[name][np.newaxis] for name in KEPT[:2] if name in held}
    if CODE in held:
        check_codes(file.path, told, np.array([True]), held[CODE])
    else:
        check_positions(file.path, told, np.array([True]), held[former_kept.POSITIONS])
