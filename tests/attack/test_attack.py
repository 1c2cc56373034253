from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attack import disturbed_run
from tests.attack.__main__ import PARTS, part
from tests.attack.case import Outcome, attack, sample
from tests.attack.chaos import disturb
from tests.attack.disturbed_run import HERE, DisturbedRun, flaw_of_outcome
from tests.attack.materials import prepare

SEED, COUNT = 1, 5
SAMPLED = {name: "list" if name in ("traces", "texts", "words") else "trace" for name in PARTS}
"""Part -> the command of which some cases are tried here, and all by `make attack`."""
KILL, CHAOS = "kill -9 of one process", "kill -9 of two shards at once"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("attack"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DisturbedRun]:
    yield DisturbedRun(tmp_path_factory.mktemp("chaos") / "run")


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTS)
def test_a_bad_input_ends_in_one_line_or_in_the_right_answer(name: str, shared: Path) -> None:
    cases = [case for case in part(name).cases(shared, SEED) if case.argv[0] == SAMPLED[name]]
    chosen = enumerate(sample(cases, COUNT, SEED))
    assert not {
        case.name: flaw for number, case in chosen if (flaw := attack(case, shared.parent / f"{name}-{number}"))
    }


@pytest.mark.parametrize("kind", [KILL, pytest.param(CHAOS, marks=pytest.mark.slow)])
def test_a_disturbed_run_goes_on_to_the_same_file(kind: str, run: DisturbedRun) -> None:
    assert disturb(kind, SEED, run) is None


@pytest.mark.chaos
def test_what_is_lost_repeated_or_left_is_seen(run: DisturbedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run.clear()
    assert run.flaw_of_rest(HERE, {"p90", "p120"}, 1) == "lost: ['p120', 'p90']"
    (run.notes / "150").write_bytes(b"...")
    assert run.flaw_of_rest(HERE, set(), 2) == "measured more than 2 times: {'p150': 3}"
    (run.shared / ".t.h5.lock").touch()
    assert run.flaw_of_end([], ()) == "left behind: ['.t.h5.lock']"
    monkeypatch.setattr(disturbed_run, "END_S", 0.1)
    env = {**os.environ, "PERTURBKV_CACHE": str(run.folder.with_name("run.cache"))}
    with subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"], env=env,
                          stdout=subprocess.PIPE) as orphan:  # fmt: skip
        assert orphan.stdout is not None
        orphan.stdout.readline()
        assert str(run.flaw_of_end([], ())).startswith(f"processes are left: {orphan.pid} ")
    assert orphan.returncode == -signal.SIGKILL


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("code", "text", "wrong"),
    [(1, "Traceback (most recent call last)", "exit code 1"), (2, "oh", "no line: oh"), (0, "fine", "None")],
)
def test_an_end_without_a_line_or_with_more_is_seen(code: int, text: str, wrong: str) -> None:
    assert str(flaw_of_outcome(Outcome(code, "", text), (0, 2))).startswith(wrong)
