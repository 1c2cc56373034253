"""Where does a gain come from: un-pooling, the value norms, or the group's product? (METHOD: controls.).

The tables of the ablation: each ingredient over the baseline, and over the row that lacks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan
from typing import Any

from perturbkv.analyses import text
from perturbkv.analyses.ablation.ingredients import BASELINE, Row, Setting, left_out, settings
from perturbkv.analyses.heads.head_comparison import HeadKind
from perturbkv.analyses.outcomes import OfSettings, by_head
from perturbkv.analyses.pairing import short_names
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.text import Case, compared, decided, difference, extremes, over, same, sentence, tally_verdicts
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.trace import Trace

_COLUMNS = ("", "#α", "#held /\nfull", "", "#Σ of all\nheads", "#median\nhead", "#heads\nbetter")
_KINDS = {"isolated": "isol.", "propagated": "prop."}


def of_setting(setting: Setting, with_policy: bool) -> list[Table | str]:
    """Its rows over the baseline, what each ingredient brings, and the lines between; `with_policy` in its title."""
    shown = [_baseline(setting), *_lines(setting.rows)]
    controls = ", ".join(config.selection.name for config in setting.controls)
    absent = [f"not in this trace: {', '.join(setting.absent)}"] if setting.absent else []
    policy = f"{setting.baseline.policy.name} " if with_policy else ""
    title = "what each ingredient brings: L1 over that without it"
    return [
        Table(f"{policy}{setting.setting}: L1 over the baseline's", _COLUMNS, shown),
        _half(setting),
        f"controls, of the same budget and protection: {controls}",
        *absent,
        *([Table(title, _COLUMNS, _lines(setting.brings))] if setting.brings else []),
    ]


def _half(setting: Setting) -> str:
    """In how many heads half of the setting's baseline lies."""
    kinds = (setting.rows[0].compared.isolated, setting.rows[0].compared.propagated)
    shares = " and ".join(text.percent(kind.half_share) for kind in kinds)
    return f"half of the baseline's Σ lies in {shares} of the heads (isolated and propagated)"


def _baseline(setting: Setting) -> list[str]:
    return [BASELINE, "", text.held(setting.rows[0].compared.held[0]), "both", "1", "1", ""]


def _lines(rows: Iterable[Row]) -> list[list[str]]:
    """A line per row and kind of perturbation, each name once."""
    found, before = [], ""
    for row in rows:
        name = [row.name if row.name != before else "", row.alpha_told]
        named = [*name, text.held(row.compared.held[1])]
        for kind, word in _KINDS.items():
            found.append([*named, word, *_cells(getattr(row.compared, kind))])
            named = [""] * len(named)
        before = row.name
    return found


def _cells(kind: HeadKind) -> list[str]:
    return [
        text.decimal(kind.sum_ratio, kind.sum_ratio_interval, apart="\n"),
        text.decimal(kind.median_ratio, kind.median_ratio_interval, apart="\n"),
        text.percent(kind.better_share, kind.better_share_interval, "\n"),
    ]


_METHOD = "two-stage"
_PARTS = {"un-pooling": "un-pooling by itself", "the value norms ν": "the value norms on top of it"}
_FOUND = {-1: ("less", "less"), 1: ("more", "more"), 0: ("undecided", "undecided")}


