"""Measurements: a trace of a model's full cache and of every evicted one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, overload

from perturbkv.api.inputs import make_plan
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources, Workers
from perturbkv.configs.run import Settings, Shard
from perturbkv.datasets.encode import Prompt
from perturbkv.engines import engine_choice
from perturbkv.errors import ConfigError
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.run.running import run_in_memory, run_to_file
from perturbkv.pipeline.run.sharding import ShardDone, run_shard
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace

_RESOURCES, _SETTINGS, _WORKERS = Resources(), Settings(), Workers()


@overload
def measure(
    model: Adapter, prompts: Iterable[Prompt], configs: Iterable[EvictionConfig], *, shard: None = None, **options: Any
) -> Trace: ...


@overload
def measure(
    model: Adapter, prompts: Iterable[Prompt], configs: Iterable[EvictionConfig], *, shard: str | Shard, **options: Any
) -> Trace | ShardDone: ...


def measure(  # type: ignore[misc]  # `options` above stands for the options below
    model: Adapter,
    prompts: Iterable[Prompt],
    configs: Iterable[EvictionConfig],
    *,
    settings: Settings = _SETTINGS,
    path: str | Path | None = None,
    workers: Workers = _WORKERS,
    shard: str | Shard | None = None,
    overwrite: bool = False,
    wait: bool = False,
    resources: Resources = _RESOURCES,
    progress: bool = True,
) -> Trace | ShardDone:
    """Run the model once with its full cache and once with each evicted one; return the trace of what was lost.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`, or any series of `Prompt`.
        configs: from `grid`, or any series of `EvictionConfig`; all of them share a prompt's one prefill.
        settings: steps, scenario, answers and what the trace holds.
        path: file of the trace. A killed run resumes from it, and a run with more prompts or configurations measures
            only those. None: everything stays in memory.
        workers: the engine; by default this process.
        shard: `3/16`: measure every 16th sample from the third on, and keep it beside `path`; a `Shard` by `configs`
            measures every 16th configuration of every sample. The shard that ends last joins all of them and
            returns the trace; the others return a `ShardDone`; `merge` joins them too.
        overwrite: replace a trace of another run at `path`, which stays until the new one is whole.
        wait: where another process writes `path`, wait until it is done, then resume from it.
        resources: memory and kernels.
        progress: whether a bar is shown.

    Raises BudgetError, ConfigError, DatasetError, ModelError, OutputError, TraceError, WorkerError;
    InterruptedRunError on Ctrl-C with a path.
    """
    parsed = Shard.parse(shard) if isinstance(shard, str) else shard
    if parsed is not None and path is None:
        raise ConfigError("expected a path with a shard, got none; give both")
    ready = make_plan(model, prompts, configs, settings, resources, resumable=path is not None)
    with (
        engine_choice.open_engine(workers, [ready]) as measuring,
        bar("samples", shown=progress, status=measuring.alive) as progress_bar,
        user_model.eval_mode(model),
    ):
        if path is None:
            return run_in_memory(ready, measuring, progress_bar.update)
        options: Any = {"overwrite": overwrite, "wait": wait, "progress": progress_bar.update}
        if parsed is None:
            return read_trace(run_to_file(ready, measuring, Path(path), **options))
        result = run_shard(ready, measuring, Path(path), parsed, **options)
        return result if isinstance(result, ShardDone) else read_trace(result)
