"""`perturbkv ablation`: which ingredient of the two-stage selection brings its gain."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from perturbkv.analyses import numbers
from perturbkv.cli import console
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.spreading import with_options
from perturbkv.cli.study import open_study
from perturbkv.configs.choice import Choice, as_choice
from perturbkv.configs.eviction import EvictionConfig

if TYPE_CHECKING:
    from perturbkv.analyses.ablation import Ablation, Row

_ALPHAS = (0.0, 0.25, 0.5)
_UNSTAGED = ["attention", "attention-unpooled", "value", "random", "hindsight-attention", "hindsight"]
_STAGED = ["two-stage-uniform", "two-stage"]


@with_options
def ablation(run: RunOptions, look: LookOptions) -> None:
    """Tell apart what un-pooling, the value norms and the group's product bring, between the baseline and hindsight.

    Without --granularity both are measured: one kept set per query head, and one per kv head, where alone the group's
    product is a choice.
    """
    study = open_study("ablation", run, look, lambda: _configs(run))
    if study is None:
        return
    from perturbkv.analyses.ablation import summarise
    from perturbkv.analyses.identity import identity
    from perturbkv.figures.ablation import draw

    results = summarise(study.trace, look.step)
    configs = list(dict.fromkeys(config for result in results for config in result.identity.configs))
    shown = identity(study.trace, configs, study.look.step)
    study.save(draw(results, shown, study.width_mm), shown, "ablation")
    study.finish({"settings": [result.to_dict() for result in results]}, lambda: _print(results))


def _configs(run: RunOptions) -> tuple[EvictionConfig, ...]:
    """The whole chain at every α; what has no stages once."""
    from perturbkv.analyses.ablation import MEAN_OF_PRODUCTS

    alphas = run.alpha or list(_ALPHAS)
    made: list[EvictionConfig] = []
    for granularity in map(as_choice, run.granularity or ["query", "kv"]):
        plain = granularity.without(["product"])
        wanted = dataclasses.replace(run, granularity=[str(plain)])
        made += dataclasses.replace(wanted, alpha=alphas[:1]).configs(_UNSTAGED)
        made += dataclasses.replace(wanted, alpha=alphas).configs(_STAGED)
        if granularity.name == "kv":
            product = Choice(plain.name, {**plain.options, "product": MEAN_OF_PRODUCTS})
            grouped = dataclasses.replace(wanted, alpha=alphas, granularity=[str(product)])
            made += grouped.configs(["two-stage"])
    return tuple(dict.fromkeys(made))


def _print(results: tuple[Ablation, ...]) -> None:
    columns = ["", "#α", "#held /\nfull", "#isol.\nΣ", "#median\nhead", "#heads\nbetter", "#prop.\nΣ",
               "#median\nhead", "#heads\nbetter"]  # fmt: skip
    for result in results:
        console.say(f"\n{result.setting}: L1 over the baseline's", bold=True)
        console.table("", columns, [_baseline(result), *_rows(result.rows)])
        console.say(_half(result))
        controls = ", ".join(config.selection.name for config in result.controls)
        console.say(f"controls, of the same budget and protection: {controls}")
        if result.absent:
            console.say(f"not in this trace: {', '.join(result.absent)}")
        if result.brings:
            console.table("\nwhat each ingredient brings: L1 over that without it", columns, _rows(result.brings))
    kind = results[0].rows[0].compared.propagated
    console.say(
        f"{numbers.about_intervals(results[0].identity.samples)} Isol., prop.: isolated and propagated. "
        f"Σ: of all heads; a few may carry half of it, so beside it the median head's ratio. Heads better: mean "
        f"over samples of each sample's share. {numbers.ABOUT_TIES} With one kept set per query head there is no "
        f"group, and no row for its product. {numbers.about_floor(kind.floor_relative_median)} {numbers.ABOUT_HELD}"
    )


def _half(result: Ablation) -> str:
    """In how many heads half of the setting's baseline lies."""
    kinds = (result.rows[0].compared.isolated, result.rows[0].compared.propagated)
    shares = " and ".join(numbers.percent(kind.half_share) for kind in kinds)
    return f"half of the baseline's Σ lies in {shares} of the heads (isolated and propagated)"


def _baseline(result: Ablation) -> list[str]:
    return ["attention", "", numbers.held(result.rows[0].compared.held[0]), "1", "1", "", "1", "1", ""]


def _rows(rows: tuple[Row, ...]) -> list[list[str]]:
    """A line per row, each name once."""
    found, before = [], ""
    for row in rows:
        cells = [row.name if row.name != before else "", "" if row.alpha is None else f"{row.alpha:g}"]
        cells.append(numbers.held(row.compared.held[1]))
        for kind in (row.compared.isolated, row.compared.propagated):
            cells.append(numbers.decimal(kind.sum_ratio, kind.sum_ratio_interval, apart="\n"))
            cells.append(numbers.decimal(kind.median_ratio, kind.median_ratio_interval, apart="\n"))
            cells.append(numbers.percent(kind.better_share, kind.better_share_interval, "\n"))
        found.append(cells)
        before = row.name
    return found
