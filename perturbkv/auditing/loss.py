"""The loss of foreign kept sets, beside our configurations of equal budget and protection (METHOD: Audit, 4).

Foreign kept sets are measured, physically evicted and decoded exactly as ours are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perturbkv.audit_trace import Integers, Loss
from perturbkv.configs import layer_types
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.one_sample import trace_sample
from perturbkv.pipeline.variants.presses import KeptMasks
from perturbkv.schema import MEASURED_LAYERS
from perturbkv.selection.policies.registry import normalise
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.trace import Trace

_DEFAULT = Resources()


def external_configuration(name: str, budget: float) -> EvictionConfig:
    """Return a configuration `given:NAME` whose kept sets are passed in.

    `budget` is the entries of a kept set (an int) or their share of the prompt, as for other configurations of that
    size; the kept sets determine what is really stored.
    """
    return EvictionConfig(budget, Choice(f"given:{name}"), "given", 0, "kv")


def measure_kept_sets(
    adapter: Adapter,
    prompts: Sequence[Prompt],
    given: Sequence[KeptMasks],
    beside: Sequence[EvictionConfig] = (),
    resources: Resources = _DEFAULT,
    attrs: Mapping[str, str] | None = None,
    **run: Any,
) -> Trace:
    """Return the trace of foreign kept sets, and of our configurations beside them.

    Args:
        adapter: the model.
        prompts: one or more samples.
        given: per prompt, configuration and layer a mask (kv_head, key): True where an entry stays.
        beside: configurations that rank for themselves.
        resources: memory and kernels.
        attrs: provenance of the trace.
        run: further fields of `RunConfig`: steps, scenario, dataset, …

    Raises ConfigError for masks of other shapes, and as `trace_sample`.
    """
    known = {"dataset": "prompts", "dtype": str(adapter.dtype).removeprefix("torch."), "device": adapter.device.type}
    fields = {"model": adapter.name, "revision": adapter.revision, "random_weights": adapter.random_weights, **known}
    asked = RunConfig(configs=(*given[0], *beside), samples=len(prompts), **{**fields, **run})
    known_run = ResolvedRun.from_run(asked)
    measured = [
        trace_sample(adapter, prompt, known_run, resources, masks) for prompt, masks in zip(prompts, given, strict=True)
    ]
    told = layer_types.format_measured(adapter.config)
    return Trace.from_samples(asked, measured, {**({MEASURED_LAYERS: told} if told else {}), **(attrs or {})})


CONTROLS = ("attention", "two-stage", "random", "hindsight")
_WINDOW = 32
OWN = "its kept sets"
Sets = tuple[tuple[Integers, ...], ...]
"""Per layer and key/value head, positions."""


@dataclass(frozen=True)
class Measured:
    """The loss of kept sets.

    Attributes:
        losses: the eviction's, then the controls'.
        protected: first and most recent entries that every kept set holds.
        configs: the eviction's configuration, then the controls'.
        freed: whether the controls protect less, as the budget would otherwise leave nothing to choose.
    """

    losses: tuple[Loss, ...]
    protected: tuple[int, int]
    configs: tuple[EvictionConfig, ...]
    freed: bool = False


def protection(kept: Sequence[Sets], tokens: Sequence[int]) -> tuple[int, int]:
    """Return how many first and most recent entries every kept set of every prompt holds."""
    firsts, lasts = [], []
    for sets, n in zip(kept, tokens, strict=True):
        for one in (own for layer in sets for own in layer):
            firsts.append(_prefix_length(one))
            lasts.append(_prefix_length(n - 1 - one[::-1]))
    return min(firsts, default=0), min(lasts, default=0)


def _prefix_length(places: Integers) -> int:
    """Return the length of the prefix 0, 1, 2, … of ascending positions."""
    ahead = places == np.arange(len(places))
    return len(places) if ahead.all() else int(ahead.argmin())


def measure(adapter: Adapter, prompts: Sequence[Prompt], kept: Sequence[Sets], resources: Resources) -> Measured:
    """Measure the losses, mean over prompts, at the first decoding step."""
    tokens = [len(prompt.token_ids) for prompt in prompts]
    protected, budget = protection(kept, tokens), _budget(kept, tokens)
    own = external_configuration("audited", budget)
    beside, freed = _controls(budget, protected, min(tokens))
    masks = [{own: _masks(sets, n)} for sets, n in zip(kept, tokens, strict=True)]
    trace = measure_kept_sets(adapter, prompts, masks, beside, resources)
    names = (OWN, *(config.selection.name for config in beside))
    losses = tuple(_loss(trace, place, told) for place, told in enumerate(names))
    return Measured(losses, protected, (own, *beside), freed)


def _budget(kept: Sequence[Sets], tokens: Sequence[int]) -> int | float:
    """Return the mean entries of a kept set; a share of the prompt where prompts differ in it."""
    means = [float(np.mean([len(one) for layer in sets for one in layer])) for sets in kept]
    counts = {max(1, round(mean)) for mean in means}
    if len(counts) == 1:
        return counts.pop()
    return round(min(1.0, float(np.mean([mean / n for mean, n in zip(means, tokens, strict=True)]))), 4)


def _controls(budget: float, protected: tuple[int, int], tokens: int) -> tuple[tuple[EvictionConfig, ...], bool]:
    """Return our configurations of equal budget and protection, and whether they protect less than the eviction."""
    most = budget if isinstance(budget, int) else int(budget * tokens)
    first, recent = protected
    freed = first + max(recent, 1) >= most
    if freed:
        first, recent = 0, min(recent, max(1, most // 2))
    window = min(_WINDOW, max(1, recent))
    made = (
        EvictionConfig(
            budget, "snapkv", selection, window, "kv", protect_first=first,
            protect_recent=recent if recent > window else 0,
        )
        for selection in CONTROLS if most > 1
    )  # fmt: skip
    return tuple(map(normalise, made)), freed


def _masks(sets: Sets, tokens: int) -> list[Tensor]:
    """Return a mask (kv_head, key) per layer."""
    masks = []
    for layer in sets:
        mask = torch.zeros(len(layer), tokens, dtype=torch.bool)
        for row, places in zip(mask, layer, strict=True):
            row[torch.from_numpy(places)] = True
        masks.append(mask)
    return masks


def _loss(trace: Trace, place: int, name: str) -> Loss:
    """Return one configuration's loss, mean over samples."""
    arrays = trace.arrays

    def over(moved: Any, full: Any) -> float:
        """Return the mean over samples of one sum over another."""
        sums = [np.asarray(one, dtype=np.float64).reshape(len(one), -1).sum(axis=-1) for one in (moved, full)]
        return float(np.mean(sums[0] / sums[1]))

    return Loss(
        name=name,
        held=float(arrays["held_share"][:, place].astype(np.float64).mean()),
        isolated=over(arrays["perturbation_isolated"][:, place, 0], arrays["output_norm"][:, 0]),
        propagated=over(arrays["perturbation_propagated"][:, place, 0], arrays["output_norm"][:, 0]),
        drift=over(arrays["hidden_drift_l1"][:, place, 0, -1], arrays["hidden_norm"][:, 0, -1]),
        kl=float(arrays["logit_kl"][:, place, 0].astype(np.float64).mean()),
    )
