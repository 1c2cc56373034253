"""Every prompt's heads searched for their best kept set: on the prompt itself, and, proven, on a short prefix.

What single heads attend to at the first decoding step, and what configurations keep of it: for searches per head.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perturbkv import theory
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import BudgetError, ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.optimum.exact import HeadEntries, Kept
from perturbkv.optimum.search import PREFIX, PROMPT, HeadSearch, prove, search
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.sample.decoding import StepRecord, decode_full
from perturbkv.pipeline.sample.prefill import Prefill, prefill
from perturbkv.selection.budgets import blocks_at_ends
from perturbkv.selection.policies import registry
from perturbkv.storage.json_lines import SAMPLE, SampleLines

Place = tuple[int, int]
"""A measured layer's place and a query head."""


@dataclass(frozen=True)
class HeadView:
    """One head.

    Attributes:
        layer, head: its place.
        entries: what its query attends to; what stays in every configuration, the window with it, always stays.
        kept: of each configuration the set, (entry,) True where an entry stays.
    """

    layer: int
    head: int
    entries: HeadEntries
    kept: tuple[Kept, ...]


@torch.inference_mode()
def head_views(
    adapter: Adapter,
    context: Sequence[int],
    question: Sequence[int],
    configs: Sequence[EvictionConfig],
    heads: Sequence[Place],
    sample: str,
    resources: Resources,
) -> Iterator[HeadView]:
    """The chosen heads of one prompt, layer by layer: prefill, and one decode step from the full cache (METHOD).

    All configurations have one window. Raises ActivationError for NaN or Inf.
    """
    before = prefill(adapter, context, configs, resources, sample)
    (full,), _ = decode_full(adapter, before, question, 1, 1)
    before.finite.raise_if_not(sample)
    for layer in dict.fromkeys(sorted(layer for layer, _ in heads)):
        yield from _of_layer(adapter, before, full, configs, layer, [head for at, head in heads if at == layer])


