"""Where the time of a run goes: code marks its phases, and whoever asks gets their seconds. Costs nothing otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Seconds per phase; a phase inside another counts in both. `wait` waits until the device has done its work."""

    wait: Callable[[], None]
    seconds: dict[str, float] = field(default_factory=dict)


_clock: ContextVar[Clock | None] = ContextVar("perturbkv_clock", default=None)


@contextmanager
def timed(wait: Callable[[], None] = lambda: None) -> Iterator[dict[str, float]]:
    """Collect the seconds of every phase inside the block."""
    clock = Clock(wait)
    token = _clock.set(clock)
    try:
        yield clock.seconds
    finally:
        _clock.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the block's seconds under `name`, where someone asks."""
    clock = _clock.get()
    if clock is None:
        yield
        return
    clock.wait()
    start = time.perf_counter()
    try:
        yield
    finally:
        clock.wait()
        clock.seconds[name] = clock.seconds.get(name, 0.0) + time.perf_counter() - start
