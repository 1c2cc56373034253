"""`perturbkv heads`: which heads does a selection help, and by how much (paper, figure 2)."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from perturbkv.cli import console, numbers
from perturbkv.cli.choices import DEFAULT_COMPARE, parse_compare
from perturbkv.cli.options import CompareOption, LookOptions, RunOptions
from perturbkv.cli.spreading import with_options
from perturbkv.cli.study import Study, open_study

if TYPE_CHECKING:
    from perturbkv.analyses.heads import HeadComparison, HeadKind


@with_options
def heads(run: RunOptions, look: LookOptions, compare: CompareOption = DEFAULT_COMPARE) -> None:
    """Compare selections head by head: perturbation isolated and propagated, heads improved, tied and worsened."""
    names = parse_compare(compare)
    study = open_study("heads", run, look, lambda: run.configs(names))
    if study is None:
        return
    results = _compare(study, names)
    _draw(study, results)
    study.finish({"comparisons": [result.to_dict() for result in results]}, lambda: _print(results))


def _compare(study: Study, names: list[str]) -> list[HeadComparison]:
    from perturbkv.analyses.heads import summarise
    from perturbkv.analyses.pairing import pairs

    found = [pair for treatment in names[1:] for pair in pairs(study.trace.run, names[0], treatment)]
    order = list(dict.fromkeys(baseline for baseline, _ in found))
    found.sort(key=lambda pair: order.index(pair[0]))
    return [summarise(study.trace, *pair, step=study.look.step) for pair in found]


def _draw(study: Study, results: list[HeadComparison]) -> None:
    from perturbkv.analyses.naming import selection
    from perturbkv.figures.heads import draw

    for number, result in enumerate(results):
        stem = "heads" if len(results) == 1 else f"heads-{number + 1}-{selection(result.treatment)}"
        study.save(draw(result, study.width_mm), result.identity, stem)


def _print(results: list[HeadComparison]) -> None:
    for baseline, compared in groupby(results, key=lambda result: result.baseline):
        _print_group(baseline, list(compared))


def _print_group(baseline: str, results: list[HeadComparison]) -> None:
    """One table per baseline: two rows per treatment."""
    console.say(f"\nbaseline {baseline}")
    columns = ["treatment", "", "#heads\n+ / = / −", "#share\nbetter", "#L1 over\nbaseline's"]
    rows = [
        row
        for result in results
        for row in (
            [_treatment(result), *_row("isolated", result.isolated)],
            [_flagged(result), *_row("propagated", result.propagated)],
        )
    ]
    console.table("", columns, rows)
    console.say(_caption(results[0]))


def _treatment(result: HeadComparison) -> str:
    """The treatment in as few words as tell it from its baseline."""
    (policy, selection), other = (label.split(" ")[0].split(":") for label in (result.treatment, result.baseline))
    return selection if policy == other[0] else f"{policy}:{selection}"


def _flagged(result: HeadComparison) -> str:
    return f"  σ ≤ 0.5: {int(result.flagged.sum())}"


def _row(kind: str, measured: HeadKind) -> list[str]:
    return [
        kind,
        numbers.verdicts(measured.verdict),
        numbers.percent(measured.improved_share, measured.improved_share_interval),
        numbers.decimal(measured.l1_ratio, measured.l1_ratio_interval),
    ]


def _caption(result: HeadComparison) -> str:
    words = numbers.about_intervals(result.identity.samples)
    floor = result.propagated.floor_relative_median
    return (
        f"{words} + / = / −: heads better, tied, worse than the baseline. L1 is summed over heads. "
        f"σ ≤ 0.5: how many heads are no evidence for Theorem 3. Noise floor: {floor:.1e} of ‖o_h‖₁ (median)."
    )
