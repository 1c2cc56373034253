"""Search for the best kept sets of single heads: on every prompt itself, and with proof on a short prefix of it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from perturbkv import theory
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import BudgetError, ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.optimum.exact import HeadEntries, Kept
from perturbkv.optimum.search import PREFIX, PROMPT, HeadSearch, prove, search
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.sample_run import SampleRun
from perturbkv.selection.policies import registry
from perturbkv.selection.resolved_config import ResolvedConfig, ResolvedRun
from perturbkv.storage.json_lines import SAMPLE, SampleLines

_Config = TypeVar("_Config", bound=EvictionConfig)
HeadIndex = tuple[int, int]
"""Index of a measured layer, and of a query head."""


@dataclass(frozen=True)
class HeadView:
    """One head with the kept sets of all configurations.

    Attributes:
        layer, head: its indices.
        entries: the entries that its query attends to; those that all configurations keep always stay.
        kept: per configuration the set, (entry,) True where an entry stays.
    """

    layer: int
    head: int
    entries: HeadEntries
    kept: tuple[Kept, ...]


@torch.inference_mode()
def head_views(sample: SampleRun, heads: Sequence[HeadIndex]) -> Iterator[HeadView]:
    """Yield the chosen heads of one prompt, layer by layer, at the first decode step from the full cache (METHOD).

    All configurations have one window. Raises ActivationError for NaN or Inf.
    """
    sample.prefill.finite.raise_if_not(sample.prompt.sample_id)
    for index in dict.fromkeys(sorted(layer for layer, _ in heads)):
        yield from _layer_views(sample, sample.layer(index), [head for at, head in heads if at == index])


def _layer_views(sample: SampleRun, layer: FullLayer, heads: Sequence[int]) -> Iterator[HeadView]:
    step, configs = sample.full.steps[0], sample.run.configs
    weights, sinks = layer.weights(step)
    masks = _kept_masks(layer, configs, weights)
    always = _always_kept(configs, layer.tokens, step.entries)
    for head in heads:
        value = layer.values[head * len(layer.values) // sample.adapter.heads, : step.entries]
        projected = value.to(theory.WORK) @ layer.slices[head]
        entries = HeadEntries(weights[head].cpu().numpy(), projected.cpu().numpy(), always, float(sinks[head]))
        yield HeadView(layer.index, head, entries, tuple(_with_decoded(mask[head], step.entries) for mask in masks))


def _always_kept(configs: Sequence[ResolvedConfig], prompt_tokens: int, entries: int) -> Kept:
    """Return the entries that every configuration keeps whatever its scores: window, protected and decoded entries."""
    ends = [config.ends(prompt_tokens) for config in configs]
    first, recent = min(one.first for one in ends), min(one.recent for one in ends)
    begin = prompt_tokens - min(configs[0].window, prompt_tokens) - recent
    index = np.arange(entries)
    return np.asarray((index < first) | (index >= begin))


def _kept_masks(layer: FullLayer, configs: Sequence[ResolvedConfig], weights: Tensor) -> list[Tensor]:
    """Return, per configuration, (head, n): True where an entry stays."""
    masks: dict[int, Tensor] = {}
    for group in layer.groups(configs, weights):
        masks |= dict(zip(group.config_indices, group.kept_sets().kept, strict=True))
    return [masks[index] for index in range(len(configs))]


def _with_decoded(mask: Tensor, entries: int) -> Kept:
    """Return the prompt's kept set with all decoded entries."""
    kept = np.ones(entries, dtype=np.bool_)
    kept[: len(mask)] = mask.cpu().numpy()
    return kept


@dataclass(frozen=True)
class SearchSettings:
    """The settings of a search.

    Attributes:
        heads: largest number of heads searched by swaps on the prompt itself, drawn for every prompt.
        proven: number of heads searched by integer programs on the prefix.
        seconds: time limit per head and method of search.
        prefix: tokens of the prefix.
        budget, window: budget and window of the prefix's kept sets.
        seed: seed of the draws.
    """

    heads: int = 64
    proven: int = 8
    seconds: float = 60.0
    prefix: int = 64
    budget: int = 16
    window: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.heads, self.proven) < 0 or not (self.heads or self.proven):
            msg = f"expected heads to search, got {self.heads} of the prompt and {self.proven} of the prefix"
            raise ConfigError(msg)
        if not 0 < self.seconds < np.inf:
            msg = f"seconds for a head must be above 0 and finite, got {self.seconds}"
            raise ConfigError(msg)
        if not 1 <= self.window < self.budget < self.prefix:
            msg = (
                f"a prefix needs window < budget < tokens, got a window of {self.window}, a budget of {self.budget} "
                f"and {self.prefix} tokens"
            )
            raise BudgetError(msg)


