"""Functions that kill their process in the midst of something."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def dying(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The function, whose call of this number, from 1, is the process's last."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return counted


BEGUN, HALF_SENT, SENT = "begun", "half sent", "sent"
MOMENTS = (BEGUN, HALF_SENT, SENT)
"""What a worker has done of its sample when it is killed; what is sent nobody has acknowledged yet."""


def die_at(moment: str) -> None:
    """Kill this worker, which has begun a sample: now, or as it sends its next reply, half of it or all."""
    if moment == BEGUN:
        os.kill(os.getpid(), signal.SIGKILL)
    send: Any = Connection._send_bytes  # type: ignore[attr-defined]

    def send_and_die(self: Any, reply: Any) -> None:
        if moment == SENT:
            send(self, reply)
        else:
            self._send(struct.pack("!i", len(reply)) + bytes(reply[: len(reply) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)

    Connection._send_bytes = send_and_die  # type: ignore[attr-defined]
