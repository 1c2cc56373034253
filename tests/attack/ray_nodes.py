"""A Ray cluster of two nodes in a network of its own, one of which may be killed and replaced."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.attack import processes
from tests.support import alone

_NETWORK = 0x40000000
"""CLONE_NEWNET, of unshare(2) and setns(2)."""
_ROOT = Path(__file__).resolve().parents[2]
_STARTS = 4
"""Ray gives up a node that takes 30 s to start, as it may on a machine that others use."""
_FORGETS = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}


def possible() -> bool:
    """Whether this process may go into another network."""
    return os.geteuid() == 0 and alone.possible()


class Nodes:
    """The cluster as those who measure on it see it."""

    def __init__(self, held: subprocess.Popen[str], environment: dict[str, str]) -> None:
        self._held, self._environment = held, environment
        self.address = self._answer()
        self._second = 0

    def whole(self) -> None:
        """Have two nodes, where one was killed."""
        if not (self._second and _lives(self._second)):
            assert self._held.stdin is not None
            self._held.stdin.write("add\n")
            self._held.stdin.flush()
            self._second = int(self._answer())

    def kill_one(self) -> None:
        """kill −9 of the second node: of its raylet and of everything that it started."""
        raylet = psutil.Process(self._second)
        for one in [raylet, *raylet.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()

    def actors(self) -> list[psutil.Process]:
        """Workers that are there."""
        return [one for one in processes.in_network_of(self._held.pid) if processes.title(one).startswith("ray::Actor")]

    def entrance(self) -> tuple[int, dict[str, str]]:
        """What `enter_cluster` wants to know."""
        return self._held.pid, {**self._environment, "RAY_ADDRESS": self.address}

    def _answer(self) -> str:
        assert self._held.stdout is not None
        while line := self._held.stdout.readline():
            if line.startswith("node "):
                return line.removeprefix("node ").strip()
        msg = "the Ray cluster did not start"
        raise RuntimeError(msg)


def enter_cluster(holder: int, environment: dict[str, str]) -> None:
    """From now on this process is on a node of the cluster."""
    os.environ.update(environment)
    network = os.open(f"/proc/{holder}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(network, _NETWORK):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(network)


def leave_network() -> None:
    """From now on this process has a network of its own, in which Ray may start."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NETWORK):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


@contextmanager
def nodes() -> Iterator[Nodes]:
    """The cluster, which ends with the block."""
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    up = 'ip link set lo up && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", up, "sh", sys.executable, "-m", __name__]
    held = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=_ROOT,
        env={**os.environ, **environment, **_FORGETS, "RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
    try:
        yield Nodes(held, environment)
    finally:
        there = processes.in_network_of(held.pid)
        held.kill()
        held.wait()
        processes.end(there)


def _lives(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE


def _serve() -> None:
    """Hold the cluster: say where it is, and add a node whenever a line asks for one."""
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    add = partial(_added, cluster)
    add(include_dashboard=False)
    _say(cluster.address)
    for _ in sys.stdin:
        _say(add().all_processes["raylet"][0].process.pid)


def _added(cluster: Any, **more: Any) -> Any:
    for attempt in range(_STARTS):
        try:
            return cluster.add_node(num_cpus=1, **more)
        except Exception:
            if attempt == _STARTS - 1:
                raise
    raise AssertionError


def _say(what: object) -> None:
    sys.stdout.write(f"node {what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve()
