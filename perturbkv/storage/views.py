"""A trace as other libraries' objects: an xarray dataset, a pandas table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from perturbkv.schema import KEPT_AXIS, VARIABLES
from perturbkv.storage.export import rows
from perturbkv.trace import Trace


def to_dataset(trace: Trace) -> Any:
    """An `xarray.Dataset` of every variable, named and with units as in a trace file."""
    import xarray as xr

    coordinates = {"sample": list(trace.sample_ids), "config": trace.run.labels()}
    variables = {
        name: (_axes(name), np.asarray(array), {"units": VARIABLES[name].units, "long_name": VARIABLES[name].long_name})
        for name, array in trace.arrays.items()
    }
    return xr.Dataset(variables, coordinates, {"run": trace.run.to_json(), **trace.attrs})


def _axes(name: str) -> tuple[str, ...]:
    axes = VARIABLES[name].dims
    return axes if axes[:1] == (KEPT_AXIS,) else ("sample", *axes)


def to_table(trace: Trace) -> Any:
    """A `pandas.DataFrame`, one row per sample × configuration × step × layer × head, as `export` writes it."""
    return pa.Table.from_batches([rows(trace, int(place)) for place in np.flatnonzero(trace.ok)]).to_pandas()
