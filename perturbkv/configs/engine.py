"""Where samples are measured: in this process, in worker processes of this machine, or on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from perturbkv.configs import numbers
from perturbkv.errors import ConfigError, UnknownNameError

ENGINES = {
    "here": "this process, one sample after the other",
    "workers": "worker processes on this machine, one per GPU or per few cores",
    "ray": "actors of a Ray cluster, one per GPU or per few cores",
}
MOST_WORKERS = 4096
NEEDS = {
    "workers": ("workers", "ray"),
    "ray_address": ("ray",),
    "cpus_per_worker": ("workers", "ray"),
    "timeout_per_sample": ("workers", "ray"),
    "by_configs": ("workers", "ray"),
}
"""Option -> the engines that it makes a difference to."""


@dataclass(frozen=True)
class EngineConfig:
    """How a run is spread. No number depends on it, but for the rounding of what is computed in other batches.

    Attributes:
        name: a key of `ENGINES`.
        workers: how many; None: one per GPU, or as many as the cores allow.
        ray_address: of the cluster's head, host:port; None: what RAY_ADDRESS says.
        cpus_per_worker: cores of each; None: OMP_NUM_THREADS, or an even share of what the machine has.
        timeout_per_sample: seconds after which a worker counts as hanging; None: never.
        by_configs: whether a sample's configurations are shared out over the workers, each reading the prompt again.

    Raises UnknownNameError, and ConfigError for a number that cannot be, or that makes no difference to the engine.
    """

    name: str = "here"
    workers: int | None = None
    ray_address: str | None = None
    cpus_per_worker: int | None = None
    timeout_per_sample: float | None = None
    by_configs: bool = False

    def __post_init__(self) -> None:
        check_alone(self.name, self.workers, self.cpus_per_worker, self.timeout_per_sample)
        for field in NEEDS:
            if getattr(self, field) not in (None, False) and self.name not in NEEDS[field]:
                msg = f"{_said(field)} has no effect here: it needs {needs(field)}; leave it out"
                raise ConfigError(msg)


def check_alone(name: str, workers: int | None, cpus_per_worker: int | None, timeout_per_sample: float | None) -> None:
    """Raise UnknownNameError or ConfigError for what is refused whatever the other choices are."""
    if name not in ENGINES:
        raise UnknownNameError(name, "engine", ENGINES)
    _check_count("workers", workers)
    _check_count("cpus_per_worker", cpus_per_worker)
    if timeout_per_sample is not None:
        numbers.check(_said("timeout_per_sample"), timeout_per_sample)
        if not timeout_per_sample > 0:
            msg = f"{_said('timeout_per_sample')} takes seconds above 0, got {timeout_per_sample}"
            raise ConfigError(msg)


def needs(field: str) -> str:
    """The engines that an option makes a difference to, as they are typed."""
    return " or ".join(f"--engine {name}" for name in NEEDS[field])


def _check_count(field: str, value: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_WORKERS:
        msg = f"{_said(field)} takes a whole number from 1 to {MOST_WORKERS:,}, got {value}"
        raise ConfigError(msg)


def _said(field: str) -> str:
    """The option as it is typed, with its name in Python."""
    return f"--{field.replace('_', '-')} ({field}=…)"
