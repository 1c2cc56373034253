"""`perturbkv layers`: how far the residual stream drifts, per layer, per sample, per budget (paper, figs. 3, 5, 6)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

from typer import Option

from perturbkv.cli.choices import DEFAULT_COMPARE, check_choice, named, parse_compare
from perturbkv.cli.option_routing import showing, with_options
from perturbkv.cli.options import FRACTIONS, CompareOption, LookOptions, RunOptions
from perturbkv.cli.session import Study, open_study

if TYPE_CHECKING:
    from perturbkv.analyses.layers.layers import LayerDrifts, SampleDrifts
    from perturbkv.analyses.result import Result

Answer = TypeVar("Answer")


@showing(budget=" ".join(FRACTIONS))
@with_options
def layers(
    run: RunOptions,
    look: LookOptions,
    compare: CompareOption = DEFAULT_COMPARE,
    distance: Annotated[str, Option(metavar="NAME", help="l1, l2 or cosine")] = "l1",
    per_sample: Annotated[bool, Option("--per-sample", help="Also the last layer's drift of every sample")] = False,
    budgets: Annotated[bool, Option("--budgets", help="Also last-layer drift, KL and top-1 by budget")] = False,
) -> None:
    """Follow the residual stream's drift from layer to layer.

    Baseline against treatment (paper, figures 3, 5, 6).
    """
    from perturbkv.analyses.layers.budget_curves import budget_curves
    from perturbkv.analyses.layers.layers import last_layer, layer_drift
    from perturbkv.analyses.verdicts import DISTANCES

    names, distance = parse_compare(compare), check_choice("distance", distance, tuple(DISTANCES))
    wanted = run.with_budgets(("0.01", *FRACTIONS) if budgets else FRACTIONS)
    name = named("layers", distance)
    stems = [name, *[f"{name}-samples"] * per_sample, *[f"{name}-budgets"] * budgets]
    study = open_study(name, wanted, look, lambda: wanted.configs(names), leave_out_unfit=not run.budget, stems=stems)
    if study is None:
        return

    def asked(question: Callable[..., Answer]) -> Answer:
        return question(study.trace, names[0], names[1:], step=look.step, distance=distance)

    drifts = asked(layer_drift)
    _save(study, drifts, study.name)
    results: list[Result] = [drifts]
    document = drifts.to_dict()
    if per_sample:
        samples = asked(last_layer)
        _save(study, samples, f"{study.name}-samples")
        results.append(samples)
        document |= samples.to_dict()
    if budgets:
        curves = asked(budget_curves)
        study.save(curves.plot(study.width_mm), curves.identity, f"{study.name}-budgets")
        results.append(curves)
        document["budgets"] = curves.to_dict()
    study.show(results, document)


def _save(study: Study, found: LayerDrifts | SampleDrifts, stem: str) -> None:
    """A figure of each series, numbered where there are several."""
    for place in range(len(found)):
        series = found[place]
        name = stem if len(found) == 1 else f"{stem}-{place + 1}-{series[0].treatment.selection.name}"
        study.save(series.plot(study.width_mm), series.identity, name)
