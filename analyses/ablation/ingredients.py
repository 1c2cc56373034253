"""Each ingredient of the two-stage selection and each control, against the baseline and against what lacks it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from perturbkv.analyses.ablation.methods import controls_of_others
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import setting_object
from perturbkv.analyses.pairing import Pair, order, setting_name
from perturbkv.analyses.pairing import settings as alike
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.configs.alpha_table import AlphaTable
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "ablation"
BASELINE = "attention"
MEAN_OF_PRODUCTS = "mean-of-products"
INGREDIENTS = {
    BASELINE: "window attention, pooled: the baseline",
    "attention-unpooled": "window attention without pooling",
    "two-stage-uniform": "two stages, ν ≡ 1",
    "two-stage": "two stages with ν, a group's product of means",
    MEAN_OF_PRODUCTS: "two stages with ν, a group's mean of products",
    "value": "ν alone",
    "random": "a seeded random set",
    "hindsight-attention": "realised A: knows the query",
    "hindsight": "realised A·ν: knows the query",
}
"""Rows of the table, from the baseline to what knowing the query would bring."""
BRINGS = {
    "un-pooling": (BASELINE, "two-stage-uniform"),
    "the value norms ν": ("two-stage-uniform", "two-stage"),
    "mean of products": ("two-stage", MEAN_OF_PRODUCTS),
    "knowing the query": ("two-stage", "hindsight"),
    "ν, knowing the query": ("hindsight-attention", "hindsight"),
}
"""What one ingredient adds to the row before it: name -> (without, with)."""
CONTROLS = (BASELINE, "random")
"""What every method of a setting is to be held against: they protect the same first and recent entries."""
Alpha = float | str | None
"""α of two stages, of a table its text; None without stages."""
_Members = dict[tuple[str, Alpha], EvictionConfig]
"""Ingredient and α -> configuration."""
_APART = ("alpha", "product")
"""What tells rows apart, beside their selection."""
_FREE = ("selection", "selection_alpha", "granularity_product")
"""The same, as a configuration holds it."""
_STAGED = ("two-stage-uniform", "two-stage", MEAN_OF_PRODUCTS)
"""Only these depend on α."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: an ingredient, or what it brings.
        alpha: of the two stages; None for a row without stages, which is the same at every α.
        compared: against the baseline, or against the row without the ingredient.
    """

    name: str
    alpha: Alpha
    compared: HeadComparison

    @property
    def alpha_told(self) -> str:
        """Its α in words; empty for a row without stages."""
        return f"{self.alpha:g}" if isinstance(self.alpha, float) else self.alpha or ""

    @property
    def title(self) -> str:
        """The name, with its α where it has one."""
        return f"{self.name} α={self.alpha_told}" if self.alpha_told else self.name


@dataclass(frozen=True)
class Setting:
    """One setting: everything but selection, group's product and α is shared.

    Attributes:
        baseline: the configuration that every row is held against.
        rows: each ingredient, at each α, against the baseline, in the order of `INGREDIENTS`.
        brings: what each ingredient adds, at each α, to the row without it.
        absent: ingredients that the trace does not hold.
        controls: the setting's `CONTROLS`: of the same budget and the same protection as every row.
        identity: of the run.
    """

    baseline: EvictionConfig
    rows: tuple[Row, ...]
    brings: tuple[Row, ...]
    absent: tuple[str, ...]
    controls: tuple[EvictionConfig, ...]
    identity: RunIdentity

    @property
    def setting(self) -> str:
        """What all rows share, in words."""
        return setting_name(self.baseline, *_APART)

    @property
    def granularity(self) -> str:
        """What all rows keep a set for: query, kv or layer."""
        return self.baseline.granularity.name

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        document: dict[str, Any] = {
            "setting": setting_object(self.identity.configs),
            "granularity": self.granularity,
            "baseline": self.baseline,
            "absent": self.absent,
            "controls": self.controls,
            "rows": [_row_dict(row) for row in self.rows],
            "brings": [_row_dict(row) for row in self.brings],
        }
        numbers: dict[str, Any] = plain(document)
        return numbers


def settings(trace: Trace, step: int = 0) -> tuple[Setting, ...]:
    """One entry per setting of the trace, but for those that are a method's controls and nothing else.

    Raises TraceError where no setting holds the baseline and another row, and as `head_comparison.summarise`.
    """
    found = [_setting(trace, _members(group), step) for group in _compared(trace.run)]
    if not found:
        held = ", ".join(dict.fromkeys(config.selection.name for config in trace.run.configs))
        msg = f"{ANALYSIS} needs the selection '{BASELINE}' and another one of the same budget, got a trace of {held}"
        raise TraceError(msg)
    return tuple(found)


def left_out(run: RunConfig) -> tuple[EvictionConfig, ...]:
    """Configurations that are in no setting."""
    inside = {config for group in _compared(run) for config in group}
    return tuple(config for config in run.configs if config not in inside)


def _compared(run: RunConfig) -> list[list[EvictionConfig]]:
    """What shares a setting, with the baseline and another row in it."""
    others = controls_of_others(run)
    groups = [[run.configs[place] for place in group] for group in alike(run, *_FREE)]
    return [group for group in groups if _has_rows(_members(group)) and not others.issuperset(group)]


def _has_rows(members: _Members) -> bool:
    return (BASELINE, None) in members and len(members) > 1


def _ingredient(config: EvictionConfig) -> str:
    """The row that a configuration stands for."""
    grouped = config.granularity.options.get("product") == MEAN_OF_PRODUCTS
    return MEAN_OF_PRODUCTS if config.selection.name == "two-stage" and grouped else config.selection.name


def _members(configs: Iterable[EvictionConfig]) -> _Members:
    """Each row's configuration; of those without stages that of the least α."""
    found: _Members = {}
    for config in sorted(configs, key=order):
        ingredient = _ingredient(config)
        found.setdefault((ingredient, _alpha(config) if ingredient in _STAGED else None), config)
    return found


