"""The tables of the ablation: each ingredient over the baseline, and over the row that lacks it."""

from __future__ import annotations

from collections.abc import Iterable

from perturbkv.analyses import text
from perturbkv.analyses.ablation.ingredients import BASELINE, Row, Setting
from perturbkv.analyses.heads.head_kind import HeadKind
from perturbkv.display import Table

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
