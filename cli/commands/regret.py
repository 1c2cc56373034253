"""`perturbkv regret`: how far each method is from the best kept set."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from perturbkv.analyses.json_values import run_object
from perturbkv.cli import console, dry_run, option_effects
from perturbkv.cli.choices import parse_methods
from perturbkv.cli.figure_options import FigureOptions
from perturbkv.cli.leaving import Leaving
from perturbkv.cli.option_routing import hiding, with_options
from perturbkv.cli.options import CompareOption, RunOptions
from perturbkv.cli.planned_run import run_folder
from perturbkv.cli.planning import plan
from perturbkv.cli.saving import reachable

_NAME = "regret"
_METHODS = "attention,attention-unpooled,two-stage,random"


@hiding(*option_effects.UNUSED[_NAME])
@with_options
def regret(
    run: RunOptions,
    look: FigureOptions,
    compare: CompareOption = _METHODS,
    heads: Annotated[int, Option(metavar="N", help="Searched of each prompt by swaps, drawn by --seed")] = 64,
    proven: Annotated[int, Option(metavar="N", help="Of its prefix of 64 tokens, 16 kept, by integer programs")] = 8,
    seconds: Annotated[float, Option(metavar="S", help="At most for each head and search")] = 60.0,
) -> None:
    """Tell how far each method is from the best kept set.

    Per head, isolated: against the best set known of its size on the prompt, and the proven best of a short prefix.
    """
    from perturbkv.api.searching import searched
    from perturbkv.optimum.chain import with_references
    from perturbkv.pipeline.run import searching

    asked = searching.Searches(heads, proven, seconds, seed=run.seed)
    configs = with_references(run.configs(parse_methods(compare)))
    option_effects.check(_NAME, run, configs)
    searching.check(configs, asked)
    folder = run_folder(run, run.output)
    place, path = Leaving(_NAME, folder, look, run.overwrite, run.as_json), folder / f"{_NAME}.jsonl"
    if not run.dry_run:
        reachable(path, run.wait)
        place.check_free()
    planned = plan(run, configs)
    if run.dry_run:
        dry_run.show(planned, run.as_json, None)
        return
    with place.held(), console.progress("samples") as bar:
        found = searched(planned, asked, path, bar.at, overwrite=run.overwrite, wait=run.wait)
    place.leave(found, {"run": run_object(planned.run), "file": str(path)})
