"""The rows of the benchmark with their targets, its JSON document, and the comparison of two reports."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from perturbkv.errors import ConfigError, UnknownNameError, install_extra
from perturbkv.user_files import FileKind

FORMAT = 1
_FILE = FileKind("a benchmark's JSON", ConfigError, hint="make one with perturbkv doctor bench")
NO_GPU = "needs a CUDA device"
NO_KVPRESS = f"kvpress is not installed; {install_extra('kvpress')}"
NO_RAY = f"Ray is not installed; {install_extra('ray')}"
NO_BROWSER = f"needs Chromium (apt-get install chromium) and Playwright; {install_extra('browser')}"
"""Reasons that excuse a row from being measured."""
_EXCUSES = (NO_GPU, NO_KVPRESS, NO_RAY, NO_BROWSER)


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


TARGETS = (
    Target("capture-2", "2 configurations, heads and layers / plain prefill + 2 decodes", 1.1),
    Target("sweep-24", "24 configurations (3 policies × 2 selections × 4 budgets) / plain prefill", 1.25),
    Target("sweep-200", "200 configurations / plain prefill", 2.0),
    Target("scores-11", "ten scores of later methods beside SnapKV's / plain prefill", 1.6),
    Target("presses-24", "the same 24 configurations, ours / kvpress' presses, a prefill each", 0.2),
    Target("peak-24", "peak memory, 24 configurations / plain prefill's", 1.3),
    Target("growth", "everything but the prefill, 8,192 tokens / 2,048 tokens", 4.6),
    Target("norms-time", "value norms / head-by-head matmul loop, seconds", 1.0),
    Target("norms-memory", "value norms / head-by-head matmul loop, extra memory", 0.2),
    Target("writing-24", "writing the trace / the run, 24 configurations", 0.02),
    Target("writing-200", "writing the trace / the run, 200 configurations", 0.02),
    Target("kept-coding", "seconds a sample: kept sets coded and written beside a sleep of 1.5 s, 8B shapes", 1.8),
    Target("generation", "peak saved / cache saved, generating from an evicted cache", 0.8, at_least=True),
    Target("quality-12", "12 configurations and the full cache, 64 tokens scored / plain prefill + 64 tokens", 3.0),
    Target("startup-help", "processor seconds of perturbkv -h / import numpy", 3.0),
    Target("startup-figure", "processor seconds of heads on a finished trace / import matplotlib.pyplot", 3.5),
    Target("triton-time", "value norms in Triton / loop, 7B shapes, 32k entries, bf16", 0.35, cuda=True),
    Target("triton-rate", "value norms in Triton / matmul rate measured there", 0.6, at_least=True, cuda=True),
    Target("cuda-24", "24 configurations / plain prefill, random:mistral-7b, 8,192 tokens, bf16", 1.5, cuda=True),
    Target("cuda-decode", "decoding from b = 1,024 / from 32k entries, 7B shapes, batch 4", 0.5, cuda=True),
)
SCALE = (
    Target("scale-workers", "8 worker processes that sleep / one, speed-up over 8", 0.95, at_least=True),
    Target("scale-ray", "8 actors of Ray that sleep / one, speed-up over 8", 0.95, at_least=True),
    Target("coordination-workers", "the coordinating process's CPU, 8 worker processes, ms per sample", 3.0),
    Target("coordination-ray", "the coordinating process's CPU, 8 actors of Ray, ms per sample", 3.0),
    Target("coordinator-memory", "the coordinating process's peak memory, all samples / 10", 1.1),
    Target("merging", "merging 7 shards / writing the same samples once", 2.0),
    Target("merging-memory", "peak memory of merging 7 shards, all samples / 10", 1.1),
    Target("two-workers", "2 workers that measure, a thread each / one, samples per second", 1.6, at_least=True),
)
"""Targets of runs of thousands of samples: workers, coordination and merging."""
REPORT = (
    Target("report-small", "page of 8 samples × 24 configurations × 270 heads, MB", 5.0),
    Target("report-large", "page of 32 samples × 24 configurations × 1,024 heads, MB", 25.0),
    Target("report-paint", "first paint of the smaller one in headless Chromium, s", 1.5),
    Target("report-ready", "until choices can be made in it, s", 1.5),
    Target("report-change", "a change of choice in it until it is painted, median, s", 0.1),
    Target("report-change-most", "the longest of these changes, s", 0.1),
)
"""Targets of a report's page: its size, and how soon it shows a choice."""


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


