"""The tables of the ablation: each ingredient over the baseline, and over the row that lacks it."""

from __future__ import annotations

from collections.abc import Iterable

from perturbkv.analyses import numbers
from perturbkv.analyses.ingredients import BASELINE, Row, Setting
from perturbkv.display import Table

_COLUMNS = ("", "#α", "#held /\nfull", "#isol.\nΣ", "#median\nhead", "#heads\nbetter", "#prop.\nΣ", "#median\nhead",
            "#heads\nbetter")  # fmt: skip


def of_setting(setting: Setting) -> list[Table | str]:
    """Its rows over the baseline, what each ingredient brings, and the lines between."""
    shown = [_baseline(setting), *_lines(setting.rows)]
    controls = ", ".join(config.selection for config in setting.controls)
    absent = [f"not in this trace: {', '.join(setting.absent)}"] if setting.absent else []
    title = "what each ingredient brings: L1 over that without it"
    return [
        Table(f"{setting.setting}: L1 over the baseline's", _COLUMNS, shown),
        _half(setting),
        f"controls, of the same budget and protection: {controls}",
        *absent,
        *([Table(title, _COLUMNS, _lines(setting.brings))] if setting.brings else []),
    ]


def _half(setting: Setting) -> str:
    """In how many heads half of the setting's baseline lies."""
    kinds = (setting.rows[0].compared.isolated, setting.rows[0].compared.propagated)
    shares = " and ".join(numbers.percent(kind.half_share) for kind in kinds)
    return f"half of the baseline's Σ lies in {shares} of the heads (isolated and propagated)"


def _baseline(setting: Setting) -> list[str]:
    return [BASELINE, "", numbers.held(setting.rows[0].compared.held[0]), "1", "1", "", "1", "1", ""]


def _lines(rows: Iterable[Row]) -> list[list[str]]:
    """A line per row, each name once."""
    found, before = [], ""
    for row in rows:
        cells = [row.name if row.name != before else "", "" if row.alpha is None else f"{row.alpha:g}"]
        cells.append(numbers.held(row.compared.held[1]))
        for kind in (row.compared.isolated, row.compared.propagated):
            cells.append(numbers.decimal(kind.sum_ratio, kind.sum_ratio_interval, apart="\n"))
            cells.append(numbers.decimal(kind.median_ratio, kind.median_ratio_interval, apart="\n"))
            cells.append(numbers.percent(kind.better_share, kind.better_share_interval, "\n"))
        found.append(cells)
        before = row.name
    return found
