from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import many_samples, many_workers, rows
from benchmarks.__main__ import main
from benchmarks.subprocesses import no_network_prefix
from perturbkv.engines.scheduler import Scheduler
from perturbkv.engines.worker import Do, Reply, WorkerModel
from perturbkv.errors import ConfigError, PerturbkvError, WorkerError
from perturbkv.storage.trace.trace_file import read_trace
from tests.support.crews import FakeCrew
from tests.support.folders import model_folder

KEPT: dict[str, Any] = {"bytes": 200, "seconds": 1.0}
ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "store_one_sample": lambda **more: KEPT,
    "time_speed_up": lambda workers, pause, **more: {
        "one": [2.0, 3.0, 2.0], "all": [2.5, 3.0, 2.5] if pause is None else [2.0, 4.0, 2.5],
        "ready": {"one": 2.0, "all": 3.5},
    },
    "time_coordination": lambda samples, **more: {
        "handing": {"passed": 1.0, "cpu": 0.5}, "writing": {"passed": samples / 100, "cpu": samples / 400},
        "finishing": {"passed": 2.0, "cpu": 1.0}, "ready": 9.0, "peak": 500 if samples > 10 else 400,
    },
    "time_merging": lambda samples, once, **more: {
        "journals": 1.0, "merging": {"seconds": 6.0, "peak": samples}, **({"once": 4.0} if once else {})
    },
}  # fmt: skip
EXPECTED = {
    "scale-workers": 0.8, "scale-ray": 0.8, "coordination-workers": 2.5, "coordination-ray": 2.5,
    "coordinator-memory": 1.25, "merging": 1.5, "merging-memory": 10.0, "two-workers": 1.6,
}  # fmt: skip
"""By hand: the median turn of the sleepers is 2.0 / 2.5; two that measure do twice the samples."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Processes whose numbers are known, and what each was asked for: its work, and the words before it."""
    seen: list[tuple[str, Any]] = []

    def answer(name: str, *, prefix: Any = (), **arguments: Any) -> dict[str, Any]:
        seen.append((f"{name} {arguments.get('engine', '')}".strip(), prefix))
        return ANSWERS[name](**arguments)

    monkeypatch.setattr(many_samples, "run_process", answer)
    monkeypatch.setattr(many_samples, "find_spec", lambda name: name)
    monkeypatch.setattr(many_samples, "no_network_prefix", lambda: ("alone",))
    return seen


def test_every_row_of_scale_is_what_its_processes_found(asked: list[tuple[str, Any]]) -> None:
    report = many_samples.measure(many_samples.Settings(samples=20), rows.SCALE)
    assert {row.target.name: row.value for row in report.rows} == {
        name: pytest.approx(value) for name, value in EXPECTED.items()
    }
    found = {row.target.name: row for row in report.rows}
    assert found["two-workers"].details["with_loading"] == pytest.approx(2 * 4.0 / 6.0)
    assert found["coordination-ray"].details["ms_per_sample"]["handing"] == {"passed": 50.0, "cpu": 25.0}
    assert all(row.details["wall"] >= 0 for row in report.rows)
    assert [name for name, _ in asked].count("store_one_sample") == 1


def test_only_what_is_rays_runs_without_a_network_and_says_so(asked: list[tuple[str, Any]]) -> None:
    report = many_samples.measure(many_samples.Settings(samples=20), rows.SCALE)
    assert {name for name, before in asked if before} == {"time_speed_up ray", "time_coordination ray"}
    told = {row.target.name for row in report.rows if row.details.get("network") == "loopback alone"}
    assert told == {"scale-ray", "coordination-ray"}


@pytest.mark.parametrize("name", [one for one in EXPECTED if one != "two-workers"])
def test_the_sample_that_sleepers_answer_with_is_there_before_them(asked: list[tuple[str, Any]], name: str) -> None:
    many_samples.measure(many_samples.Settings(samples=20), rows.find_targets([name], rows.SCALE))
    assert asked[0] == ("store_one_sample", ())


@pytest.mark.usefixtures("asked")
def test_without_ray_its_rows_say_so_and_nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_samples, "find_spec", lambda name: None)
    report = many_samples.measure(many_samples.Settings(samples=20), rows.SCALE)
    without = {row.target.name: row.reason for row in report.rows if row.value is None}
    assert without == {"scale-ray": rows.NO_RAY, "coordination-ray": rows.NO_RAY}
    assert report.unmeasured_rows(*rows.EXCUSES) == []


