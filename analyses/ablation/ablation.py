"""Gains of un-pooling, the value norms and the group's product, each by itself (METHOD: controls)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.ablation.ingredients import BASELINE, GAINS, Setting, left_out_configs, settings
from perturbkv.analyses.columns import column, record
from perturbkv.analyses.conclusions import COMPARED, Case, Claim
from perturbkv.analyses.outcomes import SettingsResult, head_rows
from perturbkv.analyses.result import add_first_step
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part, plural
from perturbkv.trace import Trace

_METHOD = "two-stage"
_CLAIMED_GAINS = {
    "un-pooling": "two-stage-uniform (un-pooling alone)",
    "the value norms ν": "two-stage (value norms added)",
}
"""Name in `GAINS` -> subject of the claim on this gain."""


@record
class Ablation(
    SettingsResult,
    section="ablation",
    scope="propagated, all heads",
    rows="heads",
    shown=(
        "cache_share",
        "isolated_ratio",
        "propagated_ratio",
        "median_ratio",
        "better_share",
    ),
    first="ingredient",
    ignored=("alpha", "product"),
):
    """The gain of each ingredient of the two-stage selection, in every setting of the trace."""

    settings: tuple[Setting, ...] = column("one per policy, budget, granularity and so on")
    left_out: tuple[EvictionConfig, ...] = column(
        "configurations in no setting, as nothing there but controls can be compared"
    )

    def claims(self) -> Sequence[Claim]:
        """Return by how much two-stage selection perturbs less than the baseline, and each ingredient's gain."""
        method = _METHOD if self.cases(_METHOD) else self.settings[0].rows[0].name
        gains = [(phrase, self.cases(name, "brings"), GAINS[name][0]) for name, phrase in _CLAIMED_GAINS.items()]
        return [
            Claim(method, "perturbs", self.cases(method), COMPARED, BASELINE, is_name=True),
            *(Claim(phrase, "perturbs", cases, COMPARED, without) for phrase, cases, without in gains if cases),
        ]

    def title(self) -> str:
        """Return the table's title: the baseline, and the choices of a single setting."""
        policies = dict.fromkeys(setting.baseline.policy.name for setting in self.settings)
        where = f": {', '.join(policies)} {self.settings[0].setting}" if len(self.settings) == 1 else ""
        return f"L1 over that of {BASELINE}{where}"

    def caveats(self) -> Sequence[str]:
        """Return the heads with half of the baseline's sum, and the configurations left out."""
        kind, count = self.settings[0].rows[0].propagated, len(self.left_out)
        left = [f"Left out: {plural(count, 'configuration')} that no setting compares."] if count else []
        half = f"Half of {BASELINE}'s sum lies in {text.percent(kind.half_share)} of the heads (propagated)."
        return [half, *left]

    def details(self) -> Sequence[Part]:
        """Return notes on controls, missing ingredients and left-out configurations; definitions of ties, floors."""
        notes = []
        for name, setting in zip(self.setting_names(), self.settings, strict=True):
            named, controls = name or setting.setting, ", ".join(config.selection.name for config in setting.controls)
            notes.append(f"{named}: controls of the same budget and protection: {controls}")
            notes += [f"{named}: not in this trace: {', '.join(setting.absent)}"] if setting.absent else []
        counts = Counter(f"{config.policy}:{config.selection}" for config in self.left_out)
        left = ", ".join(name if count == 1 else f"{count} × {name}" for name, count in counts.items())
        why = f"Left out, as nothing in their settings but controls can be compared with {BASELINE}"
        return [
            *notes,
            *([f"{why}: {left}"] if left else []),
            text.TIES_NOTE,
            "With one kept set per query head there is no group, and no row for its product.",
            text.noise_floor_note(self.settings[0].rows[0].propagated.floor_relative_median),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per comparison, kind, layer and head: both sides' mean L1, their floor and the verdict.

        `part` is `rows` (against the baseline) or `brings` (against the row without the ingredient); the configuration
        is the one that has it, `baseline` the label of the other. A verdict is 1 (better), 0 (tied) or −1 (worse).
        """
        return [
            head
            for setting in self.settings
            for part in ("rows", "brings")
            for row in getattr(setting, part)
            for head in head_rows(row, part=part, name=row.name, alpha=row.alpha)
        ]

    def cases(self, name: str, part: str = "rows") -> list[Case]:
        """Return the ratio of propagated perturbation of an ingredient, in every setting and at every α, as cases.

        `name` is the row's name in `part`: `rows`, over the baseline, or `brings`, over the row without the ingredient.
        """
        rows = [
            (where, row)
            for where, setting in zip(self.setting_names(), self.settings, strict=True)
            for row in getattr(setting, part)
            if row.name == name
        ]
        several = len({row.alpha for _, row in rows}) > 1
        names = [f"{where} α={row.alpha_text}".strip() if several else where for where, row in rows]
        return [row.propagated.case(name) for name, (_, row) in zip(names, rows, strict=True)]


def ablation(trace: Trace, step: int | None = None) -> Ablation:
    """Measure the gains of un-pooling, the value norms and the group's product, between baseline and hindsight.

    Compared is L1, isolated and propagated (METHOD: the quantities), of each selection of a setting with that of
    `attention` (METHOD: controls), and of each ingredient with the row that lacks it.

    Args:
        trace: what was measured.
        step: decode step, from 0; None: the mean over the steps of each sample.

    Raises TraceError where no setting holds the baseline and another selection, and where the trace has no complete
    sample or lacks a variable that is needed; ConfigError where it has no such step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> pk.ablation(trace).settings[0].rows[0].isolated.baseline_mean.shape
        (2, 2)
    """
    result = Ablation.from_settings(trace, settings(trace, step), step, left_out=left_out_configs(trace.run))
    return add_first_step(result, result.step, partial(ablation, trace, 0))
