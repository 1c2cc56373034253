"""From what a user chose to the engine that measures, and its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Protocol

import torch

from perturbkv.configs.engine import EngineConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.engines import devices, joining, nodes
from perturbkv.engines import ray as actors
from perturbkv.engines.answering import Done, Failed
from perturbkv.engines.crew import Crew
from perturbkv.engines.here import HereTogether
from perturbkv.engines.processes import Processes
from perturbkv.engines.scheduler import Scheduler
from perturbkv.engines.spread import Spread
from perturbkv.models.loading import pick_device
from perturbkv.pipeline.answers.answering import Asked
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import Engine


class Measuring(Engine, Protocol):
    """An engine that answers too, and says how many of its workers are there."""

    def answer(self, planned: Plan, asked: Asked, prompts: Sequence[Prompt], done: Done, failed: Failed) -> None:
        """Answer prompts; `done` or `failed` gets each."""

    def alive(self) -> str:
        """For a progress bar: `7 of 8 workers`; empty where there are none."""


@contextmanager
def engine(chosen: EngineConfig, plans: Sequence[Plan]) -> Iterator[Measuring]:
    """The engine for runs of one model, which is loaded when the first of them lacks a sample.

    Its workers end with the block. Raises PerturbkvErrors for what cannot be had, before a weight is loaded.
    """
    if chosen.name == "here":
        yield HereTogether(plans)
        return
    largest = max(plans, key=Plan.caches_bytes)
    devices.check_device(chosen, largest)
    with _crew(chosen, largest) as crew, closing(crew):
        yield Spread(chosen, plans, Scheduler(crew))


@contextmanager
def _crew(chosen: EngineConfig, largest: Plan) -> Iterator[Crew]:
    if chosen.name == "workers":
        yield Processes(devices.places(chosen, largest))
        return
    with joining.joined(chosen) as ray:
        needed, device = devices.needed_bytes(largest), largest.placement.device.type
        yield actors.Actors(ray, nodes.seats(chosen, actors.nodes(ray), device, needed))


def device(chosen: EngineConfig, name: str) -> torch.device:
    """Where a run computes, by its name or `auto`: a cluster's workers may have GPUs that this machine lacks.

    Raises ConfigError for a device that is not there.
    """
    if chosen.name != "ray" or torch.cuda.is_available() or not joining.address(chosen):
        return pick_device(name)
    if name == "cuda":
        return torch.device(name)
    if name != "auto":
        return pick_device(name)
    with joining.joined(chosen, told=False) as ray:
        return torch.device("cuda" if ray.cluster_resources().get("GPU", 0) >= 1 else "cpu")
