"""`perturbkv assumption`: does stage 1 hold more than half of the attention (paper, figure 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.analyses import numbers
from perturbkv.cli import console
from perturbkv.cli.options import FRACTIONS, LookOptions, RunOptions
from perturbkv.cli.spreading import with_options
from perturbkv.cli.study import open_study

if TYPE_CHECKING:
    from perturbkv.analyses.assumption import Assumption, Reading

_MOST_LISTED = 40


@with_options
def assumption(
    run: RunOptions,
    look: LookOptions,
    selection: Annotated[str, Option(help="Whose stage 1 is looked at.")] = "two-stage",
) -> None:
    """Check Assumption 1 per layer and head: as the paper states σ, as stage 1 holds it, and S."""
    wanted = run.with_budgets(FRACTIONS)
    study = open_study("assumption", wanted, look, lambda: wanted.configs([selection]), leave_out_unfit=not run.budget)
    if study is None:
        return
    from perturbkv.analyses.assumption import summarise
    from perturbkv.figures.assumption import draw

    result = summarise(study.trace, selection, look.step)
    study.save(draw(result, study.width_mm), result.identity, "assumption")
    study.finish(result.to_dict(), lambda: _print(result))


def _print(result: Assumption) -> None:
    from perturbkv.analyses.assumption import READINGS
    from perturbkv.analyses.naming import budgets, folded

    names = [" ".join(parts) for parts in budgets([one.config for one in result.configs])]
    for name, title in READINGS.items():
        rows = []
        for budget, config in zip(names, result.configs, strict=True):
            reading = config.readings[name]
            rows.append([
                folded(budget),
                numbers.held(config.held),
                numbers.percent(reading.share, reading.share_interval),
                f"{int(reading.failing.sum())} of {reading.failing.size}",
                _layers(reading),
            ])  # fmt: skip
        columns = ["budget", "#held /\nfull", "#share > 0.5", "#heads ≤ 0.5", "most of them in layer"]
        console.table(f"\n{title} ({name})", columns, rows)
    console.say("Heads at most 0.5 in stage 1, as layer-head:")
    for budget, config in zip(names, result.configs, strict=True):
        console.say(f"  {budget}: {_below(config.readings['sigma_stage1']) or 'none'}")
    words = numbers.about_intervals(result.identity.samples)
    console.say(
        f"{words} Share > 0.5: mean over samples of each sample's share of heads. Heads ≤ 0.5: by their mean over "
        "samples; summary.json lists all. Theorem 3 says nothing where σ of stage 1 is at most 0.5; S is what the "
        f"paper's figure 4 plots. {numbers.ABOUT_HELD}"
    )


def _layers(reading: Reading) -> str:
    """The layers with the most heads below, as 'layer:heads'."""
    counts = sorted(enumerate(reading.failing.sum(axis=1).tolist()), key=lambda pair: -pair[1])
    return " ".join(f"{layer}:{heads}" for layer, heads in counts[:5] if heads) or "none"


def _below(reading: Reading) -> str:
    """The heads below as layer-head, the first of them."""
    names = [f"{layer}-{head}" for layer, head in zip(*reading.failing.nonzero(), strict=True)]
    more = f" … {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return " ".join(names[:_MOST_LISTED]) + more
