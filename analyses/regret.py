"""How far is each method from the best kept set, and is it the criterion or the unknown query that costs?."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perturbkv.analyses import numbers
from perturbkv.analyses.arithmetic import plain
from perturbkv.analyses.identity import RunIdentity, of_run
from perturbkv.analyses.naming import counted, folded
from perturbkv.analyses.objects import columns_of
from perturbkv.analyses.regret_parts import Part, parts_of
from perturbkv.analyses.regret_rows import Regret
from perturbkv.analyses.result import Result
from perturbkv.analyses.sentences import factor, over, sentence
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.optimum import chain
from perturbkv.optimum.found import PROMPT, FoundSets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ANALYSIS = "regret"
_FACTORS = ("#= pooling,\nstages", "#× query\nunknown", "#× the\ncriterion")
_WHERE = ("", "#mean\nfactor", *_FACTORS)
_COLUMNS = ("", "#Σ of all\nheads", "#median\nhead", "#mean\nfactor", *_FACTORS)


@dataclass(frozen=True, repr=False)
class RegretResult(Result):
    """Every part.

    Attributes:
        identity: which run this is.
        samples: their names.
        parts: whole prompts by budget, then the prefixes.
        asked: how heads were searched.
    """

    identity: RunIdentity
    samples: tuple[str, ...]
    parts: tuple[Part, ...]
    asked: Mapping[str, Any]

    def conclusion(self) -> str:
        """By which factor each method misses the best known set, and what of it is the query's."""
        told = [one for one in (self.parts[0].regrets if self.parts else ()) if _asked(one)]
        if not told:
            return "No head loses more than rounding under every kept set of its size."
        names = named([one.config for one in told])
        verbs = [" perturbs", *[""] * (len(told) - 1)]
        missed = ", ".join(
            f"{name}{verb} {factor(one.factor.value, one.factor.interval)}"
            for name, verb, one in zip(names, verbs, told, strict=True)
        )
        last = told[-1]
        said = (
            f"{missed} what the best known set of the same size does; of {names[-1]}'s, "
            f"{factor(last.form.value, last.form.interval)} is pooling and stages, "
            f"{factor(last.query.value, last.query.interval)} not knowing the query and "
            f"{factor(last.criterion.value, last.criterion.interval)} the criterion"
        )
        return sentence(f"{said} (isolated, geometric means; {over(self.identity.samples)})", *names)

    def tables(self) -> list[Table | str]:
        """Of each part every method's ratios, and what was proven."""
        found: list[Table | str] = []
        for part in self.parts:
            found += [_table(part), *self._apart(part), _searched(part)]
        return found

    def _apart(self, part: Part) -> list[Table]:
        """Of prompts the first layer's heads beside all others, of methods that a hindsight ranks like."""
        if part.part != PROMPT or not (part.first and part.others):
            return []
        first = f"layer {self.identity.layer(0)}"
        rows = [
            [f"{folded(name, 20)}, {where}", *_factors(found[place])]
            for place, name in enumerate(named(part.configs))
            for where, found in ((first, part.first), ("others", part.others))
            if found and _asked(found[place])
        ]
        return [Table(f"{part.setting}: {first} and the others", _WHERE, rows)]

    def notes(self) -> str:
        """What columns mean."""
        return (
            f"{numbers.about_intervals(self.identity.samples, medians=True)} Isolated L1 of a method's set over "
            "that of the best set known of the same head and size, which knows the query; the window stays, and what "
            "all protect. Pooling, stages: over Top-k of the window's unpooled mean A, of two-stage A ν; query "
            "unknown: that over Top-k of the realised one; the criterion: that over the best. Swaps exchange entries "
            "of the best set given until none helps; integer programs (HiGHS in Dinkelbach's iteration) prove a bound. "
            "Heads are drawn anew for each prompt. A prefix: the prompt's first token and "
            f"{self.asked['prefix'] - 1} of its middle."
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {"samples": self.samples, "searches": self.asked, "parts": [part.to_dict() for part in self.parts]}
        )
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per sample, part, head and method: L1, the best known, and the bound below which no set lies."""
        return [
            {
                **columns_of(config), "sample": sample, "part": part.part,
                "layer": self.identity.layer(row["layer"]), "head": row["head"],
                "perturbation": row["perturbation"][place],
                **{name: row[name] for name in ("kept", "improved", "best", "lower", "closed", "settled")},
            }
            for part in self.parts
            for sample, rows in zip(self.samples, part.rows, strict=True)
            for row in rows
            for place, config in enumerate(part.configs)
        ]  # fmt: skip

    def plot(self, width_mm: float = 174) -> Figure:
        """Of each part, the share of heads within a factor of the best known set, by method."""
        from perturbkv.figures.regret import draw

        return draw(self, width_mm)


def regret_of(found: FoundSets) -> RegretResult:
    """What searches say of every method (METHOD: the quantities): isolated L1 over that of the best known kept set."""
    return RegretResult(
        identity=of_run(found.run, found.made_with, len(found.rows), "sets", found.digest),
        samples=tuple(str(row["sample"]) for row in found.rows),
        parts=parts_of(found),
        asked=found.asked,
    )


def named(configs: Sequence[EvictionConfig]) -> list[str]:
    """Each method as it is written: its selection, behind its policy where there are several."""
    several = len({config.policy.name for config in configs}) > 1
    return [f"{config.policy}:{config.selection}" if several else str(config.selection) for config in configs]


def _table(part: Part) -> Table:
    names = named([one.config for one in part.regrets])
    rows = [
        [
            folded(name, 20),
            numbers.decimal(one.sum_ratio, one.sum_ratio_interval, apart="\n"),
            numbers.decimal(one.median_ratio, one.median_ratio_interval, apart="\n"),
            *_factors(one),
        ]
        for name, one in zip(names, part.regrets, strict=True)
    ]
    return Table(f"{part.setting}: isolated L1 over that of the best known set", _COLUMNS, rows)


def _asked(one: Regret) -> bool:
    """Whether it is a method whose parts are known, and no part of another's chain."""
    return one.query.value == one.query.value and chain.plain(one.config) != one.config


def _factors(one: Regret) -> list[str]:
    """L over the best's, and its three parts."""
    parts = (one.factor, one.form, one.query, one.criterion)
    return [numbers.decimal(each.value, each.interval, apart="\n") for each in parts]


def _searched(part: Part) -> str:
    """How many heads, and how sure their best sets are."""
    said = [f"{counted(part.heads, 'head')} searched, no swap helps any more in {part.settled}"]
    if part.tried:
        open_heads = part.tried - part.closed
        said.append(f"the best set is proven in {part.closed} of {part.tried}, where swaps alone had found it in "
                    f"{part.at_optimum}")  # fmt: skip
        if open_heads:
            said.append(f"of {open_heads} not proven the bound is up to {numbers.percent(part.gap)} lower")
    if part.left_out:
        said.append(f"{counted(part.left_out, 'head')} left out, whose best set loses nothing but rounding")
    return "; ".join(said) + "."
