"""`perturbkv budget`: safe budgets, and cliffs of KL."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.cli import console
from perturbkv.cli.choices import (
    check_distinct,
    parse_numbers,
    split_names,
)
from perturbkv.cli.command_line import hide_options, show_defaults, show_options, without_options
from perturbkv.cli.options import DEFAULT_SELECTIONS, LookOptions, RunOptions
from perturbkv.cli.session import Analysis, Session, analysis_views, sides_check
from perturbkv.configs.cache_contents import DEFAULT_STEPS
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import BudgetError, ConfigError

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result
    from perturbkv.datasets.encode import Prompt
    from perturbkv.models.loading import ModelFiles


_BUDGETS = ("0.05", "0.1", "0.2", "0.4", "0.6", "0.8")


MethodsOption = Annotated[
    str | None,
    Option(
        metavar="NAMES",
        help="Methods: policy:selection,…",
        show_default="attention,two-stage",
    ),
]


def _safe_budgets(
    run: RunOptions,
    look: LookOptions,
    compare: MethodsOption = None,
    max_kl: Annotated[float | None, Option(metavar="X", help="Mean KL at most, nat, by a lognormal's bound")] = None,
    max_perplexity: Annotated[
        float | None,
        Option(metavar="X", help="Mean perplexity of --text at most, as a ratio to the full cache's: 1.05"),
    ] = None,
    max_drop: Annotated[float | None, Option(metavar="X", help="Mean drop of the score at most, points of 100")] = None,
    min_top1: Annotated[float | None, Option(metavar="X", help="Mean share of same next tokens at least: 0.99")] = None,
    for_length: Annotated[
        int | None, Option(metavar="N", help="Also the caches' bytes for prompts of so many entries")
    ] = None,
    for_batch: Annotated[int, Option(metavar="N", help="And for so many of them at once")] = 1,
) -> Analysis:
    """Find each selection's smallest safe budget."""
    from perturbkv.analyses.budget.budget_axis import check_budget_units
    from perturbkv.analyses.budget.criteria import criteria
    from perturbkv.analyses.budget.safe_budget import check_size

    criteria(max_kl, max_drop, min_top1, max_perplexity)
    check_size(for_length, for_batch)
    wanted = dataclasses.replace(run.with_budgets(_BUDGETS), reads_whole_text=max_perplexity is not None)
    sides = _parse_optional_methods(compare)

    def configs() -> tuple[EvictionConfig, ...]:
        chosen = wanted.configs(sides or DEFAULT_SELECTIONS)
        check_budget_units(chosen, "budget")
        return chosen

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.budget.safe_budget import safe_budget

        return safe_budget(
            session.trace, max_kl=max_kl, max_perplexity=max_perplexity, max_drop=max_drop, min_top1=min_top1,
            sides=sides, for_length=for_length, for_batch=for_batch,
        )  # fmt: skip

    return Analysis(
        "budget", wanted, configs, analyse, check=sides_check(sides or ()),
        leave_out_unfit=not run.budget, generate=0 if max_drop is None else None,
        exit_code=lambda result: int(result.exit_code),
    )  # fmt: skip


def _parse_optional_methods(compare: str | None) -> list[str] | None:
    """Return the methods that --compare lists, None without it. Raises ConfigError for a repeated method."""
    return None if compare is None else list(check_distinct("--compare", split_names(compare)))


_CLIFF_BUDGETS = ("0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.4")
_METHODS = "attention,two-stage,attention-unpooled,random"


def _cliff(
    run: RunOptions,
    look: LookOptions,
    compare: MethodsOption = None,
    kl: Annotated[str, Option(metavar="X", help="--cliff: thresholds of KL, nat, by commas")] = "0.1,1",
) -> Analysis:
    """Find the budget from which on the next token's KL stays below a threshold."""
    from perturbkv.analyses.budget.cliff import check_thresholds

    thresholds = check_thresholds(parse_numbers("--kl", [kl]))
    sides = _parse_optional_methods(compare)
    if sides == []:
        raise ConfigError(f"--compare takes methods such as {_METHODS}, got none")
    wanted, files = run.with_budgets(_CLIFF_BUDGETS), None
    methods = sides or _METHODS.split(",")
    if look.trace is None:
        # what is invalid at every window is refused before a model is opened
        _cliff_configs(wanted if "window" in run.typed_options else dataclasses.replace(wanted, window=1), methods)
        wanted, files = _with_window(wanted)

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.budget.cliff import cliff

        return cliff(session.trace, sides=sides, kl=thresholds)

    return Analysis(
        "budget-cliff", wanted, lambda: _cliff_configs(wanted, methods), analyse, command="budget --cliff",
        check=sides_check(sides or ()), files=files,
    )  # fmt: skip


