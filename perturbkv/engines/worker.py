"""A worker, in a process or an actor: it prepares a task once, does its items and answers each order."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from perturbkv.errors import ModelError, PerturbkvError
from perturbkv.models.adapter import Adapter, OpenArguments
from perturbkv.models.loading import check_memory, load_weights, open_model
from perturbkv.pipeline.run.plan import Plan

Do = Callable[[Any], Any]


class Task(Protocol):
    """The work of one run, sent to every worker, so that it holds settings and no prompts."""

    def prepare(self, models: Models) -> Do:
        """Return the function that does one item; `models` keeps the model over several tasks."""


@dataclass(frozen=True)
class ModelSpec:
    """A task's model, as any process can open it.

    Attributes:
        open_arguments: its name, seed and commit.
        revision: identifies its weights.
        dtype: such as float32.
        cache_bytes: bytes that its caches take beside the weights.
    """

    open_arguments: OpenArguments
    revision: str
    dtype: str
    cache_bytes: int

    @classmethod
    def of(cls, planned: Plan, cache_bytes: int) -> ModelSpec:
        """Return the model of a plan. Raises ModelError for one that no other process can open."""
        files = planned.files
        if files.open_arguments is None:
            msg = (
                f"expected a model that worker processes can open by its name, got '{files.name}', which was given "
                "loaded; name it, as in pk.load_model('folder'), or measure without workers"
            )
            raise ModelError(msg)
        return cls(
            files.open_arguments, files.revision, str(planned.placement.dtype).removeprefix("torch."), cache_bytes
        )

    def load(self, device: torch.device) -> Adapter:
        """Return the model with its weights.

        Raises as `open_model` and `load_weights`; ModelError for other weights.
        """
        files = open_model(self.open_arguments.name, self.open_arguments.seed, self.open_arguments.revision)
        if files.revision != self.revision:
            msg = f"expected model '{files.name}' of {self.revision} on every machine, got {files.revision} on this one"
            raise ModelError(msg)
        dtype = getattr(torch, self.dtype)
        check_memory(files, dtype, device, self.cache_bytes)
        return load_weights(files, dtype, device, self.open_arguments.seed)


@dataclass
class Models:
    """A worker's model, loaded on its device when a task first needs it."""

    device: torch.device
    _spec: ModelSpec | None = None
    _adapter: Adapter | None = None

    def get(self, spec: ModelSpec) -> Adapter:
        """Return the model; another one is freed first."""
        if self._adapter is None or spec != self._spec:
            self._adapter = None
            self._adapter, self._spec = spec.load(self.device), spec
        return self._adapter


LogLine = tuple[str, int, str]
"""A log line: logger, level, message."""
_OURS = "perturbkv"


@dataclass(frozen=True)
class WorkerDevice:
    """A worker's device.

    Attributes:
        device: such as cuda:0.
        threads: threads of computations on the CPU.
        node: the machine in a cluster; empty on this one.
    """

    device: str
    threads: int
    node: str = ""


@dataclass(frozen=True)
class Reply:
    """The answer to an order.

    Attributes:
        value: result of an item.
        error: a PerturbkvError without its traceback.
        unexpected: the traceback of any other exception.
        log: lines that were logged meanwhile.
    """

    value: Any = None
    error: tuple[type[BaseException], tuple[Any, ...], dict[str, Any]] | None = None
    unexpected: str = ""
    log: tuple[LogLine, ...] = ()

    def exception(self, who: str) -> BaseException | None:
        """Return the exception, its message beginning with the worker's name; None where there was none."""
        if self.unexpected:
            return RuntimeError(f"{who}: {self.unexpected}")
        if self.error is None:
            return None
        kind, (message, *others), state = self.error
        error = kind.__new__(kind)
        error.args = (f"{who}: {message}", *others)
        error.__dict__.update(state)
        return error


class Worker:
    """A worker that carries out a coordinator's orders; exceptions become answers.

    Args:
        worker: its device.
        log: the buffer of its process's log.
    """

    def __init__(self, worker: WorkerDevice, log: LogBuffer) -> None:
        torch.set_num_threads(worker.threads)
        device = torch.device(worker.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._models, self._log = Models(device), log
        self._do: Do | None = None

    def begin(self, task: Task) -> Reply:
        """Prepare a task: load its model unless it is already loaded."""

        def prepare() -> None:
            self._do = task.prepare(self._models)

        return self._reply(prepare)

    def do(self, item: Any) -> Reply:
        """Do one item of the prepared task."""
        assert self._do is not None
        do = self._do
        return self._reply(lambda: do(item))

    def _reply(self, order: Callable[[], Any]) -> Reply:
        try:
            return Reply(order(), log=self._log.drain())
        except PerturbkvError as error:
            return Reply(error=(type(error), error.args, dict(vars(error))), log=self._log.drain())
        except Exception:
            return Reply(unexpected=traceback.format_exc(), log=self._log.drain())


class LogBuffer(logging.Handler):
    """A log handler that keeps lines until the next answer sends them."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[LogLine] = []

    def listen(self) -> LogBuffer:
        """Capture everything that is logged or warned in this process from now on."""
        logging.getLogger().addHandler(self)
        logging.getLogger(_OURS).setLevel(logging.INFO)
        logging.captureWarnings(True)
        return self

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self._lines.append((record.name, record.levelno, record.getMessage()))

    def drain(self) -> tuple[LogLine, ...]:
        """Return the lines since the last call."""
        lines, self._lines = tuple(self._lines), []
        return lines
