"""A worker, in a process or an actor: it prepares a task once, does its items and answers each order."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from perturbkv.devices import dtype_name
from perturbkv.errors import ModelError, PerturbkvError
from perturbkv.models.adapter import Adapter, OpenArguments
from perturbkv.models.loading import check_memory, load_weights, open_model
from perturbkv.pipeline.run.plan import Plan

Do = Callable[[Any], Any]
"""Function from an item of a task to its result."""


class Task(Protocol):
    """The work of one run, sent to every worker; it has settings and no prompts, which are its items."""

    def prepare(self, model: WorkerModel) -> Do:
        """Return the function that processes one item; `model` keeps its weights between tasks."""


@dataclass(frozen=True)
class ModelSpec:
    """The description of a task's model, from which any process can load it.

    Attributes:
        open_arguments: its name, seed and commit.
        revision: digest of its weights.
        dtype: such as float32.
        cache_bytes: memory of its caches, besides that of the weights.
    """

    open_arguments: OpenArguments
    revision: str
    dtype: str
    cache_bytes: int

    @classmethod
    def from_plan(cls, planned: Plan, cache_bytes: int) -> ModelSpec:
        """Return the description of a plan's model. Raises ModelError if other processes cannot open the model."""
        files = planned.files
        if files.open_arguments is None:
            raise ModelError(
                f"expected a model that worker processes can open by its name, got '{files.name}', which was given "
                "loaded; name it, as in pk.load_model('folder'), or measure without workers"
            )
        return cls(files.open_arguments, files.revision, dtype_name(planned.placement.dtype), cache_bytes)

    def load(self, device: torch.device) -> Adapter:
        """Return the model with its weights on a device.

        Raises as `open_model` and `load_weights`, and ModelError for weights of another revision.
        """
        files = open_model(self.open_arguments.name, self.open_arguments.seed, self.open_arguments.revision)
        if files.revision != self.revision:
            raise ModelError(
                f"expected model '{files.name}' of {self.revision} on every machine, got {files.revision} on this one"
            )
        dtype = getattr(torch, self.dtype)
        check_memory(files, dtype, device, self.cache_bytes)
        return load_weights(files, dtype, device, self.open_arguments.seed)


@dataclass
class WorkerModel:
    """A worker's model, which is loaded when a task needs it and kept for the next tasks."""

    device: torch.device
    _spec: ModelSpec | None = None
    _adapter: Adapter | None = None

    def get(self, spec: ModelSpec) -> Adapter:
        """Return the model of a description, loading it if necessary; a different loaded model is freed first."""
        if self._adapter is None or spec != self._spec:
            self._adapter = None
            self._adapter, self._spec = spec.load(self.device), spec
        return self._adapter


LogLine = tuple[str, int, str]
"""A log line: logger, level, message."""


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
    """A worker's answer to an order.

    Attributes:
        value: result of an item.
        error: class, arguments and attributes of a PerturbkvError.
        unexpected: traceback of another exception, as text.
        log: lines that were logged meanwhile.
    """

    value: Any = None
    error: tuple[type[BaseException], tuple[Any, ...], dict[str, Any]] | None = None
    unexpected: str = ""
    log: tuple[LogLine, ...] = ()

    def exception(self, who: str) -> BaseException | None:
        """Return the exception in the reply, None without one; its message begins with the worker's name `who`."""
        if self.unexpected:
            return RuntimeError(f"{who}: {self.unexpected}")
        if self.error is None:
            return None
        kind, (message, *more), attributes = self.error
        error = kind.__new__(kind)
        error.args = (f"{who}: {message}", *more)
        error.__dict__.update(attributes)
        return error


class Worker:
    """A worker that carries out a coordinator's orders; exceptions become replies.

    Args:
        worker_device: its device and threads.
        log: the buffer of its process's log.
    """

    def __init__(self, worker_device: WorkerDevice, log: LogBuffer) -> None:
        torch.set_num_threads(worker_device.threads)
        device = torch.device(worker_device.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._model, self._log = WorkerModel(device), log
        self._do: Do | None = None

    def begin(self, task: Task) -> Reply:
        """Prepare a task, loading its model, and return the reply."""

        def prepare() -> None:
            self._do = task.prepare(self._model)

        return self._reply(prepare)

    def do(self, item: Any) -> Reply:
        """Process one item of the prepared task, and return the reply with its result."""
        assert self._do is not None
        do = self._do
        return self._reply(lambda: do(item))

    def _reply(self, order: Callable[[], Any]) -> Reply:
        """Return a reply with the function's result, or with its exception, and the log."""
        try:
            return Reply(order(), log=self._log.drain())
        except PerturbkvError as error:
            return Reply(error=(type(error), error.args, dict(vars(error))), log=self._log.drain())
        except Exception:
            return Reply(unexpected=traceback.format_exc(), log=self._log.drain())


class LogBuffer(logging.Handler):
    """A log handler that keeps lines until the next reply."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[LogLine] = []

    def listen(self) -> LogBuffer:
        """Capture all log lines and warnings of this process from now on, and return the buffer."""
        logging.getLogger().addHandler(self)
        logging.getLogger("perturbkv").setLevel(logging.INFO)
        logging.captureWarnings(True)
        return self

    def emit(self, record: logging.LogRecord) -> None:
        """Store a log line."""
        self._lines.append((record.name, record.levelno, record.getMessage()))

    def drain(self) -> tuple[LogLine, ...]:
        """Return the stored lines and clear them."""
        lines, self._lines = tuple(self._lines), []
        return lines
