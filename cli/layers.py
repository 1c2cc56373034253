"""`perturbkv layers`: how far the residual stream drifts, per layer, per sample, per budget (paper, figs. 3, 5, 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeVar

from typer import Option

from perturbkv.analyses import numbers
from perturbkv.cli import console
from perturbkv.cli.choices import DEFAULT_COMPARE, check_choice, named, parse_compare
from perturbkv.cli.options import FRACTIONS, CompareOption, LookOptions, RunOptions
from perturbkv.cli.spreading import with_options
from perturbkv.cli.study import Study, open_study
from perturbkv.configs.eviction import EvictionConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perturbkv.analyses.budgets import Budgets
    from perturbkv.analyses.identity import RunIdentity
    from perturbkv.analyses.last_layer import LastLayer
    from perturbkv.analyses.layers import LayerDrift

Compared = TypeVar("Compared", "LayerDrift", "LastLayer")


@with_options
def layers(
    run: RunOptions,
    look: LookOptions,
    compare: CompareOption = DEFAULT_COMPARE,
    distance: Annotated[str, Option(help="l1, l2 or cosine.")] = "l1",
    per_sample: Annotated[bool, Option("--per-sample", help="Also the last layer's drift of every sample.")] = False,
    budgets: Annotated[
        bool, Option("--budgets", help="Also last-layer drift, KL and top-1 agreement against the budget.")
    ] = False,
) -> None:
    """Follow the drift of the residual stream from layer to layer, baseline against treatment."""
    from perturbkv.analyses.distances import DISTANCES

    names, distance = parse_compare(compare), check_choice("distance", distance, tuple(DISTANCES))
    wanted = run.with_budgets(("0.01", *FRACTIONS) if budgets else FRACTIONS)
    study = open_study(
        named("layers", distance), wanted, look, lambda: wanted.configs(names), leave_out_unfit=not run.budget
    )
    if study is None:
        return
    drifts, samples, curves = _drifts(study, names, distance), [], None
    if per_sample:
        samples = _samples(study, names, distance)
    if budgets:
        curves = _budgets(study, names, distance)
    document = {
        "drifts": [drift.to_dict() for series in drifts for drift in series],
        **({"per_sample": [sample.to_dict() for series in samples for sample in series]} if samples else {}),
        **({"budgets": curves.to_dict()} if curves else {}),
    }
    study.finish(document, lambda: _print(drifts, samples, curves))


def _drifts(study: Study, names: list[str], distance: str) -> list[list[LayerDrift]]:
    from perturbkv.analyses.layers import summarise
    from perturbkv.figures.layers import draw

    def compare(baseline: EvictionConfig, treatment: EvictionConfig) -> LayerDrift:
        return summarise(study.trace, baseline, treatment, distance, study.look.step)

    return _series(study, names, study.name, compare, draw)


def _samples(study: Study, names: list[str], distance: str) -> list[list[LastLayer]]:
    from perturbkv.analyses.last_layer import summarise
    from perturbkv.figures.last_layer import draw

    def compare(baseline: EvictionConfig, treatment: EvictionConfig) -> LastLayer:
        return summarise(study.trace, baseline, treatment, distance, study.look.step)

    return _series(study, names, f"{study.name}-samples", compare, draw)


def _budgets(study: Study, names: list[str], distance: str) -> Budgets:
    from perturbkv.analyses.budgets import summarise
    from perturbkv.figures.budgets import draw

    curves = summarise(study.trace, names, distance, study.look.step)
    study.save(draw(curves, study.width_mm), curves.identity, f"{study.name}-budgets")
    return curves


def _series(
    study: Study,
    names: list[str],
    stem: str,
    compare: Callable[[EvictionConfig, EvictionConfig], Compared],
    draw: Callable[[Sequence[Compared], RunIdentity, float], Figure],
) -> list[list[Compared]]:
    """Every treatment against the baseline: a list over budgets per setting, and a figure of each list."""
    from perturbkv.analyses.identity import identity
    from perturbkv.analyses.pairing import series

    pairs = [found for treatment in names[1:] for found in series(study.trace.run, names[0], treatment)]
    compared: list[list[Compared]] = []
    for number, together in enumerate(pairs):
        results = [compare(*pair) for pair in together]
        shown = identity(study.trace, [config for pair in together for config in pair], study.look.step)
        name = stem if len(pairs) == 1 else f"{stem}-{number + 1}-{together[0][1].selection.name}"
        study.save(draw(results, shown, study.width_mm), shown, name)
        compared.append(results)
    return compared


def _print(drifts: list[list[LayerDrift]], samples: list[list[LastLayer]], curves: Budgets | None) -> None:
    for series in drifts:
        _print_drifts(series)
    for found in samples:
        _print_samples(found)
    if curves:
        _print_budgets(curves)
    console.say(_caption(drifts[0][0], curves, bool(samples)))


def _caption(drift: LayerDrift, curves: Budgets | None, samples: bool) -> str:
    exact, counted = bool(samples or curves), "layers, and samples," if samples else "layers"
    return (
        f"{numbers.about_intervals(drift.identity.samples, exact, medians=True)} Drift: distance of the evicted "
        f"run's residual stream from the full run's, median over samples; reduced: by the means over samples. "
        f"+ / = / −: {counted} that drift less, tied, more than the baseline; of layers the means over samples are "
        f"compared, without a test. {_floors(drift, curves)} {numbers.ABOUT_HELD}"
    )


def _floors(drift: LayerDrift, curves: Budgets | None) -> str:
    """What rounding alone brings, and what a tie is."""
    kl = f" Noise floor of KL: {curves.kl_floor:.1e} nat (median)." if curves else ""
    if drift.noise_floor is None:
        return f"This trace holds no noise floor of the distance: only equal is tied.{kl}"
    return f"{numbers.ABOUT_TIES} Noise floor: {drift.noise_floor[-1]:.1e} after the last layer (mean).{kl}"


def _print_drifts(series: list[LayerDrift]) -> None:
    """The first, the middle and the last layer; and in how many layers the treatment is better, tied, worse."""
    last = len(series[0].ratio) - 1
    shown = list(dict.fromkeys([0, last // 2, last]))
    rows = []
    for drift in series:
        counts = numbers.verdicts(drift.verdict)
        rows.append([str(drift.baseline.budget), *(_sides(drift, layer) for layer in shown), counts])
        rows.append([_held(drift), *(_reduced(drift, layer) for layer in shown), ""])
    console.say(f"\n{_compared(series[0])}", bold=True)
    columns = ["budget, held / full", *(f"#layer {layer}" for layer in shown), "#layers\n+ / = / −"]
    console.table(f"{series[0].distance} drift after a layer, and by how much it is reduced", columns, rows)


def _compared(result: LayerDrift | LastLayer) -> str:
    from perturbkv.analyses.naming import setting, sides

    return f"{' → '.join(sides(result.baseline, result.treatment))}, {setting(result.baseline, 'budget')}"


def _held(result: LayerDrift | LastLayer) -> str:
    """What both caches hold; once where it is the same."""
    return " → ".join(dict.fromkeys(numbers.held(share) for share in result.held))


def _sides(drift: LayerDrift, layer: int) -> str:
    medians = (float(side[layer]) for side in (drift.baseline_median, drift.treatment_median))
    return " → ".join(numbers.significant(median) for median in medians)


def _reduced(drift: LayerDrift, layer: int) -> str:
    ends = numbers.at(drift.ratio_interval, layer)
    reduced = None if ends is None else replace(ends, low=1 - ends.high, high=1 - ends.low)
    return numbers.percent(1 - float(drift.ratio[layer]), reduced)


def _print_samples(series: list[LastLayer]) -> None:
    rows = [
        [
            str(result.baseline.budget),
            _held(result),
            numbers.percent(result.improved_share, result.improved_share_interval),
            numbers.verdicts(result.verdict),
        ]
        for result in series
    ]
    console.say(_compared(series[0]), bold=True)
    console.table("samples that drift less by the last layer", ["budget", "#held / full", "#share", "#+ / = / −"], rows)


def _print_budgets(curves: Budgets) -> None:
    from perturbkv.analyses.naming import folded

    rows = []
    for curve in curves.curves:
        for place, budget in enumerate(curve.budgets):
            ends = {name: numbers.at(band, place) for name, band in curve.intervals.items()}
            rows.append([
                folded(curve.name) if place == 0 else "",
                str(budget),
                numbers.percent(float(curve.kept[place])),
                numbers.held(float(curve.held[place])),
                numbers.significant(float(curve.medians["drift"][place]), ends["drift"]),
                numbers.significant(float(curve.medians["kl"][place]), ends["kl"]),
                numbers.percent(float(curve.medians["top1"][place]), ends["top1"], "\n"),
            ])  # fmt: skip
    columns = ["selection", "budget", "#kept", "#held /\nfull", "#drift,\nmedian", "#KL, nat,\nmedian", "#same\ntoken"]
    console.table("how much cache can go", columns, rows)
    for curve in curves.curves:
        if curve.cliff:
            first, second = curve.cliff
            console.say(f"{curve.name}: median KL rises most per halving of the budget from {first} to {second}")
