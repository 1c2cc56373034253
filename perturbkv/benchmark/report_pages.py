"""Measuring a report: how large its page is, how soon it is there, and how fast it follows a choice."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from perturbkv.benchmark import browsing
from perturbkv.benchmark.made_traces import made_trace
from perturbkv.benchmark.rows import Report, Target
from perturbkv.benchmark.subprocesses import machine
from perturbkv.benchmark.suite import Found, Group, check_repeats, reported
from perturbkv.errors import ConfigError
from perturbkv.reporting.report import report

_SMALL = {"samples": 8, "layers": 30, "heads": 9}
_LARGE = {"samples": 32, "layers": 32, "heads": 32}
_MOST_TOKENS = 100_000
_MILLION = 1e6


@dataclass(frozen=True)
class Settings:
    """How it is asked for: `tokens` of each prompt; what is timed, is so `repeats` times."""

    tokens: int = 1500
    repeats: int = 5

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        if not 100 <= self.tokens <= _MOST_TOKENS:
            msg = f"--tokens must lie between 100 and {_MOST_TOKENS:,}, got {self.tokens}"
            raise ConfigError(msg)


def measure(
    settings: Settings, targets: Sequence[Target], finished: Callable[[str], None] = lambda name: None
) -> Report:
    """All rows asked for; `finished` gets each group's name. Rows that need a browser say so where there is none."""
    with tempfile.TemporaryDirectory(prefix="perturbkv-report-") as folder:
        groups = list(_groups(_Rows(settings, Path(folder))))
        return reported(machine("cpu", "auto"), asdict(settings), targets, groups, finished)


def groups(settings: Settings) -> int:
    """How many groups `measure` goes through."""
    return len(list(_groups(_Rows(settings, Path()))))


def _groups(rows: _Rows) -> Iterator[Group]:
    yield "small page", ("report-small",), rows.small
    yield "first paint", ("report-paint", "report-ready"), rows.first_times
    yield "changes", ("report-change", "report-change-most"), rows.changes
    yield "large page", ("report-large",), rows.large


class _Rows:
    """The rows of one run, which share the page that is opened."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings, self._folder = settings, folder

    def small(self) -> Found:
        """Megabytes of the page that is opened."""
        return {"report-small": self._size("small", _SMALL)}

    def large(self) -> Found:
        """Megabytes of a page of many more heads and samples."""
        return {"report-large": self._size("large", _LARGE)}

    def first_times(self) -> Found:
        """Medians of seconds."""
        found = browsing.first_times(self._page("small", _SMALL), self._settings.repeats)
        return {f"report-{name}": (statistics.median(times), {"seconds": times}) for name, times in found.items()}

    def changes(self) -> Found:
        """The median and the longest of all changes, in seconds."""
        found = browsing.changes(self._page("small", _SMALL), self._settings.repeats)
        times = [one for own in found.values() for one in own]
        if not times:
            msg = "expected a page with something to choose, got none"
            raise ConfigError(msg)
        return {
            "report-change": (statistics.median(times), {"seconds": found}),
            "report-change-most": (max(times), {"changes": len(times)}),
        }

    def _size(self, name: str, shape: dict[str, int]) -> tuple[float, dict[str, float]]:
        start = time.perf_counter()
        size = self._page(name, shape).stat().st_size
        return size / _MILLION, {"bytes": size, "seconds": time.perf_counter() - start, **shape}

    def _page(self, name: str, shape: dict[str, int]) -> Path:
        """The page's file, made when it is first needed."""
        path = self._folder / f"{name}.html"
        if not path.exists():
            report(made_trace(shape["samples"], shape["layers"], shape["heads"], self._settings.tokens), path)
        return path
