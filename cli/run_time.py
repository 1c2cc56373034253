"""Estimates of a run's time: from its operations and a rate measured in a moment, then from its first samples.

The estimate counts the operations of prefill, attention and decoding, and multiplies those of the prefill by what
measuring added to it in cost.md. It leaves out loading the weights and reading the data: it is right within a
factor of two or so, which is why it is rounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from perturbkv.analyses.names import plural
from perturbkv.cli import console
from perturbkv.configs.resources import Shape

if TYPE_CHECKING:
    from perturbkv.pipeline.run.plan import Plan
    from perturbkv.pipeline.run.running import Progress

_MEASURED_OVER_PLAIN = 1.3
"""Time of a measured prefill over that of a plain one, explanation/cost.md: 1.1 for two configurations, 1.25 for 24."""
_MOST_ROWS, _MOST_WIDTH = 512, 8192
"""Most rows and width of the product that is timed; larger ones run at about its rate."""
_PROBE_S = 0.1
WORTH_A_NOTE_S = 10.0
_DURATIONS = ((90.0, 1.0, "s"), (90 * 60.0, 60.0, "min"), (48 * 3600.0, 3600.0, "h"), (float("inf"), 86400.0, "days"))


def estimate_seconds(planned: Plan) -> float:
    """Return an estimate of a run's duration in seconds, for all samples in a single process on its device."""
    run, shape = planned.run, Shape.from_config(planned.files.config, 1, 0)
    parameters = planned.files.parameters()
    lengths = [len(prompt.token_ids) for prompt in planned.prompts]
    attention = 2 * (shape.layers + shape.sliding) * shape.heads * shape.d_head  # causal: half of QKᵀ and of AV
    prefill = sum(2 * parameters * tokens + attention * tokens**2 for tokens in lengths)
    caches = len(run.configs) + 1
    decoded = len(lengths) * (run.steps + (run.generate or 0)) * caches
    rate = {rows: _operations_per_second(planned, rows) for rows in {_MOST_ROWS, min(caches, _MOST_ROWS)}}
    return _MEASURED_OVER_PLAIN * prefill / rate[_MOST_ROWS] + 2 * parameters * decoded / rate[min(caches, _MOST_ROWS)]


def _operations_per_second(planned: Plan, rows: int) -> float:
    """Return the floating-point operations per second of a projection of about the model's width, on `rows` rows."""
    import torch

    placement = planned.placement
    width = min(Shape.from_config(planned.files.config, 1, 0).d_model, _MOST_WIDTH)
    inputs = torch.ones(rows, width, dtype=placement.dtype, device=placement.device)
    weights = torch.ones(width, 4 * width, dtype=placement.dtype, device=placement.device)

    def multiply() -> None:
        inputs @ weights
        if placement.device.type == "cuda":
            torch.cuda.synchronize(placement.device)

    multiply()
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < _PROBE_S or count < 1:
        multiply()
        count += 1
    return 2 * rows * width * 4 * width * count / elapsed


def duration(seconds: float) -> str:
    """Return a duration as rounded text: 'a few seconds', 'about 40 s', 'about 12 min', 'about 3 h'."""
    if seconds < WORTH_A_NOTE_S:
        return "a few seconds"
    unit, name = next((unit, name) for most, unit, name in _DURATIONS if seconds < most)
    return f"about {float(f'{seconds / unit:.2g}'):g} {name}"


def with_time_notes(progress: Progress, planned: Plan, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Return `progress` extended by notes on the remaining time: an estimate first, a measured time from sample 2 on.

    The first sample is not counted, as it includes loading the weights. The second note is left out on a terminal,
    where a bar shows the time left; durations below ten seconds are not printed.
    """
    start, first, printed = clock(), -1, console.err.is_terminal

    def update(done: int, total: int) -> None:
        nonlocal first, printed, start
        progress(done, total)
        if first < 0:
            first = done
            seconds = estimate_seconds(planned) * (total - done) / max(total, 1)
            if seconds >= WORTH_A_NOTE_S:
                console.note(f"{plural(total - done, 'sample')} to measure, {duration(seconds)} by a quick estimate")
            start = clock()
        elif done > first and not printed:
            printed = True
            seconds = (clock() - start) / (done - first) * (total - done)
            if seconds >= WORTH_A_NOTE_S:
                console.note(f"{done} of {total} samples are done; the others take {duration(seconds)}")

    return update
