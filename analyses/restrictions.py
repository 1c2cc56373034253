"""Configurations that differ in what their kept sets are restricted to, against one set per key/value head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perturbkv.analyses.arithmetic import plain
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.naming import common
from perturbkv.analyses.objects import setting_object
from perturbkv.analyses.outcomes import Divergence, Outcome, divergence, outcome
from perturbkv.analyses.pairing import settings as alike
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "restriction"
BASELINE = "kv"
_ORDER = (BASELINE, "layer", "query")
_FREE = ("granularity", "granularity_block", "granularity_block_score")
"""What the rows of a setting differ in, as `EvictionConfig.flat` names it."""


@dataclass(frozen=True)
class Row(Outcome):
    """One restriction, against one kept set of single entries per key/value head."""

    @property
    def name(self) -> str:
        """The restriction as it is written: `layer(block=16)`."""
        return restriction(self.compared.treatment)

    @property
    def wider(self) -> bool:
        """Whether it is none: a set per query head holds more of a grouped cache than the baseline."""
        return self.compared.treatment.granularity.name == "query"


@dataclass(frozen=True)
class Setting:
    """One setting: everything but the restriction is shared.

    Attributes:
        baseline: one kept set of single entries per key/value head.
        kl: the baseline's.
        rows: each restriction, per key/value head first, then per layer, then per query head.
        identity: of the run.
    """

    baseline: EvictionConfig
    kl: Divergence
    rows: tuple[Row, ...]
    identity: RunIdentity

    @property
    def setting(self) -> str:
        """What all rows share, in words."""
        return common((self.baseline,), "granularity")

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "setting": setting_object(self.identity.configs),
                "baseline": self.baseline,
                "kl_median": self.kl.median,
                "kl_median_interval": self.kl.interval,
                "rows": [{**row.to_dict(), "name": row.name} for row in self.rows],
            }
        )
        return found


def restriction(config: EvictionConfig) -> str:
    """What a configuration's kept sets are restricted to, as it is written."""
    return str(config.granularity.without(["reduce", "product"]))


def settings(trace: Trace, step: int = 0) -> tuple[Setting, ...]:
    """One entry per setting of the trace.

    Raises TraceError where no setting holds the baseline and another row, and as `heads.summarise`.
    """
    groups = [[trace.run.configs[place] for place in group] for group in alike(trace.run, *_FREE)]
    found = [_setting(trace, one, group, step) for group in groups for one in group[:] if _is_baseline(one, group)]
    if not found:
        held = ", ".join(dict.fromkeys(restriction(config) for config in trace.run.configs))
        msg = (
            f"{ANALYSIS} needs the granularity '{BASELINE}' of single entries and another one, alike in all else; "
            f"got a trace of {held}"
        )
        raise TraceError(msg)
    return tuple(found)


def _is_baseline(config: EvictionConfig, group: list[EvictionConfig]) -> bool:
    return config.granularity.name == BASELINE and config.block == 1 and len(group) > 1


def _place(config: EvictionConfig) -> tuple[int, int, str]:
    return _ORDER.index(config.granularity.name), config.block, restriction(config)


def _setting(trace: Trace, baseline: EvictionConfig, group: list[EvictionConfig], step: int) -> Setting:
    others = sorted((config for config in group if config != baseline), key=_place)
    return Setting(
        baseline=baseline,
        kl=divergence(trace, ANALYSIS, baseline, step),
        rows=tuple(_row(trace, baseline, config, step) for config in others),
        identity=identity(trace, [baseline, *others], step),
    )


def _row(trace: Trace, baseline: EvictionConfig, config: EvictionConfig, step: int) -> Row:
    found = outcome(trace, ANALYSIS, baseline, config, step)
    return Row(found.compared, found.drift_ratio, found.drift_ratio_interval, found.kl)
