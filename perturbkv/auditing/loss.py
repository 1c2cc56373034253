"""The loss of external kept sets, beside our configurations of equal budget and protection (METHOD: Audit, 4).

External kept sets are physically evicted, decoded and measured exactly as those of our configurations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from perturbkv.analyses.audit.audit import AuditLoss
from perturbkv.analyses.audit.cache_entries import Integers, count_without_gap
from perturbkv.configs import layer_types
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.devices import dtype_name
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.one_sample import trace_sample
from perturbkv.pipeline.variants.given_sets import KeptMasks
from perturbkv.schema import MEASURED_LAYERS
from perturbkv.selection.policies.registry import normalise
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.trace import Trace

_DEFAULT = Resources()
CONTROLS = ("attention", "two-stage", "random", "hindsight")
"""Selections of our configurations with which external kept sets are compared."""
_WINDOW = 32
"""Largest observation window of the controls."""
OWN = "its kept sets"
"""Name of the loss of the external kept sets."""
Sets = tuple[tuple[Integers, ...], ...]
"""Per layer and key/value head, positions."""


def external_configuration(name: str, budget: float) -> EvictionConfig:
    """Return the configuration `given:NAME` for external kept sets.

    `budget` is the number of entries in a kept set (an int) or their share of the prompt, by which it is compared with
    other configurations; the kept sets determine what is really stored.
    """
    return EvictionConfig(budget, Choice(f"given:{name}"), "given", 0, "kv")


def measure_kept_sets(
    adapter: Adapter,
    prompts: Sequence[Prompt],
    kept: Sequence[KeptMasks],
    configs: Sequence[EvictionConfig] = (),
    resources: Resources = _DEFAULT,
    attrs: Mapping[str, str] | None = None,
    **run: Any,
) -> Trace:
    """Return a trace of external kept sets, and of the configurations `configs`, on the same prompts.

    Args:
        adapter: the model.
        prompts: one or more samples.
        kept: per prompt, configuration and layer a mask (kv_head, key): True where an entry stays.
        configs: our configurations.
        resources: memory and kernels.
        attrs: provenance of the trace.
        run: further fields of `RunConfig`: steps, scenario, dataset, …

    Raises ConfigError for masks of other shapes, and the errors of `trace_sample`.
    """
    defaults = {"dataset": "prompts", "dtype": dtype_name(adapter.dtype), "device": adapter.device.type}
    fields = {"model": adapter.name, "revision": adapter.revision, "random_weights": adapter.random_weights, **defaults}
    config = RunConfig(configs=(*kept[0], *configs), samples=len(prompts), **{**fields, **run})
    resolved_run = ResolvedRun.from_run(config)
    measured = [
        trace_sample(adapter, prompt, resolved_run, resources, masks)
        for prompt, masks in zip(prompts, kept, strict=True)
    ]
    layers = layer_types.format_measured(adapter.config)
    return Trace.from_samples(config, measured, {**({MEASURED_LAYERS: layers} if layers else {}), **(attrs or {})})


def protected_counts(kept: Sequence[Sets], tokens: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of first and of most recent entries that all kept sets of all prompts contain.

    `tokens` are the lengths of the prompts. 0 and 0 without kept sets.
    """
    every = [(positions, n) for sets, n in zip(kept, tokens, strict=True) for layer in sets for positions in layer]
    first = min((count_without_gap(positions) for positions, _ in every), default=0)
    recent = min((count_without_gap(n - 1 - positions[::-1]) for positions, n in every), default=0)  # from the end
    return first, recent


