"""Ingredients of the two-stage selection and controls, against the baseline and the row without the ingredient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from perturbkv.analyses.ablation.methods import controls_of_others
from perturbkv.analyses.columns import Derived, Line, attribute, column, record
from perturbkv.analyses.heads import head_comparison
from perturbkv.analyses.identity import identity_at
from perturbkv.analyses.names import setting_name
from perturbkv.analyses.outcomes import BaselineSetting, ComparisonRow, field_values
from perturbkv.analyses.sides import Pair, budget_order, group_settings
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
"""Rows of the table, from the baseline to the gain of knowing the query."""
GAINS = {
    "un-pooling": (BASELINE, "two-stage-uniform"),
    "the value norms ν": ("two-stage-uniform", "two-stage"),
    "mean of products": ("two-stage", MEAN_OF_PRODUCTS),
    "knowing the query": ("two-stage", "hindsight"),
    "ν, knowing the query": ("hindsight-attention", "hindsight"),
}
"""Name of a gain -> ingredient of the row without it, and of the row with it."""
CONTROLS = (BASELINE, "random")
"""Selections that protect the same first and recent entries as every method of the setting."""
Alpha = float | str | None
"""α of two stages, the text of an α table; None without stages."""
_ByIngredient = dict[tuple[str, Alpha], EvictionConfig]
"""(ingredient, α) -> configuration of a setting."""
_STAGED = ("two-stage-uniform", "two-stage", MEAN_OF_PRODUCTS)
"""Rows that depend on α."""


@record
class Row(ComparisonRow, section="ablation row"):
    """One ingredient against the baseline, or against the row that lacks the ingredient."""

    name: str = column("an ingredient, or what it brings")
    alpha: Alpha = column("share of stage 1, of a table its name; null for a row without stages")

    @property
    def alpha_text(self) -> str:
        """The row's α as text; empty for a row without stages."""
        return f"{self.alpha:g}" if isinstance(self.alpha, float) else self.alpha or ""

    @property
    def title(self) -> str:
        """The ingredient's name, followed by α if it has stages."""
        return f"{self.name} α={self.alpha_text}" if self.alpha_text else self.name


@record
class Setting(BaselineSetting, section="ablation setting"):
    """Configurations that share all but selection, group's product and α; rows are in the order of `INGREDIENTS`."""

    baseline: EvictionConfig = column("the selection attention, which every row is compared with")
    rows: tuple[Row, ...] = column("each ingredient, at each α, against the baseline")
    brings: tuple[Row, ...] = column("what each ingredient adds, at each α, to the row without it")
    absent: tuple[str, ...] = column("ingredients that the trace does not hold")
    controls: tuple[EvictionConfig, ...] = column("attention and random of the same budget and protection")

    @property
    def setting(self) -> str:
        """The choices that all rows share, in a label's notation."""
        return setting_name(self.baseline, "alpha", "product")

    granularity: ClassVar[Derived[str]] = attribute(
        "baseline.granularity.name", "Heads that share a kept set: query, kv, layer, head or model"
    )

    def lines(self) -> Sequence[Line]:
        """Return a line per ingredient over the baseline, then one per ingredient over the row that lacks it."""
        rows, brings = ([Line(row.title, (row,)) for row in part] for part in (self.rows, self.brings))
        return [*rows, *([Line("over that without it:", ()), *brings] if brings else [])]


def settings(trace: Trace, step: int | None = None) -> tuple[Setting, ...]:
    """Return the settings of the trace, without those that only hold controls of another method.

    Raises TraceError where no setting holds the baseline and another row, and as `head_comparison.summarise`.
    """
    results = [_setting(trace, _configs_by_ingredient(group), step) for group in _setting_groups(trace.run)]
    if not results:
        names = ", ".join(dict.fromkeys(config.selection.name for config in trace.run.configs))
        raise TraceError(
            f"{ANALYSIS} needs the selection '{BASELINE}' and another one of the same budget, got a trace of {names}"
        )
    return tuple(results)


def left_out_configs(run: RunConfig) -> tuple[EvictionConfig, ...]:
    """Return the configurations of a run that are in no setting of the ablation."""
    inside = {config for group in _setting_groups(run) for config in group}
    return tuple(config for config in run.configs if config not in inside)


def _setting_groups(run: RunConfig) -> list[list[EvictionConfig]]:
    """Return the configurations by setting; only settings that hold the baseline and another ingredient."""
    controls = controls_of_others(run)
    groups = [
        (group, _configs_by_ingredient(group))
        for group in group_settings(run, *("selection", "selection_alpha", "granularity_product"))
    ]
    compared = [group for group, rows in groups if (BASELINE, None) in rows and len(rows) > 1]
    return [group for group in compared if not controls.issuperset(group)]


def _configs_by_ingredient(configs: Iterable[EvictionConfig]) -> _ByIngredient:
    """Return (ingredient, α) -> configuration; α is None for an ingredient without stages.

    Of several configurations of one key, such as of different α without stages, the one of the smallest α counts.
    """
    members: _ByIngredient = {}
    for config in sorted(configs, key=budget_order):
        grouped = config.granularity.options.get("product") == MEAN_OF_PRODUCTS
        ingredient = MEAN_OF_PRODUCTS if config.selection.name == "two-stage" and grouped else config.selection.name
        members.setdefault((ingredient, _alpha(config) if ingredient in _STAGED else None), config)
    return members


def _alpha(config: EvictionConfig) -> Alpha:
    """Return the α of a configuration: a number, or the label text of an α table."""
    return config.alpha_text if isinstance(config.alpha, AlphaTable) else config.alpha


def _setting(trace: Trace, members: _ByIngredient, step: int | None) -> Setting:
    """Return the setting of `members` ((ingredient, α) -> configuration), with its comparisons and gains."""

    def compare(name: str, alpha: Alpha, without: EvictionConfig, with_it: EvictionConfig) -> Row:
        return Row(**field_values(head_comparison.summarise(trace, without, with_it, step)), name=name, alpha=alpha)

    ranks = {name: rank for rank, name in enumerate(INGREDIENTS)}
    keys = sorted(((name, alpha) for name, alpha in members if name != BASELINE), key=lambda key: ranks[key[0]])
    baseline = members[BASELINE, None]
    has_groups = baseline.granularity.name != "query"
    expected = [name for name in INGREDIENTS if name != MEAN_OF_PRODUCTS or has_groups]
    return Setting(
        baseline=baseline,
        rows=tuple(compare(*key, baseline, members[key]) for key in keys),
        brings=tuple(compare(name, alpha, *pair) for name, alpha, pair in _gain_pairs(members)),
        absent=tuple(name for name in expected if name not in {name for name, _ in members}),
        controls=tuple(config for (name, _), config in members.items() if name in CONTROLS),
        identity=identity_at(trace, list(members.values()), step),
    )


def _gain_pairs(members: _ByIngredient) -> list[tuple[str, Alpha, Pair]]:
    """Return (gain's name, α, (configuration without, configuration with it)) for every gain that can be measured."""
    alphas = dict.fromkeys(alpha for _, alpha in members if alpha is not None)
    gains: list[tuple[str, Alpha, Pair]] = []
    for name, sides in GAINS.items():
        for alpha in alphas if set(sides) & set(_STAGED) else [None]:
            without, with_it = (members.get((side, alpha if side in _STAGED else None)) for side in sides)
            if without and with_it:
                gains.append((name, alpha, (without, with_it)))
    return gains
