"""A worker process's main loop: it gets orders through a pipe, sends answers back, and ends when the pipe closes."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
from multiprocessing.connection import Connection


def main(pipe: int) -> None:
    """Carry out the coordinator's orders from a pipe, given as file descriptor, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator hears it, and ends its workers itself
    coordinator = Connection(pipe)
    threading.Thread(target=_exit_when_closed, args=(pipe,), daemon=True).start()
    sys.path[:] = pickle.loads(coordinator.recv_bytes())
    try:
        _serve(coordinator)
    except (EOFError, OSError):  # nobody listens any more
        os._exit(0)


def _serve(coordinator: Connection) -> None:
    """Carry out the coordinator's orders and send the replies; raise EOFError when the pipe closes."""
    # imported here, as the module path has to be set first
    from perturbkv.engines.worker import LogBuffer, Reply, Worker

    worker = Worker(pickle.loads(coordinator.recv_bytes()), LogBuffer().listen())
    orders = {"begin": worker.begin, "do": worker.do}
    coordinator.send_bytes(pickle.dumps(Reply()))
    while True:
        order, what = pickle.loads(coordinator.recv_bytes())
        coordinator.send_bytes(pickle.dumps(orders[order](what), pickle.HIGHEST_PROTOCOL))


def _exit_when_closed(pipe: int) -> None:
    """End this process when the coordinator's end of the pipe is closed, as by its death."""
    closed = select.poll()
    closed.register(pipe, 0)  # of no event but the other end's closing
    while not any(event & (select.POLLHUP | select.POLLERR) for _, event in closed.poll()):
        pass
    os._exit(0)
