"""`perturbkv heads`: which heads does a selection help, and by how much (paper, figure 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.analyses import numbers
from perturbkv.cli import console
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
    _draw(study, results, names)
    study.finish({"comparisons": [result.to_dict() for result in results]}, lambda: _print(results))


def _compare(study: Study, names: list[str], distance: str) -> list[HeadComparison]:
    from perturbkv.analyses.heads import summarise
    from perturbkv.analyses.pairing import pairs

    found = [pair for treatment in names[1:] for pair in pairs(study.trace.run, names[0], treatment)]
    order = list(dict.fromkeys(baseline for baseline, _ in found))
    found.sort(key=lambda pair: order.index(pair[0]))
    return [summarise(study.trace, *pair, step=study.look.step, distance=distance) for pair in found]


def _draw(study: Study, results: list[HeadComparison], names: list[str]) -> None:
    """Of one pair its own figure; of many one figure with a panel for each, named after what they compare."""
    from perturbkv.analyses.identity import identity
    from perturbkv.figures import head_panels
    from perturbkv.figures import heads as scatter

    if len(results) == 1:
        study.save(scatter.draw(results[0], study.width_mm), results[0].identity, study.name)
        return
    labels = dict.fromkeys(label for result in results for label in (result.baseline, result.treatment))
    shown = identity(study.trace, list(labels), study.look.step)
    stem = "-".join([study.name, *names]).replace(":", "-")
    study.save(head_panels.draw(results, shown, study.width_mm), shown, stem)


def _print(results: list[HeadComparison]) -> None:
    if len(results) == 1:
        _print_group(results[0].baseline, results)
    else:
        _print_pairs(results)
    console.say(_caption(results[0], pairs=len(results) > 1))


def _print_pairs(results: list[HeadComparison]) -> None:
    """One table over all pairs, a row for each kind of perturbation; summary.json holds the rest."""
    from perturbkv.analyses.distances import DISTANCES
    from perturbkv.analyses.naming import SIDE, common, folded, short

    shared = common([side for one in results for side in (one.baseline, one.treatment)])
    console.say(f"\nbaseline {_baselines(results)} · {shared}")
    rows = []
    for result, words in zip(results, short([one.baseline for one in results], *SIDE), strict=True):
        rows.append([_name(result), numbers.held(result.held[1]), "isol.", *_short_row(result.isolated)])
        rows.append([folded(words, 20), "", "prop.", *_short_row(result.propagated)])
    columns = ["treatment", "#held /\nfull", "", "#share\nbetter", "#Σ over\nbaseline's", "#beyond\nchance\n+ / −"]
    console.table(f"isolated and propagated perturbation, {DISTANCES[results[0].distance]}", columns, rows)


def _baselines(results: list[HeadComparison]) -> str:
    """The selections, or policies and selections, of all baselines: what their treatments differ in."""
    from perturbkv.analyses.naming import sides

    return ", ".join(dict.fromkeys(sides(one.baseline, one.treatment)[0] for one in results))


def _short_row(measured: HeadKind) -> list[str]:
    return [
        numbers.percent(measured.better_share, measured.better_share_interval),
        numbers.decimal(measured.sum_ratio, measured.sum_ratio_interval),
        f"{measured.decided.better}/{measured.decided.worse}",
    ]


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
    treatment, same = result.treatment, result.treatment.policy.name == result.baseline.policy.name
    return treatment.selection.name if same else f"{treatment.policy.name}{colon}{treatment.selection.name}"


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


def _caption(result: HeadComparison, pairs: bool = False) -> str:
    floor = numbers.about_floor(result.propagated.floor_relative_median)
    power = numbers.about_power(result.propagated.decided)
    own = (
        "Isol., prop.: isolated and propagated."
        if pairs
        else "+ / = / −: heads whose mean over samples is better, tied, worse than the baseline's."
    )
    more = (
        ""
        if pairs
        else (
            "; half of Σ in: the share of heads that carries half of the baseline's. σ ≤ 0.5: heads that are no "
            "evidence for Theorem 3"
        )
    )
    return (
        f"{numbers.about_intervals(result.identity.samples)} {own} {numbers.ABOUT_TIES} Beyond chance: {power} "
        f"Share better: mean over samples of each sample's share of heads. Σ: of all heads{more}. {numbers.ABOUT_HELD} "
        f"{floor}"
    )
