"""Rows with a target, each a ratio that one or a few processes measure, and the report of one run; without torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from perturbkv.errors import PerturbkvError

FORMAT = 1
NO_GPU = "needs a CUDA device"
"""The reason why a row of a GPU is not measured elsewhere."""


@dataclass(frozen=True)
class Target:
    """The target of a row: its description and the bound to reach; farther inside the bound is better."""

    name: str
    what: str
    bound: float
    at_least: bool = False
    cuda: bool = False

    def is_reached(self, value: float) -> bool:
        """Return whether the value is inside the bound."""
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(frozen=True)
class Row:
    """A target and its measurement.

    Attributes:
        target: the target.
        value: the ratio; None where it was not measured.
        reason: the reason why it was not measured.
        details: seconds, bytes, phases: the parts of the ratio.
    """

    target: Target
    value: float | None
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def verdict(self) -> str:
        """Return "reached", "falls short" or "not measured"."""
        if self.value is None:
            return "not measured"
        return "reached" if self.target.is_reached(self.value) else "falls short"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        found = {"value": self.value, "verdict": self.verdict(), "reason": self.reason, "details": dict(self.details)}
        return {**asdict(self.target), **found}


@dataclass(frozen=True)
class Report:
    """One run of several rows: machine, settings and rows."""

    machine: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON document."""
        rows = [row.to_dict() for row in self.rows]
        return {"format": FORMAT, "machine": dict(self.machine), "settings": dict(self.settings), "rows": rows}

    def failed(self, *excuses: str) -> list[str]:
        """Return the names of rows that were not measured for another reason than `excuses` and the lack of a GPU."""
        excused = (NO_GPU, *excuses)
        return [row.target.name for row in self.rows if row.value is None and row.reason not in excused]


Values = dict[str, tuple[float, dict[str, Any]]]
"""Row name -> value and details."""
Group = tuple[str, tuple[str, ...], Callable[[], Values]]
"""Rows that are measured together: the group's name, the rows' names, and the function that measures them."""


def run_groups(
    targets: Sequence[Target], groups: Iterable[Group], finished: Callable[[str], None] = lambda name: None
) -> tuple[Row, ...]:
    """Return a row per target, from the groups that have one, measured in turn; call `finished` with their names.

    A row whose process fails has the reason instead of a value, and a row of no group the lack of a GPU.
    """
    names, values, reasons = {target.name for target in targets}, Values(), dict[str, str]()
    for group, rows, work in groups:
        if names & set(rows):
            try:
                values |= work()
            except PerturbkvError as error:
                reasons |= dict.fromkeys(rows, str(error))
            finished(group)
    return tuple(
        Row(target, values[target.name][0], "", values[target.name][1])
        if target.name in values
        else Row(target, None, reasons.get(target.name, NO_GPU))
        for target in targets
    )


def median_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over turns of seconds / base seconds."""
    return statistics.median(one / other for one, other in zip(seconds, base, strict=True))


def ratio(seconds: Sequence[float], base: Sequence[float]) -> tuple[float, dict[str, Any]]:
    """Return the median over turns of seconds / base seconds, and all seconds as details."""
    return median_ratio(seconds, base), {"seconds": list(seconds), "base_seconds": list(base)}
