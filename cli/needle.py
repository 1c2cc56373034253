"""`perturbkv needle`: is a fact still found from an evicted cache, and does perturbation tell (paper, figure 8)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.analyses import numbers
from perturbkv.cli import console
from perturbkv.cli.choices import apart
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.spreading import with_options
from perturbkv.cli.study import open_study
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.analyses.needle import Method, Needle
    from perturbkv.analyses.retrieval import BudgetLink, Correlation, Retrieval

_METHODS = ",".join(
    f"{policy}:{selection}" for policy in ("snapkv", "pyramidkv", "adakv") for selection in ("attention", "two-stage")
)
_LENGTHS, _DEPTHS = ["500,1000,2000"], ["0,0.2,0.4,0.6,0.8,1"]
_STEPS = 8


@with_options
def needle(
    run: RunOptions,
    look: LookOptions,
    compare: Annotated[str, Option(help="Methods: policy:selection, separated by commas.")] = _METHODS,
    max_new_tokens: Annotated[int, Option(help="Tokens of an answer; the needle's number has 7 digits.")] = 12,
) -> None:
    """Ask for a number hidden in a long text, from the full cache and from every evicted one.

    One prompt per length and depth unless --samples asks for more. The first decode step's perturbation is correlated
    with what was found, between the methods of one prompt and one budget; what is measured over all --steps (8) of the
    full cache's own answer nearly is the score, and is shown apart.
    """
    wanted = _with_defaults(run, max_new_tokens)
    study = open_study("needle", wanted, look, lambda: wanted.configs(_names(compare)), generate=max_new_tokens)
    if study is None:
        return
    from perturbkv.analyses import retrieval
    from perturbkv.analyses.needle import summarise
    from perturbkv.figures import needle as grids
    from perturbkv.figures import needle_depths
    from perturbkv.figures import retrieval as levels

    result, link = summarise(study.trace), retrieval.summarise(study.trace)
    study.save(grids.draw(result, study.width_mm), result.identity, "needle")
    study.save(grids.draw(result, study.width_mm, "digits"), result.identity, "needle-digits")
    study.save(needle_depths.draw(result, study.width_mm), result.identity, "needle-depths")
    study.save(levels.draw(link, result.identity, study.width_mm), result.identity, "needle-correlation")
    study.finish({**result.to_dict(), "correlation": link.to_dict()}, lambda: _print(result, link))


def _with_defaults(run: RunOptions, max_new_tokens: int) -> RunOptions:
    """Needle's own defaults, where the user chose none."""
    if run.dataset != "needle":
        msg = f"needle makes its own prompts; leave --dataset out, got '{run.dataset}'"
        raise ConfigError(msg)
    if max_new_tokens < 1:
        msg = f"--max-new-tokens must be at least 1, got {max_new_tokens}"
        raise ConfigError(msg)
    wanted = dataclasses.replace(
        run, length=run.length or _LENGTHS, depth=run.depth or _DEPTHS, steps=_STEPS if run.steps is None else run.steps
    )
    cells = len(wanted.lengths) * len(wanted.depths)
    if run.samples is not None and run.samples < cells:
        grid = f"{len(wanted.lengths)} lengths × {len(wanted.depths)} depths"
        msg = f"{grid} need {cells} samples, got --samples {run.samples}"
        raise ConfigError(msg)
    return dataclasses.replace(wanted, samples=run.samples or cells)


def _names(compare: str) -> list[str]:
    names = [name.strip() for name in compare.split(",") if name.strip()]
    if not names:
        msg = f"--compare takes methods such as {_METHODS.partition(',')[0]}, got none"
        raise ConfigError(msg)
    return list(apart("--compare", names))


def _print(result: Needle, link: Retrieval) -> None:
    from perturbkv.analyses.naming import common, short

    configs = result.identity.configs
    console.say(f"haystack: {result.haystack} · scenario: {result.scenario} · {common(configs)}")
    columns = ["method", "#held /\nfull", "#found", "#leading\ndigits", *(f"#{length:,}" for length in result.lengths)]
    rows = [_row("full cache", result.full)]
    rows += [_row(name or "evicted", method) for name, method in zip(short(configs), result.methods, strict=True)]
    console.table("\nshare of numbers found in all, of their leading digits, and found by prompt tokens", columns, rows)
    _print_link(link)
    console.say(
        f"{numbers.about_intervals(result.identity.samples, exact=True)} Of shares of prompts found: exact ones. "
        f"{numbers.ABOUT_HELD}"
    )


def _row(name: str, method: Method) -> list[str]:
    import numpy as np

    columns = [column[~np.isnan(column)] for column in method.grid.T]
    by_length = [float(column.mean()) if len(column) else float("nan") for column in columns]
    whole = numbers.percent(method.score, method.score_interval, "\n")
    digits = numbers.percent(method.digits, method.digits_interval, "\n")
    return [name, numbers.held(method.held), whole, digits, *(numbers.percent(share) for share in by_length)]


def _print_link(link: Retrieval) -> None:
    from perturbkv.analyses.retrieval import CIRCULAR, LEAST_CONFIGS, MEASURES

    console.say(f"does perturbation tell? {link.samples} prompts that the full cache answers", bold=True)
    for budget in link.too_few:
        console.say(f"b={budget}: fewer than {LEAST_CONFIGS} methods, no ranks")
    if not link.budgets:
        return
    title = "Spearman's ρ between the methods of one prompt, first decode step"
    _print_ranks(title, MEASURES, [(one, one.correlations) for one in link.budgets])
    title = "circular: on the answer's own tokens these nearly are the score"
    _print_ranks(title, CIRCULAR, [(one, one.circular) for one in link.budgets])
    console.say(
        "ρ < 0: the more perturbed of a prompt's methods find less. Only methods of one budget, one granularity and "
        "one protection are ranked together; under a budget stands what their caches hold over the full cache. Mean "
        "over the n prompts whose methods differ; its interval over them. L1, θ (of all heads) and drift are relative "
        "to the full run's norms."
    )


def _print_ranks(
    title: str, measures: dict[str, str], budgets: list[tuple[BudgetLink, tuple[Correlation, ...]]]
) -> None:
    """A row per budget and measure, both outcomes beside each other, each with its n."""
    from perturbkv.analyses.needle import OUTCOMES

    rows = []
    for link, correlations in budgets:
        held = " to ".join(dict.fromkeys(map(numbers.held, link.held_ends)))
        names = [link.name, f"held {held}", *[""] * len(measures)]
        found = {(one.measure, one.outcome): one for one in correlations}
        for place, (name, words) in enumerate(measures.items()):
            cells = [cell for outcome in OUTCOMES for cell in _ranked(found[name, outcome])]
            rows.append([names[place], words, *cells])
    console.table(title, ["budget", "measure", "#whole number", "#n", "#digits", "#n"], rows)


def _ranked(one: Correlation) -> list[str]:
    return [numbers.decimal(one.rho, one.interval), str(one.deciding)]
