"""Runs on Ray, made by a process of their own: its arguments say where everything lies, its last line how they went.

With namespaces a cluster of one node, then of two; without, one node that the run itself starts.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from tests.support.mischief import Mischief
from tests.support.pages import commands, environment

CLI = (sys.executable, "-c", "from perturbkv.cli.start import main; main()")
_DEATH = "kill once"


def main(folder: str, data: str, place: str, nodes: str) -> None:
    """Measure, and say what was seen."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), OMP_NUM_THREADS="1")
    mischief, where = Mischief(Path(place)), Path(place)
    run = _Runs(folder, data, mischief.policy, where)
    if nodes == "local":
        mischief.on(120, _DEATH)
        run.measured("two", "local")
        sys.stdout.write(json.dumps({"deaths": len(mischief.met(120)), "logs": run.logs}))
        return
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False)
    run.measured("one", cluster.address, workers=1)
    cluster.add_node(num_cpus=1)
    mischief.on(120, _DEATH)
    run.measured("two", cluster.address)
    found: dict[str, Any] = {"deaths": len(mischief.met(120)), "logs": run.logs}
    mischief.on(240, "hang")
    for name, number in (("terminated", signal.SIGTERM), ("killed", signal.SIGKILL)):
        found[name] = run.stopped(cluster.address, number, mischief)
    mischief.off()
    run.documented(cluster.address)
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    cluster.shutdown()


class _Runs:
    """Runs in several places."""

    def __init__(self, folder: str, data: str, policy: str, where: Path) -> None:
        self.folder, self.data, self.policy, self.where = folder, data, policy, where
        self.logs: list[str] = []

    def measured(self, name: str, address: str, workers: int = 2) -> None:
        """A run over every policy."""
        asked = (self.folder, self.data, self.policy, self.where / f"{name}.h5", workers, address)
        command = [sys.executable, "-m", "tests.support.every_policy", *map(str, asked)]
        self.logs += subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr.splitlines()

    def documented(self, address: str) -> None:
        """The page's own commands on Ray, in this folder."""
        script = commands("## On Ray")
        subprocess.run(["sh", "-e", "-c", script], check=True, cwd=self.where, env=environment(RAY_ADDRESS=address))

    def stopped(self, address: str, number: int, mischief: Mischief) -> dict[str, Any]:
        """A run of which one worker hangs, ended by a signal: its exit code, and how long until its actors are gone."""
        asked = ("--model", self.folder, "--dataset", self.data, "--policy", self.policy, "--selection", "attention",
                 "--budget", "24", "--window", "8", "-o", str(self.where / "stopped.h5"),
                 "--engine", "ray", "--workers", "2", "--ray-address", address)  # fmt: skip
        started = subprocess.Popen([*CLI, "trace", *asked], stderr=subprocess.PIPE, text=True)
        journal = self.where / "stopped.h5.journal"
        before, end = set(mischief.met(240)), time.monotonic() + 300
        while time.monotonic() < end and not (
            set(mischief.met(240)) - before and len(list(journal.glob("*.npz"))) == 5
        ):
            time.sleep(0.05)
        actors = set(mischief.met(240)) - before
        started.send_signal(number)
        began = time.monotonic()
        _, said = started.communicate(timeout=60)
        while any(map(_lives, actors)) and time.monotonic() - began < 60:
            time.sleep(0.05)
        return {"code": started.returncode, "seconds": time.monotonic() - began, "said": said.splitlines()[-1:],
                "actors": len(actors)}  # fmt: skip


def _lives(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE


if __name__ == "__main__":
    main(*sys.argv[1:])
