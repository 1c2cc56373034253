"""What searches found at one budget: on whole prompts, or on prefixes, and how sure the best sets are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from perturbkv.analyses.naming import setting
from perturbkv.analyses.questions.regret.regret_rows import Heads, Regret, regrets
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.optimum.found import PREFIX, PROMPT, FoundSets

_NOT_TOLD = ("rows", "configs", "regrets", "first", "others")
_SAME = 1e-9
"""Two values of L this near are one."""


@dataclass(frozen=True)
class Part:
    """The searches of one budget on whole prompts, or those on prefixes.

    Attributes:
        part: `prompt` or `prefix`.
        configs: the methods at this part's budget.
        rows: per sample its heads, as `FoundSets` holds them.
        heads: searched, of all samples.
        left_out: of them, whose best L is rounding.
        settled: in how many no swap improves what swaps ended in.
        tried, closed: in how many a proof was tried, and the best set proven.
        at_optimum: in how many of the proven ones swaps alone had found it.
        gap: the largest share of L that is left between bound and best set where no proof was reached; 0 of none.
        regrets: per method, over the best known sets, those that are proven among them.
        first, others: the same of the heads of the first measured layer, and of all others, apart.
    """

    part: str
    configs: tuple[EvictionConfig, ...]
    rows: tuple[tuple[Mapping[str, Any], ...], ...]
    heads: int
    left_out: int
    settled: int
    tried: int
    closed: int
    at_optimum: int
    gap: float
    regrets: tuple[Regret, ...]
    first: tuple[Regret, ...]
    others: tuple[Regret, ...]

    @property
    def setting(self) -> str:
        """What its configurations share."""
        return f"{self._searched}: {setting(self.configs[0])}"

    @property
    def where(self) -> str:
        """On what heads were searched, and at which budget."""
        return f"{self._searched}, b={self.configs[0].budget}"

    @property
    def _searched(self) -> str:
        return "prefixes" if self.part == PREFIX else "prompts"

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        told = {name: value for name, value in vars(self).items() if name not in _NOT_TOLD}
        apart = {"methods": self.regrets, "first_layer": self.first, "other_layers": self.others}
        return {**told, **{name: [one.to_dict() for one in found] for name, found in apart.items()}}


def parts_of(found: FoundSets) -> tuple[Part, ...]:
    """Whole prompts by budget, then the prefixes; those of which heads were searched."""
    parts = [_part(found, PROMPT, configs) for configs in _by_budget(found.run.configs)]
    parts.append(_part(found, PREFIX, _of_prefix(found)))
    return tuple(part for part in parts if part.heads)


def _by_budget(configs: tuple[EvictionConfig, ...]) -> list[tuple[EvictionConfig, ...]]:
    budgets = dict.fromkeys(config.budget for config in configs)
    return [tuple(config for config in configs if config.budget == budget) for budget in budgets]


def _of_prefix(found: FoundSets) -> tuple[EvictionConfig, ...]:
    budget, window = Budget(int(found.asked["budget"])), int(found.asked["window"])
    return tuple(replace(one, budget=budget, window=window) for one in _by_budget(found.run.configs)[0])


def _part(found: FoundSets, part: str, configs: tuple[EvictionConfig, ...]) -> Part:
    rows = tuple(
        tuple(row for row in sample["heads"] if row["part"] == part and row["budget"] == str(configs[0].budget))
        for sample in found.rows
    )
    every = [row for sample in rows for row in sample]
    tried = [row for row in every if row["lower"] is not None]
    closed = [row for row in tried if row["closed"]]
    count = len(configs)
    heads = [Heads.of(sample, count) for sample in rows]
    return Part(
        part=part,
        configs=configs,
        rows=rows,
        heads=len(every),
        left_out=len(every) - sum(one.best.size for one in heads),
        settled=sum(bool(row["settled"]) for row in every),
        tried=len(tried),
        closed=len(closed),
        at_optimum=sum(row["improved"] <= row["best"] * (1 + _SAME) for row in closed),
        gap=max((1 - row["lower"] / row["best"] for row in tried if not row["closed"]), default=0.0),
        regrets=regrets(configs, heads),
        first=regrets(configs, [Heads.of([row for row in sample if not row["layer"]], count) for sample in rows]),
        others=regrets(configs, [Heads.of([row for row in sample if row["layer"]], count) for sample in rows]),
    )
