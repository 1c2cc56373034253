"""Analyses of what eviction does to attention outputs; `ablation` has a module of its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from perturbkv.cli.choices import DEFAULT_COMPARE, METHODS, check_choice, parse_compare, parse_methods
from perturbkv.cli.command_line import hide_options, show_defaults, show_options, without_options
from perturbkv.cli.options import FRACTIONS, CompareOption, LookOptions, RunOptions
from perturbkv.cli.session import Analysis, Session, analysis, sides_check
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.analyses.layers.layers import DriftSeries, LayerDrifts, SampleDrifts, SampleSeries
    from perturbkv.analyses.result import Result
    from perturbkv.trace import Trace

DistanceOption = Annotated[str, Option(metavar="NAME", help="l1, l2 or cosine")]
HeadDistanceOption = Annotated[str, Option(metavar="NAME", help="l1, l2, cosine; effect: on the text's log p")]
_MOST_STEM_CHARACTERS = 150
"""Most characters of a figure's name; file systems limit it."""


def _name_with_distance(analysis: str, distance: str) -> str:
    """Return an analysis's name in summary.json and file names, with its distance appended unless it is l1.

    Raises UnknownNameError for an unknown distance.
    """
    from perturbkv.analyses.verdicts import DISTANCES, HEAD_DISTANCES

    check_choice("distance", distance, tuple(HEAD_DISTANCES if analysis == "heads" else DISTANCES))
    return analysis if distance == "l1" else f"{analysis}-{distance}"


def _sides(run: RunOptions, look: LookOptions, names: Sequence[str]) -> tuple[str, Sequence[str]] | tuple[None, None]:
    """Return the baseline and the treatments that `names` lists; (None, None) for those of a finished trace.

    A finished trace has its own unless the user typed --compare.
    """
    return (names[0], names[1:]) if look.trace is None or "compare" in run.typed_options else (None, None)


def _pairs_check(run: RunOptions, look: LookOptions, names: Sequence[str]) -> Callable[[Trace], object]:
    """Return a function that raises TraceError for a trace without a pair of the sides that `names` lists."""

    def check(trace: Trace) -> object:
        from perturbkv.analyses.sides import all_series

        return all_series(trace, *_sides(run, look, names))

    return check


@analysis
def heads(
    run: RunOptions, look: LookOptions, compare: CompareOption = DEFAULT_COMPARE, distance: HeadDistanceOption = "l1"
) -> Analysis:
    """Compare selections head by head, isolated and propagated.

    Which heads are better, tied or worse than with the baseline, and what the sum over them does (paper, figure 2).
    """
    run, compare = run.beside_snapkv(compare)
    names, name = parse_compare(compare), _name_with_distance("heads", distance)
    saved = list(dict.fromkeys([*(run.save or ()), "effect"]))
    wanted = dataclasses.replace(run, save=saved) if distance == "effect" else run

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.heads.heads import compare_heads

        first, others = _sides(run, look, names)
        result = compare_heads(session.trace, first, others, step=look.step, distance=distance)
        stem = name
        if len(result) > 1 and first is not None:  # the user named several treatments
            stem = re.sub("[:/]", "-", "-".join([name, *names]))[:_MOST_STEM_CHARACTERS]
        session.draw(result, stem)
        return result

    return Analysis(
        name, wanted, lambda: run.configs(names), analyse, stems=[name], check=_pairs_check(run, look, names),
        compares_sums=True,
    )  # fmt: skip


