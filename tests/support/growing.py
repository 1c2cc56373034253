"""A run that gets more eviction configurations: what is measured for each, and how its trace is filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import h5py

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.selection.grid import configuration
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.trace import SampleTrace
from tests.support.traces import cut, ragged, run_config, sample_trace

CONFIGS = tuple(configuration(budget, selection=name) for budget in (64, 128, 256) for name in ("attention", "value"))
OLD, NEW = CONFIGS[:2], CONFIGS[2:]


def opened(path: Path, configs: Sequence[EvictionConfig], samples: int = 3, **run: Any) -> TraceWriter:
    names = [f"s{place}" for place in range(samples)]
    overwrite = run.pop("overwrite", False)
    return TraceWriter(path, run_config(samples, configs=tuple(configs), **run), names, {"model": "m"}, overwrite)


@cache
def measured(name: str, configs: tuple[EvictionConfig, ...], optional: bool = True) -> SampleTrace:
    """What the sample's whole measurement holds for these configurations."""
    seed = int(name[1:])
    whole = ragged(sample_trace(name, configs=len(CONFIGS), heads=4, seed=seed, optional=optional), seed, sharing=2)
    whole = replace(whole, arrays={**whole.arrays, "evicted": whole.arrays["evicted"] % 2})
    return cut(whole, [CONFIGS.index(config) for config in configs])


def fill(writer: TraceWriter, kept: Callable[[str], None] = lambda name: None, optional: bool = True) -> Path:
    """Measure what is missing; `kept` hears of each sample that is safe."""
    for name, configs in writer.missing().items():
        writer.append(measured(name, configs, optional), configs)
        kept(name)
    return writer.finish()


def assert_same_file(found: Path, expected: Path) -> None:
    """Every variable and coordinate byte for byte with its attributes, and what the file says of itself."""
    assert told(found) == _told_before(expected, expected.stat().st_mtime_ns)


@cache
def _told_before(path: Path, written: int) -> list[Any]:
    """Of a file that many are held against."""
    return told(path)


def told(path: Path) -> list[Any]:
    with h5py.File(path) as file:
        everything: list[Any] = [dict(file.attrs)]
        for name, variable in file.items():
            value = variable[()]
            axes = [dim[0].name for dim in variable.dims if len(dim)]
            everything.append(
                [name, axes, variable.attrs["units"], variable.attrs["long_name"], value.dtype, value.shape]
            )
            everything.append(value.tolist() if value.dtype == object else value.tobytes())
    return everything
