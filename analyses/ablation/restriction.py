"""What does it cost that an engine's heads share one block table, which keeps whole blocks?.

Configurations that differ in what their kept sets are restricted to, against one set per key/value head.
"""

from __future__ import annotations

from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.identity import identity
from perturbkv.analyses.outcomes import OfSettings, Outcome, Outcomes, by_head, divergence
from perturbkv.analyses.pairing import common, folded, short_names
from perturbkv.analyses.pairing import settings as alike
from perturbkv.analyses.text import Case, compared, over, sentence
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "restriction"
RESTRICTION_BASELINE = "kv"
_ORDER = (RESTRICTION_BASELINE, "layer", "query")
_FREE = ("granularity", "granularity_block", "granularity_block_score")
"""What the rows of a setting differ in, as `EvictionConfig.flat` names it."""


class Row(Outcome):
    """One restriction, against one kept set of single entries per key/value head."""

    @property
    def name(self) -> str:
        """The restriction as it is written: `layer(block=16)`."""
        return restriction_of(self.compared.treatment)

    @property
    def wider(self) -> bool:
        """Whether it is none: a set per query head holds more of a grouped cache than the baseline."""
        return self.compared.treatment.granularity.name == "query"


class RestrictionSetting(Outcomes[Row]):
    """Everything but the restriction is shared.

    The baseline is one kept set of single entries per key/value head; then come restrictions per key/value head, per
    layer, and one per query head.
    """

    @property
    def setting(self) -> str:
        """What all rows share, in words."""
        return common((self.baseline,), "granularity")


def restriction_of(config: EvictionConfig) -> str:
    """What a configuration's kept sets are restricted to, as it is written."""
    return str(config.granularity.without(["reduce", "product"]))


def settings(trace: Trace, step: int = 0) -> tuple[RestrictionSetting, ...]:
    """One entry per setting of the trace.

    Raises TraceError where no setting holds the baseline and another row, and as `head_comparison.summarise`.
    """
    groups = [[trace.run.configs[place] for place in group] for group in alike(trace.run, *_FREE)]
    found = [_setting(trace, one, group, step) for group in groups for one in group[:] if _is_baseline(one, group)]
    if not found:
        held = ", ".join(dict.fromkeys(restriction_of(config) for config in trace.run.configs))
        msg = (
            f"{ANALYSIS} needs the granularity '{RESTRICTION_BASELINE}' of single entries and another one, alike in "
            f"all else; got a trace of {held}"
        )
        raise TraceError(msg)
    return tuple(found)


def _is_baseline(config: EvictionConfig, group: list[EvictionConfig]) -> bool:
    return config.granularity.name == RESTRICTION_BASELINE and config.block == 1 and len(group) > 1


def _place(config: EvictionConfig) -> tuple[int, int, str]:
    return _ORDER.index(config.granularity.name), config.block, restriction_of(config)


def _setting(trace: Trace, baseline: EvictionConfig, group: list[EvictionConfig], step: int) -> RestrictionSetting:
    others = sorted((config for config in group if config != baseline), key=_place)
    return RestrictionSetting(
        baseline=baseline,
        kl=divergence(trace, ANALYSIS, baseline, step),
        rows=tuple(Row.of(trace, ANALYSIS, baseline, config, step) for config in others),
        identity=identity(trace, [baseline, *others], step),
    )


_HEADS = (
    "",
    "#held /\nfull",
    "#isolated:\nΣ of all heads",
    "#propagated:\nΣ of all heads",
    "#propagated:\nmedian head",
)
_OUTPUT = ("", "#last layer's drift\nover the baseline's", "#KL of the next token\n(nat)")


