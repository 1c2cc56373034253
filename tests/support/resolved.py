"""The pipeline's functions as tests call them: with configurations and runs whose names are looked up here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.pipeline.answers import generation
from perturbkv.pipeline.sample import one_sample
from perturbkv.pipeline.sample import prefill as reading
from perturbkv.selection import kept_sets
from perturbkv.selection.resolved_config import ResolvedConfig, ResolvedRun, resolve

_DEFAULT = Resources()


def every(configs: Iterable[EvictionConfig]) -> tuple[ResolvedConfig, ...]:
    return tuple(map(resolve, configs))


def trace_sample(adapter: Any, prompt: Any, run: RunConfig, *more: Any, **named: Any) -> Any:
    return one_sample.trace_sample(adapter, prompt, ResolvedRun.from_run(run), *more, **named)


def resolved_run(configs: Iterable[EvictionConfig], **fields: Any) -> ResolvedRun:
    return ResolvedRun.from_run(RunConfig("m", "d", tuple(configs), **fields))


def answer(
    adapter: Any, prompt: Any, configs: Iterable[EvictionConfig], most: int, resources: Resources = _DEFAULT,
    **named: Any,
) -> Any:  # fmt: skip
    divergence = named.pop("divergence", False)
    run = resolved_run(configs, generate=most, **named)
    return generation.answer(adapter, prompt, run, resources, divergence=divergence)


def prefill_and_evict(
    adapter: Any, context: Any, configs: Iterable[EvictionConfig], sample: str, cache: str = "ragged",
    compress_over: int = 0, **named: Any,
) -> Any:  # fmt: skip
    prompt, run = Prompt(sample, tuple(context), 0), resolved_run(configs, cache=cache, compress_over=compress_over)
    return generation.prefill_and_evict(adapter, prompt, run, **named)


def prefill(
    adapter: Any, token_ids: Any, configs: Iterable[EvictionConfig], resources: Any, sample: str, **named: Any
) -> Any:
    prompt = Prompt(sample, tuple(token_ids), 0)
    return reading.prefill(adapter, prompt, resolved_run(configs), resources, **named)


def select(config: EvictionConfig, *more: Any) -> Any:
    return kept_sets.select(resolve(config), *more)


def asked(config: EvictionConfig) -> Any:
    return resolve(config).requests[0]


def ranking_groups(configs: Iterable[EvictionConfig], *more: Any) -> Any:
    return kept_sets.ranking_groups(every(configs), *more)


def trace(adapter: Any, prompts: Any, run: RunConfig, *more: Any, **named: Any) -> Any:
    return one_sample.trace(adapter, prompts, ResolvedRun.from_run(run), *more, **named)
