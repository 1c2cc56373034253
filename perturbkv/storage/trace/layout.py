"""The layout of a trace file: format, axes, variables and smallest size."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from perturbkv.schema import VARIABLES, Variable

FORMAT, FORMAT_VERSION = "perturbkv-trace", 4
AXES = {
    "sample": "sample id",
    "config": "eviction configuration",
    "step": "decode step",
    "layer": "decoder layer",
    "head": "query head",
    "answer_token": "place in a generated answer",
    "d_head": "component of a head's output",
    "d_model": "component of a hidden state",
    "key": "position of a cache entry",
    "kept_byte": "place in kept_code",
    "prompt_entry": "place in prompt_token",
    "lost_entry": "place among the evicted entries that add most",
}
"""Axis of a file -> the meaning of its coordinate."""
FLAGS = {
    "failure": Variable((), "1", "why the sample failed; empty where it is complete", "str"),
    "complete": Variable((), "1", "1 where every number of the sample is there", "uint8"),
}
"""Variables of a file beyond those of a trace: the state of each sample."""
STORED = {**VARIABLES, **FLAGS}


def least_bytes(sizes: Mapping[str, int], names: set[str]) -> int:
    """Return a lower bound of a trace file's bytes: those of its prompts' tokens, which are uncompressed."""
    variables = [
        variable for name, variable in VARIABLES.items() if name in names and variable.in_rows and name != "kept_code"
    ]
    return sum(
        math.prod(sizes[axis] for axis in variable.axes) * np.dtype(variable.dtype).itemsize for variable in variables
    )
