"""`perturbkv patching`: the layers and heads that decide the output."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.analyses.json_values import run_object
from perturbkv.cli import console, dry_run, option_refusals
from perturbkv.cli.choices import DEFAULT_COMPARE, parse_compare
from perturbkv.cli.command_line import hide_options, show_defaults, with_options, without_options
from perturbkv.cli.options import LOOK, FigureOptions, RunOptions
from perturbkv.cli.planned_run import plan, run_folder
from perturbkv.cli.session import Session
from perturbkv.configs import patching as rules
from perturbkv.configs.patching import BY, LEAST, OUTCOMES, PatchingConfig
from perturbkv.errors import ConfigError
from perturbkv.storage.output import OutputFolder, resumable_file
from perturbkv.storage.patching_file import FILE

if TYPE_CHECKING:
    from perturbkv.pipeline.run.plan import Plan

_COMMAND = "patching"
_GAME_OPTIONS = ("by", "layers", "outcome", "exact")


@show_defaults(steps="--step + 1")
@hide_options("preset", "alpha", "precision", "max_tokens", "dtype")
@without_options(
    "save",
    "effect_gradient",
    "prompts",
    "kept",
    "correction",
    "shard",
    "shard_by",
    "engine",
    "workers",
    "ray_address",
    "cpus_per_worker",
    "timeout_per_sample",
)
@with_options
def patching(
    run: RunOptions,
    look: FigureOptions,
    compare: Annotated[str, Option(metavar="NAMES", help="Baseline and treatment")] = DEFAULT_COMPARE,
    by: Annotated[str, Option(metavar="NAME", help=f"Unit that is switched: {' or '.join(BY)}")] = BY[0],
    layers: Annotated[
        str | None, Option(metavar="LIST", help="Layers that are switched: 0,18-23", show_default="all")
    ] = None,
    baseline_in: Annotated[
        list[str] | None, Option(metavar="LIST", help="Also measure: baseline here, treatment elsewhere")
    ] = None,
    treatment_in: Annotated[
        list[str] | None, Option(metavar="LIST", help="Also measure: treatment here, baseline elsewhere")
    ] = None,
    permutations: Annotated[
        int | None,
        Option(metavar="N", help=f"Orders for Shapley values: even, from {LEAST}, or 0", show_default="16"),
    ] = None,
    exact: Annotated[bool, Option("--exact", help="All subsets, not orders: to 8 by default, at most 12")] = False,
    greedy: Annotated[
        int | None, Option(metavar="N", help="Number switched greedily; 0: none", show_default="10")
    ] = None,
    outcome: Annotated[str, Option(metavar="NAME", help=", ".join(OUTCOMES))] = "drift",
    answers: Annotated[bool, Option("--answers", help="Also answer from every mixture, and grade it")] = False,
    max_new_tokens: Annotated[
        int | None, Option(metavar="N", help="Tokens of an answer at most", show_default="the dataset's")
    ] = None,
    step: Annotated[int, Option(metavar="N", help="Decode step that is looked at", rich_help_panel=LOOK)] = 0,
) -> None:
    """Find the layers and heads that decide the output.

    The treatment's kept sets in some layers or heads, the baseline's elsewhere: what each does to drift, KL or score,
    and which to switch first (swap.jsonl).
    """
    _check_effects(run, permutations, greedy, answers)
    patches = PatchingConfig(
        by, () if layers is None else rules.parse_layers("--layers", layers),
        _parse_layer_lists("--baseline-in", baseline_in), _parse_layer_lists("--treatment-in", treatment_in),
        permutations, exact, greedy, outcome, step, run.seed,
    )  # fmt: skip
    configs = run.configs(parse_compare(compare))
    if len(configs) != 2:
        raise ConfigError(
            f"expected one baseline and one treatment at one budget, got {len(configs)} configurations; ask for each "
            "pair apart"
        )
    rules.check_sides(*configs)
    option_refusals.check_effects(_COMMAND, configs, run)
    run = run if run.steps is not None else dataclasses.replace(run, steps=step + 1)
    folder = run_folder(run, run.output)
    if not run.dry_run:
        OutputFolder(folder, wait=run.wait).claim(resumable_file(folder / FILE), writer=folder / FILE)
    planned = plan(run, configs, generate=max_new_tokens if answers else 0)
    if run.dry_run:
        _show_plan(run, planned, patches)
        return
    _measure(run, look, folder, planned, patches)


def _measure(run: RunOptions, look: FigureOptions, folder: Path, planned: Plan, patches: PatchingConfig) -> None:
    """Measure the missing mixtures, write figure and numbers, and print them; exit with 1 where samples failed."""
    from perturbkv.api.patching import patching_game, run_patching

    patching_game(planned, patches)
    session, path = Session("patching", OutputFolder(folder, run.overwrite), look, run.as_json), folder / FILE
    with session.claim([session.name]):
        with console.progress("mixtures") as bar:
            result = run_patching(planned, patches, path, run.overwrite, run.wait, bar.update)
        session.source = {"file": str(path), "run": run_object(planned.run)}
        session.draw(result, session.name)
        session.show(result, failures=result.failures)


def _show_plan(run: RunOptions, planned: Plan, patches: PatchingConfig) -> None:
    """Print the plan of a dry run, with the numbers of mixtures that it would measure."""
    from perturbkv.api.patching import mixture_counts, patching_game

    mixtures, samples = mixture_counts(planned, patches, patching_game(planned, patches)), len(planned.prompts)
    if run.as_json:
        console.print_json({**dry_run.describe(planned, None), "mixtures": mixtures})
        return
    dry_run.show([planned], as_json=False, folder=None)
    console.say(
        f"mixtures of each prompt: {mixtures['named']} by name, {mixtures['shapley']:,} for Shapley values, at most "
        f"{mixtures['greedy']:,} for the greedy path; at most {samples * mixtures['mixtures']:,} of {samples} prompts, "
        f"{mixtures['rows']} in a batch"
    )


def _parse_layer_lists(option: str, texts: list[str] | None) -> tuple[tuple[int, ...], ...]:
    """Return one tuple of layers per text, such as `0,18-23`, of a repeatable option."""
    return tuple(rules.parse_layers(option, text) for text in texts or [])


def _check_effects(run: RunOptions, permutations: int | None, greedy: int | None, answers: bool) -> None:
    """Raise ConfigError for a typed option without effect.

    The options of Shapley values and the greedy path need one of both, --max-new-tokens needs --answers.
    """
    unused = [name for name in _GAME_OPTIONS if name in run.typed_options] if permutations == 0 and greedy == 0 else []
    if unused:
        flag = option_refusals.option_flag(unused[0])
        raise ConfigError(f"{flag} has no effect here: it needs --permutations or --greedy; leave it out")
    if "max_new_tokens" in run.typed_options and not answers:
        raise ConfigError("--max-new-tokens has no effect here: it needs --answers; leave it out")
