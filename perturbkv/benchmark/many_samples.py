"""Rows on runs of thousands of samples: the cost of workers, coordination and merging, beside measuring."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from perturbkv.benchmark.rows import NO_RAY, Report, Target
from perturbkv.benchmark.subprocesses import Result, in_process, machine, without_network
from perturbkv.benchmark.suite import Found, Group, check_repeats, reported
from perturbkv.errors import ConfigError
from perturbkv.models.aliases import DEFAULT

_WORKERS, _SHARDS, _FEW = 8, 7, 10
_MOST = 100_000
"""Samples: as many as a run may have."""
_PAUSE = 0.3
"""Seconds that a worker sleeps per sample."""
_SLEPT, _MEASURED = 40, 3
"""Samples per worker in one turn, at most: sleeping and measured ones."""


@dataclass(frozen=True)
class Settings:
    """The benchmark's options: `samples` of the longest runs, and `repeats` of everything that is timed in turns."""

    model: str = DEFAULT
    samples: int = 10_000
    repeats: int = 3

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        if not 1 <= self.samples <= _MOST:
            msg = f"--samples must lie between 1 and {_MOST:,}, got {self.samples}"
            raise ConfigError(msg)


def measure(
    settings: Settings, targets: Sequence[Target], finished: Callable[[str], None] = lambda name: None
) -> Report:
    """Measure the rows of these targets; `finished` gets each group's name.

    A row whose process fails has the reason; the others are measured.
    """
    with tempfile.TemporaryDirectory(prefix="perturbkv-scale-") as folder:
        groups = list(_groups(_Rows(settings, folder), {target.name for target in targets}))
        return reported(machine("cpu", "auto"), asdict(settings), targets, groups, finished)


def groups(settings: Settings) -> int:
    """Return the number of groups that `measure` goes through."""
    return len(list(_groups(_Rows(settings, ""), set())))


def _groups(rows: _Rows, names: set[str]) -> Iterator[Group]:
    yield "two workers", ("two-workers",), rows.two_workers
    for engine in ("workers", "ray"):
        yield f"{engine}' scaling", (f"scale-{engine}",), lambda engine=engine: rows.scaling(engine)  # type: ignore[misc]
    yield "coordination", ("coordination-workers", "coordinator-memory"), lambda: rows.workers(names)
    yield "ray's coordination", ("coordination-ray",), lambda: rows.coordination("ray")
    yield "merging", ("merging", "merging-memory"), lambda: rows.merging(names)


class _Rows:
    """The rows of one run of the benchmark, which share a sample that is measured when it is first needed."""

    def __init__(self, settings: Settings, folder: str) -> None:
        self._settings, self._folder = settings, folder
        self._sample: Result = {}

    def scaling(self, engine: str) -> Found:
        """Return the speed-up of sleeping workers over their number: at best 1."""
        each = min(_SLEPT, max(1, self._settings.samples // _WORKERS))
        found = self._speed_up(engine, _WORKERS, each, _PAUSE)
        value = statistics.median(_ratios(found["one"], found["all"]))
        return {f"scale-{engine}": (value, {**found, "pause": _PAUSE})}

    def two_workers(self) -> Found:
        """Return the speed-up of two measuring workers; `with_loading` includes the seconds until they are ready."""
        each = min(_MEASURED, self._settings.samples)
        found = self._speed_up("workers", 2, each, None)
        loading = {name: [one + found["ready"][name] for one in found[name]] for name in ("one", "all")}
        whole = 2 * statistics.median(_ratios(loading["one"], loading["all"]))
        return {"two-workers": (2 * statistics.median(_ratios(found["one"], found["all"])),
                                {**found, "with_loading": whole})}  # fmt: skip

    def coordination(self, engine: str) -> Found:
        """Return the process's CPU milliseconds per sample, with the journal; wall time includes the disk's."""
        found = self._coordinating(engine, self._settings.samples)
        per_sample = {
            name: {kind: 1000 * spent / self._settings.samples for kind, spent in found[name].items()}
            for name in ("handing", "writing", "finishing")
        }
        return {f"coordination-{engine}": (per_sample["writing"]["cpu"], {**found, "ms_per_sample": per_sample})}

    def workers(self, names: set[str]) -> Found:
        """Return the row of worker processes, and that of the coordinator's memory where it is asked for."""
        found = self.coordination("workers")
        if "coordinator-memory" in names:
            _, many = found["coordination-workers"]
            few = self._coordinating("workers", self._few())
            details = {"bytes": many["peak"], "base_bytes": few["peak"], "wall": many["wall"] + few["wall"]}
            found["coordinator-memory"] = (many["peak"] / few["peak"], details)
        return found

    def merging(self, names: set[str]) -> Found:
        """Return the rows of merging shards; its memory is compared with that of a run of few samples."""
        self._measure_one()
        many = self._process("merging", samples=self._settings.samples, shards=_SHARDS, once="merging" in names)
        found: Found = {}
        if "merging" in names:
            found["merging"] = (many["merging"]["seconds"] / many["once"], many)
        if "merging-memory" in names:
            few = self._process("merging", samples=self._few(), shards=_SHARDS, once=False)
            peaks = {"bytes": many["merging"]["peak"], "base_bytes": few["merging"]["peak"]}
            details = {**peaks, "wall": many["wall"] + few["wall"]}
            found["merging-memory"] = (peaks["bytes"] / peaks["base_bytes"], details)
        return found

    def _few(self) -> int:
        """Return the number of samples of the small run that the large one is compared with."""
        return max(1, min(_FEW, self._settings.samples // 10))

    def _speed_up(self, engine: str, workers: int, each: int, pause: float | None) -> Result:
        if pause is not None:
            self._measure_one()
        turns = {"each": each, "repeats": self._settings.repeats}
        return self._run_engine(engine, "speed_up", workers=workers, pause=pause, **turns) | turns

    def _coordinating(self, engine: str, samples: int) -> Result:
        sample = self._measure_one()  # which the workers answer with
        return self._run_engine(engine, "coordinating", workers=_WORKERS, samples=samples) | {"sample": sample}

    def _run_engine(self, engine: str, work: str, **arguments: Any) -> Result:
        """Return a process's result; Ray's runs without network where possible, so that it joins no cluster."""
        if engine == "ray" and find_spec("ray") is None:
            raise ConfigError(NO_RAY)
        before = without_network() if engine == "ray" else ()
        told = {"network": "loopback alone" if before else "this machine's"} if engine == "ray" else {}
        return told | self._process(work, before=before, engine=engine, **arguments)

    def _measure_one(self) -> Result:
        self._sample = self._sample or self._process("one_sample")
        return self._sample

    def _process(self, work: str, **arguments: Any) -> Result:
        """Return a process's result, and its seconds in all."""
        start = time.perf_counter()
        found = in_process(work, model=self._settings.model, folder=self._folder, **arguments)
        return {**found, "wall": time.perf_counter() - start}


def _ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(first, second, strict=True)]
