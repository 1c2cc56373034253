"""Reading an HDF5 file: whatever HDF5 cannot read is a TraceError of one line.

HDF5 checks the sums of numbers (Fletcher32), headers and indices as it reads them; `trace_file` checks once that the
contents are a trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import h5py
import numpy as np
from numpy.typing import NDArray

from perturbkv.errors import TraceError, TraceUnavailableError

_HDF5_ERRORS = (OSError, LookupError, RuntimeError, ValueError, TypeError, AttributeError, ArithmeticError, MemoryError)
"""Exceptions that h5py raises on a defective file."""
_OPEN_MESSAGE = "already open for write"
"""Part of HDF5's message for a file that was not closed after writing, which need not be damaged."""


@dataclass(frozen=True)
class StoredVariable:
    """The description of a variable in a trace file, without its numbers."""

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    units: str
    long_name: str
    nbytes: int


@contextmanager
def open_file(path: Path) -> Iterator[StoredFile]:
    """Open an HDF5 file for reading, and yield it. Raises TraceError for a file that HDF5 cannot open."""
    try:
        file = h5py.File(path, "r")
    except _HDF5_ERRORS as error:
        if isinstance(error, OSError) and (error.errno is not None or _OPEN_MESSAGE in str(error)):
            raise TraceUnavailableError(path, error) from error
        raise TraceError(
            f"expected a trace file (HDF5) at {path}, got one that is no HDF5, truncated or damaged; make it again"
        ) from error
    with file:
        yield StoredFile(file, path)


class StoredFile:
    """An HDF5 file that is open for reading; every method raises TraceError for a defect of the file."""

    def __init__(self, file: h5py.File, path: Path) -> None:
        self.path = path
        self._file = file
        self._scale_names: dict[int, str] = {}

    def __contains__(self, name: str) -> bool:
        with self._translate_errors(name):
            return name in self._file

    def names(self) -> list[str]:
        """Return the names of all items in the file."""
        with self._translate_errors("its variables"):
            return list(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a variable or an axis."""
        return tuple(self._dataset(name).shape)

    def holds_text(self, name: str) -> bool:
        """Return whether a variable holds text instead of numbers."""
        with self._translate_errors(f"the type of {name}"):
            return self._dataset(name).dtype.kind not in "biuf"  # truth values, whole numbers and floats

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the axis name of each dimension of a variable; 'none' where it has none."""
        with self._translate_errors(f"the axes of {name}"):
            return self._axis_names(self._dataset(name))

    def describe_unknown(self, name: str) -> StoredVariable | None:
        """Return the description of a variable that is not part of the format.

        None for an item that is no variable, and for one without axes, unit or meaning.
        """
        with self._translate_errors(f"the variable {name}"):
            item = self._file.get(name)
            if not isinstance(item, h5py.Dataset) or item.is_scale:
                return None
            axes, units, meaning = self._axis_names(item), item.attrs.get("units"), item.attrs.get("long_name")
            if not axes or "none" in axes or not isinstance(units, str) or not isinstance(meaning, str):
                return None
            return StoredVariable(axes, item.shape, str(item.dtype), units, meaning, int(item.nbytes))

    @cached_property
    def attributes(self) -> Mapping[str, str | int | float]:
        """Attributes of the file that are texts or single numbers, by name."""
        with self._translate_errors("its attributes"):
            values = {key: value.item() if np.isscalar(value) and hasattr(value, "item") else value
                      for key, value in self._file.attrs.items()}  # fmt: skip
        return {key: value for key, value in values.items() if isinstance(value, str | int | float)}

    def text_attribute(self, name: str, key: str) -> str:
        """Return the text attribute `key` of a variable."""
        with self._translate_errors(f"the text '{key}' of {name}"):
            return str(self._dataset(name).attrs[key])

    def read(self, name: str, where: Any = ()) -> NDArray[Any]:
        """Return a variable's numbers or texts at the index `where`, by default all of them."""
        dataset = self._dataset(name)
        with self._translate_errors(f"the numbers of {name}"):
            return np.asarray((dataset.asstr() if dataset.dtype.kind == "O" else dataset)[where])

    def refuse(self, expected: str, got: str) -> NoReturn:
        """Raise TraceError for a damaged file, with a message of the expected and the actual content."""
        advice = "the file is damaged or was changed since it was made; make it again"
        raise TraceError(f"expected {expected} in {self.path}, got {got[:200]}; {advice}")

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Turn exceptions of HDF5 calls inside the block into a TraceError on reading `what`."""
        try:
            yield
        except _HDF5_ERRORS:
            self.refuse(what, "what HDF5 cannot read")

    def _dataset(self, name: str) -> h5py.Dataset:
        """Return the HDF5 dataset of a variable or an axis."""
        with self._translate_errors(f"the variable {name}"):
            item = self._file[name]
        if not isinstance(item, h5py.Dataset):
            self.refuse(f"the variable {name}", "something else of this name")
        return item

    def _axis_names(self, item: h5py.Dataset) -> tuple[str, ...]:
        """Return the name of each dimension's scale; 'none' for a dimension without one."""
        return tuple(self._axis_name(dim[0]) if len(dim) else "none" for dim in item.dims)

    def _axis_name(self, scale: h5py.Dataset) -> str:
        """Return the name of a scale, which HDF5 looks for among all items: asked once for each place in the file."""
        place = h5py.h5o.get_info(scale.id).addr
        if place not in self._scale_names:
            self._scale_names[place] = scale.name.lstrip("/")
        return self._scale_names[place]
