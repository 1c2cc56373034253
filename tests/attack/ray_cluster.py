"""A Ray cluster of two nodes in a network of its own, one of which may be killed; and how processes are found."""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support import alone

_NETWORK = 0x40000000
"""CLONE_NEWNET, of unshare(2) and setns(2)."""
_FORGETS = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}


def possible() -> bool:
    """Return whether this process may go into another network."""
    return os.geteuid() == 0 and alone.possible()


def living() -> Iterator[psutil.Process]:
    """Yield the processes of this machine that have not ended."""
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE:
                yield one


def title(process: psutil.Process) -> str:
    """Return what a process runs."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())[:80]
    return "?"


def listed(processes: list[psutil.Process]) -> str:
    """Return the ids of processes and what they run."""
    return "; ".join(f"{one.pid} {title(one)}" for one in processes)


def network(pid: int) -> str:
    """Return a process' network namespace; nothing where it is gone."""
    with suppress(OSError):
        return os.readlink(Path(f"/proc/{pid}/ns/net"))
    return ""


def in_network(space: str) -> list[psutil.Process]:
    """Return the processes of a network namespace."""
    return [one for one in living() if space and network(one.pid) == space]


def in_network_of(pid: int, beginning: str = "") -> list[psutil.Process]:
    """Return other processes in a process' network namespace whose title begins so."""
    return [one for one in in_network(network(pid)) if one.pid != pid and title(one).startswith(beginning)]


class RayCluster:
    """The cluster as those who measure on it see it."""

    def __init__(self, server: subprocess.Popen[str], environment: dict[str, str]) -> None:
        self._server, self.pid, self._second = server, server.pid, 0
        self._environment = {**environment, "RAY_ADDRESS": self._answer()}

    def entrance(self) -> tuple[int, dict[str, str]]:
        """Return what `enter_cluster` needs, once there are two nodes."""
        with suppress(psutil.NoSuchProcess):
            if self._second and psutil.Process(self._second).status() != psutil.STATUS_ZOMBIE:
                return self.pid, self._environment
        assert self._server.stdin is not None
        self._server.stdin.write("add\n")
        self._server.stdin.flush()
        self._second = int(self._answer())
        return self.pid, self._environment

    def kill_node(self) -> None:
        """Kill the second node: its raylet and everything that it started."""
        raylet = psutil.Process(self._second)
        for one in [raylet, *raylet.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()

    def _answer(self) -> str:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            if line.startswith("node "):
                return line.removeprefix("node ").strip()
        raise RuntimeError("the Ray cluster did not start")


def enter_cluster(pid: int, environment: dict[str, str]) -> None:
    """Move this process to a node of the cluster."""
    os.environ.update(environment)
    space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(space, _NETWORK):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(space)


def leave_network() -> None:
    """Give this process a network of its own, in which Ray may start."""
    if ctypes.CDLL(None, use_errno=True).unshare(_NETWORK):
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Have the cluster, which ends with the block."""
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, "-m", __name__]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, **environment, **_FORGETS, "RAY_USAGE_STATS_ENABLED": "0"},
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    try:
        yield RayCluster(server, environment)
    finally:
        left = in_network_of(server.pid)
        server.kill()
        server.wait()
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()


def _serve() -> None:
    """Hold the cluster: write its address, and add a node whenever a line comes in."""
    from ray.cluster_utils import Cluster

    def add(**more: Any) -> Any:
        for _ in range(3):  # Ray gives up a node that takes 30 s to start
            with suppress(Exception):
                return cluster.add_node(num_cpus=1, **more)
        return cluster.add_node(num_cpus=1, **more)

    cluster = Cluster()
    add(include_dashboard=False)
    sys.stdout.write(f"node {cluster.address}\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        sys.stdout.write(f"node {add().all_processes['raylet'][0].process.pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