def _alpha(config: EvictionConfig) -> Alpha:
    return config.alpha_told if isinstance(config.alpha, AlphaTable) else config.alpha


def _setting(trace: Trace, members: _Members, step: int) -> Setting:
    def compare(without: EvictionConfig, added: EvictionConfig) -> HeadComparison:
        return head_comparison.summarise(trace, without, added, step)

    places = {name: place for place, name in enumerate(INGREDIENTS)}
    rows = sorted((key for key in members if key[0] != BASELINE), key=lambda key: places[key[0]])
    grouped = members[BASELINE, None].granularity.name != "query"
    expected = [name for name in INGREDIENTS if name != MEAN_OF_PRODUCTS or grouped]
    return Setting(
        baseline=members[BASELINE, None],
        rows=tuple(Row(*key, compare(members[BASELINE, None], members[key])) for key in rows),
        brings=tuple(Row(what, alpha, compare(*pair)) for what, alpha, pair in _steps(members)),
        absent=tuple(name for name in expected if name not in {name for name, _ in members}),
        controls=tuple(config for (name, _), config in members.items() if name in CONTROLS),
        identity=identity(trace, list(members.values()), step),
    )


def _steps(members: _Members) -> list[tuple[str, Alpha, Pair]]:
    """What each ingredient brings, at each α that one of its sides depends on: the configurations without and with."""
    alphas = dict.fromkeys(alpha for _, alpha in members if alpha is not None)
    found: list[tuple[str, Alpha, Pair]] = []
    for what, sides in BRINGS.items():
        for alpha in alphas if set(sides) & set(_STAGED) else [None]:
            without, added = (members.get((name, alpha if name in _STAGED else None)) for name in sides)
            if without and added:
                found.append((what, alpha, (without, added)))
    return found


def _row_dict(row: Row) -> dict[str, Any]:
    return {"name": row.name, "alpha": row.alpha, **row.compared.to_dict()}