def measure_losses(
    adapter: Adapter, prompts: Sequence[Prompt], kept: Sequence[Sets], resources: Resources
) -> dict[str, Any]:
    """Return the losses of kept sets and of control configurations at the first decoding step, means over prompts.

    They are in fields of `Audit`, with what controls protect and their configurations.
    """
    tokens = [len(prompt.token_ids) for prompt in prompts]
    protected, budget = protected_counts(kept, tokens), _mean_budget(kept, tokens)
    external = external_configuration("audited", budget)
    controls, protect_less = _control_configurations(budget, protected, min(tokens))
    masks = [{external: masks_of(sets, n)} for sets, n in zip(kept, tokens, strict=True)]
    trace = measure_kept_sets(adapter, prompts, masks, controls, resources)
    names = (OWN, *(config.selection.name for config in controls))
    return {
        "losses": tuple(_loss(trace, index, name) for index, name in enumerate(names)),
        "configs": (external, *controls), "protected_first": protected[0], "protected_recent": protected[1],
        "controls_protect_less": protect_less,
    }  # fmt: skip


def _mean_budget(kept: Sequence[Sets], tokens: Sequence[int]) -> int | float:
    """Return the mean kept-set size: in entries if all prompts keep equally many, else as a share of the prompt.

    `tokens` are the lengths of the prompts. At least 1 entry.
    """
    means = [float(np.mean([len(positions) for layer in sets for positions in layer])) for sets in kept]
    counts = {max(1, round(mean)) for mean in means}
    if len(counts) == 1:
        return counts.pop()
    return round(min(1.0, float(np.mean([mean / n for mean, n in zip(means, tokens, strict=True)]))), 4)


def _control_configurations(
    budget: float, protected: tuple[int, int], tokens: int
) -> tuple[tuple[EvictionConfig, ...], bool]:
    """Return control configurations of equal budget and protection, and whether their protection had to be reduced.

    `budget` is in entries (an int) or a share of the prompt, `protected` as in `protected_counts`, `tokens` the length
    of the shortest prompt. There are no controls for a budget of a single entry.
    """
    most = budget if isinstance(budget, int) else int(budget * tokens)
    first, recent = protected
    protect_less = first + max(recent, 1) >= most
    if most <= 1:
        return (), protect_less
    if protect_less:  # it would leave nothing to choose: recent entries alone, at most half of the budget
        first, recent = 0, min(recent, max(1, most // 2))
    window = min(_WINDOW, max(1, recent))  # a window always stays; more than it has to be protected by an option
    beyond = recent if recent > window else 0
    configs = (
        EvictionConfig(budget, "snapkv", name, window, "kv", protect_first=first, protect_recent=beyond)
        for name in CONTROLS
    )
    return tuple(map(normalise, configs)), protect_less


def masks_of(sets: Sets, tokens: int) -> list[Bool[Tensor, "kept_head key"]]:
    """Return the kept sets as one mask per layer, for a prompt of `tokens` tokens."""
    places = np.arange(tokens)
    return [torch.from_numpy(np.stack([np.isin(places, positions) for positions in layer])) for layer in sets]


def _loss(trace: Trace, config: int, name: str) -> AuditLoss:
    """Return the loss, called `name`, of the configuration at index `config` of a trace: at step 0, mean over samples.

    Its perturbations are sums over layers and heads, its drift that of the last layer.
    """
    arrays = trace.arrays

    def mean_ratio(perturbation: Any, full: Any) -> float:
        """Return the mean over samples of Σ perturbation / Σ full; samples are the first axis."""
        sums = [np.asarray(array, dtype=np.float64).reshape(len(array), -1).sum(-1) for array in (perturbation, full)]
        return float(np.mean(sums[0] / sums[1]))

    return AuditLoss(
        name=name,
        cache_share=float(arrays["held_share"][:, config].astype(np.float64).mean()),
        isolated=mean_ratio(arrays["perturbation_isolated"][:, config, 0], arrays["output_norm"][:, 0]),
        propagated=mean_ratio(arrays["perturbation_propagated"][:, config, 0], arrays["output_norm"][:, 0]),
        drift=mean_ratio(arrays["hidden_drift_l1"][:, config, 0, -1], arrays["hidden_norm"][:, 0, -1]),
        kl=float(arrays["logit_kl"][:, config, 0].astype(np.float64).mean()),
    )
