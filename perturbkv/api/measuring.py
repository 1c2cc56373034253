"""One trace of a model's full cache and of every evicted one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

from perturbkv.api.inputs import planned
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import EngineConfig, Resources
from perturbkv.configs.run import BY, Shard
from perturbkv.datasets.encode import Prompt
from perturbkv.engines import choosing
from perturbkv.errors import ConfigError
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.run.plan import Settings
from perturbkv.pipeline.run.running import run_in_memory, run_to_file
from perturbkv.pipeline.run.sharding import ShardDone, run_shard
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace

_DEFAULT = Resources()


@overload
def measure(
    model: Adapter, prompts: Iterable[Prompt], configs: Iterable[EvictionConfig], *, shard: None = None, **options: Any
) -> Trace: ...


@overload
def measure(
    model: Adapter, prompts: Iterable[Prompt], configs: Iterable[EvictionConfig], *, shard: str, **options: Any
) -> Trace | ShardDone: ...


def measure(  # type: ignore[misc]  # the options above are those below
    model: Adapter,
    prompts: Iterable[Prompt],
    configs: Iterable[EvictionConfig],
    *,
    steps: int = 1,
    scenario: str = "regular",
    path: str | Path | None = None,
    engine: str = "here",
    workers: int | None = None,
    ray_address: str | None = None,
    cpus_per_worker: int | None = None,
    timeout_per_sample: float | None = None,
    save_outputs: bool = False,
    text: bool = True,
    kept: bool = True,
    cache: str = "ragged",
    generate: int | None = 0,
    head_scores: Sequence[Sequence[float]] = (),
    shard: str | None = None,
    shard_by: str = BY[0],
    overwrite: bool = False,
    wait: bool = False,
    resources: Resources = _DEFAULT,
    progress: bool = True,
) -> Trace | ShardDone:
    """Run the model once with its full cache and once with each evicted one, and say what was lost.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`, or any series of `Prompt`.
        configs: from `grid`, or any series of `EvictionConfig`; all of them share a prompt's one prefill.
        steps: decode steps, teacher-forced on the full run.
        scenario: `regular`, or `context-only`, which compresses the context before the question is known.
        path: where the trace goes. A run that was killed goes on, and one that asks for more prompts or
            configurations measures those alone. None: everything stays in memory.
        engine: where samples are measured: `here`; in `workers`, processes of this machine, or on `ray`, a cluster,
            which open the model by its name.
        workers: how many; None: one per GPU, or as many as the cores allow.
        ray_address: of the cluster's head, host:port; None: what RAY_ADDRESS says.
        cpus_per_worker: cores of each; None: OMP_NUM_THREADS, or an even share.
        timeout_per_sample: seconds after which a worker is ended and its sample measured again, once.
        save_outputs: keep head outputs, hidden states and attention too.
        text: keep each prompt's tokens and text too, which `tokens` shows, and the text of answers. No number depends
            on it: a run that goes on adds it to the samples that are there, or takes it out of them.
        kept: keep the positions that every head keeps, which `tokens` and `Trace.kept` show; their counts, and what
            compares equal sets, stay without. A run that goes on takes them out of the samples that are there, and
            cannot add them.
        cache: layout of evicted caches, `ragged` or `rectangular`.
        generate: tokens generated from every cache and graded, which takes prompts with accepted answers; None: as many
            as the dataset says.
        head_scores: one row per layer, for the policy `headkv`.
        shard: `3/16`: measure every 16th sample from the third on, and keep it beside `path`. The one that ends last
            joins all of them and gives the trace; the others give what they measured, and `merge` joins them too.
        shard_by: `samples`, or `configs`: every sample for every 16th configuration. Without a shard: the workers share
            out each sample's configurations, for few prompts that are long.
        overwrite: replace a trace of another run at `path`, which stays until the new one is whole.
        wait: where another process writes `path`, wait until it is done, then go on from there.
        resources: memory and kernels.
        progress: whether a bar is shown.

    Raises BudgetError, ConfigError, DatasetError, ModelError, OutputError, TraceError, WorkerError;
    InterruptedRunError on Ctrl-C with a path.
    """
    part = _part(shard, shard_by, path, engine)
    by_configs = part is None and shard_by != BY[0]
    chosen = EngineConfig(engine, workers, ray_address, cpus_per_worker, timeout_per_sample, by_configs)
    save = ("outputs",) if save_outputs else ()
    settings = Settings(steps, scenario, cache, save, generate, head_scores, text, kept)
    ready = planned(model, prompts, configs, settings, resources, kept=path is not None)
    with (
        choosing.engine(chosen, [ready]) as measuring,
        bar("samples", shown=progress, beside=measuring.alive) as drawn,
        user_model.evaluating(model),
    ):
        if path is None:
            return run_in_memory(ready, measuring, drawn.at)
        if part is not None:
            left = run_shard(ready, measuring, Path(path), part, overwrite=overwrite, wait=wait, progress=drawn.at)
            return left if isinstance(left, ShardDone) else read_trace(left)
        made = run_to_file(ready, measuring, Path(path), overwrite=overwrite, wait=wait, progress=drawn.at)
        return read_trace(made)


def _part(shard: str | None, by: str, path: str | Path | None, engine: str) -> Shard | None:
    """The share that is measured; None: all of it. Raises ConfigError for one without a path, or by nothing."""
    if shard is None and (by == BY[0] or (by in BY and engine != "here")):
        return None
    if shard is None or path is None:
        lacking = "shard_by with a shard, or an engine of several workers" if shard is None else "a path with a shard"
        msg = f"expected {lacking}, got none; give both"
        raise ConfigError(msg)
    return Shard.parse(shard, by)
