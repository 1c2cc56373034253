from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.attack import processes
from tests.attack.counted import Counted
from tests.attack.life import HERE, Life, flaw_of_line
from tests.attack.running import Outcome


@pytest.fixture
def place(tmp_path: Path) -> Life:
    (tmp_path / "life" / "shared").mkdir(parents=True)
    return Life(tmp_path / "life", tmp_path / "expected.h5", Counted(tmp_path / "life", tmp_path / "notes"))


def test_a_sample_that_was_finished_and_is_gone(place: Life) -> None:
    assert place.flaw_of_rest(HERE, {"p90", "p120"}, 1) == "lost: ['p120', 'p90']"


def test_a_sample_that_was_measured_too_often(place: Life, tmp_path: Path) -> None:
    (tmp_path / "notes" / "150").write_bytes(b"...")
    assert place.flaw_of_rest(HERE, set(), 2) == "measured more than 2 times: {'p150': 3}"


def test_a_process_that_outlives_its_run(place: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "patience", lambda seconds: 0.1)
    env = {**os.environ, "PERTURBKV_CACHE": str(tmp_path / "life.cache")}
    with subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], env=env,
                          stdout=subprocess.PIPE) as orphan:  # fmt: skip
        assert orphan.stdout is not None
        orphan.stdout.readline()
        assert str(place.flaw_of_ended([], ())).startswith(f"processes are left: {orphan.pid} ")
    assert orphan.returncode == -9


@pytest.mark.parametrize("name", [".t.h5.lock", "t.h5.tmp-12", "t.h5.journal/a.npz.tmp-12"])
def test_what_an_orderly_end_should_have_removed(place: Life, name: str) -> None:
    (place.shared / name).parent.mkdir(exist_ok=True)
    (place.shared / name).touch()
    assert place.flaw_of_ended([outcome(2, "error: no room")], (2,)) == f"left behind: ['{Path(name).name}']"
    assert place.flaw_of_ended([outcome(-9, "")], (-9,)) is None


@pytest.mark.parametrize(
    ("code", "said", "wrong"),
    [(1, "Traceback (most recent call last)", "exit code 1"), (2, "oh", "no line: oh"), (0, "fine", "None")],
)
def test_an_end_without_a_line_or_with_more(code: int, said: str, wrong: str) -> None:
    assert str(flaw_of_line(outcome(code, said), (0, 2))).startswith(wrong)


def outcome(code: int, said: str) -> Outcome:
    return Outcome(code, "", said, 1.0, False, ())
