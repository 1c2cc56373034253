"""Progress tells of workers; a shard awaits one that joins; stopping leaves no process."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from perturbkv.cli.main import app
from perturbkv.configs.run import Shard
from perturbkv.errors import LockedOutputError
from perturbkv.pipeline import progress
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.run import sharding
from perturbkv.storage.output import Lock
from perturbkv.storage.run.shard_merging import ShardWriter
from perturbkv.storage.run.shards import ShardJournal, ShardRecord
from tests.support.alike import differing
from tests.support.growing import CONFIGS, measured
from tests.support.mischief import Mischief
from tests.support.patience import patience
from tests.support.traces import run_config


@pytest.mark.slow
def test_a_terminal_of_eighty_columns_shows_all_of_it() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with bar("samples", console=screen, status=lambda: "7 of 8 workers") as drawn:
        for done in range(990, 1000):
            drawn.update(done, 10_000)
            time.sleep(0.12)
    lines = [line.rstrip() for line in re.split(r"[\r\n]", screen.file.getvalue())]  # type: ignore[attr-defined]
    whole = [line for line in lines if re.search(r"samples .* 99\d/10000 +\d.*/min left \d.* 7 of 8 workers", line)]
    assert whole
    assert max(map(len, whole)) < 90, "signs that move the cursor among them"


def test_a_bar_of_one_process_is_as_it_was() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    with bar("samples", console=screen) as drawn:
        drawn.update(1, 2)
        time.sleep(0.2)
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "workers" not in shown
    assert "/min" not in shown


def test_a_notebook_shows_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, found: dict[str, str], raw: bool) -> None:
            shown.append(found)

    clock: Any = iter(range(0, 1000, 30))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    drawn = progress._NotebookBar(None, 0, Handle(), "samples", lambda: "2 of 2 workers")
    drawn.update(0, 4)
    drawn.update(2, 4)
    said = shown[-1]["text/plain"]
    assert said == "samples: 2 of 4, 0:01:30, about 0:01:30 left, 1.33/min, 2 of 2 workers"


def begun(folder: Path, joining: bool) -> bool:
    """Begin a shard while its trace is held, for a moment more where somebody joins; whether the trace is free then."""
    trace, held, ended = folder / "t.h5", threading.Event(), threading.Event()

    def hold() -> None:
        with Lock(trace):
            held.set()
            time.sleep(0.5)
            ended.set()

    other = threading.Thread(target=hold)
    other.start()
    held.wait()
    try:
        with sharding._lock_shard(trace, folder / "t.h5.shard-1-of-2", wait=False, all_done=lambda: joining):
            return ended.is_set()
    finally:
        other.join()


def test_a_shard_waits_for_who_joins_all_of_them(tmp_path: Path) -> None:
    assert begun(tmp_path, joining=True)


def test_of_any_other_writer_it_is_told(tmp_path: Path) -> None:
    with pytest.raises(LockedOutputError, match="locked by another"):
        begun(tmp_path, joining=False)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_begins_again_while_another_joins_joins_all_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, merge_shards = tmp_path / "t.h5", sharding.merge_shards
    of = [
        ShardRecord(Shard(number, 2), run_config(2, configs=CONFIGS), ("s0", "s1"), {"model": "m"}, False)
        for number in (1, 2)
    ]
    for record in of:
        writer = ShardWriter(path, record, {})
        for name, configs in writer.missing().items():
            writer.append(measured(name, configs), configs)
        writer.finish()
    second = ShardJournal(path, of[1].shard)

    def beginning_again(*asked: Any, **more: Any) -> int:
        second.begin(of[1])
        return merge_shards(*asked, **more)

    monkeypatch.setattr(sharding, "texts_of", lambda planned: {})
    monkeypatch.setattr(sharding, "merge_shards", beginning_again)
    assert not sharding._join_if_complete(None, path, of[0], False)  # type: ignore[arg-type]
    monkeypatch.setattr(sharding, "merge_shards", merge_shards)
    second.finish()
    assert sharding._join_if_complete(None, path, of[1], False)  # type: ignore[arg-type]
    assert [file.name for file in tmp_path.iterdir()] == ["t.h5"]


pytestmark = pytest.mark.chaos
SECONDS = 5.0
_COMMAND = (sys.executable, "-c", "from perturbkv.cli.start import main; main()")


@pytest.fixture
def command(folder: Path, data: Path, mischief: Mischief) -> list[str]:
    options = ["--model", folder, "--dataset", data, "--policy", mischief.policy, "--selection", "attention"]
    return [*_COMMAND, "trace", *map(str, options), "--budget", "24", "--window", "8"]


def started(command: list[str], place: Path) -> subprocess.Popen[str]:
    """A run that hears Ctrl-C, which is ignored in a shell's background jobs and whatever they start."""
    more = ["--engine", "workers", "--workers", "2", "-o", str(place)]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen([*command, *more], stderr=subprocess.PIPE, text=True, start_new_session=True)
    finally:
        signal.signal(signal.SIGINT, before)


def until(met: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end
        time.sleep(0.02)


def workers_of(coordinator: int) -> list[psutil.Process]:
    return psutil.Process(coordinator).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def test_a_run_is_stopped_and_gone_on_with_by_any_engine(
    command: list[str], mischief: Mischief, tmp_path: Path
) -> None:
    """First by Ctrl-C, then killed; one worker hangs each time, the other has done its part."""
    place = tmp_path / "t.h5"
    mischief.on(240, "hang")
    for number, code, line in (
        (signal.SIGINT, 130, "error: interrupted: 5 of 6 samples kept"),
        (signal.SIGKILL, -9, "5 of 6 samples are there already; going on"),
    ):
        run = started(command, place)
        until(lambda: len(list((tmp_path / "t.h5.journal").glob("*.npz"))) == 5)
        until(lambda run=run: any(pid in mischief.met(240) for pid in (one.pid for one in workers_of(run.pid))))
        workers = workers_of(run.pid)
        os.killpg(run.pid, number)
        began = time.monotonic()
        _, said = run.communicate(timeout=patience(SECONDS) + 5)
        until(lambda workers=workers: gone(workers), patience(SECONDS))
        assert time.monotonic() - began < patience(SECONDS)
        assert run.returncode == code
        assert said.splitlines()[-1].startswith(line), said
    mischief.off()
    for path in (place, tmp_path / "alone.h5"):
        assert CliRunner().invoke(app, [*command[len(_COMMAND) :], "-o", str(path)]).exit_code == 0
    assert differing(place, tmp_path / "alone.h5") == []