@show_defaults(budget=" ".join(FRACTIONS))
@analysis
def layers(
    run: RunOptions,
    look: LookOptions,
    compare: CompareOption = DEFAULT_COMPARE,
    distance: DistanceOption = "l1",
    per_sample: Annotated[bool, Option("--per-sample", help="Also the last layer's drift of every sample")] = False,
    budgets: Annotated[bool, Option("--budgets", help="Also last-layer drift, KL and top-1 by budget")] = False,
) -> Analysis:
    """Follow the residual stream's drift from layer to layer.

    Baseline against treatment (paper, figures 3, 5, 6).
    """
    run, compare = run.beside_snapkv(compare)
    names, name = parse_compare(compare), _name_with_distance("layers", distance)
    wanted = run.with_budgets(("0.01", *FRACTIONS) if budgets else FRACTIONS)

    def analyse(session: Session) -> tuple[list[Result], dict[str, Any]]:
        from perturbkv.analyses.layers.budget_curves import budget_curves
        from perturbkv.analyses.layers.layers import last_layer, layer_drift

        def compare_drifts(function: Callable[..., Any]) -> Any:
            return function(session.trace, *_sides(run, look, names), step=look.step, distance=distance)

        drifts = compare_drifts(layer_drift)
        _save_series(session, drifts, name)
        results, document = [drifts], drifts.to_dict()
        if per_sample:
            samples = compare_drifts(last_layer)
            _save_series(session, samples, f"{name}-samples")
            results.append(samples)
            document |= samples.to_dict()
        if budgets:
            curves = compare_drifts(budget_curves)
            session.draw(curves, f"{name}-budgets")
            results.append(curves)
            document["budgets"] = curves.to_dict()
        return results, document

    stems = [name, *[f"{name}-samples"] * per_sample, *[f"{name}-budgets"] * budgets]
    return Analysis(
        name, wanted, lambda: wanted.configs(names), analyse, stems=stems, check=_pairs_check(run, look, names),
        leave_out_unfit=not run.budget,
    )  # fmt: skip


def _save_series(session: Session, result: LayerDrifts | SampleDrifts, stem: str) -> None:
    """Save one figure per series of the result; file names are numbered if there are several."""
    members: Sequence[DriftSeries | SampleSeries] = result.members
    for index, series in enumerate(members, 1):
        name = stem if len(result) == 1 else f"{stem}-{index}-{series[0].treatment.selection.name}"
        session.draw(series, name)


@show_defaults(budget=" ".join(FRACTIONS))
@analysis
def assumption(
    run: RunOptions,
    look: LookOptions,
    selection: Annotated[str, Option(metavar="NAME", help="Selection whose stage 1 is looked at")] = "two-stage",
) -> Analysis:
    """Check Assumption 1 per head, in three readings of σ.

    Attention on the αb largest entries, as the paper states it; on the entries of stage 1; and on all kept entries, S
    (paper, figure 4).
    """
    wanted = run.with_budgets(FRACTIONS)

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.bounds.assumption import assumption

        return assumption(session.trace, selection, look.step)

    return Analysis("assumption", wanted, lambda: wanted.configs([selection]), analyse, leave_out_unfit=not run.budget)


_RANKED_SELECTIONS = "attention,attention-unpooled,two-stage-uniform,two-stage,value,random,hindsight"


@show_defaults(budget=" ".join(FRACTIONS))
@analysis
def bound_tightness(
    run: RunOptions,
    look: LookOptions,
    selection: Annotated[str, Option(metavar="NAME", help="Selection in table and figures")] = "two-stage",
    compare: Annotated[
        str,
        Option(
            metavar="NAMES",
            help="Selections to rank, separated by commas; a finished trace has its own",
            show_default="all but hindsight-attention, position",
        ),
    ] = _RANKED_SELECTIONS,
) -> Analysis:
    """Measure how tight the bounds are, and if they rank.

    L/θ, L/θ̂, θ/θ̂, θ̂/θ̂_relax, violations, and whether lower bounds mean lower L.
    """
    wanted, names = run.with_budgets(FRACTIONS), parse_compare(compare)
    sides = names if selection in names else [*names, selection]

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.bounds.bound_tightness import bound_tightness

        return bound_tightness(session.trace, selection, look.step)

    return Analysis(
        "bound-tightness", wanted, lambda: wanted.configs(sides), analyse,
        figures={"plot": "", "plot_heads": "-heads"}, leave_out_unfit=not run.budget,
    )  # fmt: skip


_HORIZON_STEPS, _LEAST_HORIZON_STEPS = 32, 3


@show_defaults(steps=str(_HORIZON_STEPS))
@show_options("compress_every", "compress_over", "isolated_every")
@without_options("step")
@analysis
def horizon(run: RunOptions, look: LookOptions, compare: CompareOption = DEFAULT_COMPARE) -> Analysis:
    """Follow the perturbation over many decode steps.

    Teacher-forced on the full cache's own text: does the error grow, and does one selection stay ahead?
    """
    names = parse_compare(compare)
    steps = _HORIZON_STEPS if run.steps is None else run.steps
    if look.trace is None and steps < _LEAST_HORIZON_STEPS:
        raise ConfigError(f"horizon needs at least {_LEAST_HORIZON_STEPS} decode steps, got --steps {steps}")
    wanted = dataclasses.replace(run, steps=steps)

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.horizon.horizon import horizon

        return horizon(session.trace, None if _sides(run, look, names)[0] is None else names)

    return Analysis(
        "horizon", wanted, lambda: wanted.configs(names), analyse,
        figures={"plot": "", "plot_heads": "-heads", "plot_steps": "-steps"},
        check=sides_check(names if "compare" in run.typed_options else ()),
    )  # fmt: skip


