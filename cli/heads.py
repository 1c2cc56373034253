"""`perturbkv heads`: which heads does a selection help, and by how much (paper, figure 2)."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.cli import console, numbers
from perturbkv.cli.choices import DEFAULT_COMPARE, check_choice, named, parse_compare
from perturbkv.cli.options import CompareOption, LookOptions, RunOptions
from perturbkv.cli.spreading import with_options
from perturbkv.cli.study import Study, open_study
from perturbkv.configs.eviction import EvictionConfig

if TYPE_CHECKING:
    from perturbkv.analyses.head_kind import HeadKind
    from perturbkv.analyses.heads import HeadComparison


@with_options
def heads(
    run: RunOptions,
    look: LookOptions,
    compare: CompareOption = DEFAULT_COMPARE,
    distance: Annotated[str, Option(help="l1, l2 or cosine.")] = "l1",
) -> None:
    """Compare selections head by head: perturbation isolated and propagated, heads improved, tied and worsened."""
    from perturbkv.analyses.distances import DISTANCES

    names, distance = parse_compare(compare), check_choice("distance", distance, tuple(DISTANCES))
    study = open_study(named("heads", distance), run, look, lambda: run.configs(names))
    if study is None:
        return
    results = _compare(study, names, distance)
    _draw(study, results)
    study.finish({"comparisons": [result.to_dict() for result in results]}, lambda: _print(results))


def _compare(study: Study, names: list[str], distance: str) -> list[HeadComparison]:
    from perturbkv.analyses.heads import summarise
    from perturbkv.analyses.pairing import pairs

    found = [pair for treatment in names[1:] for pair in pairs(study.trace.run, names[0], treatment)]
    order = list(dict.fromkeys(baseline for baseline, _ in found))
    found.sort(key=lambda pair: order.index(pair[0]))
    return [summarise(study.trace, *pair, step=study.look.step, distance=distance) for pair in found]


def _draw(study: Study, results: list[HeadComparison]) -> None:
    from perturbkv.figures.heads import draw

    for number, result in enumerate(results):
        stem = study.name if len(results) == 1 else f"{study.name}-{number + 1}-{result.treatment.selection}"
        study.save(draw(result, study.width_mm), result.identity, stem)


def _print(results: list[HeadComparison]) -> None:
    for baseline, compared in groupby(results, key=lambda result: result.baseline):
        _print_group(baseline, list(compared))
    console.say(_caption(results[0]))


def _print_group(baseline: EvictionConfig, results: list[HeadComparison]) -> None:
    """Two tables per baseline, isolated and propagated, a row per treatment; beneath, what chance would give."""
    from perturbkv.analyses.distances import DISTANCES

    console.say(f"\nbaseline {baseline.label()}")
    unit = DISTANCES[results[0].distance]
    columns = ["treatment", "#heads\n+ / = / −", "#beyond\nchance\n+ / −", "#share\nbetter", "#Σ over\nbaseline's",
               "#median\nhead's", "#half\nof Σ in"]  # fmt: skip
    for kind in ("isolated", "propagated"):
        rows = [[_treatment(result), *_row(getattr(result, kind))] for result in results]
        console.table(f"{kind} perturbation, {unit}", columns, rows)
        for result in results:
            console.say(f"  {_name(result)}: {numbers.about_flips(getattr(result, kind).decided)}")
        console.say("")


def _name(result: HeadComparison, colon: str = ":") -> str:
    """The treatment in as few words as tell it from its baseline."""
    treatment, same = result.treatment, result.treatment.policy == result.baseline.policy
    return treatment.selection if same else f"{treatment.policy}{colon}{treatment.selection}"


def _treatment(result: HeadComparison) -> str:
    """The treatment, what both caches hold, and how many of its heads are flagged."""
    held = " → ".join(numbers.held(share) for share in result.held)
    return "\n".join([_name(result, ":\n"), f"held {held}", f"σ ≤ 0.5: {int(result.flagged.sum())}"])


def _row(measured: HeadKind) -> list[str]:
    return [
        numbers.verdicts(measured.verdict),
        f"{measured.decided.better}/{measured.decided.worse}",
        numbers.percent(measured.better_share, measured.better_share_interval, "\n"),
        numbers.decimal(measured.sum_ratio, measured.sum_ratio_interval, apart="\n"),
        numbers.decimal(measured.median_ratio, measured.median_ratio_interval, apart="\n"),
        numbers.percent(measured.half_share),
    ]


def _caption(result: HeadComparison) -> str:
    floor = numbers.about_floor(result.propagated.floor_relative_median)
    power = numbers.about_power(result.propagated.decided)
    return (
        f"{numbers.about_intervals(result.identity.samples)} + / = / −: heads whose mean over samples is better, tied, "
        f"worse than the baseline's. {numbers.ABOUT_TIES} Beyond chance: {power} "
        "Share better: mean over samples of each sample's share of heads. Σ: of all heads; "
        "half of Σ in: the share of heads that carries half of the baseline's. σ ≤ 0.5: heads that are no evidence for "
        f"Theorem 3. {numbers.ABOUT_HELD} {floor}"
    )
