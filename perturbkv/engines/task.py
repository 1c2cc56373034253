"""What a worker is sent: work that is prepared once, and then done on one item after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from perturbkv.errors import ModelError
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
