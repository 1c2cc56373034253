"""`perturbkv ablation`: ingredients of two-stage selection, whole methods, an engine's restrictions, equal bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Option

from perturbkv.analyses.verdicts import MARGIN, check_margin
from perturbkv.cli import console
from perturbkv.cli.choices import check_distinct, split_names
from perturbkv.cli.options import DEFAULT_SELECTIONS, LookOptions, RunOptions
from perturbkv.cli.session import Analysis, Session, analysis_views
from perturbkv.configs.cache_contents import WITHOUT_EVICTION
from perturbkv.configs.choice import Choice, as_choice, parse, split_policy_and_selection
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import FULL
from perturbkv.configs.selections import GIVEN, UNION, reduction
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.analyses.result import Result
    from perturbkv.selection.policies.base import Policy
    from perturbkv.trace import Trace


_ALPHAS = (0.0, 0.25, 0.5)
_UNSTAGED = ["attention", "attention-unpooled", "value", "random", "hindsight-attention", "hindsight"]
_STAGED = ["two-stage-uniform", "two-stage"]
_ALL = "all"
_TWO_STAGE_POLICIES = ("snapkv", "pyramidkv", "adakv")


def _ingredients(run: RunOptions, look: LookOptions) -> Analysis:
    """Rank the ingredients of the two-stage selection."""

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.ablation.ablation import ablation

        return ablation(session.trace, look.step)

    return Analysis(
        "ablation", run, lambda: _ingredient_configs(run), analyse, options={"methods": None, "step": look.step},
        compares_sums=True,
    )  # fmt: skip


def _method_ranking(
    run: RunOptions,
    look: LookOptions,
    methods: Annotated[
        str | None,
        Option(metavar="NAMES", help="Rank whole methods: all, or policies with commas", show_default=False),
    ] = None,
    margin: Annotated[float, Option(metavar="X", help="--methods: sums this near count as equal")] = MARGIN,
) -> Analysis:
    """Rank whole methods against snapkv, and against random entries and attention's with the same protection."""
    check_margin(margin, "--margin")
    names = split_names(methods or "")
    if not names:
        raise ConfigError("--methods takes all, or policies such as caote,h2o; got none")
    if _ALL in names and len(names) > 1:
        raise ConfigError(
            f"--methods takes all, which is every policy at its defaults, or names; got both in '{methods}', give one"
        )
    only = () if names == [_ALL] else tuple(check_distinct("--methods", names))

    def check(trace: Trace) -> None:
        from perturbkv.analyses.ablation.methods import check_names

        check_names(trace, only)

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.ablation.methods import methods

        return methods(session.trace, look.step, only, margin)

    return Analysis(
        "ablation-methods", run, lambda: _method_configs(run, only), analyse, command="ablation --methods",
        figures={"plot": "", "plot_budgets": "-budgets"}, check=check, compares_sums=True, margin=margin,
    )  # fmt: skip


def _method_configs(run: RunOptions, only: Sequence[str]) -> tuple[EvictionConfig, ...]:
    """Return the configurations of the methods `only` (empty: all methods), of snapkv, and of their controls.

    Controls keep random entries, or attention's, with the same protection. Raises ConfigError for a --policy, and for
    snapkv as the only method.
    """
    from perturbkv.analyses.ablation.methods import CONTROLS, baseline_of, control
    from perturbkv.selection.policies.registry import normalise

    if "policy" in run.typed_options:
        raise ConfigError("--policy has no effect here: --methods names the policies; leave it out")
    named = map(_with_selection, only) if only else _all_methods(run)
    one_alpha = dataclasses.replace(run, alpha=run.alpha and run.alpha[:1])  # without stages all α keep the same
    configs = one_alpha.configs(list(dict.fromkeys(["snapkv:attention", *named])))
    if len({(one.policy, one.selection.name) for one in configs}) < 2:
        raise ConfigError("--methods needs another method than snapkv, which it compares them with; name one, or all")
    controls = []
    for config in configs:
        size = config.budget, config.granularity.name, config.block
        baseline = baseline_of([one for one in configs if (one.budget, one.granularity.name, one.block) == size])
        wanted = [control(baseline, config, selection) for selection in CONTROLS] if baseline else []
        controls += [normalise(one) for one in wanted if one is not None]
    return tuple(dict.fromkeys([*configs, *controls]))


def _all_methods(run: RunOptions) -> list[str]:
    """Return all methods as policy:selection: the policies that support these options, and variants of some of them.

    The variants are SnapKV without pooling, and three policies with two stages. Prints a note on the other policies.
    """
    from perturbkv.selection.policies import registry

    known = [policy for policy in registry.all_policies() if policy.name not in ("random", "randkv")]
    fitting = [policy.name for policy in known if _can_run(run, policy)]
    if unfit := [policy.name for policy in known if policy.name not in fitting]:
        why = "left out, as it evicts nothing, or needs head scores, another cache or another granularity"
        console.note(f"{why}: {', '.join(unfit)}")
    staged = [f"{name}:two-stage" for name in _TWO_STAGE_POLICIES if name in fitting]
    return [*map(_with_selection, fitting), "snapkv:attention-unpooled", *staged]


def _can_run(run: RunOptions, policy: type[Policy]) -> bool:
    """Return whether a policy evicts entries and supports the user's head scores, cache and granularities."""
    from perturbkv.selection.compatibility import can_share

    granularities = [as_choice(name) for name in run.granularity or []]
    can_share_sets = all(can_share(policy, one) for one in granularities)
    in_blocks = any(int(one.options.get("block", 1)) > 1 for one in granularities)
    can_take_blocks = not in_blocks or policy().first_stage is None
    has_scores = run.head_scores is not None or not policy.needs_scores
    evicts = policy.name not in WITHOUT_EVICTION
    return evicts and has_scores and run.cache in policy.caches() and can_share_sets and can_take_blocks


