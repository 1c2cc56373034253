"""Numbers as tables show them: rounded, with their interval, a dash where there is none."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Interval = tuple[float, float] | None


def decimal(value: float, interval: Interval = None, digits: int = 2) -> str:
    """'0.71 [0.65, 0.78]'; fewer digits from 10 on."""
    digits = max(0, digits - 1) if abs(value) >= 10 else digits
    return "–" if isnan(value) else f"{_fixed(value, digits)}{_ends(interval, digits)}"


def percent(share: float, interval: Interval = None) -> str:
    """'72 % [58, 82]' of a share in [0, 1]."""
    ends = None if interval is None else (100 * interval[0], 100 * interval[1])
    return "–" if isnan(share) else f"{_fixed(100 * share, 0)} %{_ends(ends, 0)}"


def significant(value: float, interval: Interval = None) -> str:
    """Three significant digits, thousands apart; the interval on a line of its own."""
    if isnan(value):
        return "–"
    ends = "" if interval is None else f"\n[{_three(interval[0])}, {_three(interval[1])}]"
    return _three(value) + ends


def _three(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def about_intervals(samples: int) -> str:
    """What a table's caption says of its intervals."""
    return "In brackets: 95 % bootstrap intervals over samples." if samples > 1 else "One sample: no intervals."


def verdicts(verdict: NDArray[np.int8]) -> str:
    """'7/0/1': better, tied, worse."""
    return "/".join(str(int((verdict == sign).sum())) for sign in (1, 0, -1))


def ends(interval: NDArray[np.float64]) -> tuple[float, float]:
    """An interval out of an array (2,)."""
    return float(interval[0]), float(interval[1])


def _fixed(value: float, digits: int) -> str:
    """With a minus sign that is none of a hyphen's, and no negative zero."""
    return f"{value:z.{digits}f}".replace("-", "−")


def _ends(interval: Interval, digits: int) -> str:
    return "" if interval is None else f" [{_fixed(interval[0], digits)}, {_fixed(interval[1], digits)}]"
