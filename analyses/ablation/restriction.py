"""Costs of kept sets that heads or layers share, and of whole blocks, as an engine's block table has them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.columns import Line, column, derived, record, table
from perturbkv.analyses.conclusions import COMPARED, Claim
from perturbkv.analyses.identity import identity_at
from perturbkv.analyses.names import common_text
from perturbkv.analyses.outcomes import Outcome, OutcomeSetting, SettingsResult, head_rows, next_token_kl
from perturbkv.analyses.result import add_first_step
from perturbkv.analyses.sides import group_settings
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.selections import UNION, reduction
from perturbkv.display import Part
from perturbkv.errors import TraceError
from perturbkv.trace import Trace

ANALYSIS = "restriction"
RESTRICTION_BASELINE = "kv"
_ORDER = (RESTRICTION_BASELINE, "layer", "head", "model", "query")
"""Granularities in the order of the table."""


@record
class Row(Outcome, section="restriction row"):
    """One restriction of kept sets against the baseline, one set of single entries per key/value head."""

    @derived()
    def name(self) -> str:
        """The restriction in a label's notation: `layer(block=16)`."""
        return restriction_text(self.treatment)

    @property
    def is_per_query_head(self) -> bool:
        """True for a kept set per query head: no restriction, as its cache can be larger than the baseline's."""
        return self.treatment.granularity.name == "query"


@record
class RestrictionSetting(OutcomeSetting, section="restriction setting"):
    """Configurations that share all but the restriction: per key/value head, shared ones, then one per query head."""

    baseline: EvictionConfig = column(
        "one kept set of single entries per key/value head, which every row is compared with"
    )
    rows: tuple[Row, ...] = column("each restriction against the baseline")

    @property
    def setting(self) -> str:
        """The choices that all rows share, in a label's notation."""
        return common_text((self.baseline,), "granularity")

    def lines(self) -> Sequence[Line]:
        """Return the baseline's line, then one per restriction."""
        return [Line(f"{RESTRICTION_BASELINE} (= 1)", (self,)), *(Line(row.name, (row,)) for row in self.rows)]


def restriction_text(config: EvictionConfig) -> str:
    """Return the restriction of a configuration's kept sets as text: `layer(block=16)`, `model(reduce=union)`.

    How scores are combined is not part of it, unless sets are joined by union.
    """
    dropped = ["product"] if reduction(config.granularity) == UNION else ["reduce", "product"]
    return str(config.granularity.drop(dropped))


def settings(trace: Trace, step: int | None = None) -> tuple[RestrictionSetting, ...]:
    """Return the settings of a trace, each with the baseline and at least one restriction.

    Raises TraceError where no setting holds the baseline and another row, and as `head_comparison.summarise`.
    """
    groups = group_settings(
        trace.run, *("granularity", "granularity_block", "granularity_block_score", "granularity_reduce")
    )
    results = []
    for group in groups:
        kept = [config for config in group if config.granularity.name == RESTRICTION_BASELINE and config.block == 1]
        for baseline in (config for config in kept if reduction(config.granularity) != UNION):
            own = reduction(baseline.granularity)  # treatments combine scores so, too, or by union
            treatments = [
                config
                for config in group
                if config != baseline and config.granularity.options.get("reduce", own) in (own, UNION)
            ]
            if treatments:
                treatments = sorted(
                    treatments,
                    key=lambda config: (_ORDER.index(config.granularity.name), config.block, restriction_text(config)),
                )
                results.append(
                    RestrictionSetting(
                        baseline=baseline,
                        **next_token_kl(trace, ANALYSIS, baseline, step),
                        rows=tuple(Row.compare(trace, ANALYSIS, baseline, config, step) for config in treatments),
                        identity=identity_at(trace, [baseline, *treatments], step),
                    )
                )
    if not results:
        names = ", ".join(dict.fromkeys(restriction_text(config) for config in trace.run.configs))
        raise TraceError(
            f"{ANALYSIS} needs the granularity '{RESTRICTION_BASELINE}' of single entries and another one, alike in "
            f"all else; got a trace of {names}"
        )
    return tuple(results)


