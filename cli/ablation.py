"""`perturbkv ablation`: which ingredient of the two-stage selection brings its gain."""

from __future__ import annotations

import dataclasses

from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.spreading import with_options
from perturbkv.cli.study import open_study
from perturbkv.configs.choice import Choice, as_choice
from perturbkv.configs.eviction import EvictionConfig

_ALPHAS = (0.0, 0.25, 0.5)
_UNSTAGED = ["attention", "attention-unpooled", "value", "random", "hindsight-attention", "hindsight"]
_STAGED = ["two-stage-uniform", "two-stage"]


@with_options
def ablation(run: RunOptions, look: LookOptions) -> None:
    """Tell apart what each ingredient of a method brings.

    Un-pooling, the value norms and the group's product, between the baseline and hindsight. Without --granularity both
    are measured: one kept set per query head, and one per kv head, where alone the group's product is a choice.
    """
    study = open_study("ablation", run, look, lambda: _configs(run))
    if study is None:
        return
    from perturbkv.analyses.ablation import ablation as analyse

    result = analyse(study.trace, look.step)
    study.save(result.plot(study.width_mm), result.identity, "ablation")
    study.show(result)


def _configs(run: RunOptions) -> tuple[EvictionConfig, ...]:
    """The whole chain at every α; what has no stages once."""
    from perturbkv.analyses.ingredients import MEAN_OF_PRODUCTS

    alphas = run.alpha or list(_ALPHAS)
    made: list[EvictionConfig] = []
    for granularity in map(as_choice, run.granularity or ["query", "kv"]):
        plain = granularity.without(["product"])
        wanted = dataclasses.replace(run, granularity=[str(plain)])
        made += dataclasses.replace(wanted, alpha=run.alpha and run.alpha[:1]).configs(_UNSTAGED)
        made += dataclasses.replace(wanted, alpha=alphas).configs(_STAGED)
        if granularity.name != "query":
            product = Choice(plain.name, {**plain.options, "product": MEAN_OF_PRODUCTS})
            grouped = dataclasses.replace(wanted, alpha=alphas, granularity=[str(product)])
            made += grouped.configs(["two-stage"])
    return tuple(dict.fromkeys(made))
