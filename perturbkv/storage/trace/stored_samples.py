"""One sample's part of a trace file, its kept positions checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.schema import KEPT
from perturbkv.storage.trace.hdf5 import StoredFile
from perturbkv.storage.trace.validation import check_codes
from perturbkv.trace import part_of


def sample_of(file: StoredFile, names: Iterable[str], place: int) -> dict[str, NDArray[Any]]:
    """Those of the named variables that a complete sample has, as in a `SampleTrace`; its bytes alone are read.

    Raises TraceError where its kept positions are none.
    """
    held = part_of(file.read, [name for name in names if name in file], place)
    if KEPT[2] in held:
        told = {name: file.read(name, place)[np.newaxis] for name in ("kept_count", "prompt_tokens")}
        told |= {name: held[name][np.newaxis] for name in KEPT[:2] if name in held}
        check_codes(file.path, told, np.array([True]), held[KEPT[2]])
    return held