@dataclass(frozen=True)
class Report:
    """One run of the benchmark: machine, settings and rows."""

    machine: Mapping[str, str]
    settings: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def failed(self) -> list[str]:
        """The names of rows that this machine supports but that were not measured."""
        return [row.target.name for row in self.rows if row.value is None and row.reason not in _EXCUSES]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document that `read` reads."""
        rows = [
            {**asdict(row.target), "value": row.value, "verdict": row.verdict(), "reason": row.reason,
             "details": dict(row.details)}
            for row in self.rows
        ]  # fmt: skip
        return {"format": FORMAT, "machine": dict(self.machine), "settings": dict(self.settings), "rows": rows}


def read(path: Path) -> Report:
    """Return a report from its JSON file. Raises ConfigError for a file that is no report."""
    document = _FILE.read_json(path)
    try:
        rows = tuple(_parse_row(entry) for entry in document["rows"])
        _check_header(document["format"], [row.target.name for row in rows])
        return Report(_json_object(document["machine"]), _json_object(document["settings"]), rows)
    except (ValueError, KeyError, TypeError) as error:
        raise _FILE.refusal(path, f"another document ({type(error).__name__}: {error})") from None


def _check_header(version: Any, names: Sequence[str]) -> None:
    """Raise ValueError unless `version` is the current format and the row names are unique."""
    if version != FORMAT:
        raise ValueError(f"format is {str(version)[:40]}, not {FORMAT}")
    if len(set(names)) < len(names):
        raise ValueError("a row stands there twice")


def _parse_row(entry: Mapping[str, Any]) -> Row:
    """Return a row parsed from its JSON object. Raises KeyError or TypeError for an invalid object."""
    target = Target(
        name=_typed_field(str, entry, "name"), what=_typed_field(str, entry, "what"),
        bound=_finite_number(entry["bound"]),
        at_least=_typed_field(bool, entry, "at_least"), cuda=_typed_field(bool, entry, "cuda"),
    )  # fmt: skip
    value = None if entry["value"] is None else _finite_number(entry["value"])
    return Row(target, value, _typed_field(str, entry, "reason"), _json_object(entry["details"]))


_Kind = TypeVar("_Kind", str, bool)


def _typed_field(kind: type[_Kind], entry: Mapping[str, Any], name: str) -> _Kind:
    """Return a field of a JSON object. Raises TypeError if it is not of the type `kind`."""
    value = entry[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {str(value)[:40]}")
    return value


def _finite_number(value: Any) -> float:
    """Return a number as a finite float. Raises TypeError for booleans, texts and numbers beyond a float's range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise TypeError(f"{str(value)[:40]} is no number")
    return float(value)


def _json_object(value: Any) -> dict[str, Any]:
    """Return a JSON object unchanged. Raises TypeError for any other value."""
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {str(value)[:40]}")
    return value


def find_targets(names: Sequence[str], targets: Sequence[Target] = TARGETS) -> tuple[Target, ...]:
    """Return the targets with these names, or all targets if `names` is empty. Raises UnknownNameError."""
    known = tuple(target.name for target in targets)
    for name in names:
        if name not in known:
            raise UnknownNameError(name, "benchmark row", known)
    return tuple(target for target in targets if not names or target.name in names)


@dataclass(frozen=True)
class Change:
    """A row's values in two reports, None where it was not measured.

    `worse` is the deterioration as a share of the old value: below 0 the new one is better.
    """

    name: str
    old: float | None
    new: float | None
    worse: float | None
    regressed: bool


def compare(old: Report, new: Report, tolerance: float) -> list[Change]:
    """Return every row's change between two reports; a row has regressed if it is worse by more than `tolerance`.

    `tolerance` is a share of the old value. A row that is no longer measured has not regressed.
    Raises ConfigError for a negative tolerance.
    """
    if not tolerance >= 0:
        raise ConfigError(f"--tolerance must be at least 0, got {tolerance}")
    before = {row.target.name: row for row in old.rows}
    after = {row.target.name: row for row in new.rows}
    changes = []
    for name in dict.fromkeys([*before, *after]):
        was, now = (rows[name].value if name in rows else None for rows in (before, after))
        at_least = (after if name in after else before)[name].target.at_least
        worse = _deterioration(was, now, at_least)
        changes.append(Change(name, was, now, worse, worse is not None and worse > tolerance))
    return changes


def _deterioration(old: float | None, new: float | None, at_least: bool) -> float | None:
    """Return the deterioration as a share of the old value; None if a value is missing or the share is infinite."""
    if old is None or new is None or old == 0:
        return None
    worse = (old - new) / abs(old) if at_least else (new - old) / abs(old)
    return worse if math.isfinite(worse) else None


def setting_differences(old: Report, new: Report) -> list[str]:
    """Return the differences in machine and settings between two reports, such as 'cores: 2 and 16'."""
    pairs = [(old.machine, new.machine), (old.settings, new.settings)]
    return [
        f"{name}: {first.get(name)} and {second.get(name)}"
        for first, second in pairs
        for name in dict.fromkeys([*first, *second])
        if first.get(name) != second.get(name)
    ]