@record
class Restriction(
    SettingsResult,
    section="ablation --restrictions",
    scope="propagated, all heads, equal budgets",
    rows="heads",
    shown=("cache_share", "isolated_ratio", "propagated_ratio", "drift_ratio", "kl_median"),
    first="one set per",
    has_medians=True,
    ignored=("granularity",),
):
    """Restricted kept sets against one set per key/value head, in every setting that has both."""

    settings: tuple[RestrictionSetting, ...] = column("one per policy, selection, budget and so on")

    def claims(self) -> Sequence[Claim]:
        """Return by how much more restricted kept sets perturb than the baseline, without sets per query head."""
        baseline = f"one of single entries per {RESTRICTION_BASELINE} head"
        cases = [
            row.propagated.case(f"{where} {row.name}".strip())
            for where, setting in zip(self.setting_names(), self.settings, strict=True)
            for row in setting.rows
            if not row.is_per_query_head
        ]
        none = f"this trace holds no shared sets and no blocks, only {RESTRICTION_BASELINE} and query"
        missing = "too little is perturbed" if cases else none
        return [Claim("a restricted kept set", "perturbs", cases, COMPARED, baseline, missing=missing)]

    def title(self) -> str:
        """Return the table's title: the baseline, and the choices of a single setting."""
        where = f": {self.settings[0].setting}" if len(self.settings) == 1 else ""
        return f"L1 and drift over those of {RESTRICTION_BASELINE}{where}"

    def caveats(self) -> Sequence[str]:
        """Return the note that sets per query head, if any, make larger caches."""
        larger = any(row.is_per_query_head for setting in self.settings for row in setting.rows)
        return ["A set per query head holds more of a grouped cache: no equal comparison."] if larger else []

    def details(self) -> Sequence[Part]:
        """Return the median head's ratios, and the definitions of blocks, ties and floors."""
        kind = self.settings[0].rows[0].propagated
        return [
            table("propagated L1: the median head", self.lines(), ("median_ratio", "better_share"), self.FIRST),
            "Blocks that hold an entry of the window are kept whole, and a budget of b never keeps more than b: what "
            "it cannot spend on a whole block is part of what blocks cost.",
            text.TIES_NOTE,
            text.noise_floor_note(kind.floor_relative_median),
        ]  # fmt: skip

    def records(self) -> list[dict[str, Any]]:
        """Return a row per restriction, kind, layer and head: both sides' mean L1, their floor and the verdict.

        `baseline` is the label of the set per key/value head, `held` what the restricted cache holds over the full
        one. A verdict is 1 (better), 0 (tied) or −1 (worse).
        """
        rows = [row for setting in self.settings for row in setting.rows]
        return [head for row in rows for head in head_rows(row, name=row.name, held=row.cache_shares[1])]


def restriction(trace: Trace, step: int | None = None) -> Restriction:
    """Compare kept sets that heads or layers share, or that are whole blocks, as in engines, with unrestricted ones.

    Compared is L1, isolated and propagated (METHOD: the quantities), of each granularity and size of block with that of
    `kv`, one set of single entries per key/value head, at the same budget; beside it the drift after the last layer,
    and KL(full ‖ evicted) of the next token.

    Args:
        trace: what was measured.
        step: decode step, from 0; None: the mean over the steps of each sample.

    Raises TraceError where no setting holds `kv` and another granularity or block, and where the trace has no complete
    sample or lacks a variable that is needed; ConfigError where it has no such step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> [row.name for row in pk.restriction(trace).settings[0].rows]
        ['kv(block=16)', 'layer', 'query']
    """
    result = Restriction.from_settings(trace, settings(trace, step), step)
    return add_first_step(result, result.step, partial(restriction, trace, 0))
