"""Whether a trace file's axes are what its run and its variables say; a result read by wrong labels is turned around.

And whether what counts or points into another axis stays within it.

Called once for every file that is opened; nothing behind it asks again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError
from perturbkv.schema import VARIABLES

_AGAIN = "the file was changed since it was made; make it again"
Shape = tuple[int, ...]
Counts = NDArray[np.int64]


def check_configs(path: Path, labels: Sequence[str], held: Sequence[str]) -> None:
    """Raise TraceError unless the coordinate `config` holds the labels of the run's configurations in their order."""
    if len(held) != len(labels):
        msg = (
            f"expected the {len(labels)} configurations of the run along 'config' in {path}, got {len(held)}; {_AGAIN}"
        )
        raise TraceError(msg)
    for place, (expected, got) in enumerate(zip(labels, held, strict=True)):
        if expected != got:
            where = f"at place {place} along 'config' in {path}"
            msg = f"expected '{expected}', as the run says, {where}, got '{got}'; {_AGAIN}"
            raise TraceError(msg)


def check_run(path: Path, lengths: Mapping[str, int], run: RunConfig) -> None:
    """Raise TraceError unless there are as many samples and steps as the run has."""
    for axis, expected in (("sample", run.samples), ("step", run.steps)):
        if lengths[axis] != expected:
            msg = f"expected the {expected} places of the run along '{axis}' in {path}, got {lengths[axis]}; {_AGAIN}"
            raise TraceError(msg)


def check_samples(path: Path, held: Sequence[str]) -> None:
    """Raise TraceError unless every sample id is there once."""
    if len(set(held)) < len(held):
        twice = next(name for name in held if list(held).count(name) > 1)
        msg = f"expected every sample id once along 'sample' in {path}, got '{twice}' twice; {_AGAIN}"
        raise TraceError(msg)


def check_places(path: Path, axis: str, held: NDArray[np.generic], measured: Sequence[int] | None = None) -> None:
    """Raise TraceError unless a coordinate counts its places from 0 on, or holds the layers that were measured."""
    if not np.array_equal(held, np.arange(len(held)) if measured is None else np.array(measured)):
        expected = f"0 … {len(held) - 1}" if measured is None else " ".join(map(str, measured))
        msg = f"expected the places {expected} along '{axis}' in {path}, got {held[:8].tolist()} …; {_AGAIN}"
        raise TraceError(msg)


def check_shapes(path: Path, lengths: Mapping[str, int], shapes: Mapping[str, Shape]) -> None:
    """Raise TraceError unless every variable is as long along each axis as the axis' coordinate."""
    for name, shape in shapes.items():
        axes = VARIABLES[name].axes if name in VARIABLES else ("sample",)
        expected = tuple(lengths[axis] for axis in axes)
        if shape != expected:
            msg = f"expected {name} of the shape {expected} along {' '.join(axes)} in {path}, got {shape}; {_AGAIN}"
            raise TraceError(msg)


def check_measured(path: Path, measured: Counts, ok: NDArray[np.bool_], steps: int) -> None:
    """Raise TraceError unless `steps_measured` is 1 … `steps` in every complete sample and 0 in every failed one."""
    wrong = np.where(ok, (measured < 1) | (measured > steps), measured != 0)
    if wrong.any():
        place = int(wrong.argmax())
        expected = f"1 … {steps}" if ok[place] else "0, as the sample failed,"
        msg = f"expected steps_measured of {expected} for sample {place} in {path}, got {measured[place]}; {_AGAIN}"
        raise TraceError(msg)


def check_rows(path: Path, axis: str, names: tuple[str, str], offset: Counts, count: Counts, held: int) -> None:
    """Raise TraceError unless the places that two variables tell, offset and count, lie within the `held` of `axis`."""
    wrong = (offset < 0) | (count < 0) | (count > held - offset)
    if wrong.any():
        where = tuple(np.argwhere(wrong)[0].tolist())
        msg = (
            f"expected {' and '.join(names)} within the {held} places along '{axis}' in {path}, "
            f"got {offset[where]} and {count[where]} at {where}; {_AGAIN}"
        )
        raise TraceError(msg)
