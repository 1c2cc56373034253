"""What a number that a user gives may be, whatever it is for: finite, and small enough to count with."""

from __future__ import annotations

import math

from perturbkv.errors import ConfigError

LARGEST = 2**63 - 1
"""The largest whole number that arrays, files and drawn numbers hold."""
MOST_CONFIGURATIONS = 10_000
"""Of one run: more are nobody's sweep, and planning them alone takes longer than anybody waits."""
MOST_SAMPLES = 100_000
LONGEST = 2_000_000
"""Tokens of a prompt that is made: beyond every model's context, and made in seconds."""


def check(what: str, value: float, most: float = LARGEST) -> None:
    """Raise ConfigError for what is NaN, infinite or beyond `most`; `what` names it."""
    if isinstance(value, float) and not math.isfinite(value):
        msg = f"{what} must be a finite number, got {value}"
        raise ConfigError(msg)
    if not -most <= value <= most:
        msg = f"{what} must be at most {most:,}, got {_said(value)}"
        raise ConfigError(msg)


def check_configurations(count: int) -> None:
    """Raise ConfigError for more configurations than a run takes."""
    if count > MOST_CONFIGURATIONS:
        msg = (
            f"expected at most {MOST_CONFIGURATIONS:,} configurations in a run, got {count:,}; give fewer values, or "
            "make several runs of it"
        )
        raise ConfigError(msg)


def _said(value: float) -> str:
    return f"{value:.3g}" if abs(value) > 1e15 else str(value)
