"""Which pages configurations read that evict nothing: at every step others, as its query chooses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.selection.budgets import Budgets, Rows
from perturbkv.selection.given import Group
from perturbkv.selection.kept_sets import KeptSets, RankingGroup, ranking_groups
from perturbkv.selection.lined import LinedGroup
from perturbkv.selection.page_selection import PagedLayer, PageScores

Layers = Callable[[EvictionConfig], PagedLayer]
"""One layer in the pages of a configuration; those with the same pages get the same object."""


@dataclass(frozen=True, eq=False)
class ReadGroup:
    """Configurations that choose pages alike; `steps` are what they read at each decode step.

    What is stored as their kept sets is what they read at the first.
    """

    steps: tuple[RankingGroup, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """Which of the run's configurations they are."""
        return self.steps[0].places

    @property
    def kept_heads(self) -> int:
        """Sets of each configuration."""
        return self.steps[0].kept_heads

    @property
    def budgets(self) -> Budgets:
        """How many pages are read: as many at every step."""
        return self.steps[0].budgets

    def kept_sets(self, rows: Rows = slice(None)) -> KeptSets:
        """Masks of some of the group's configurations at the first step, by their place in it."""
        return self.steps[0].kept_sets(rows)

    def each_step(self, rows: Rows) -> list[KeptSets]:
        """The same at every step."""
        return [step.kept_sets(rows) for step in self.steps]


AnyGroup = Group | ReadGroup | LinedGroup
"""What some configurations keep, read, or look along, in one layer."""


def read_groups(
    configs: Sequence[EvictionConfig],
    layer: Layers,
    queries: Sequence[Float[Tensor, "head d_head"]],
    prompt_tokens: int,
) -> list[ReadGroup]:
    """What the configurations that read pages read in one layer at each step, whose query is given."""
    places = [place for place, config in enumerate(configs) if config.reads]
    reading = [configs[place] for place in places]
    steps = [_chosen(reading, layer, query, prompt_tokens) for query in queries] if places else []
    return [
        ReadGroup(tuple(replace(step, places=tuple(places[own] for own in step.places)) for step in group))
        for group in zip(*steps, strict=True)
    ]


def _chosen(configs: Sequence[EvictionConfig], layer: Layers, query: Tensor, tokens: int) -> list[RankingGroup]:
    made: dict[PagedLayer, PageScores] = {}

    def scores(config: EvictionConfig) -> PageScores:
        paged = layer(config)
        if paged not in made:
            made[paged] = PageScores(paged, query)
        return made[paged]

    return ranking_groups(configs, scores, tokens)


@dataclass(frozen=True, eq=False)
class Reader:
    """What one configuration reads of one layer of `prompt_tokens` entries, whatever query asks."""

    config: EvictionConfig
    layer: PagedLayer
    prompt_tokens: int

    def __call__(self, query: Float[Tensor, "head query d_head"]) -> Bool[Tensor, "head query key"]:
        """True where a query of a head looks at an entry of the prompt; each chooses for itself."""
        sets = [self._of(one) for one in query.unbind(dim=1)]
        return torch.stack(sets, dim=1).repeat_interleave(len(query) // len(sets[0]), dim=0)

    def _of(self, query: Float[Tensor, "head d_head"]) -> Bool[Tensor, "kept_head key"]:
        (only,) = _chosen([self.config], lambda _: self.layer, query, self.prompt_tokens)
        return only.kept_sets().kept[0]