class Restriction(OfSettings[RestrictionSetting]):
    """Every setting of a trace that holds one kept set per key/value head and something to compare with it.

    A setting: what shares everything but the restriction.
    """

    def conclusion(self) -> str:
        """By how much more restricted kept sets perturb; a set per query head is no restriction."""
        told = short_names([setting.baseline for setting in self.settings])
        cases = [_case(words, row) for words, one in zip(told, self.settings, strict=True) for row in one.rows]
        restricted = [case for case in cases if case is not None]
        who, baseline = "a restricted kept set", f"one of single entries per {RESTRICTION_BASELINE} head"
        if not restricted:
            return f"This trace holds no restriction to layers or blocks, only {RESTRICTION_BASELINE} and query."
        said = compared(who, baseline, restricted)
        return sentence(f"{said} (propagated, all heads, equal budgets; {over(self.identity.samples)})")

    def tables(self) -> list[Table | str]:
        """Of each setting what every restriction does to the heads, and to what comes out."""
        return [part for setting in self.settings for part in _tables(setting)]

    def notes(self) -> str:
        """What rows and columns mean, and how much each cache holds."""
        kind = self.settings[0].rows[0].compared.propagated
        return (
            f"{text.about_intervals(self.identity.samples, medians=True)} L1, treatment over {RESTRICTION_BASELINE}'s; "
            "below 1 it perturbs less. KL: median over samples. Blocks that hold an entry of the window are held "
            "whole, and a budget of b never holds more than b: what it cannot spend on a whole block is part of what "
            "blocks cost. A set per query head holds more of a grouped cache, and is no equal comparison. "
            f"{text.ABOUT_HELD} {text.about_floor(kind.floor_relative_median)}"
        )

    def records(self) -> list[dict[str, Any]]:
        """A row per restriction, kind, layer and head: both sides' mean L1 over samples, their floor and the verdict.

        `baseline` is the label of the set per key/value head, `held` what the restricted cache holds over the full
        one. A verdict is 1 (better), 0 (tied) or −1 (worse).
        """
        rows = [row for setting in self.settings for row in setting.rows]
        return [one for row in rows for one in by_head(row.compared, name=row.name, held=row.compared.held[1])]


def restriction(trace: Trace, step: int = 0) -> Restriction:
    """What does it cost to keep one set for all heads of a layer, or whole blocks, as engines do?.

    Compared is L1, isolated and propagated (METHOD: the quantities), of each granularity and size of block with that of
    `kv`, one set of single entries per key/value head, at the same budget; beside it the drift after the last layer,
    and KL(full ‖ evicted) of the next token.

    Args:
        trace: what was measured.
        step: decode step.

    Raises TraceError where no setting holds `kv` and another granularity or block, or the trace has no complete sample
    or not what is needed; ConfigError where it has no such step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> [row.name for row in pk.restriction(trace).settings[0].rows]
        ['kv(block=16)', 'layer', 'query']
    """
    return Restriction.of(trace, settings(trace, step), step)


def _case(words: str, row: Row) -> Case | None:
    kind = row.compared.propagated
    return None if row.wider else (f"{words} {row.name}".strip(), kind.sum_ratio, kind.sum_ratio_interval)


def _tables(setting: RestrictionSetting) -> list[Table | str]:
    ones = ["1", "1", "1"]
    heads = [[RESTRICTION_BASELINE, text.held(setting.rows[0].compared.held[0]), *ones], *map(_heads, setting.rows)]
    output = [
        [RESTRICTION_BASELINE, "1", text.significant(setting.kl.median, setting.kl.interval)],
        *map(_output, setting.rows),
    ]
    return [
        Table(f"{setting.setting}: L1 over that of {RESTRICTION_BASELINE}", _HEADS, heads),
        Table(f"{setting.setting}: what comes out", _OUTPUT, output),
    ]


def _heads(row: Row) -> list[str]:
    isolated, propagated = row.compared.isolated, row.compared.propagated
    return [
        folded(row.name),
        text.held(row.compared.held[1]),
        text.decimal(isolated.sum_ratio, isolated.sum_ratio_interval, apart="\n"),
        text.decimal(propagated.sum_ratio, propagated.sum_ratio_interval, apart="\n"),
        text.decimal(propagated.median_ratio, propagated.median_ratio_interval, apart="\n"),
    ]


def _output(row: Row) -> list[str]:
    drift = text.decimal(row.drift_ratio, row.drift_ratio_interval, apart="\n")
    return [folded(row.name), drift, text.significant(row.kl.median, row.kl.interval)]
