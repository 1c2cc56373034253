"""Sentences and tables of a page: what pairs of configurations let a reader conclude, and the ablation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perturbkv.analyses import naming
from perturbkv.analyses.ablation import ingredients
from perturbkv.analyses.ablation.ingredients import Row, Setting
from perturbkv.analyses.heads import head_comparison, heads_told
from perturbkv.analyses.heads.head_comparison import HeadComparison
from perturbkv.reporting.comparing import with_ends
from perturbkv.reporting.sides import Places, Sides
from perturbkv.trace import Trace
from perturbkv.visible import line


def conclusions(trace: Trace, sides: Sides, baseline: int) -> dict[str, str]:
    """Of a side with every other one, at every budget: 'a-b' -> what compares heads in L1 at the first step."""
    return {f"{first}-{second}": _conclusion(trace, first, second) for first, second in _against(sides, baseline)}


def ablation(trace: Trace, sides: Sides) -> list[dict[str, Any]]:
    """Every setting's rows over the baseline, and what each ingredient brings.

    Raises TraceError where the trace holds no such rows.
    """
    found = ingredients.settings(trace)
    told = naming.short([one.baseline for one in found], "alpha", "product")
    return [_setting(one, words or one.setting, sides) for one, words in zip(found, told, strict=True)]


def _against(sides: Sides, baseline: int) -> Sequence[Places]:
    """Configurations of one side, each with those of its budget."""
    places = range(len(sides.side))
    firsts = [place for place in places if sides.side[place] == baseline]
    return [
        (first, second)
        for first in firsts
        for second in places
        if second != first and sides.budget[first] == sides.budget[second]
    ]


def _conclusion(trace: Trace, first: int, second: int) -> str:
    configs = trace.run.configs
    return line(heads_told.conclusion([head_comparison.summarise(trace, configs[first], configs[second])]))


def _setting(one: Setting, title: str, sides: Sides) -> dict[str, Any]:
    return {
        "budget": sides.budgets.index(one.baseline.budget),
        "title": line(title),
        "rows": [_row(row) for row in one.rows],
        "brings": [_row(row) for row in one.brings],
    }


def _row(row: Row) -> dict[str, Any]:
    return {"name": line(row.title), **{kind: _ratio(row.compared, kind) for kind in ("isolated", "propagated")}}


def _ratio(compared: HeadComparison, kind: str) -> list[float]:
    found = getattr(compared, kind)
    return with_ends(found.sum_ratio, found.sum_ratio_interval)