@show_defaults(budget="a trace's first; 128")
@hide_options("precision", "preset")
@without_options("step")
@analysis
def tokens(
    run: RunOptions,
    look: LookOptions,
    sample: Annotated[str | None, Option(metavar="ID", help="Prompt", show_default="the first")] = None,
    layer: Annotated[int | None, Option(metavar="N", help="Layer, from 0", show_default="any")] = None,
    head: Annotated[
        int | None, Option(metavar="N", help="Query head of it", show_default="the one that changes most")
    ] = None,
    compare: CompareOption = DEFAULT_COMPARE,
    everything: Annotated[bool, Option("--all", help="The whole prompt, nothing folded")] = False,
) -> Analysis:
    """Show the words that a head keeps and evicts.

    Under two configurations, in colours or, without them, in marks, and why the head's output moves. Without --head,
    the head whose output the treatment changes most. Of a finished trace, files are written where --output says.
    """
    names = parse_compare(compare)
    if len(names) != 2:
        raise ConfigError(
            f"expected a baseline and a treatment in --compare, such as {DEFAULT_COMPARE}; got '{compare}'"
        )

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.tokens.tokens import tokens

        first, others = _sides(run, look, names)
        return tokens(
            session.trace,
            sample,
            layer,
            head,
            baseline=first,
            treatment=others[0] if others else None,
            everything=everything,
        )

    asked = run.output is not None or look.trace is None
    return Analysis(
        "tokens", run, lambda: run.configs(names), analyse, figures={"plot": ""} if asked else {},
        check=_pairs_check(run, look, names), writes=asked,
    )  # fmt: skip


_NEEDLE_LENGTHS, _NEEDLE_DEPTHS = ["500,1000,2000"], ["0,0.2,0.4,0.6,0.8,1"]
_NEEDLE_STEPS = 8


@show_defaults(length=_NEEDLE_LENGTHS[0], depth=_NEEDLE_DEPTHS[0], steps=str(_NEEDLE_STEPS))
@show_defaults(samples="one of each", policy="by --compare")
@show_options("depth", "haystack")
@hide_options("dataset", "data_dir")
@without_options("step")
@analysis
def needle(
    run: RunOptions,
    look: LookOptions,
    compare: Annotated[
        str,
        Option(
            metavar="NAMES",
            help="Methods: policy:selection,…",
            show_default="attention and two-stage of snapkv, pyramidkv, adakv",
        ),
    ] = METHODS,
    max_new_tokens: Annotated[int, Option(metavar="N", help="Tokens of an answer; the number has 7 digits")] = 12,
) -> Analysis:
    """Ask every cache for a number hidden in a long text.

    One prompt per length and depth unless --samples asks for more. The answers are compared with the first step's
    perturbation, and separately with its mean over all --steps, which nearly repeats the score.
    """
    if run.dataset != "needle":
        raise ConfigError(f"needle makes its own prompts; leave --dataset out, got '{run.dataset}'")
    if max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {max_new_tokens}")
    steps = _NEEDLE_STEPS if run.steps is None else run.steps
    wanted = dataclasses.replace(
        run, length=run.length or _NEEDLE_LENGTHS, depth=run.depth or _NEEDLE_DEPTHS, steps=steps
    )
    needed = len(wanted.lengths) * len(wanted.depths)
    if run.samples is not None and run.samples < needed:
        grid = f"{len(wanted.lengths)} lengths × {len(wanted.depths)} depths"
        raise ConfigError(f"{grid} need {needed} samples, got --samples {run.samples}")
    wanted = dataclasses.replace(wanted, samples=run.samples or needed)

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.needle.needle import needle

        return needle(session.trace)

    return Analysis(
        "needle", wanted, lambda: wanted.configs(parse_methods(compare)), analyse, generate=max_new_tokens,
        figures={"plot": "", "plot_digits": "-digits", "plot_depths": "-depths", "plot_correlation": "-correlation"},
    )  # fmt: skip
