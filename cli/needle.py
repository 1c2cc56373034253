"""`perturbkv needle`: is a fact still found from an evicted cache, and does perturbation tell (paper, figure 8)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.cli import console, numbers
from perturbkv.cli.choices import apart
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.spreading import with_options
from perturbkv.cli.study import open_study
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.analyses.needle import Method, Needle
    from perturbkv.analyses.retrieval import Retrieval

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

    One prompt per length and depth unless --samples asks for more. Perturbation is averaged over --steps (8) decode
    steps of the full cache's own answer, and correlated with what was found.
    """
    wanted = _with_defaults(run, max_new_tokens)
    study = open_study("needle", wanted, look, lambda: wanted.configs(_names(compare)), generate=max_new_tokens)
    if study is None:
        return
    from perturbkv.analyses import retrieval
    from perturbkv.analyses.needle import summarise
    from perturbkv.figures import needle as grids
    from perturbkv.figures import retrieval as levels

    result, link = summarise(study.trace), retrieval.summarise(study.trace)
    study.save(grids.draw(result, study.width_mm), result.identity, "needle")
    study.save(grids.draw(result, study.width_mm, "digits"), result.identity, "needle-digits")
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

    labels = [method.label for method in result.methods]
    console.say(f"haystack: {result.haystack} · scenario: {result.scenario} · {common(labels)}")
    columns = ["method", "#found", "#leading\ndigits", *(f"#{length:,}" for length in result.lengths)]
    rows = [_row("full cache", result.full)]
    rows += [_row(name or "evicted", method) for name, method in zip(short(labels), result.methods, strict=True)]
    console.table("\nshare of numbers found in all, of their leading digits, and found by prompt tokens", columns, rows)
    _print_link(link)
    console.say(numbers.about_intervals(result.identity.samples))


def _row(name: str, method: Method) -> list[str]:
    import numpy as np

    columns = [column[~np.isnan(column)] for column in method.grid.T]
    by_length = [float(column.mean()) if len(column) else float("nan") for column in columns]
    whole = numbers.percent(method.score, method.score_interval)
    digits = numbers.percent(method.digits, method.digits_interval)
    return [name, whole, digits, *(numbers.percent(share) for share in by_length)]


def _print_link(link: Retrieval) -> None:
    from perturbkv.analyses.retrieval import MEASURES

    rows = [
        [
            MEASURES[exact.measure],
            numbers.decimal(exact.rho, exact.interval),
            numbers.decimal(digits.rho, digits.interval),
            numbers.decimal(digits.within, digits.within_interval),
        ]
        for exact, digits in zip(link.of("score"), link.of("digits"), strict=True)
    ]
    title = f"perturbation against retrieval: Spearman's ρ, {link.samples} prompts that the full cache answers"
    console.table(title, ["measure", "#whole number", "#digits", "#digits, within\na prompt"], rows)
    console.say(
        "ρ < 0: the more perturbed, the less was found. Within a prompt: across the methods, in the "
        f"{link.of('digits')[0].deciding} prompts in which they differ. L1, θ (of all heads) and drift are relative to "
        f"the full run's norms, means of {link.steps} decode steps."
    )
