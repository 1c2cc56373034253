"""A trace as other libraries' objects: an xarray dataset, a pandas table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from perturbkv.schema import ROWS, VARIABLES
from perturbkv.storage.trace.export import rows, schema
from perturbkv.trace import Trace


def to_dataset(trace: Trace) -> Any:
    """An `xarray.Dataset` of every variable, named and with units as in a trace file."""
    import xarray as xr

    coordinates: dict[str, Any] = {"sample": list(trace.sample_ids), "config": trace.run.labels()}
    variables: dict[str, Any] = {
        name: (
            VARIABLES[name].axes,
            np.asarray(array),
            {"units": VARIABLES[name].units, "long_name": VARIABLES[name].long_name},
        )
        for name, array in trace.arrays.items()
    }
    variables["complete"] = (("sample",), trace.ok.astype(np.uint8), {})
    variables["failure"] = (("sample",), [trace.failures.get(name, "") for name in trace.sample_ids], {})
    made = xr.Dataset(variables, coordinates, {"run": trace.run.to_json(), **trace.attrs})
    counted = {axis: np.arange(length) for axis, length in made.sizes.items() if axis not in {*coordinates, *ROWS}}
    if "layer" in counted:
        counted["layer"] = np.array([trace.layer_name(int(place)) for place in counted["layer"]])
    return made.assign_coords(counted)


def to_table(trace: Trace) -> Any:
    """A `pandas.DataFrame`, one row per sample × configuration × step × layer × head, as `export` writes it."""
    batches = [rows(trace, int(place)) for place in np.flatnonzero(trace.ok)]
    return pa.Table.from_batches(batches, schema=schema(trace)).to_pandas()