def check(configs: Sequence[EvictionConfig], settings: SearchSettings) -> None:
    """Raise ConfigError for configurations whose kept sets cannot be searched per head.

    BudgetError where what always stays leaves nothing to choose in a prefix that is searched.
    """
    for config in configs:
        if wrong := _unsupported_property(config):
            msg = f"the best set of a head is searched among sets of one size, a set per query head; got {wrong}"
            raise ConfigError(msg)
    if len({config.window for config in configs}) > 1:
        msg = f"expected one window for all configurations, got {sorted({config.window for config in configs})}"
        raise ConfigError(msg)
    if settings.proven:
        prefix_configs(configs, settings)


def _unsupported_property(config: EvictionConfig) -> str:
    """Return the property of a configuration that rules a search out; empty where there is none."""
    kind = registry.info(config.policy.name)
    reasons = {
        "policies with kept sets from outside": config.is_external,
        f"policy {config.policy.name}, which evicts nothing": not config.evicts,
        f"granularity {config.granularity}": config.granularity.name != "query" or config.block > 1,
        f"policy {config.policy.name}, whose budgets are {kind.budgets}": kind.budgets != "uniform",
        f"precision {config.precision}": config.quantised,
        f"correction {config.correction}, which changes the output of a set": config.corrected,
    }
    return next((words for words, met in reasons.items() if met), "")


def prefix_configs(configs: Sequence[_Config], settings: SearchSettings) -> list[_Config]:
    """Return the first budget's configurations on a prefix. Raises BudgetError where too few entries are free."""
    first, *_ = group_by_budget(configs)
    try:
        return [replace(one, budget=Budget(settings.budget), window=settings.window) for one in first]
    except BudgetError as error:
        msg = f"the prefix of {settings.prefix} tokens cannot be searched: {error}; --proven 0 (proven=0) leaves it out"
        raise BudgetError(msg) from None


def search_samples(
    planned: Plan, settings: SearchSettings, lines: SampleLines, finished: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Return a line per prompt of the plan, in its order; prompts with stored lines are not searched again."""
    total = len(planned.prompts)
    todo = [prompt for prompt in planned.prompts if prompt.sample_id not in lines.finished]
    finished(total - len(todo), total)
    for prompt, adapter in zip(todo, [planned.model()] * len(todo) if todo else [], strict=True):
        lines.add({SAMPLE: prompt.sample_id, "heads": list(_search_prompt(planned, adapter, prompt, settings))})
        finished(len(lines.rows), total)
    return lines.select(planned.prompts.ids)


def _search_prompt(
    planned: Plan, adapter: Adapter, prompt: Prompt, settings: SearchSettings
) -> Iterator[dict[str, Any]]:
    """Yield an object per head, budget and part."""
    context, _ = prompt.parts(planned.run.scenario)
    draw = np.random.default_rng([settings.seed, zlib.crc32(prompt.sample_id.encode())])
    heads, prefix_heads = (_draw_heads(draw, adapter, count) for count in (settings.heads, settings.proven))
    for configs in group_by_budget(planned.configs):
        for view in _views(planned, adapter, prompt, replace(planned.resolved, configs=tuple(configs)), heads):
            yield _search_row(PROMPT, configs[0], view, search(view.entries, view.kept, settings.seconds))
    if not prefix_heads:
        return
    short = prefix_configs(planned.configs, settings)
    run = replace(planned.resolved, configs=tuple(short), scenario="regular")
    part = replace(prompt, token_ids=tuple(prefix(context, settings.prefix)), question_tokens=0)
    for view in _views(planned, adapter, part, run, prefix_heads):
        search_result = prove(view.entries, view.kept, settings.seconds, settings.seed)
        yield _search_row(PREFIX, short[0], view, search_result)


def group_by_budget(configs: Sequence[_Config]) -> list[list[_Config]]:
    """Return the configurations of each budget, budgets in order of appearance."""
    groups: dict[Budget, list[_Config]] = {}
    for config in configs:
        groups.setdefault(config.budget, []).append(config)
    return list(groups.values())


def prefix(context: Sequence[int], tokens: int) -> Sequence[int]:
    """Return a short prompt: the first token, an attention sink, and tokens from the middle.

    The tokens after the first are left out, as they are the same words of a template in every prompt.
    """
    begin = max(1, (len(context) - tokens) // 2)
    return [context[0], *context[begin : begin + tokens - 1]]


def _draw_heads(generator: np.random.Generator, adapter: Adapter, count: int) -> list[HeadIndex]:
    """Draw `count` distinct heads of all."""
    total = len(adapter.layers) * adapter.heads
    drawn = generator.permutation(total)[:count]
    return [divmod(int(index), adapter.heads) for index in np.sort(drawn)]


def _views(
    planned: Plan,
    adapter: Adapter,
    prompt: Prompt,
    run: ResolvedRun,
    heads: Sequence[HeadIndex],
) -> Iterator[HeadView]:
    if heads:
        sample = SampleRun.read(adapter, prompt, replace(run, steps=1), planned.resources, rows=1)
        yield from head_views(sample, heads)


def _search_row(part: str, config: EvictionConfig, view: HeadView, result: HeadSearch) -> dict[str, Any]:
    """Return a search result as an object of a line."""
    return {"part": part, "budget": str(config.budget), "layer": view.layer, "head": view.head, **asdict(result)}
