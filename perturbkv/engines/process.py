"""A worker process from inside: orders come through a pipe, answers go back, and its end is this process' end."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection


def main(pipe: int) -> None:
    """Serve the coordinator at the other end of a pipe until it goes away, however it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator hears it, and ends its workers itself
    coordinator = Connection(pipe)
    threading.Thread(target=_leave_with, args=(pipe,), daemon=True).start()
    sys.path[:] = pickle.loads(coordinator.recv_bytes())
    try:
        _serve(coordinator)
    except (EOFError, OSError):  # nobody listens any more
        os._exit(0)


def _serve(coordinator: Connection) -> None:
    """Imported late: reading the path comes first."""
    from perturbkv.engines.worker import Heard, Reply, Worker

    worker = Worker(pickle.loads(coordinator.recv_bytes()), Heard().listen())
    orders = {"begin": worker.begin, "do": worker.do}
    coordinator.send_bytes(pickle.dumps(Reply()))
    while True:
        order, what = pickle.loads(coordinator.recv_bytes())
        coordinator.send_bytes(pickle.dumps(orders[order](what), pickle.HIGHEST_PROTOCOL))


def _leave_with(pipe: int) -> None:
    """End this process, whatever it does, once the coordinator's end of the pipe is closed: killed ones say nothing."""
    closed = select.poll()
    closed.register(pipe, 0)  # of no event but the other end's closing
    while not any(event & (select.POLLHUP | select.POLLERR) for _, event in closed.poll()):
        pass
    os._exit(0)
