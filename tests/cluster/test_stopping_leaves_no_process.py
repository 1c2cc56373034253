"""Ctrl-C and a killed coordinator end every worker within seconds, hanging ones too; any engine goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from perturbkv.cli.main import app
from tests.support.alike import differing
from tests.support.mischief import Mischief
from tests.support.patience import patience

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
        (signal.SIGINT, 130, "error: interrupted: 5 of 6 samples are kept"),
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