@dataclass(frozen=True, repr=False)
class Ablation(OfSettings[Setting]):
    """Every setting of a trace that holds the baseline and something to compare with it.

    A setting: what shares everything but selection, group's product and α.

    Attributes:
        left_out: configurations that are in none of them.
    """

    left_out: tuple[EvictionConfig, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        return {**super().to_dict(), "left_out": plain(list(self.left_out))}

    def conclusion(self) -> str:
        """By how much the two-stage selection perturbs less than the baseline, and which ingredient brings it."""
        method = _METHOD if self._cases(_METHOD) else self.settings[0].rows[0].name
        said = compared(method, BASELINE, self._cases(method))
        parts = [self._part(name, words) for name, words in _PARTS.items()]
        told = "; ".join(filter(None, (said, *parts)))
        return sentence(f"{told} (propagated, all heads; {over(self.identity.samples)})", method)

    def tables(self) -> list[Table | str]:
        """Of each setting its rows over the baseline, and what each ingredient adds to the row without it."""
        policies = {setting.baseline.policy.name for setting in self.settings}
        shown = [part for setting in self.settings for part in of_setting(setting, with_policy=len(policies) > 1)]
        return [*shown, *([_about(self.left_out)] if self.left_out else [])]

    def notes(self) -> str:
        """What sums, medians and rows mean."""
        kind = self.settings[0].rows[0].compared.propagated
        return (
            f"{text.about_intervals(self.identity.samples)} Isol., prop.: isolated and propagated. Σ: of all heads; "
            "a few may carry half of it, so beside it the median head's ratio. Heads better: mean over samples of each "
            f"sample's share. {text.ABOUT_TIES} With one kept set per query head there is no group, and no row for "
            f"its product. {text.about_floor(kind.floor_relative_median)} {text.ABOUT_HELD}"
        )

    def records(self) -> list[dict[str, Any]]:
        """A row per comparison, kind, layer and head: both sides' mean L1 over samples, their floor and the verdict.

        `part` is `rows` (against the baseline) or `brings` (against the row without the ingredient); the configuration
        is the one that has it, `baseline` the label of the other. A verdict is 1 (better), 0 (tied) or −1 (worse).
        """
        return [
            one
            for setting in self.settings
            for part in ("rows", "brings")
            for row in getattr(setting, part)
            for one in by_head(row.compared, part=part, name=row.name, alpha=row.alpha)
        ]

    def _cases(self, name: str, part: str = "rows") -> list[Case]:
        """The propagated ratios of a row, of every setting and α."""
        told = short_names([setting.baseline for setting in self.settings], "alpha", "product")
        rows = [
            (words, row)
            for words, setting in zip(told, self.settings, strict=True)
            for row in getattr(setting, part)
            if row.name == name
        ]
        several = len({row.alpha for _, row in rows}) > 1
        return [_case(f"{words} α={row.alpha_told}".strip() if several else words, row) for words, row in rows]

    def _part(self, name: str, words: str) -> str:
        """What one ingredient brings: by how much where there is one case, else in how many."""
        known = [case for case in self._cases(name, "brings") if not isnan(case[1])]
        if not known:
            return ""
        if all(same(ratio, interval) for _, ratio, interval in known):
            return f"{words}: nothing"
        verdicts = [decided(interval, 1) for _, _, interval in known]
        if len(known) > 1 and None not in verdicts:
            return f"{words}: {tally_verdicts(verdicts, _FOUND, 'case')}"
        unsure = ", undecided" if verdicts == [0] else ""
        return f"{words}: {extremes([(case, ratio, difference(ratio, band)) for case, ratio, band in known])}{unsure}"


def ablation(trace: Trace, step: int = 0) -> Ablation:
    """Tell apart what un-pooling, the value norms and the group's product bring, between baseline and hindsight.

    Compared is L1, isolated and propagated (METHOD: the quantities), of each selection of a setting with that of
    `attention` (METHOD: controls), and of each ingredient with the row that lacks it.

    Args:
        trace: what was measured.
        step: decode step.

    Raises TraceError where no setting holds the baseline and another selection, or the trace has no complete sample or
    not what is needed; ConfigError where it has no such step.

    Example, of a `trace` of 2 layers and 2 heads:
        >>> import perturbkv as pk
        >>> pk.ablation(trace).settings[0].rows[0].compared.isolated.baseline_mean.shape
        (2, 2)
    """
    return Ablation.of(trace, settings(trace, step), step, left_out=left_out(trace.run))


def _case(name: str, row: Row) -> Case:
    return name, row.compared.propagated.sum_ratio, row.compared.propagated.sum_ratio_interval


def _about(left: Iterable[EvictionConfig]) -> str:
    """Which configurations are left out, and why: 'h2o:attention, 2 × snapkv:random'."""
    names = Counter(f"{config.policy}:{config.selection}" for config in left)
    told = ", ".join(name if count == 1 else f"{count} × {name}" for name, count in names.items())
    return f"left out, as nothing in their settings but controls can be held against {BASELINE}: {told}"