def _with_selection(method: str) -> str:
    """Return a method as policy:selection; a policy alone gets its first selection."""
    from perturbkv.selection.policies import registry

    if len(split_policy_and_selection(method)) > 1:
        return method
    return f"{method}:{registry.policy_class(parse(method).name).selections[0]}"


def _ingredient_configs(run: RunOptions) -> tuple[EvictionConfig, ...]:
    """Return the two-stage selections at every α and the other selections, at every granularity."""
    from perturbkv.analyses.ablation.ingredients import MEAN_OF_PRODUCTS

    alphas = run.alpha or list(_ALPHAS)
    configs: list[EvictionConfig] = []
    for granularity in map(as_choice, run.granularity or ["query", "kv"]):
        plain = granularity.drop(["product"])
        wanted = dataclasses.replace(run, granularity=[str(plain)])
        configs += dataclasses.replace(wanted, alpha=run.alpha and run.alpha[:1]).configs(_UNSTAGED)
        configs += dataclasses.replace(wanted, alpha=alphas).configs(_STAGED)
        if granularity.name != "query":
            product = Choice(plain.name, {**plain.options, "product": MEAN_OF_PRODUCTS})
            grouped = dataclasses.replace(wanted, alpha=alphas, granularity=[str(product)])
            configs += grouped.configs(["two-stage"])
    return tuple(dict.fromkeys(configs))


_BLOCKS = (16, 32)


def _restrictions(run: RunOptions, look: LookOptions) -> Analysis:
    """Compare one set of single entries per kv head with coarser kept sets."""

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.ablation.restriction import restriction

        return restriction(session.trace, look.step)

    return Analysis(
        "ablation-restrictions", run, lambda: _restriction_configs(run), analyse, command="ablation --restrictions",
        compares_sums=True,
    )  # fmt: skip


def _restriction_configs(run: RunOptions) -> tuple[EvictionConfig, ...]:
    """Return both default selections at every granularity, single entries per kv head first."""
    granularities = ["kv", *(run.granularity or _default_granularities(run))]
    return dataclasses.replace(run, granularity=list(dict.fromkeys(granularities))).configs(DEFAULT_SELECTIONS)


def _default_granularities(run: RunOptions) -> list[str]:
    """Return the default granularities: entries and blocks per kv head and per layer, entries that layers share.

    Last come entries per query head. Left out is what a policy's budgets between heads or layers rule out, and the
    union where a score combines the heads by itself.
    """
    from perturbkv.selection.compatibility import can_share
    from perturbkv.selection.policies import registry

    policies = [registry.build(parse(name)) for name in run.policy or ["snapkv"]]

    def fits(text: str) -> bool:
        granularity = parse(text)
        unites = reduction(granularity) == UNION
        return all(can_share(type(one), granularity) and not (unites and one.score.reduces) for one in policies)

    names = list(filter(fits, ("kv", "layer")))
    blocks = [f"{name}(block={size})" for size in _BLOCKS for name in names]
    return [*names, *blocks, *filter(fits, ("head", "model", f"model(reduce={UNION})")), "query"]


_BUDGETS = ("0.1", "0.2", "0.4")
_FEW_BITS = ("quantise(bits=8)", "quantise(bits=4)")


def _equal_bytes(run: RunOptions, look: LookOptions) -> Analysis:
    """Compare caches of all bytes: evicted, in few bits, both."""

    def analyse(session: Session) -> Result:
        from perturbkv.analyses.ablation.equal_bytes import equal_bytes

        return equal_bytes(session.trace, look.step)

    return Analysis(
        "ablation-bytes", run, lambda: _byte_configs(run), analyse, command="ablation --bytes", compares_sums=True,
        leave_out_unfit="budget" not in run.typed_options,
    )  # fmt: skip


def _byte_configs(run: RunOptions) -> tuple[EvictionConfig, ...]:
    """Return each policy at each budget in 16 bits and in few, then every entry in few bits.

    Few bits are those of a typed --precision, and of no cache of somebody's; kept sets are per kv head unless
    --granularity says otherwise. Raises ConfigError where all take the same bytes.
    """
    few = [name for name in run.precision or _FEW_BITS if name != FULL]
    selections = [_with_selection(name) for name in run.policy or ["snapkv"]]
    ours = [name for name in selections if split_policy_and_selection(name)[-1] != GIVEN]
    chosen = dataclasses.replace(
        run.with_budgets(_BUDGETS), granularity=run.granularity or ["kv"], policy=None, typed_options=frozenset()
    )
    if not few and ours == selections and len(chosen.budget or ()) < 2:
        raise ConfigError("--bytes compares caches of different bytes: give several budgets, or --precision")
    configs = dataclasses.replace(chosen, precision=[FULL]).configs(selections)
    if few and ours:
        configs += dataclasses.replace(chosen, precision=few).configs(ours)
    if few:
        configs += dataclasses.replace(chosen, precision=few, budget=["1.0"]).configs(["snapkv:attention"])
    return tuple(dict.fromkeys(configs))


@analysis_views(
    _ingredients,
    methods=_method_ranking,
    restrictions=_restrictions,
    bytes=_equal_bytes,
    flags={
        "restrictions": Annotated[
            bool, Option("--restrictions", help="Compare what engines restrict: shared sets, blocks")
        ],
        "bytes": Annotated[bool, Option("--bytes", help="Compare at equal bytes: evicted, in few bits, both")],
    },
)
def ablation() -> None:
    """Measure what each ingredient or restriction brings.

    Un-pooling, the value norms and the group's product, between the baseline and hindsight; without --granularity per
    query head and per kv head. --methods ranks policies against snapkv, and against controls of the same protection.
    """
