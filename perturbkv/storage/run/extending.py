"""Whether a run goes on with what an older one left: only samples and configurations may be added."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perturbkv.configs.run import DIGESTS, METRICS, RunConfig
from perturbkv.errors import TraceError


def check_extends(run: RunConfig, held: RunConfig, where: Path) -> None:
    """Raise TraceError unless what lies at `where`, of the run `held`, can be extended to `run`."""
    if fields := differing_fields(run, held):
        msg = (
            f"expected a trace of this run at {where}, got one that differs in {', '.join(fields)}"
            f"{_changed(run, held) if 'plugins' in fields else ''}; use another "
            "--output, or --overwrite to replace it (only samples and configurations may be added)"
        )
        raise TraceError(msg)


def differing_fields(run: RunConfig, held: RunConfig) -> list[str]:
    """Fields in which `held` differs so that it cannot be extended to `run`; none where it is a part of it."""
    may_grow = {
        "samples": held.samples <= run.samples,
        "configs": set(held.configs) <= set(run.configs),
        "head_scores": not held.head_scores,  # empty where no configuration needs them
        "plugins": held.plugins.items() <= run.plugins.items(),
        "dataset_options": _grown(held.dataset_options, run.dataset_options),
    }
    return [name for name in run.differences(held) if not may_grow.get(name, False)]


def _changed(run: RunConfig, held: RunConfig) -> str:
    """Which scores and policies are another version now."""
    names = [name for name, version in held.plugins.items() if run.plugins.get(name, version) != version]
    return f" ({', '.join(names)} is another version now)" if names else ""


def _grown(held: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether options differ in prompts that were added alone, and in what grades those."""
    may_grow = {DIGESTS: None, METRICS: None}
    old, new = held.get(DIGESTS, {}), asked.get(DIGESTS, {})
    more = old.items() <= new.items() and set(held.get(METRICS, ())) <= set(asked.get(METRICS, ()))
    graded = (METRICS in held) == (METRICS in asked)
    return {**held, **may_grow} == {**asked, **may_grow} and more and graded
