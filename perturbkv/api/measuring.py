"""One trace of a model's full cache and of every evicted one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, overload

from perturbkv.api.inputs import planned
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


def measure(  # type: ignore[misc]  # the options above are those below
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
    """Run the model once with its full cache and once with each evicted one, and return what was lost.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`, or any series of `Prompt`.
        configs: from `grid`, or any series of `EvictionConfig`; all of them share a prompt's one prefill.
        settings: steps, scenario, answers and what the trace holds.
        path: where the trace goes. A run that was killed goes on, and one that asks for more prompts or
            configurations measures those alone. None: everything stays in memory.
        workers: the engine; by default this process.
        shard: `3/16`: measure every 16th sample from the third on, and keep it beside `path`; a `Shard` by `configs`
            measures every 16th configuration of every sample. The one that ends last joins all of them and gives the
            trace; the others give what they measured, and `merge` joins them too.
        overwrite: replace a trace of another run at `path`, which stays until the new one is whole.
        wait: where another process writes `path`, wait until it is done, then go on from there.
        resources: memory and kernels.
        progress: whether a bar is shown.

    Raises BudgetError, ConfigError, DatasetError, ModelError, OutputError, TraceError, WorkerError;
    InterruptedRunError on Ctrl-C with a path.
    """
    part = Shard.parse(shard) if isinstance(shard, str) else shard
    if part is not None and path is None:
        msg = "expected a path with a shard, got none; give both"
        raise ConfigError(msg)
    ready = planned(model, prompts, configs, settings, resources, kept=path is not None)
    with (
        engine_choice.open_engine(workers, [ready]) as measuring,
        bar("samples", shown=progress, status=measuring.alive) as drawn,
        user_model.eval_mode(model),
    ):
        if path is None:
            return run_in_memory(ready, measuring, drawn.update)
        if part is not None:
            left = run_shard(ready, measuring, Path(path), part, overwrite=overwrite, wait=wait, progress=drawn.update)
            return left if isinstance(left, ShardDone) else read_trace(left)
        made = run_to_file(ready, measuring, Path(path), overwrite=overwrite, wait=wait, progress=drawn.update)
        return read_trace(made)
