"""Whether intervals of a mean difference hold it where most differences are 0.

`python studies/rare_losses.py [DRAWS]` prints the table of docs/explanation/statistics.md. Drawn from invented
populations of losses (full − evicted score) whose mean is known, without any trace. Beside ours stand the same degrees
of freedom without the share that was not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from common import Floats, Table, simulate

import perturbkv as pk

intervals = pk.stats.intervals
DRAWS, FEW = 3000, 200
SAMPLES = (8, 12, 20, 40, 100)
Draw = Callable[[np.random.Generator, tuple[int, int]], Floats]


def sometimes(share: float, draw: Draw) -> Draw:
    """Return losses that are 0 but in a share of the samples."""
    return lambda source, size: np.where(source.random(size) < share, draw(source, size), 0.0)


def heavy(source: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Return small losses, of which a few are large."""
    return np.minimum(1.0, 0.05 * source.lognormal(sigma=1.2, size=size))


def either(source: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Return a gain or a loss per sample."""
    return source.choice([-1.0, 1.0], size) * source.beta(1, 2, size)


def quarter(source: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Return losses of a quarter, as token F1 and ROUGE know them."""
    return source.beta(1, 3, size)


def whole(_source: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Return lost answers, of 0 or 1."""
    return np.ones(size)


HEAVY = float(heavy(np.random.default_rng(0), (4_000_000, 1)).mean())
POPULATIONS: dict[str, tuple[Draw, float]] = {
    **{f"{share:.0%} lose Beta(1, 3)": (sometimes(share, quarter), share / 4) for share in (0.5, 0.2, 0.1, 0.05, 0.02)},
    **{f"{share:.0%} lose 1": (sometimes(share, whole), share) for share in (0.1, 0.05)},
    "10% lose or gain Beta(1, 2)": (sometimes(0.1, either), 0.0),
    "20% lose 0.05 × lognormal(1.2)": (sometimes(0.2, heavy), 0.2 * HEAVY),
    "all lose normal(0.1, 0.2)": (lambda source, size: source.normal(0.1, 0.2, size), 0.1),
}


def told(draw: Draw, truth: float, samples: int, draws: int) -> str:
    """Return '86 → 93 %, 1.4 ×': coverage without and with the share, and by how much the width grows."""
    each = draw(np.random.default_rng(1), (samples, draws))
    left_out = (each.sum(axis=0) - each) / (samples - 1)
    ends = [
        intervals.jackknife(each.mean(axis=0), left_out, replace(intervals.DIFFERENCE, rare=rare))
        for rare in (False, True)
    ]
    held = [100 * np.mean((low <= truth + 1e-9) & (truth - 1e-9 <= high)) for low, high in ends]
    widths = [float(np.mean(high - low)) for low, high in ends]
    return f"{held[0]:.1f} → {held[1]:.1f} %, {widths[1] / widths[0]:.2f} ×"


def tables(draws: int) -> Iterator[Table]:
    """Yield the table of all populations."""
    rows = [
        [name.replace("%", " %"), *(told(draw, truth, samples, draws) for samples in SAMPLES)]
        for name, (draw, truth) in POPULATIONS.items()
    ]
    yield "coverage without and with the share that was not seen", ["losses", *(f"n = {n}" for n in SAMPLES)], rows


if __name__ == "__main__":
    simulate(__doc__ or "", tables, DRAWS, FEW)
