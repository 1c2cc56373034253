"""Search for the best kept sets of single heads: on every prompt itself, and with proof on a short probe from it."""

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
from perturbkv.optimum.search import PREFIX, PROMPT, HeadSearch, search_head, search_head_with_proof
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.sample_run import SampleRun
from perturbkv.selection.compatibility import check_searchable
from perturbkv.selection.resolved_config import ResolvedRun
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
        kept: per configuration the mask (entry,) of the kept set.
    """

    layer: int
    head: int
    entries: HeadEntries
    kept: tuple[Kept, ...]


@torch.inference_mode()
def head_views(sample: SampleRun, heads: Sequence[HeadIndex]) -> Iterator[HeadView]:
    """Yield the entries and kept sets of the given heads on one prompt, layer by layer, at the first decode step.

    All configurations have one window. Raises ActivationError for NaN or Inf.
    """
    sample.prefill.finite.raise_if_not(sample.prompt.sample_id)
    for index in dict.fromkeys(sorted(layer for layer, _ in heads)):
        yield from _layer_views(sample, sample.layer(index), [head for layer, head in heads if layer == index])


def _layer_views(sample: SampleRun, layer: FullLayer, heads: Sequence[int]) -> Iterator[HeadView]:
    """Yield the entries and kept sets of the given heads of one layer."""
    step, configs = sample.full.steps[0], sample.run.configs
    (weights, sinks), slices = layer.weights(step), layer.slices_at(step)
    masks = layer.kept_masks(configs, lambda _: weights)
    ends = [config.prefix_counts(layer.tokens) for config in configs]
    first, recent = min(each.first for each in ends), min(each.recent for each in ends)
    begin = layer.tokens - min(configs[0].window, layer.tokens) - recent
    index = np.arange(step.entries)
    always_kept = np.asarray((index < first) | (index >= begin))  # by every configuration, whatever the scores
    for head in heads:
        value = layer.values[head * len(layer.values) // sample.adapter.heads, : step.entries]
        projected = value.to(theory.WORK) @ slices[head]
        entries = HeadEntries(weights[head].cpu().numpy(), projected.cpu().numpy(), always_kept, float(sinks[head]))
        yield HeadView(layer.index, head, entries, tuple(_append_decoded(mask[head], step.entries) for mask in masks))


def _append_decoded(mask: Tensor, entries: int) -> Kept:
    """Return the mask of a prompt's kept set extended to `entries` by decoded entries, all of them kept."""
    kept = np.ones(entries, dtype=np.bool_)
    kept[: len(mask)] = mask.cpu().numpy()
    return kept


@dataclass(frozen=True)
class SearchSettings:
    """The settings of a search.

    Attributes:
        heads: largest number of heads searched by swaps on the prompt itself, drawn for every prompt.
        proven: number of heads searched by integer programs on the short probe.
        seconds: time limit per head and method of search.
        prefix: number of tokens of the probe.
        budget, window: budget and window of the probe's kept sets.
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
            raise ConfigError(
                f"expected heads to search, got {self.heads} of the prompt and {self.proven} of the prefix"
            )
        if not 0 < self.seconds < np.inf:
            raise ConfigError(f"seconds for a head must be above 0 and finite, got {self.seconds}")
        if not 1 <= self.window < self.budget < self.prefix:
            raise BudgetError(
                f"a prefix needs window < budget < tokens, got a window of {self.window}, a budget of {self.budget} "
                f"and {self.prefix} tokens"
            )


def check_search(configs: Sequence[EvictionConfig], settings: SearchSettings) -> None:
    """Raise ConfigError for configurations that rule out a per-head search of their kept sets.

    Raises BudgetError where always-kept entries leave nothing to choose in a short probe that is to be searched.
    """
    for config in configs:
        check_searchable(config)
    if len({config.window for config in configs}) > 1:
        raise ConfigError(
            f"expected one window for all configurations, got {sorted({config.window for config in configs})}"
        )
    if settings.proven:
        probe_configs(configs, settings)


def probe_configs(configs: Sequence[_Config], settings: SearchSettings) -> list[_Config]:
    """Return the configurations of the first budget, with budget and window replaced by those of the short probe.

    Raises BudgetError where they leave too few entries to choose.
    """
    first_group = group_by_budget(configs)[0]
    try:
        return [replace(config, budget=Budget(settings.budget), window=settings.window) for config in first_group]
    except BudgetError as error:
        raise BudgetError(
            f"the prefix of {settings.prefix} tokens cannot be searched: {error}; --proven 0 (proven=0) leaves it out"
        ) from None


def search_samples(
    planned: Plan, settings: SearchSettings, lines: SampleLines, finished: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Search the best kept sets on every prompt, and return a JSON object per prompt, in the plan's order.

    Prompts with stored lines are not searched again, and the model is loaded only where one is left. `finished` is
    called with the number of searched prompts and of all, at the beginning and after each prompt.
    """
    total = len(planned.prompts)
    todo = [prompt for prompt in planned.prompts if prompt.sample_id not in lines.sample_ids]
    finished(total - len(todo), total)
    if todo:
        adapter = planned.model()
        adapter.check_own_caches("a search of the best kept sets")
        for prompt in todo:
            lines.add({SAMPLE: prompt.sample_id, "heads": list(_search_prompt(planned, adapter, prompt, settings))})
            finished(len(lines.rows), total)
    return lines.select(planned.prompts.ids)


