"""How far is each method from the best kept set, and is it the criterion or the unknown query that costs?."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.identity import RunIdentity, of_run
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.pairing import counted, folded
from perturbkv.analyses.questions.regret.regret_rows import Part, Regret, parts_of
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.text import factor, over, sentence
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.optimum import chain
from perturbkv.optimum.search import PROMPT, FoundSets

ANALYSIS = "regret"
_COLUMNS = ("", "#heads", "#Σ of all\nheads", "#median\nhead", "#mean\nfactor")
_PARTS = ("", "#heads", "#mean\nfactor", "#pooling,\nstages", "#query\nunknown", "#criterion")
_NAME = 13
"""Width of a name at which four ranges fit beside it."""


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
        told = [self.parts[0].regrets[place] for place in _asked(self.parts[0])] if self.parts else []
        if not told:
            return "No head loses more than rounding under every kept set of its size."
        names = named([one.config for one in told])
        verbs = [" perturbs", *[""] * (len(told) - 1)]
        missed = ", ".join(
            f"{name}{verb} {factor(one.factor.value, one.factor.interval)}"
            for name, verb, one in zip(names, verbs, told, strict=True)
        )
        said = f"{missed} what the best known set of the same size does{_parts_of(names[-1], told[-1])}"
        return sentence(f"{said} (isolated, geometric means; {over(self.identity.samples)})", *names)

    def tables(self) -> list[Table | str]:
        """Of each part every method's ratios, what they are made of, and what was proven."""
        found: list[Table | str] = []
        for part in self.parts:
            found += [_table(part), *self._made_of(part), _searched(part)]
        return found

    def _made_of(self, part: Part) -> list[Table]:
        """The mean factors of methods that a hindsight ranks like, taken apart."""
        names = named(part.configs)
        rows = [
            row
            for place in _asked(part)
            if _known(part.regrets[place])
            for row in [[folded(names[place], _NAME), *_factors(part.regrets[place])], *self._by_layer(part, place)]
        ]
        title = f"{part.where}: mean factor = pooling, stages × query unknown × criterion"
        return [Table(title, _PARTS, rows)] if rows else []

    def _by_layer(self, part: Part, place: int) -> list[list[str]]:
        """Of prompts a method's heads of the first layer, and all others, where both were drawn."""
        if part.part != PROMPT or not (part.first and part.others):
            return []
        apart = ((f"layer {self.identity.layer(0)}", part.first), ("others", part.others))
        return [[f"· {where}", *_factors(found[place])] for where, found in apart]

    def notes(self) -> str:
        """What columns mean."""
        return (
            f"{text.about_intervals(self.identity.samples, medians=True)} Isolated L1 of a method's set over "
            "that of the best set known of the same head and size, which knows the query; the window stays, and what "
            "all protect. Pooling, stages: over Top-k of the window's unpooled mean A, of two-stage A ν; query "
            "unknown: that over Top-k of the realised one; the criterion: that over the best. Swaps exchange entries "
            "of the best set given until none helps; integer programs (HiGHS in Dinkelbach's iteration) prove a bound. "
            "Heads are drawn anew for each prompt, and counted over all; a row without ends rests on one prompt's. A "
            f"prefix: the prompt's first token and {self.asked['prefix'] - 1} of its middle."
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
            f"{one.heads:,}",
            text.decimal(one.sum_ratio, one.sum_ratio_interval, apart="\n"),
            text.decimal(one.median_ratio, one.median_ratio_interval, apart="\n"),
            text.decimal(one.factor.value, one.factor.interval, apart="\n"),
        ]
        for name, one in zip(names, part.regrets, strict=True)
    ]
    return Table(f"{part.setting}: isolated L1 over that of the best known set", _COLUMNS, rows)


def _asked(part: Part) -> list[int]:
    """Places of the methods that a part is about: whose parts are known, and that are no part of another's chain.

    Where there is none, of all that do not know the query.
    """
    free = [place for place, one in enumerate(part.regrets) if one.config.selection.name not in chain.KNOWING]
    own = [place for place in free if _known(one := part.regrets[place]) and chain.plain(one.config) != one.config]
    return own or free


def _known(one: Regret) -> bool:
    """Whether what its factor is made of is known."""
    return one.query.value == one.query.value


def _parts_of(name: str, one: Regret) -> str:
    """What a method's factor is made of, where that is known."""
    if not _known(one):
        return ""
    form, query, criterion = (factor(part.value, part.interval) for part in (one.form, one.query, one.criterion))
    return f"; of {name}'s, {form} is pooling and stages, {query} not knowing the query and {criterion} the criterion"


def _factors(one: Regret) -> list[str]:
    """Of how many heads, L over the best's, and its three parts."""
    parts = (one.factor, one.form, one.query, one.criterion)
    return [f"{one.heads:,}", *(text.decimal(each.value, each.interval, apart="\n") for each in parts)]


def _searched(part: Part) -> str:
    """How many heads, and how sure their best sets are."""
    said = [f"{counted(part.heads, 'head')} searched, no swap helps any more in {part.settled}"]
    if part.tried:
        open_heads = part.tried - part.closed
        said.append(f"the best set is proven in {part.closed} of {part.tried}, where swaps alone had found it in "
                    f"{part.at_optimum}")  # fmt: skip
        if open_heads:
            said.append(f"of {open_heads} not proven the bound is up to {text.percent(part.gap)} lower")
    if part.left_out:
        said.append(f"{counted(part.left_out, 'head')} left out, whose best set loses nothing but rounding")
    return "; ".join(said) + "."
