"""What edits of a trace file take in hand."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np

from tests.support.changed import SUMS

RAW = ("head_output", "hidden", "attention_full", "head_output_full", "hidden_full")


def any_variable(file: h5py.File, draw: np.random.Generator) -> str:
    names = [name for name in file if not file[name].is_scale]
    return names[int(draw.integers(len(names)))]


def variable_of_numbers(file: h5py.File, draw: np.random.Generator, least: int = 1) -> str:
    """A variable of numbers that commands read."""
    names = [
        name
        for name in file
        if not file[name].is_scale and file[name].dtype.kind in "fiu" and file[name].ndim >= least and name not in RAW
    ]
    return names[int(draw.integers(len(names)))]


def any_axis(file: h5py.File, draw: np.random.Generator) -> str:
    names = [name for name in file if file[name].is_scale]
    return names[int(draw.integers(len(names)))]


def remade(file: h5py.File, name: str, data: Any, axes: list[str] | None = None, **options: Any) -> h5py.Dataset:
    """The variable with other data, everything else as it was."""
    attrs = {key: value for key, value in file[name].attrs.items() if key in ("units", "long_name", SUMS)}
    held = [dim[0].name if len(dim) else None for dim in file[name].dims] if axes is None else axes
    del file[name]
    made = file.create_dataset(name, data=data, **options)
    for key, value in attrs.items():
        made.attrs[key] = value
    for dim, axis in zip(made.dims, held, strict=False):
        if axis is not None and axis in file:
            dim.attach_scale(file[axis])
    return made


def set_one(file: h5py.File, name: str, value: Any, draw: np.random.Generator) -> None:
    """One number of a variable."""
    held = file[name][()]
    held.flat[int(draw.integers(held.size))] = value
    file[name][...] = held