def _search_prompt(
    planned: Plan, adapter: Adapter, prompt: Prompt, settings: SearchSettings
) -> Iterator[dict[str, Any]]:
    """Yield a JSON object per searched head and budget: first on the prompt, then on the short probe."""
    context, _ = prompt.parts(planned.run.scenario)
    draw = np.random.default_rng([settings.seed, zlib.crc32(prompt.sample_id.encode())])
    heads, prefix_heads = (_draw_heads(draw, adapter, count) for count in (settings.heads, settings.proven))
    for configs in group_by_budget(planned.configs):
        for view in _prompt_views(planned, adapter, prompt, replace(planned.resolved, configs=tuple(configs)), heads):
            yield _search_row(PROMPT, configs[0], view, search_head(view.entries, view.kept, settings.seconds))
    if not prefix_heads:
        return
    short = probe_configs(planned.configs, settings)
    run = replace(planned.resolved, configs=tuple(short), scenario="regular")
    probe = replace(prompt, token_ids=tuple(short_probe(context, settings.prefix)), question_tokens=0)
    for view in _prompt_views(planned, adapter, probe, run, prefix_heads):
        search_result = search_head_with_proof(view.entries, view.kept, settings.seconds, settings.seed)
        yield _search_row(PREFIX, short[0], view, search_result)


def group_by_budget(configs: Sequence[_Config]) -> list[list[_Config]]:
    """Return the configurations in groups of equal budget, budgets in order of appearance."""
    groups: dict[Budget, list[_Config]] = {}
    for config in configs:
        groups.setdefault(config.budget, []).append(config)
    return list(groups.values())


def short_probe(context: Sequence[int], tokens: int) -> Sequence[int]:
    """Return a probe of `tokens` tokens: the context's first (an attention sink), then a stretch from its middle.

    The tokens right after the first are left out, as a template gives every prompt the same ones.
    """
    begin = max(1, (len(context) - tokens) // 2)
    return [context[0], *context[begin : begin + tokens - 1]]


def _draw_heads(generator: np.random.Generator, adapter: Adapter, count: int) -> list[HeadIndex]:
    """Return `count` randomly drawn heads of the model, sorted; all heads where there are fewer."""
    drawn = generator.permutation(len(adapter.layers) * adapter.heads)[:count]
    return [divmod(int(index), adapter.heads) for index in np.sort(drawn)]


def _prompt_views(
    planned: Plan,
    adapter: Adapter,
    prompt: Prompt,
    run: ResolvedRun,
    heads: Sequence[HeadIndex],
) -> Iterator[HeadView]:
    """Yield the entries and kept sets of the given heads on a prompt; without heads the prompt is not read."""
    if heads:
        sample = SampleRun.read(adapter, prompt, replace(run, steps=1), planned.resources, rows=1)
        yield from head_views(sample, heads)


def _search_row(part: str, config: EvictionConfig, view: HeadView, result: HeadSearch) -> dict[str, Any]:
    """Return the search result of a head as a JSON object."""
    return {"part": part, "budget": str(config.budget), "layer": view.layer, "head": view.head, **asdict(result)}
