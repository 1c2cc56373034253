"""`perturbkv restriction`: what one kept set for all heads and whole blocks cost."""

from __future__ import annotations

import dataclasses

from perturbkv.cli.option_routing import with_options
from perturbkv.cli.options import LookOptions, RunOptions
from perturbkv.cli.session import open_study
from perturbkv.configs.choice import parse
from perturbkv.configs.eviction import EvictionConfig

_SELECTIONS = ["attention", "two-stage"]
_BLOCKS = (16, 32)


@with_options
def restriction(run: RunOptions, look: LookOptions) -> None:
    """Tell what an engine's restrictions cost.

    One kept set for all heads of a layer, and whole blocks, against one set of single entries per kv head at the same
    budget. Without --granularity: kv, layer and query, blocks of 16 and 32.
    """
    study = open_study("restriction", run, look, lambda: _configs(run))
    if study is None:
        return
    from perturbkv.analyses.ablation.restriction import restriction as analyse

    result = analyse(study.trace, look.step)
    study.save(result.plot(study.width_mm), result.identity, "restriction")
    study.show(result)


def _configs(run: RunOptions) -> tuple[EvictionConfig, ...]:
    """Both selections under every restriction, the baseline first."""
    asked = ["kv", *(run.granularity or _usual(run))]
    return dataclasses.replace(run, granularity=list(dict.fromkeys(asked))).configs(_SELECTIONS)


def _usual(run: RunOptions) -> list[str]:
    """Whole blocks per head and per layer; per head alone where a policy shares budgets out between heads."""
    from perturbkv.selection.policies import registry

    by_head = any(registry.info(parse(name).name).budgets == "by head" for name in run.policy or [])
    names = ["kv"] if by_head else ["kv", "layer"]
    blocks = [f"{name}(block={size})" for size in _BLOCKS for name in names]
    return [*names, *blocks, "query"]
