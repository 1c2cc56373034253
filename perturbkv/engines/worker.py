"""What happens inside a worker, however it is spoken to: begin a task, do an item, answer with one object.

What a worker is sent: work that is prepared once, and then done on one item after the other.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from perturbkv.errors import ModelError, PerturbkvError
from perturbkv.models.adapter import Adapter, Opened
from perturbkv.models.loading import check_room, load_weights, open_model
from perturbkv.pipeline.run.plan import Plan

Do = Callable[[Any], Any]


class Task(Protocol):
    """Work of one run; it travels to every worker, so that it holds settings and no prompts."""

    def prepare(self, models: Models) -> Do:
        """What does one item; the model comes from `models`, which a worker keeps over several tasks."""


@dataclass(frozen=True)
class ModelSpec:
    """The model of a task as any process opens it.

    Attributes:
        opened: its name, seed and commit.
        revision: what its weights are known by.
        dtype: such as float32.
        beside: bytes that its caches take beside the weights.
    """

    opened: Opened
    revision: str
    dtype: str
    beside: int

    @classmethod
    def of(cls, planned: Plan, beside: int) -> ModelSpec:
        """The model of a plan. Raises ModelError for one that no other process can open."""
        files = planned.files
        if files.opened is None:
            msg = (
                f"expected a model that worker processes can open by its name, got '{files.name}', which was given "
                "loaded; name it, as in pk.load_model('folder'), or measure with engine='here'"
            )
            raise ModelError(msg)
        return cls(files.opened, files.revision, str(planned.placement.dtype).removeprefix("torch."), beside)

    def load(self, device: torch.device) -> Adapter:
        """The model with its weights. Raises what `open_model` and `load_weights` do, ModelError for another model."""
        files = open_model(self.opened.name, self.opened.seed, self.opened.revision)
        if files.revision != self.revision:
            msg = f"expected model '{files.name}' of {self.revision} on every machine, got {files.revision} on this one"
            raise ModelError(msg)
        dtype = getattr(torch, self.dtype)
        check_room(files, dtype, device, self.beside)
        return load_weights(files, dtype, device, self.opened.seed)


@dataclass
class Models:
    """The model that a worker holds, loaded on its device when a task first asks for it."""

    device: torch.device
    _spec: ModelSpec | None = None
    _held: Adapter | None = None

    def get(self, spec: ModelSpec) -> Adapter:
        """The model; the one before is let go first, where it is another."""
        if self._held is None or spec != self._spec:
            self._held = None
            self._held, self._spec = spec.load(self.device), spec
        return self._held


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
