"""Kept sets that come from outside: measured, physically evicted and decoded exactly as ours are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perturbkv.configs import layer_types
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.one_sample import trace_sample
from perturbkv.pipeline.variants.sources import KeptMasks
from perturbkv.schema import MEASURED
from perturbkv.trace import Trace

_DEFAULT = Resources()


def configuration(name: str, budget: float) -> EvictionConfig:
    """A configuration `given:NAME` whose kept sets are handed over.

    `budget` is the entries of a kept set (an int) or their share of the prompt, as other configurations would be asked
    for as many; what is really held, the kept sets say.
    """
    return EvictionConfig(budget, Choice(f"given:{name}"), "given", 0, "kv")


def measure(
    adapter: Adapter,
    prompts: Sequence[Prompt],
    given: Sequence[KeptMasks],
    beside: Sequence[EvictionConfig] = (),
    resources: Resources = _DEFAULT,
    attrs: Mapping[str, str] | None = None,
    **run: Any,
) -> Trace:
    """The trace of given kept sets, and of configurations of ours beside them.

    Args:
        adapter: the model.
        prompts: of one or more samples.
        given: of each prompt, per configuration of `configuration` and layer (kv_head, key): True where an entry stays.
        beside: configurations that rank for themselves.
        resources: memory and kernels.
        attrs: what the trace says of its making.
        run: further fields of `RunConfig`: steps, scenario, dataset, …

    Raises ConfigError for masks of other shapes, and as `trace_sample`.
    """
    known = {"dataset": "prompts", "dtype": str(adapter.dtype).removeprefix("torch."), "device": adapter.device.type}
    fields = {"model": adapter.name, "revision": adapter.revision, "random_weights": adapter.random_weights, **known}
    asked = RunConfig(configs=(*given[0], *beside), samples=len(prompts), **{**fields, **run})
    measured = [
        trace_sample(adapter, prompt, asked, resources, masks) for prompt, masks in zip(prompts, given, strict=True)
    ]
    told = layer_types.told(adapter.config)
    return Trace.of(asked, measured, {**({MEASURED: told} if told else {}), **(attrs or {})})
