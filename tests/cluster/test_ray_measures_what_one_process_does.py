"""On Ray, on one node and on two, a run gives the trace of one process, and dies with the program that began it.

Nothing leaves the machine: the cluster lies in a network namespace. Where none can be had, Ray runs on one node that
the run starts itself, and what takes a cluster is not asked there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import alone, every_policy
from tests.support.alike import differing
from tests.support.mischief import Mischief
from tests.support.patience import patience

SECONDS = 5.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Made:
    """What the runs on Ray left: their folder, and what was seen."""

    place: Path
    seen: dict[str, Any]

    @property
    def alone(self) -> Path:
        return self.place / "here.h5"


@pytest.fixture(scope="module")
def made(folder: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    place = tmp_path_factory.mktemp("ray")
    nodes = "two" if alone.possible() else "local"
    command = [sys.executable, "-m", "tests.support.ray_runs", str(folder), str(data), str(place), nodes]
    ran = subprocess.run(
        alone.alone(command) if alone.possible() else command, capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    every_policy.measured(folder, data, Mischief(place).policy, place / "here.h5")
    return Made(place, json.loads(ran.stdout.splitlines()[-1]))


def test_one_node_and_two_give_the_trace_of_one_process(made: Made) -> None:
    """Over every policy. The second run lost an actor on its way; its sample was measured again."""
    held = [made.place / f"{name}.h5" for name in ("one", "two") if (made.place / f"{name}.h5").exists()]
    assert len(held) == (2 if alone.possible() else 1)
    assert [differing(made.alone, trace) for trace in held] == [[]] * len(held)
    assert made.seen["deaths"] == 1
    assert sum("what it did is done again" in line for line in made.seen["logs"]) == 1


def test_the_pages_commands_run_on_a_cluster(made: Made) -> None:
    """`generate`, on the cluster that RAY_ADDRESS names."""
    if alone.possible():
        assert len((made.place / "answers" / "generation.jsonl").read_text().splitlines()) == 3


def test_a_run_says_which_cluster_it_is_on(made: Made) -> None:
    told = [line for line in made.seen["logs"] if "the Ray cluster at" in line]
    if alone.possible():
        assert "1 node, 1 CPUs" in told[0]
        assert "2 nodes, 2 CPUs" in told[1]
    else:
        assert told[0].startswith("started the Ray cluster at")


def test_a_program_that_ends_takes_its_actors_along(made: Made) -> None:
    if not alone.possible():
        assert "terminated" not in made.seen
        return
    terminated, killed = made.seen["terminated"], made.seen["killed"]
    assert (terminated["code"], killed["code"]) == (143, -9)
    assert terminated["said"][0].startswith("error: interrupted: 5 of 6 samples kept")
    assert terminated["actors"] == killed["actors"] == 1
    assert max(terminated["seconds"], killed["seconds"]) < patience(SECONDS)
