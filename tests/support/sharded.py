"""Runs in shards: how their trace is held against that of one process, and shards of samples that nobody measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perturbkv.configs.run import Shard
from perturbkv.storage.output import Lock
from perturbkv.storage.run.shard_merging import ShardWriter
from perturbkv.storage.run.shards import ShardRecord
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.trace import FailedSample
from tests.support import growing
from tests.support.growing import CONFIGS, measured
from tests.support.traces import run_config, told

SAMPLES = [f"s{place}" for place in range(5)]
FAILED = "s3"


def content(path: Path) -> list[Any]:
    """Every variable and coordinate byte for byte, and what the file says of its run."""
    attrs, *variables = growing.told(path)
    return [{name: value for name, value in attrs.items() if name != "created"}, *variables]


def assert_same_trace(found: Path, expected: Path) -> None:
    assert content(found) == content(expected)


FEW = {"run": run_config(3, configs=CONFIGS[:1]), "sample_ids": ("s1", "s2", FAILED)}
"""A run that is small."""


def record(shard: str, by: str = "samples", **more: Any) -> ShardRecord:
    run = run_config(len(SAMPLES), configs=CONFIGS)
    whole = {"run": run, "sample_ids": tuple(SAMPLES), "attrs": {"model": "m"}}
    return ShardRecord(Shard.parse(shard, by), **{**whole, **more})


def measure_shard(path: Path, shard: str, by: str = "samples", with_text: bool = False, **more: Any) -> None:
    """One shard from begin to end, as a process of its own does it; the sample `FAILED` fails."""
    own = record(shard, by, **more)
    texts = {name: told(name) for name in own.sample_ids} if with_text else {}
    writer = ShardWriter(path, own, texts)
    with Lock(writer.shard.path):
        for name, configs in writer.missing().items():
            writer.append(FailedSample(name, "it broke") if name == FAILED else measured(name, configs), configs)
        writer.finish()


def in_one_process(path: Path, **more: Any) -> Path:
    """The trace of the same samples, without text."""
    whole = record("1/1", **more)
    writer = TraceWriter(path, whole.run, whole.sample_ids, whole.attrs, texts={})
    for name, configs in writer.missing().items():
        writer.append(FailedSample(name, "it broke") if name == FAILED else measured(name, configs), configs)
    return writer.finish()
