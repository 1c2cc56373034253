"""Which configurations of a run are the two sides of one comparison."""

from __future__ import annotations

import dataclasses

from perturbkv.config import EvictionConfig, RunConfig
from perturbkv.errors import TraceError


def pairs(run: RunConfig, baseline: str, treatment: str) -> list[tuple[str, str]]:
    """Labels (baseline, treatment) of every two configurations that differ in selection (and policy) alone.

    A side is a selection (`two-stage`), a policy and a selection (`snapkv:two-stage`), or a policy. Raises
    TraceError where the run holds no such pair.
    """
    found = [
        (first.label(), second.label())
        for first in run.configs
        for second in run.configs
        if _matches(first, baseline) and _matches(second, treatment) and first != second and _alike(first, second)
    ]
    if not found:
        held = ", ".join(dict.fromkeys(f"{config.policy}:{config.selection}" for config in run.configs))
        msg = f"expected configurations to compare '{baseline}' with '{treatment}', got a trace of {held}"
        raise TraceError(msg)
    return found


def _matches(config: EvictionConfig, side: str) -> bool:
    return side in (config.selection, config.policy, f"{config.policy}:{config.selection}")


def _alike(first: EvictionConfig, second: EvictionConfig) -> bool:
    return dataclasses.replace(first, policy=second.policy, selection=second.selection) == second
