"""The rows of `python -m benchmarks scale`: the cost of workers, coordination and merging."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from benchmarks.rows import NO_RAY
from benchmarks.subprocesses import no_network_prefix, run_process
from benchmarks.suite import check_repeats
from perturbkv.errors import ConfigError
from perturbkv.models.aliases import DEFAULT
from perturbkv.selfcheck.rows import Group, Report, Result, Target, Values, machine, median_ratio, run_groups

_WORKERS, _SHARDS, _FEW = 8, 7, 10
_MOST = 100_000
"""Most samples of a run."""
_PAUSE = 0.3
"""Seconds that a sleeping worker sleeps per sample."""
_MOST_SLEEPING, _MOST_MEASURED = 40, 3
"""Most samples per worker in one turn, of workers that sleep and of workers that measure."""


@dataclass(frozen=True)
class Settings:
    """The options of the benchmark: `samples` of the longest runs, and `repeats` of what is timed in turns."""

    model: str = DEFAULT
    samples: int = 10_000
    repeats: int = 3

    def __post_init__(self) -> None:
        check_repeats(self.repeats)
        if not 1 <= self.samples <= _MOST:
            raise ConfigError(f"--samples must lie between 1 and {_MOST:,}, got {self.samples}")


def measure(
    settings: Settings, targets: Sequence[Target], finished: Callable[[str], None] = lambda name: None
) -> Report:
    """Return the report on the rows `targets`; call `finished` with the name of each group of rows when it is done.

    A row whose process fails has the reason instead of a value.
    """
    with tempfile.TemporaryDirectory(prefix="perturbkv-scale-") as folder:
        groups = list(_groups(_Rows(settings, folder), {target.name for target in targets}))
        return Report(machine("cpu", "auto"), asdict(settings), run_groups(targets, groups, finished))


def _groups(rows: _Rows, names: set[str]) -> Iterator[Group]:
    """Yield the groups of rows; `names` are the rows to measure."""
    yield "two workers", ("two-workers",), rows.two_workers
    for engine in ("workers", "ray"):
        yield f"{engine}' scaling", (f"scale-{engine}",), lambda engine=engine: rows.scaling(engine)  # type: ignore[misc]
    yield "coordination", ("coordination-workers", "coordinator-memory"), lambda: rows.worker_processes(names)
    yield "ray's coordination", ("coordination-ray",), lambda: rows.coordination("ray")
    yield "merging", ("merging", "merging-memory"), lambda: rows.merging(names)


class _Rows:
    """The rows of one run of the benchmark, which share a sample that is measured when it is first needed."""

    def __init__(self, settings: Settings, folder: str) -> None:
        self._settings, self._folder = settings, folder
        self._sample: Result = {}

    def scaling(self, engine: str) -> Values:
        """Return the row of an engine's scaling: the speed-up by sleeping workers over their number, at best 1."""
        each = min(_MOST_SLEEPING, max(1, self._settings.samples // _WORKERS))
        result = self._speed_up(engine, _WORKERS, each, _PAUSE)
        value = median_ratio(result["one"], result["all"])
        return {f"scale-{engine}": (value, {**result, "pause": _PAUSE})}

    def two_workers(self) -> Values:
        """Return the row of the speed-up by two workers that really measure; detail `with_loading` includes loading."""
        each = min(_MOST_MEASURED, self._settings.samples)
        result = self._speed_up("workers", 2, each, None)
        loading = {name: [one + result["ready"][name] for one in result[name]] for name in ("one", "all")}
        with_loading = 2 * median_ratio(loading["one"], loading["all"])
        value = 2 * median_ratio(result["one"], result["all"])
        return {"two-workers": (value, {**result, "with_loading": with_loading})}

    def coordination(self, engine: str) -> Values:
        """Return the row of the coordinator's CPU milliseconds per sample, for writing the journal."""
        result = self._coordinating(engine, self._settings.samples)
        per_sample = {
            name: {kind: 1000 * spent / self._settings.samples for kind, spent in result[name].items()}
            for name in ("handing", "writing", "finishing")
        }
        return {f"coordination-{engine}": (per_sample["writing"]["cpu"], {**result, "ms_per_sample": per_sample})}

    def worker_processes(self, names: set[str]) -> Values:
        """Return the row of coordinating worker processes and, if named, the row of the coordinator's peak memory."""
        values = self.coordination("workers")
        if "coordinator-memory" in names:
            _, many = values["coordination-workers"]
            few = self._coordinating("workers", self._few_samples())
            details = {"bytes": many["peak"], "base_bytes": few["peak"], "wall": many["wall"] + few["wall"]}
            values["coordinator-memory"] = (many["peak"] / few["peak"], details)
        return values

    def merging(self, names: set[str]) -> Values:
        """Return the named rows of merging shards: its time, and its peak memory over that of a run of few samples."""
        self._measure_one()
        many = self._timed_process(
            "time_merging", samples=self._settings.samples, shards=_SHARDS, once="merging" in names
        )
        values: Values = {}
        if "merging" in names:
            values["merging"] = (many["merging"]["seconds"] / many["once"], many)
        if "merging-memory" in names:
            few = self._timed_process("time_merging", samples=self._few_samples(), shards=_SHARDS, once=False)
            peaks = {"bytes": many["merging"]["peak"], "base_bytes": few["merging"]["peak"]}
            details = {**peaks, "wall": many["wall"] + few["wall"]}
            values["merging-memory"] = (peaks["bytes"] / peaks["base_bytes"], details)
        return values

    def _few_samples(self) -> int:
        """Return the number of samples of the small run, the reference of the large run's memory."""
        return max(1, min(_FEW, self._settings.samples // 10))

    def _speed_up(self, engine: str, workers: int, each: int, pause: float | None) -> Result:
        """Return the seconds of runs by one worker and by all; `each`: samples per worker, `pause`: seconds asleep."""
        if pause is not None:
            self._measure_one()
        turns = {"each": each, "repeats": self._settings.repeats}
        return self._run_engine(engine, "time_speed_up", workers=workers, pause=pause, **turns) | turns

    def _coordinating(self, engine: str, samples: int) -> Result:
        """Return the times and peak memory of a coordinating process whose workers answer at once."""
        sample = self._measure_one()  # the workers answer with it
        return self._run_engine(engine, "time_coordination", workers=_WORKERS, samples=samples) | {"sample": sample}

    def _run_engine(self, engine: str, work: str, **arguments: Any) -> Result:
        """Return the result of an engine's process; Ray runs without network if possible, to join no cluster."""
        if engine == "ray" and find_spec("ray") is None:
            raise ConfigError(NO_RAY)
        prefix = no_network_prefix() if engine == "ray" else ()
        network = {"network": "loopback alone" if prefix else "this machine's"} if engine == "ray" else {}
        return network | self._timed_process(work, prefix=prefix, engine=engine, **arguments)

    def _measure_one(self) -> Result:
        """Return bytes and seconds of the shared sample, which is measured on the first call."""
        self._sample = self._sample or self._timed_process("store_one_sample")
        return self._sample

    def _timed_process(self, work: str, **arguments: Any) -> Result:
        """Return the result of a process with its wall-clock seconds, start included, as `wall`."""
        start = time.perf_counter()
        result = run_process(work, model=self._settings.model, folder=self._folder, **arguments)
        return {**result, "wall": time.perf_counter() - start}
