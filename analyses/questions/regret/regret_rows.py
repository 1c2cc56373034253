"""How far a method's kept sets are from the best known ones, and how much of that is not knowing the query.

Three factors, as `optimum.chain` has it: L(method) / L(best) = L(method) / L(plain) · L(plain) / L(knowing) ·
L(knowing) / L(best). *Plain* ranks by the window's estimate without pooling and stages, *knowing* by the realised
values of the same thing. Of geometric means over the same heads the product holds exactly.

What searches found at one budget: on whole prompts, or on prefixes, and how sure the best sets are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import setting_name
from perturbkv.analyses.stats import intervals
from perturbkv.analyses.stats.arithmetic import half_share, plain, ratio
from perturbkv.analyses.stats.intervals import RATIO, Kind, Scalar
from perturbkv.analyses.text import at
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.optimum import chain
from perturbkv.optimum.search import PREFIX, PROMPT, FoundSets

_NEVER_BELOW = replace(RATIO, limits=(1, np.inf))
"""L over that of the best known set."""
_ROUNDING = 1e-9
"""Share of the largest L of a head's sets below which the best one's is rounding."""


@dataclass(frozen=True)
class Factor:
    """A geometric mean over heads, then over samples, with its interval; NaN where nothing is defined."""

    value: float
    interval: Scalar


@dataclass(frozen=True)
class Regret:
    """One method's sets against the best known ones of the same heads and sizes.

    Attributes:
        config: the method.
        heads: how many it is of, all samples together; `samples`: of how many, those that have one of them.
        sum_ratio: Σ L over Σ L of the best, all heads of all samples.
        sum_ratio_interval: over samples.
        median_ratio: of the median head of each sample, their median over samples.
        median_ratio_interval: over samples.
        half: the smallest share of the heads that carries half of Σ L.
        factor: L over the best's.
        form: of it what pooling and stages cost; NaN, like the others, where the method estimates neither A nor A ν.
        query: what not knowing the query costs.
        criterion: what the criterion costs with the query known; the three multiply to `factor`.
    """

    config: EvictionConfig
    heads: int
    samples: int
    sum_ratio: float
    sum_ratio_interval: Scalar
    median_ratio: float
    median_ratio_interval: Scalar
    half: float
    factor: Factor
    form: Factor
    query: Factor
    criterion: Factor

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(vars(self))
        return found


@dataclass(frozen=True)
class Heads:
    """The heads of one sample: (method, head) L of every set, and (head,) that of the best known."""

    methods: Floats
    best: Floats

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], methods: int) -> Heads:
        """The heads whose best known L is more than rounding."""
        found = np.array([row["perturbation"] for row in rows], dtype=np.float64).reshape(-1, methods).T
        best = np.array([row["best"] for row in rows], dtype=np.float64)
        held = best > _ROUNDING * found.max(axis=0, initial=0)
        return cls(found[:, held], best[held])


def regrets(configs: Sequence[EvictionConfig], samples: Sequence[Heads]) -> tuple[Regret, ...]:
    """Every method's, over the samples that have a head."""
    held = [sample for sample in samples if sample.best.size]
    return tuple(_regret(configs, place, held) for place in range(len(configs))) if held else ()


def _regret(configs: Sequence[EvictionConfig], place: int, samples: Sequence[Heads]) -> Regret:
    sums = np.array([(one.methods[place].sum(), one.best.sum()) for one in samples])
    medians = np.array([np.median(one.methods[place] / one.best) for one in samples])
    along = _along(configs, place)
    parts = [_steps(one, along) for one in samples]
    return Regret(
        config=configs[place],
        heads=sum(one.best.size for one in samples),
        samples=len(samples),
        sum_ratio=float(ratio(*sums.sum(axis=0))),
        sum_ratio_interval=intervals.scalar(lambda weights: ratio(*(weights @ sums).T), len(samples), _NEVER_BELOW),
        median_ratio=float(np.median(medians)),
        median_ratio_interval=at(intervals.of_medians(medians[:, None]), 0),
        half=half_share(np.concatenate([one.methods[place] for one in samples])),
        factor=_factor([_logs(one.methods[place], one.best) for one in samples], _NEVER_BELOW),
        form=_factor([part[0] for part in parts]),
        query=_factor([part[1] for part in parts]),
        criterion=_factor([part[2] for part in parts], _NEVER_BELOW),
    )


def _along(configs: Sequence[EvictionConfig], place: int) -> list[int] | None:
    """Where the method, its plain form and the one that knows the query stand; None for a method without them."""
    found = [configs[place], chain.plain(configs[place]), chain.knowing(configs[place])]
    return [configs.index(one) for one in found if one is not None] if set(found) <= set(configs) else None


def _steps(one: Heads, places: Sequence[int] | None) -> list[float]:
    """Mean log of each factor over a sample's heads; NaN without a chain."""
    if places is None:
        return [float("nan")] * 3
    along = [*(one.methods[place] for place in places), one.best]
    return [_logs(above, below) for above, below in pairwise(along)]


def _logs(above: Floats, below: Floats) -> float:
    """Mean over heads of log(above / below)."""
    return float(np.log(above / below).mean())


def _factor(logs: Sequence[float], kind: Kind = RATIO) -> Factor:
    held = np.array(logs)
    if np.isnan(held).any():
        return Factor(float("nan"), None)
    interval = intervals.scalar(lambda weights: np.exp(weights @ held), len(held), kind)
    return Factor(float(np.exp(held.mean())), interval)


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
        return f"{self._searched}: {setting_name(self.configs[0])}"

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
