"""Every prompt's heads searched for their best kept set: on the prompt itself, and, proven, on a short prefix.

What single heads attend to at the first decoding step, and what configurations keep of it: for searches per head.
"""

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
def head_views(sample: SampleRun, heads: Sequence[Place]) -> Iterator[HeadView]:
    """Yield the chosen heads of one prompt, layer by layer, at the first decode step from the full cache (METHOD).

    All configurations have one window. Raises ActivationError for NaN or Inf.
    """
    sample.prefill.finite.raise_if_not(sample.prompt.sample_id)
    for index in dict.fromkeys(sorted(layer for layer, _ in heads)):
        yield from _of_layer(sample, sample.layer(index), [head for at, head in heads if at == index])


def _of_layer(sample: SampleRun, layer: FullLayer, heads: Sequence[int]) -> Iterator[HeadView]:
    step, configs = sample.full.steps[0], sample.run.configs
    weights, sinks = layer.weights(step)
    masks = _masks(layer, configs, weights)
    always = _always(configs, layer.tokens, step.entries)
    for head in heads:
        value = layer.values[head * len(layer.values) // sample.adapter.heads, : step.entries]
        projected = value.to(theory.WORK) @ layer.slices[head]
        entries = HeadEntries(weights[head].cpu().numpy(), projected.cpu().numpy(), always, float(sinks[head]))
        yield HeadView(layer.index, head, entries, tuple(_with_decoded(mask[head], step.entries) for mask in masks))


def _always(configs: Sequence[ResolvedConfig], prompt_tokens: int, entries: int) -> Kept:
    """What stays in every configuration whatever its scores: the window, what all protect, and what was decoded."""
    ends = [config.ends(prompt_tokens) for config in configs]
    first, recent = min(one.first for one in ends), min(one.recent for one in ends)
    begin = prompt_tokens - min(configs[0].window, prompt_tokens) - recent
    place = np.arange(entries)
    return np.asarray((place < first) | (place >= begin))


def _masks(layer: FullLayer, configs: Sequence[ResolvedConfig], weights: Tensor) -> list[Tensor]:
    """Return, per configuration, (head, n): True where an entry stays."""
    found: dict[int, Tensor] = {}
    for group in layer.groups(configs, weights):
        found |= dict(zip(group.config_indices, group.kept_sets().kept, strict=True))
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
        "policies that keep what they keep": config.is_external,
        f"policy {config.policy.name}, which evicts nothing": not config.evicts,
        f"granularity {config.granularity}": config.granularity.name != "query" or config.block > 1,
        f"policy {config.policy.name}, whose budgets are {kind.budgets}": kind.budgets != "uniform",
        f"precision {config.precision}": config.quantised,
        f"correction {config.correction}, which changes the output of a set": config.corrected,
    }
    return next((words for words, met in reasons.items() if met), "")


def of_prefix(configs: Sequence[_Config], asked: Searches) -> list[_Config]:
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
    todo = [prompt for prompt in planned.prompts if prompt.sample_id not in lines.finished]
    finished(total - len(todo), total)
    for prompt, adapter in zip(todo, [planned.model()] * len(todo) if todo else [], strict=True):
        lines.add({SAMPLE: prompt.sample_id, "heads": list(_searched(planned, adapter, prompt, asked))})
        finished(len(lines.rows), total)
    return lines.select(planned.prompts.ids)


def _searched(planned: Plan, adapter: Adapter, prompt: Prompt, asked: Searches) -> Iterator[dict[str, Any]]:
    """An object per head, budget and part."""
    context, _ = prompt.parts(planned.run.scenario)
    draw = np.random.default_rng([asked.seed, zlib.crc32(prompt.sample_id.encode())])
    heads, prefix_heads = (_drawn(draw, adapter, count) for count in (asked.heads, asked.proven))
    for configs in by_budget(planned.configs):
        for view in _views(planned, adapter, prompt, replace(planned.resolved, configs=tuple(configs)), heads):
            yield _told(PROMPT, configs[0], view, search(view.entries, view.kept, asked.seconds))
    if not prefix_heads:
        return
    short = of_prefix(planned.configs, asked)
    run = replace(planned.resolved, configs=tuple(short), scenario="regular")
    part = replace(prompt, token_ids=tuple(prefix(context, asked.prefix)), question_tokens=0)
    for view in _views(planned, adapter, part, run, prefix_heads):
        found = prove(view.entries, view.kept, asked.seconds, asked.seed)
        yield _told(PREFIX, short[0], view, found)


def by_budget(configs: Sequence[_Config]) -> list[list[_Config]]:
    """The configurations of each budget, in the order in which budgets come."""
    found: dict[Budget, list[_Config]] = {}
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
    run: ResolvedRun,
    heads: Sequence[Place],
) -> Iterator[HeadView]:
    if heads:
        sample = SampleRun.read(adapter, prompt, replace(run, steps=1), planned.resources, rows=1)
        yield from head_views(sample, heads)


def _told(part: str, config: EvictionConfig, view: HeadView, found: HeadSearch) -> dict[str, Any]:
    """As a line holds it."""
    return {"part": part, "budget": str(config.budget), "layer": view.layer, "head": view.head, **asdict(found)}
