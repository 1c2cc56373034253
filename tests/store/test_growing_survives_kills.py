from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from perturbkv.storage.run import journal
from perturbkv.storage.run.journal import journal_path
from perturbkv.storage.trace.trace_file import read_run
from tests.support import growing
from tests.support.growing import CONFIGS, NEW, OLD, assert_same_file, measured, opened

ROOT = Path(__file__).resolve().parents[2]
OPERATIONS = [
    (os, "mkdir"), (os, "open"), (os, "fsync"), (os, "replace"), (os, "unlink"), (os, "rmdir"),
    (journal, "_write_bytes"),
]  # fmt: skip
fill = partial(growing.fill, optional=False)
"""With those variables alone that every trace has."""


class KilledError(BaseException):
    """No handler of errors takes it, and nothing on the disk changes after it."""


@contextmanager
def killed_at(number: int) -> Iterator[list[str]]:
    """Operations on files, of which the `number`th and all later ones never happen; yields their names."""
    made: list[str] = []
    before = {name: getattr(module, name) for module, name in OPERATIONS}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(made) >= number:
                raise KilledError
            made.append(name)
            return before[name](*args, **kwargs)

        return call

    try:
        for module, name in OPERATIONS:
            setattr(module, name, counted(name))
        yield made
    finally:
        for module, name in OPERATIONS:
            setattr(module, name, before[name])


def left_on_disk(folder: Path) -> tuple[tuple[str, bytes], ...]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return tuple((str(file.relative_to(folder)), file.read_bytes()) for file in files)


def finished_trace(path: Path) -> None:
    fill(opened(path, OLD, samples=1))


def trace_and_journal(path: Path) -> None:
    fill(opened(path, OLD[:1], samples=2))
    opened(path, OLD, samples=2).append(measured("s1", OLD[1:], optional=False), OLD[1:])


@pytest.mark.slow
@pytest.mark.parametrize("start", [pytest.param(finished_trace, marks=pytest.mark.chaos), trace_and_journal])
def test_killed_at_any_operation_growing_loses_at_most_the_part_in_flight(
    tmp_path: Path, start: Callable[[Path], None]
) -> None:
    backwards = CONFIGS[3::-1]
    grown = partial(opened, configs=backwards, samples=2)
    expected = fill(grown(tmp_path / "at-once.h5"))
    (tmp_path / "start").mkdir()
    start(tmp_path / "start" / "t.h5")
    missing = grown(tmp_path / "start" / "t.h5").missing()
    number, states = 0, set()
    while True:
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "start", folder)
        path, safe = folder / "t.h5", []
        with killed_at(number) as made:
            try:
                fill(grown(path), safe.append)
                break
            except KilledError:
                pass
        state = (len(safe), left_on_disk(folder))
        number += 1
        if state in states:
            shutil.rmtree(folder)
            continue
        states.add(state)
        again = grown(path)
        left = again.missing()
        assert left == {name: missing[name] for name in left}
        assert set(left).isdisjoint(safe)
        assert len(left) >= len(missing) - len(safe) - 1
        if path.exists():
            assert read_run(path).configs in (OLD, OLD[:1], backwards)
        assert_same_file(fill(again), expected)
        assert [file.name for file in folder.iterdir()] == ["t.h5"]
        shutil.rmtree(folder)
    assert set(made) == {name for _, name in OPERATIONS}
    assert_same_file(path, expected)


@pytest.mark.slow
def test_killed_at_any_operation_overwriting_leaves_one_whole_trace_and_goes_on(tmp_path: Path) -> None:
    new = partial(opened, configs=NEW[:1], samples=2)
    former = fill(opened(tmp_path / "former.h5", OLD[:1], samples=1)).read_bytes()
    expected = fill(new(tmp_path / "at-once.h5"))
    number, states = 0, set()
    while True:
        path, safe = tmp_path / str(number) / "t.h5", list[str]()
        path.parent.mkdir()
        path.write_bytes(former)
        with killed_at(number):
            try:
                fill(new(path, overwrite=True), safe.append)
                break
            except KilledError:
                pass
        state = (len(safe), left_on_disk(path.parent))
        number += 1
        if state in states:
            shutil.rmtree(path.parent)
            continue
        states.add(state)
        if path.read_bytes() != former:
            assert_same_file(path, expected)
        again = new(path, overwrite=True)
        assert again.missing().keys().isdisjoint(safe)
        assert_same_file(fill(again), expected)
        assert [file.name for file in path.parent.iterdir()] == ["t.h5"]
        shutil.rmtree(path.parent)
    assert number > 20
    assert len(states) > 8


SCRIPT = """
import os, signal, sys
from pathlib import Path
import h5py
from perturbkv.storage.run import journal
from tests.support.dying import dying
from tests.support.growing import CONFIGS, fill, opened

path, point, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

if point == "rename":
    Path.replace = dying(Path.replace, count)
elif point == "entry":
    journal._write_bytes = dying(journal._write_bytes, count)
elif point == "hdf5":
    h5py.Dataset.__setitem__ = dying(h5py.Dataset.__setitem__, count)
fill(opened(path, CONFIGS))
"""


@pytest.mark.chaos
@pytest.mark.parametrize(("point", "count", "kept"), [("rename", 2, 0), ("entry", 7, 2), ("hdf5", 40, 3)])
def test_a_finished_trace_survives_a_real_kill_while_it_grows(
    tmp_path: Path, point: str, count: int, kept: int
) -> None:
    path = growing.fill(opened(tmp_path / "t.h5", OLD))
    content = path.read_bytes()
    command = [sys.executable, "-c", SCRIPT, str(path), point, str(count)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert path.read_bytes() == content
    assert journal_path(path).exists()
    writer = opened(path, CONFIGS)
    assert writer.missing() == dict.fromkeys(("s0", "s1", "s2")[kept:], NEW)
    assert_same_file(growing.fill(writer), growing.fill(opened(tmp_path / "at-once.h5", CONFIGS)))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["at-once.h5", "t.h5"]
