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


def zero_inflated(share: float, draw: Draw) -> Draw:
    """Return a draw that is 0 but in a share of the samples, where it is `draw`'s."""
    return lambda source, size: np.where(source.random(size) < share, draw(source, size), 0.0)


def heavy_tailed(source: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Draw small losses, of which a few are large."""
    return np.minimum(1.0, 0.05 * source.lognormal(sigma=1.2, size=size))


def gain_or_loss(source: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Draw a gain or a loss per sample."""
    return source.choice([-1.0, 1.0], size) * source.beta(1, 2, size)


def beta_losses(source: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Draw losses of a quarter on average, as token F1 and ROUGE know them."""
    return source.beta(1, 3, size)


def whole_losses(_source: np.random.Generator, size: tuple[int, int]) -> Floats:
    """Return losses of 1: whole answers."""
    return np.ones(size)


HEAVY_MEAN = float(heavy_tailed(np.random.default_rng(0), (4_000_000, 1)).mean())
"""The mean of `heavy_tailed`, by simulation."""
POPULATIONS: dict[str, tuple[Draw, float]] = {
    **{
        f"{share:.0%} lose Beta(1, 3)": (zero_inflated(share, beta_losses), share / 4)
        for share in (0.5, 0.2, 0.1, 0.05, 0.02)
    },
    **{f"{share:.0%} lose 1": (zero_inflated(share, whole_losses), share) for share in (0.1, 0.05)},
    "10% lose or gain Beta(1, 2)": (zero_inflated(0.1, gain_or_loss), 0.0),
    "20% lose 0.05 × lognormal(1.2)": (zero_inflated(0.2, heavy_tailed), 0.2 * HEAVY_MEAN),
    "all lose normal(0.1, 0.2)": (lambda source, size: source.normal(0.1, 0.2, size), 0.1),
}


def coverage_cell(draw: Draw, truth: float, samples: int, draws: int) -> str:
    """Return '86 → 93 %, 1.4 ×': coverage without and with the share not seen, and how much wider intervals are."""
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
        [name.replace("%", " %"), *(coverage_cell(draw, truth, samples, draws) for samples in SAMPLES)]
        for name, (draw, truth) in POPULATIONS.items()
    ]
    yield "coverage without and with the share that was not seen", ["losses", *(f"n = {n}" for n in SAMPLES)], rows


if __name__ == "__main__":
    simulate(__doc__ or "", tables, DRAWS, FEW)
