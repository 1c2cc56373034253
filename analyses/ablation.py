"""Where does a gain come from? Each ingredient of the two-stage selection and each control, against the baseline."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from perturbkv.analyses import heads
from perturbkv.analyses.bootstrap import RESAMPLES
from perturbkv.analyses.heads import HeadComparison
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.naming import setting
from perturbkv.analyses.pairing import order
from perturbkv.config import SELECTIONS, EvictionConfig
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
    "hindsight": "realised A·ν: knows the query",
}
"""Rows of the table, from the baseline to what knowing the query would bring."""
BRINGS = {
    "un-pooling stage 2": (BASELINE, "two-stage-uniform"),
    "the value norms ν": ("two-stage-uniform", "two-stage"),
    "mean of products": ("two-stage", MEAN_OF_PRODUCTS),
    "knowing the query": ("two-stage", "hindsight"),
}
"""What one ingredient adds to the row before it: name -> (without, with)."""
_STAGED = ("two-stage-uniform", "two-stage", MEAN_OF_PRODUCTS)
"""Only these depend on α."""


@dataclass(frozen=True)
class Ablation:
    """One setting at one α.

    Attributes:
        setting: what all rows share, as a label.
        alpha: of the staged rows.
        granularity: query or kv.
        baseline: label of the baseline's configuration.
        rows: ingredient -> its comparison with the baseline, in the order of `INGREDIENTS`.
        brings: what an ingredient adds -> its comparison with the row without it.
        absent: ingredients that the trace does not hold.
        identity: of the run.
    """

    setting: str
    alpha: float
    granularity: str
    baseline: str
    rows: dict[str, HeadComparison]
    brings: dict[str, HeadComparison]
    absent: tuple[str, ...]
    identity: RunIdentity

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        return {
            "setting": self.setting,
            "alpha": self.alpha,
            "granularity": self.granularity,
            "baseline": self.baseline,
            "absent": list(self.absent),
            "rows": {name: row.to_dict() for name, row in self.rows.items()},
            "brings": {name: row.to_dict() for name, row in self.brings.items()},
        }


def summarise(trace: Trace, step: int = 0, resamples: int = RESAMPLES, seed: int = 0) -> tuple[Ablation, ...]:
    """One entry per setting and α of the trace.

    Raises TraceError where no setting holds the baseline and another row, and as `heads.summarise`.
    """
    grouped: dict[EvictionConfig, dict[tuple[str, float], str]] = {}
    for config in sorted(trace.run.configs, key=order):
        grouped.setdefault(_shared(config), {})[_ingredient(config), config.alpha] = config.label()
    found = [
        _ablation(trace, shared, alpha, members, (step, resamples, seed))
        for shared, members in grouped.items()
        for alpha in _alphas(members)
        if len(chain(members, alpha)) > 1 and BASELINE in chain(members, alpha)
    ]
    if not found:
        held = ", ".join(dict.fromkeys(config.selection for config in trace.run.configs))
        msg = f"{ANALYSIS} needs the selection '{BASELINE}' and another one of the same budget, got a trace of {held}"
        raise TraceError(msg)
    return tuple(found)


def chain(members: dict[tuple[str, float], str], alpha: float) -> dict[str, str]:
    """Ingredient -> label at one α; rows without stages are the same at every α."""
    found = {}
    for name in INGREDIENTS:
        exact = members.get((name, alpha))
        other = [label for (ingredient, _), label in members.items() if ingredient == name and name not in _STAGED]
        if exact or other:
            found[name] = exact or other[0]
    return found


def _ingredient(config: EvictionConfig) -> str:
    """The row that a configuration stands for."""
    grouped = config.granularity == "kv" and config.group_product == MEAN_OF_PRODUCTS
    return MEAN_OF_PRODUCTS if config.selection == "two-stage" and grouped else config.selection


def _shared(config: EvictionConfig) -> EvictionConfig:
    """The configuration without what tells rows apart."""
    return dataclasses.replace(config, selection=next(iter(SELECTIONS)), group_product="product-of-means", alpha=0.0)


def _alphas(members: dict[tuple[str, float], str]) -> list[float]:
    """The α of the staged rows; where there are none, any one."""
    staged = dict.fromkeys(alpha for name, alpha in members if name in _STAGED)
    return list(staged) or [next(alpha for _, alpha in members)]


def _ablation(
    trace: Trace,
    shared: EvictionConfig,
    alpha: float,
    members: dict[tuple[str, float], str],
    how: tuple[int, int, int],
) -> Ablation:
    labels = chain(members, alpha)

    def compare(without: str, added: str) -> HeadComparison:
        return heads.summarise(trace, labels[without], labels[added], *how)

    expected = [name for name in INGREDIENTS if name != MEAN_OF_PRODUCTS or shared.granularity == "kv"]
    return Ablation(
        setting=" ".join(part for part in setting(shared.label()).split() if not part.startswith("a=")),
        alpha=alpha,
        granularity=shared.granularity,
        baseline=labels[BASELINE],
        rows={name: compare(BASELINE, name) for name in labels if name != BASELINE},
        brings={
            what: compare(without, added)
            for what, (without, added) in BRINGS.items()
            if without in labels and added in labels
        },
        absent=tuple(name for name in expected if name not in labels),
        identity=identity(trace, list(labels.values())),
    )
