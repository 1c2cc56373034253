"""Joining a Ray cluster, or starting one on this machine where that was asked for; and what is told where it fails."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from perturbkv.configs.engine import EngineConfig
from perturbkv.errors import ConfigError

_log = logging.getLogger(__name__)
_ADDRESS = "RAY_ADDRESS"
_SECONDS = 5.0
"""For a head to take a connection, and again to answer: Ray itself would ask a dead one for two minutes."""
_LONGEST = 300
"""Characters of Ray's own message."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""What a client of HTTP/2, in which Ray speaks, begins with: the preface, and a frame of no settings."""
_SETTINGS = 4
"""The kind of frame that a server answers with, in the fourth byte."""


def bring_ray() -> Any:
    """The module `ray`, told to report nothing to anybody. Raises ConfigError where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        msg = "--engine ray needs Ray, which is not installed: pip install 'perturbkv[ray]'"
        raise ConfigError(msg)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    return ray


def address(chosen: EngineConfig) -> str:
    """Of the cluster to join; empty where one is to be started on this machine. Raises ConfigError for none of both."""
    found = chosen.ray_address or os.environ.get(_ADDRESS, "")
    if not found and chosen.workers is None:
        msg = (
            "--engine ray joins the cluster at --ray-address or RAY_ADDRESS, and got neither; with --workers N it "
            "starts Ray on this machine"
        )
        raise ConfigError(msg)
    return "" if found == "local" and chosen.workers else found


@contextmanager
def joined(chosen: EngineConfig, told: bool = True) -> Iterator[Any]:
    """The module `ray`, connected inside the block, which is `told`; a connection that was there before stays.

    Raises ConfigError where no cluster is reached, or one of another version.
    """
    ray = bring_ray()
    if ray.is_initialized():
        _log.info("on the Ray cluster that this program has joined: %s", _described(ray))
        yield ray
        return
    where = address(chosen)
    if where and where != "auto":
        check_answers(where)
    _init(ray, where)
    try:
        if told:
            _log.info("%s the Ray cluster %s", "joined" if where else "started", _described(ray))
        yield ray
    finally:
        ray.shutdown()


def _init(ray: Any, where: str) -> None:
    """Connect; signals go on meaning what they meant. Raises ConfigError."""
    logging.getLogger(ray.__name__).setLevel(logging.ERROR)  # what ends is told of by us, in one line
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)} if main else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(address=where or "local", include_dashboard=None if where else False, log_to_driver=False,
                     configure_logging=False)  # fmt: skip
    except (RuntimeError, ValueError, OSError, AssertionError, ray.exceptions.RayError) as error:
        said = " ".join(str(error).split())[:_LONGEST]
        msg = f"expected to join the Ray cluster at {where or 'this machine'} from one of its nodes, got: {said}"
        raise ConfigError(msg) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_answers(where: str) -> None:
    """Raise ConfigError for an address that is none, or at which nobody speaks as Ray does."""
    host, colon, port = where.rpartition(":")
    if "://" in where or not (host and colon and port.isdigit() and 0 < int(port) < 2**16):
        msg = f"--ray-address takes host:port of a cluster's head, such as 10.0.0.1:6379, or auto; got '{where}'"
        raise ConfigError(msg)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _SECONDS) as link:
            link.sendall(_HELLO)
            answer = link.recv(9)
    except OSError as error:
        msg = f"expected a Ray cluster at {where}, got '{error.strerror or error}'; ray status shows where it is"
        raise ConfigError(msg) from None
    if answer[3:4] != bytes((_SETTINGS,)):
        msg = f"expected a Ray cluster at {where}, got something else; ray status shows where it is"
        raise ConfigError(msg)


def _described(ray: Any) -> str:
    """Where it is and what it has."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = (round(sum(one.get(kind, 0) for one in alive)) for kind in ("CPU", "GPU"))
    where = ray.get_runtime_context().gcs_address
    return f"at {where}: {len(alive)} node{'' if len(alive) == 1 else 's'}, {cpus} CPUs, {gpus} GPUs"
