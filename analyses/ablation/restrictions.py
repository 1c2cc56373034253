"""Configurations that differ in what their kept sets are restricted to, against one set per key/value head."""

from __future__ import annotations

from perturbkv.analyses.identity import identity
from perturbkv.analyses.naming import common
from perturbkv.analyses.outcomes import Outcome, Outcomes, divergence
from perturbkv.analyses.pairing import settings as alike
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "restriction"
BASELINE = "kv"
_ORDER = (BASELINE, "layer", "query")
_FREE = ("granularity", "granularity_block", "granularity_block_score")
"""What the rows of a setting differ in, as `EvictionConfig.flat` names it."""


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


class Setting(Outcomes[Row]):
    """Everything but the restriction is shared.

    The baseline is one kept set of single entries per key/value head; then come restrictions per key/value head, per
    layer, and one per query head.
    """

    @property
    def setting(self) -> str:
        """What all rows share, in words."""
        return common((self.baseline,), "granularity")


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
        rows=tuple(Row.of(trace, ANALYSIS, baseline, config, step) for config in others),
        identity=identity(trace, [baseline, *others], step),
    )