def _cliff_configs(run: RunOptions, methods: list[str]) -> tuple[EvictionConfig, ...]:
    """Return every method at every budget. Raises ConfigError for too few budgets, or a mix of entries and shares."""
    from perturbkv.analyses.budget.budget_axis import check_budget_units
    from perturbkv.analyses.budget.cliff import ANALYSIS, LEAST_BUDGETS

    configs = run.configs(methods)
    check_budget_units(configs, ANALYSIS)
    if len(run.budget or ()) < LEAST_BUDGETS:
        raise ConfigError(
            f"{ANALYSIS} needs at least {LEAST_BUDGETS} budgets, got --budget {' '.join(run.budget or ())}; give more"
        )
    return configs


def _with_window(run: RunOptions) -> tuple[RunOptions, ModelFiles | None]:
    """Return the run with the largest window that fits, and the model files opened to find it.

    Where the user chose a window, return the run unchanged and None.
    """
    if run.window is not None:
        return run, None
    run.check_inputs()
    from perturbkv.cli.planned_run import encode_prompts
    from perturbkv.models.loading import open_model

    files = open_model(run.model, run.seed, run.revision or "")
    prompts = encode_prompts(run, files.tokenizer, int(files.config.max_position_embeddings))
    window, reason = widest_window([Budget.parse(text) for text in run.budget or ()], prompts, run.scenario)
    console.note(reason)
    return dataclasses.replace(run, window=window), files


WINDOWS = (32, 16, 8, 4, 2, 1)


def widest_window(budgets: Sequence[Budget], prompts: Sequence[Prompt], scenario: str = "regular") -> tuple[int, str]:
    """Return the largest window that fits all budgets and prompts, and the reason as a sentence.

    It fits where at least as many entries stay free as it has, at the smallest budget of the shortest prompt. All
    budgets get the same window, so that they differ in nothing else. Raises BudgetError where no window fits.
    """
    lengths = {prompt.sample_id: len(prompt.parts(scenario)[0]) for prompt in prompts}
    kept = {
        name: (min(min(budget.tokens(tokens), tokens) for budget in budgets), tokens)
        for name, tokens in lengths.items()
    }
    fewest = min(entries for entries, _ in kept.values())
    widest = next((window for window in WINDOWS if fewest >= 2 * window), None)
    if widest is None:
        name, tokens = min(lengths.items(), key=lambda item: item[1])
        raise BudgetError(
            f"the smallest budget leaves no entry beside a window of one in {name} ({tokens:,} tokens); give larger "
            "ones, or longer prompts"
        )
    entries, tokens = min(kept.values())
    return widest, (
        f"window {widest} for all budgets, the largest of {', '.join(map(str, WINDOWS))} that leaves as many free "
        f"entries as itself: the smallest budget keeps {entries} of the {tokens:,} of the shortest prompt"
    )


_HIDDEN = ("seed", "data_dir", "max_tokens", "preset", "alpha", "precision", "scenario", "dtype")
"""Options of measuring that the help of `budget` leaves out."""


@show_defaults(budget="by view", steps=f"{DEFAULT_STEPS}; perplexity: to the text's end")
@show_options("text")
@hide_options(*_HIDDEN)
@without_options("step")
@analysis_views(
    _safe_budgets,
    cliff=_cliff,
    flags={
        "cliff": Annotated[bool, Option("--cliff", help="From which budget on KL stays low")],
    },
)
def budget() -> None:
    """Find safe budgets, and from which on KL stays low.

    The smallest budget that keeps to --max-kl, --max-perplexity, --max-drop and --min-top1 (exit code 1: none; 2: few
    samples). --max-perplexity reads a text (--text) to its end, or for --steps tokens. --cliff takes the largest window
    of 32, 16, 8, 4, 2, 1 that fits.
    """
