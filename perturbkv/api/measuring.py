"""Measurements of a model with its full cache and with every evicted one: a trace, or answers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

from perturbkv.api.inputs import CONFIGS, as_tuple, make_plan
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources, Workers
from perturbkv.configs.run import Settings, Shard
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.prompts import metrics_of
from perturbkv.engines import engine_choice
from perturbkv.errors import ConfigError, WorkerError
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.answer_rows import AnsweredPrompt, Generation
from perturbkv.pipeline.answers.generation import check_answer_options
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import provenance, run_in_memory, run_to_file
from perturbkv.pipeline.run.sharding import ShardDone, run_shard
from perturbkv.storage.answers_file import WrittenAnswers
from perturbkv.storage.trace.trace_file import read_trace
from perturbkv.trace import Trace

_RESOURCES, _SETTINGS, _WORKERS = Resources(), Settings(), Workers()
_log = logging.getLogger(__name__)


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
        bar("samples", shown=progress, status=measuring.describe_workers) as progress_bar,
        user_model.eval_mode(model.model),
    ):
        if path is None:
            return run_in_memory(ready, measuring, progress_bar.update)
        options: Any = {"overwrite": overwrite, "wait": wait, "progress": progress_bar.update}
        if parsed is None:
            return read_trace(run_to_file(ready, measuring, Path(path), **options))
        result = run_shard(ready, measuring, Path(path), parsed, **options)
        return result if isinstance(result, ShardDone) else read_trace(result)


def generate(
    model: Adapter,
    prompts: Iterable[Prompt],
    configs: Iterable[EvictionConfig],
    *,
    max_new_tokens: int | None = None,
    scenario: str = "regular",
    cache: str = "ragged",
    compress_every: int = 0,
    compress_over: int = 0,
    divergence: bool = False,
    head_scores: Sequence[Sequence[float]] = (),
    workers: Workers = _WORKERS,
    resources: Resources = _RESOURCES,
    progress: bool = True,
) -> Generation:
    """Return greedy answers from the full cache and from every evicted one, one `Answers` per prompt.

    They display as text beside the accepted answers, with a score where the data set has a metric.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`, or any series of `Prompt`.
        configs: from `grid`.
        max_new_tokens: tokens of an answer at most, at least 1; None: as many as the dataset says.
        scenario: as in `Settings`.
        cache: as in `Settings`.
        compress_every: as in `Settings`.
        compress_over: as in `Settings`.
        divergence: also decode the full cache's answer from every cache, for `divergence`.
        head_scores: as in `Settings`.
        workers: as in `measure`; a prompt that workers give up is left out, with a warning in the log.
        resources: as in `measure`; where `max_bytes` does not hold all caches at once, the prompt is read once for each
            batch of them.
        progress: whether a bar is shown.

    Raises what `measure` raises, and ConfigError for a configuration that would have to know the next query or cannot
    be compressed again; WorkerError where no prompt is answered.
    """
    from perturbkv.analyses.json_values import provenance_object

    chosen = as_tuple(EvictionConfig, configs, CONFIGS)
    check_answer_options(chosen, max_new_tokens)
    settings = Settings(
        1, scenario, cache, generate=max_new_tokens, head_scores=head_scores, scored=False,
        compress_every=compress_every, compress_over=compress_over,
    )  # fmt: skip
    ready = make_plan(model, prompts, chosen, settings, resources)
    metrics_of(ready.prompts)
    with user_model.eval_mode(model.model):
        answered = _answer_prompts(ready, divergence, workers, progress)
    made_with = provenance_object(provenance(ready))
    written = WrittenAnswers(ready.run, tuple(one.row for one in answered), made_with=made_with)
    return Generation(tuple(one.answers for one in answered), written)


def _answer_prompts(ready: Plan, divergence: bool, workers: Workers, progress: bool) -> list[AnsweredPrompt]:
    """Return the answers to all prompts in order, except prompts that workers gave up."""
    answered: dict[str, AnsweredPrompt] = {}
    failed: dict[str, str] = {}

    def on_answer(prompt: Prompt, answer: AnsweredPrompt) -> None:
        answered[prompt.sample_id] = answer
        progress_bar.advance()

    def on_failure(prompt: Prompt, why: str) -> None:
        failed[prompt.sample_id] = why
        progress_bar.advance()

    with (
        engine_choice.open_engine(workers, [ready]) as engine,
        bar("samples", len(ready.prompts), shown=progress, status=engine.describe_workers) as progress_bar,
    ):
        engine.answer(ready, divergence, ready.prompts, on_answer, on_failure)
    for why in failed.values():
        _log.warning("left out: %s", why)
    if not answered:
        raise WorkerError(f"no prompt was answered: {next(iter(failed.values()))}")
    return [answered[name] for name in ready.prompts.ids if name in answered]