def _of_layer(
    adapter: Adapter,
    before: Prefill,
    full: StepRecord,
    configs: Sequence[EvictionConfig],
    layer: int,
    heads: Sequence[int],
) -> Iterator[HeadView]:
    held, n = adapter.held(before.cache, layer), before.statistics.tokens
    keys, values = held.keys[0][:, : full.entries], held.values[0][:, : full.entries]
    weights, sinks = theory.decode_weights(full.query[layer][0], keys, adapter.scale(layer), adapter.sinks(layer))
    masks = _masks(before, configs, layer, keys[:, :n], values[:, :n], weights)
    slices = theory.head_slices(adapter.output_projection(layer), adapter.heads)
    always = _always(configs, n, full.entries)
    for head in heads:
        projected = values[head * len(values) // adapter.heads].to(theory.WORK) @ slices[head]
        entries = HeadEntries(weights[head].cpu().numpy(), projected.cpu().numpy(), always, float(sinks[head]))
        yield HeadView(layer, head, entries, tuple(_with_decoded(mask[head], full.entries) for mask in masks))


def _always(configs: Sequence[EvictionConfig], prompt_tokens: int, entries: int) -> Kept:
    """What stays in every configuration whatever its scores: the window, what all protect, and what was decoded."""
    ends = [blocks_at_ends(config, prompt_tokens) for config in configs]
    first, recent = (min(side) for side in zip(*ends, strict=True))
    begin = prompt_tokens - min(configs[0].window, prompt_tokens) - recent
    place = np.arange(entries)
    return np.asarray((place < first) | (place >= begin))


def _masks(
    before: Prefill, configs: Sequence[EvictionConfig], layer: int, keys: Tensor, values: Tensor, weights: Tensor
) -> list[Tensor]:
    """Of each configuration (head, n) True where an entry stays."""
    found: dict[int, Tensor] = {}
    for group in before.statistics.groups(configs, layer, keys, values, weights):
        found |= dict(zip(group.places, group.kept_sets().kept, strict=True))
    return [found[place] for place in range(len(configs))]


def _with_decoded(mask: Tensor, entries: int) -> Kept:
    """The set of the prompt's entries, and all that was decoded since."""
    kept = np.ones(entries, dtype=np.bool_)
    kept[: len(mask)] = mask.cpu().numpy()
    return kept


@dataclass(frozen=True)
class Searches:
    """How many heads of each prompt are searched, and how.

    Attributes:
        heads: of the prompt itself, drawn anew for every prompt, at most; by swaps.
        proven: of the prefix; by integer programs.
        seconds: at most for each head and method of search.
        prefix: tokens of the prefix.
        budget, window: of the prefix' kept sets.
        seed: of the draws.
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


def check(configs: Sequence[EvictionConfig], asked: Searches) -> None:
    """Raise ConfigError for configurations whose sets of one head are not all of one size, or are not all there is.

    BudgetError where what always stays leaves nothing to choose in a prefix that is searched.
    """
    for config in configs:
        if wrong := _other(config):
            msg = f"the best set of a head is searched among sets of one size, a set per query head; got {wrong}"
            raise ConfigError(msg)
    if len({config.window for config in configs}) > 1:
        msg = f"expected one window for all configurations, got {sorted({config.window for config in configs})}"
        raise ConfigError(msg)
    if asked.proven:
        of_prefix(configs, asked)


def _other(config: EvictionConfig) -> str:
    """What of a configuration makes its sets others than those that are searched; empty where nothing does."""
    kind = registry.info(config.policy.name)
    reasons = {
        "policies that keep what they keep": config.given,
        f"policy {config.policy.name}, which evicts nothing": not config.evicts,
        f"granularity {config.granularity}": config.granularity.name != "query" or config.block > 1,
        f"policy {config.policy.name}, whose budgets are {kind.budgets}": kind.budgets != "uniform",
        f"precision {config.precision}": config.quantised,
        f"correction {config.correction}, which changes the output of a set": config.corrected,
    }
    return next((words for words, met in reasons.items() if met), "")


def of_prefix(configs: Sequence[EvictionConfig], asked: Searches) -> list[EvictionConfig]:
    """The first budget's configurations on a prefix. Raises BudgetError where too few entries are left to choose."""
    first, *_ = by_budget(configs)
    try:
        return [replace(one, budget=Budget(asked.budget), window=asked.window) for one in first]
    except BudgetError as error:
        msg = f"the prefix of {asked.prefix} tokens cannot be searched: {error}; --proven 0 (proven=0) leaves it out"
        raise BudgetError(msg) from None


def search_samples(
    planned: Plan, asked: Searches, lines: SampleLines, finished: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """A line per prompt of the plan, in its order; prompts whose lines are there are not searched again."""
    total = len(planned.prompts)
    todo = [prompt for prompt in planned.prompts if prompt.sample_id not in lines.done]
    finished(total - len(todo), total)
    for prompt, adapter in zip(todo, [planned.model()] * len(todo) if todo else [], strict=True):
        lines.add({SAMPLE: prompt.sample_id, "heads": list(_searched(planned, adapter, prompt, asked))})
        finished(len(lines.rows), total)
    return lines.of(planned.prompts.ids)


def _searched(planned: Plan, adapter: Adapter, prompt: Prompt, asked: Searches) -> Iterator[dict[str, Any]]:
    """An object per head, budget and part."""
    context, question = prompt.parts(planned.run.scenario)
    draw = np.random.default_rng([asked.seed, zlib.crc32(prompt.sample_id.encode())])
    heads, prefix_heads = (_drawn(draw, adapter, count) for count in (asked.heads, asked.proven))
    for configs in by_budget(planned.run.configs):
        for view in _views(planned, adapter, prompt, (context, question), configs, heads):
            yield _told(PROMPT, configs[0], view, search(view.entries, view.kept, asked.seconds))
    if not prefix_heads:
        return
    short = of_prefix(planned.run.configs, asked)
    for view in _views(planned, adapter, prompt, (prefix(context, asked.prefix), ()), short, prefix_heads):
        found = prove(view.entries, view.kept, asked.seconds, asked.seed)
        yield _told(PREFIX, short[0], view, found)


def by_budget(configs: Sequence[EvictionConfig]) -> list[list[EvictionConfig]]:
    """The configurations of each budget, in the order in which budgets come."""
    found: dict[Budget, list[EvictionConfig]] = {}
    for config in configs:
        found.setdefault(config.budget, []).append(config)
    return list(found.values())


def prefix(context: Sequence[int], tokens: int) -> Sequence[int]:
    """A short prompt: the first token, on which attention rests, and tokens of the middle, of the prompt's own text.

    The very first tokens are the same words of a template in every prompt.
    """
    begin = max(1, (len(context) - tokens) // 2)
    return [context[0], *context[begin : begin + tokens - 1]]


def _drawn(draw: np.random.Generator, adapter: Adapter, count: int) -> list[Place]:
    """So many heads of all, each once."""
    total = len(adapter.layers) * adapter.heads
    places = draw.permutation(total)[:count]
    return [divmod(int(place), adapter.heads) for place in np.sort(places)]


def _views(
    planned: Plan,
    adapter: Adapter,
    prompt: Prompt,
    parts: tuple[Sequence[int], Sequence[int]],
    configs: Sequence[EvictionConfig],
    heads: Sequence[Place],
) -> Iterator[HeadView]:
    if heads:
        yield from head_views(adapter, *parts, configs, heads, prompt.sample_id, planned.resources)


def _told(part: str, config: EvictionConfig, view: HeadView, found: HeadSearch) -> dict[str, Any]:
    """As a line holds it."""
    return {"part": part, "budget": str(config.budget), "layer": view.layer, "head": view.head, **asdict(found)}
