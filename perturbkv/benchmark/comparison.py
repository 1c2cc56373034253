"""Two reports of the benchmark side by side: which rows became worse."""

from __future__ import annotations

import math
from dataclasses import dataclass

from perturbkv.benchmark.rows import Report
from perturbkv.errors import ConfigError


@dataclass(frozen=True)
class Change:
    """One row in both reports; values are None where it was not measured.

    `worse` is how much worse the new value is, as a share of the old one: below 0 it is better.
    """

    name: str
    old: float | None
    new: float | None
    worse: float | None
    regressed: bool


def compare(old: Report, new: Report, tolerance: float) -> list[Change]:
    """Every row of either report; one has regressed where it is worse by more than `tolerance`, a share.

    A row that was measured before and is not any more has not regressed: nothing is known of it.
    Raises ConfigError for a negative tolerance.
    """
    if not tolerance >= 0:
        msg = f"--tolerance must be at least 0, got {tolerance}"
        raise ConfigError(msg)
    before = {row.target.name: row for row in old.rows}
    after = {row.target.name: row for row in new.rows}
    changes = []
    for name in dict.fromkeys([*before, *after]):
        was, now = (found[name].value if name in found else None for found in (before, after))
        at_least = (after if name in after else before)[name].target.at_least
        worse = _worse(was, now, at_least)
        changes.append(Change(name, was, now, worse, worse is not None and worse > tolerance))
    return changes


def _worse(old: float | None, new: float | None, at_least: bool) -> float | None:
    """How much worse, as a share of the old value; None where one is missing, or the share is no number."""
    if old is None or new is None or old == 0:
        return None
    worse = (old - new) / abs(old) if at_least else (new - old) / abs(old)
    return worse if math.isfinite(worse) else None


def other_settings(old: Report, new: Report) -> list[str]:
    """What differs between the machines and the settings of two reports: 'cores: 2 and 16'."""
    pairs = [(old.machine, new.machine), (old.settings, new.settings)]
    return [
        f"{name}: {first.get(name)} and {second.get(name)}"
        for first, second in pairs
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]
