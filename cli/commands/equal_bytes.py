"""`perturbkv bytes`: at equal bytes, is it better to evict or to quantise?."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.cli.choices import DEFAULT_COMPARE, apart, parse_methods
from perturbkv.cli.option_routing import showing, with_options
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.session import open_study
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import FULL, FULL_BITS, QUANTISE
from perturbkv.configs.resources import Shape
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.models.loading import ModelFiles

_BUDGETS = ("0.1", "0.2", "0.4")
_BITS = (16, 8, 4, 2)
_NAME = "bytes"


@showing(budget=" ".join(_BUDGETS), granularity="kv")
@with_options
def bytes(  # noqa: A001
    run: RunOptions,
    look: LookOptions,
    bits: Annotated[
        list[int] | None, Option(metavar="N", help="Of a stored number: 16, 8, 4, 2", show_default="all of them")
    ] = None,
    compare: Annotated[
        str, Option(metavar="NAMES", help="Methods, separated by commas: policy:selection")
    ] = DEFAULT_COMPARE,
    answers: Annotated[bool, Option("--answers", help="Also generate answers, and score them")] = False,
    max_new_tokens: Annotated[
        int | None, Option(metavar="N", help="Tokens of an answer at most", show_default="the data set's own")
    ] = None,
) -> None:
    """Tell whether to evict or to quantise, at equal bytes.

    A budget is what its entries take in 16 bits; in 8, 4 or 2 more entries take it, window, scales and minima counted.
    Beside them stands everything in few bits.
    """
    if max_new_tokens is not None and (max_new_tokens < 1 or not answers):
        got = f"got {max_new_tokens}" if answers else "without --answers it has no effect; give both"
        msg = f"--max-new-tokens must be at least 1, {got}"
        raise ConfigError(msg)
    wanted, counts, names = run.with_budgets(_BUDGETS), _counts(bits), parse_methods(compare)
    files = None if look.trace is not None else _opened(run)
    study = open_study(
        _NAME, wanted, look, lambda: _configs(wanted, counts, names, files), leave_out_unfit=not run.budget,
        generate=max_new_tokens if answers else 0, files=files,
    )  # fmt: skip
    if study is None:
        return
    from perturbkv.analyses.budget.equal_bytes import equal_bytes

    result = equal_bytes(study.trace, look.step)
    study.save(result.plot(study.width_mm), result.identity, _NAME)
    study.show(result)


def _counts(bits: list[int] | None) -> list[int]:
    """Bits below 16, which are there anyway. Raises ConfigError for others, and where nothing is left to compare."""
    counts = [count for count in apart("--bits", bits or _BITS) if count != FULL_BITS]
    if wrong := [count for count in counts if count not in _BITS]:
        msg = f"--bits takes {', '.join(map(str, _BITS))}, got {wrong[0]}"
        raise ConfigError(msg)
    if not counts:
        msg = f"--bits takes 8, 4 or 2 to hold against {FULL_BITS}, which is measured anyway; got {FULL_BITS} alone"
        raise ConfigError(msg)
    return sorted(counts, reverse=True)


def _opened(run: RunOptions) -> ModelFiles:
    """The model, whose heads' size says how many entries a budget of bytes holds."""
    from perturbkv.models.loading import open_model

    return open_model(run.model, run.seed, run.revision or "")


def _configs(
    run: RunOptions, counts: list[int], names: list[str], files: ModelFiles | None
) -> tuple[EvictionConfig, ...]:
    """Every method, budget and number of bits; then everything in few bits, which no method chooses."""
    if files is None:
        return ()
    d_head = Shape.of(files.config, 2, 0).d_head
    asked = dataclasses.replace(run, granularity=run.granularity or ["kv"])
    filling = [f"{QUANTISE}(bits={count}, fill={d_head})" for count in counts]
    alone = dataclasses.replace(asked, budget=["1.0"], precision=[f"{QUANTISE}(bits={count})" for count in counts])
    found = dataclasses.replace(asked, precision=[FULL, *filling]).configs(names)
    return tuple(dict.fromkeys([*found, *alone.configs(names[:1])]))
