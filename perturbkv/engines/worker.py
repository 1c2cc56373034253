"""What happens inside a worker, however it is spoken to: begin a task, do an item, answer with one object."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from perturbkv.engines.task import Do, Models, Task
from perturbkv.errors import PerturbkvError

Said = tuple[str, int, str]
"""A log line: logger, level, message."""
_OURS = "perturbkv"


@dataclass(frozen=True)
class Place:
    """Where a worker computes.

    Attributes:
        device: such as cuda:0.
        threads: of its sums on the CPU.
        node: the machine of a cluster; empty on this one.
    """

    device: str
    threads: int
    node: str = ""


@dataclass(frozen=True)
class Reply:
    """What came of an order.

    Attributes:
        value: of an item that was done.
        error: what ended it, without its traceback; `trouble` is the traceback of one that nobody foresaw.
        said: what was logged meanwhile.
    """

    value: Any = None
    error: tuple[type[BaseException], tuple[Any, ...], dict[str, Any]] | None = None
    trouble: str = ""
    said: tuple[Said, ...] = ()

    def raised(self, who: str) -> BaseException | None:
        """The error as it was raised, its message beginning with the worker; None where there was none."""
        if self.trouble:
            return RuntimeError(f"{who}: {self.trouble}")
        if self.error is None:
            return None
        kind, (message, *others), state = self.error
        found = kind.__new__(kind)
        found.args = (f"{who}: {message}", *others)
        found.__dict__.update(state)
        return found


class Worker:
    """Does what a coordinator orders; what goes wrong is an answer, too.

    Args:
        place: where it computes.
        heard: what is logged in its process.
    """

    def __init__(self, place: Place, heard: Heard) -> None:
        torch.set_num_threads(place.threads)
        device = torch.device(place.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._models, self._heard = Models(device), heard
        self._do: Do | None = None

    def begin(self, task: Task) -> Reply:
        """Prepare a task: load its model where another one, or none, is there."""

        def prepare() -> None:
            self._do = task.prepare(self._models)

        return self._answered(prepare)

    def do(self, item: Any) -> Reply:
        """Do one item of the task that was begun."""
        assert self._do is not None
        do = self._do
        return self._answered(lambda: do(item))

    def _answered(self, order: Callable[[], Any]) -> Reply:
        try:
            return Reply(order(), said=self._heard.taken())
        except PerturbkvError as error:
            return Reply(error=(type(error), error.args, dict(vars(error))), said=self._heard.taken())
        except Exception:
            return Reply(trouble=traceback.format_exc(), said=self._heard.taken())


class Heard(logging.Handler):
    """Keeps what is logged until the next answer takes it along."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[Said] = []

    def listen(self) -> Heard:
        """Hear everything that is logged, and warned of, in this process from now on."""
        logging.getLogger().addHandler(self)
        logging.getLogger(_OURS).setLevel(logging.INFO)
        logging.captureWarnings(True)
        return self

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._lines.append((record.name, record.levelno, record.getMessage()))

    def taken(self) -> tuple[Said, ...]:
        """The lines since it was last asked."""
        lines, self._lines = tuple(self._lines), []
        return lines
