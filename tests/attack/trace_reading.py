"""A script that reads a whole trace: what it holds as one number, or what is wrong with it in one line."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

import perturbkv as pk
from perturbkv.errors import PerturbkvError


def main() -> None:
    try:
        trace = pk.read_trace(sys.argv[1])
        told = hashlib.sha256(repr((trace.sample_ids, dict(trace.failures), trace.run.to_json())).encode())
        for name in sorted(trace.arrays):
            array = np.asarray(trace.arrays[name])
            told.update(name.encode() + repr(array.tolist()).encode())
        for name in trace.sample_ids:
            trace.sample(name)
        told.update(repr(trace.to_xarray().sizes).encode())
        sys.stdout.write(told.hexdigest())
    except PerturbkvError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