@pytest.mark.usefixtures("asked")
def test_bounds_are_shown_and_compare_reads_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    for path, samples in ((old, "20"), (new, "35")):
        assert main(["scale", "--samples", samples, "--output", path]) == 0
    shown = " ".join(capsys.readouterr().out.split())  # lines end where the machine's name has them end
    for words in ("≥ 0.95", "≤ 3", "1.600", "falls short", "reached", "samples 35"):
        assert words in shown
    assert main(["compare", old, new]) == 1
    told = capsys.readouterr()
    assert [line.split()[0] for line in told.out.splitlines() if "(!)" in line] == ["merging-memory"]
    assert "not measured alike: samples: 20 and 35" in told.err


def test_the_words_of_no_network_leave_the_loopback() -> None:
    names = "import socket; print(*(name for _, name in socket.if_nameindex()))"
    words = no_network_prefix()
    found = subprocess.run([*words, sys.executable, "-c", names], capture_output=True, text=True, check=True).stdout
    assert not words or found.split() == ["lo"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model under `model`, and a sample of it as the sleepers answer with."""
    made = tmp_path_factory.mktemp("scale")
    model_folder(made / "model", positions=2048)
    found = many_workers.store_one_sample(str(made / "model"), str(made))
    assert found["bytes"] > 1000
    return made


class _Here(FakeCrew):
    """A crew that does what it is asked in this process."""

    def begin(self, place: int, task: Any) -> None:
        self.do_ = task.prepare(WorkerModel(many_workers._CPU))
        super().begin(place, task)

    def do(self, place: int, item: Any) -> None:
        self._answers.append((place, Reply(self.do_(item))))

    do_: Do


@pytest.fixture
def crews_here(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def made(engine: str, sizes: list[int]) -> Iterator[list[_Here]]:
        yield [_Here(count=size) for size in sizes]

    monkeypatch.setattr(many_workers, "open_crews", made)
    monkeypatch.setattr(many_workers, "getpid", itertools.count().__next__)


@pytest.mark.slow
@pytest.mark.usefixtures("crews_here")
@pytest.mark.parametrize("pause", [0.02, None])
def test_workers_are_timed_in_turns_whether_they_sleep_or_measure(folder: Path, pause: float | None) -> None:
    each, repeats = (2, 2) if pause else (1, 1)
    found = many_workers.time_speed_up("workers", 2, each, repeats, str(folder / "model"), str(folder), pause)
    assert len(found["one"]) == len(found["all"]) == repeats
    assert min(found["one"]) > (pause or 0) * each  # in one process nothing is done at once
    assert min(found["all"]) > (pause or 0) * each * 2


@pytest.mark.slow
def test_coordinating_real_workers_tells_its_seconds_and_its_peak(folder: Path) -> None:
    found = many_workers.time_coordination("workers", 1, 3, str(folder / "model"), str(folder))
    assert set(found) == {"handing", "writing", "finishing", "ready", "peak"}
    assert 0 < found["handing"]["cpu"] <= found["handing"]["passed"] + 0.1
    assert found["writing"]["passed"] > 0
    assert found["finishing"]["passed"] > 0
    assert found["peak"] > 50 * 2**20


@pytest.mark.slow
def test_shards_merge_into_what_is_written_once(folder: Path) -> None:
    found = many_workers.time_merging(5, 2, str(folder / "model"), str(folder), once=True)
    assert min(found["journals"], found["once"], found["merging"]["seconds"]) > 0
    merged, once = (read_trace(folder / "merging-5" / name) for name in ("merged.h5", "once.h5"))
    assert merged.sample_ids == once.sample_ids == tuple(f"{number:05}" for number in range(5))
    for name in ("perturbation_isolated", "kept_code", "prompt_text"):
        np.testing.assert_array_equal(merged.arrays[name], once.arrays[name])


def test_merging_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(PerturbkvError, match="merging failed: .*nothing.h5"):
        many_workers.run_json([*many_workers._MERGING, str(tmp_path / "nothing.h5")], "merging")


def test_too_few_workers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that never comes is not waited for without end."""
    monkeypatch.setattr(many_workers, "_LONGEST", 0.0)
    monkeypatch.setattr(many_workers, "getpid", lambda: 7)
    crew = _Here(count=2)
    with pytest.raises(WorkerError, match="expected 2 workers within 0 seconds, got 1"):
        many_workers.wait_until_ready(Scheduler(crew), many_workers.SleepTask(0, None), 2)  # type: ignore[arg-type]


def test_samples_have_limits() -> None:
    with pytest.raises(ConfigError, match="--samples must"):
        many_samples.Settings(samples=100_001)
