"""Whether intervals of a ratio hold it where few prompts differ from all others.

`python studies/rare_prompts.py [DRAWS]` prints the table of docs/explanation/statistics.md. Drawn from invented
populations without any trace. A prompt has perturbations of 50 heads under a baseline and a treatment, whose sums over
all prompts have the usual ratio 0.8. In 5 % of the prompts the perturbations are some times larger and have another
ratio, in all heads or in a tenth of them. Each cell is the share of draws whose interval holds the population's own
number: of the ratio of sums, and of the median head's ratio.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from common import Floats, Table, simulate

import perturbkv as pk

intervals = pk.stats.intervals
DRAWS, FEW = 3000, 40
SAMPLES = (8, 16, 40)
HEADS, USUAL, RARE = 50, 0.8, 0.05
_CHUNK = 500


@dataclass(frozen=True)
class Population:
    """Prompts of which 5 % perturb `weight` times as much, with the ratio `ratio`, in the first `heads` heads."""

    weight: float
    ratio: float
    heads: int

    @property
    def name(self) -> str:
        """The row's name."""
        where = "all heads" if self.heads == HEADS else "a tenth of the heads"
        return f"× {self.weight:g}, ratio {self.ratio:g}, {where}" if self.heads else "none"

    def sums(self) -> tuple[Floats, Floats]:
        """Return each head's mean perturbation over all prompts: baseline, treatment."""
        differing, usual = np.arange(HEADS) < self.heads, USUAL * _head_ratios()
        rare = np.where(differing, RARE * self.weight, RARE)  # what the rare prompts add to the baseline's mean
        rare_treatment = np.where(differing, rare * self.ratio, rare * usual)
        scale = _head_scales()
        return scale * (1 - RARE + rare), scale * ((1 - RARE) * usual + rare_treatment)

    def draw(self, source: np.random.Generator, draws: int, samples: int) -> tuple[Floats, Floats]:
        """Return baseline and treatment perturbations (sample, draw, head); both kinds of noise have mean 1."""
        size = (samples, draws)
        rare = (source.random(size) < RARE)[..., None] & (np.arange(HEADS) < self.heads)
        baseline = _head_scales() * _noise(source, 0.3, (*size, 1)) * np.where(rare, self.weight, 1.0)
        baseline = baseline * _noise(source, 0.2, (*size, HEADS))
        ratio = np.where(rare, self.ratio, USUAL * _head_ratios()) * _noise(source, 0.1, (*size, 1))
        return baseline, baseline * ratio * _noise(source, 0.2, (*size, HEADS))


POPULATIONS = (
    Population(1, USUAL, 0),
    *(Population(*each) for each in product((3, 10, 30), (0.4, 1.6), (HEADS, HEADS // 10))),
)


def _head_scales() -> Floats:
    """Return how much each head perturbs: a few heads carry half of the sum."""
    return np.exp(np.linspace(-1.5, 1.5, HEADS)[np.random.default_rng(5).permutation(HEADS)])


def _head_ratios() -> Floats:
    """Return the heads' ratios over the usual one."""
    return np.exp(np.linspace(-0.3, 0.3, HEADS)[np.random.default_rng(6).permutation(HEADS)])


def _noise(source: np.random.Generator, spread: float, size: tuple[int, ...]) -> Floats:
    """Return lognormal factors of mean 1, whose logarithms have the deviation `spread`."""
    return source.lognormal(-(spread**2) / 2, spread, size)


def ratios(baseline: Floats, treatment: Floats) -> tuple[Floats, Floats]:
    """Return the ratio of sums over heads and the median head's ratio, (…) each, of sums over prompts (…, head)."""
    return treatment.sum(axis=-1) / baseline.sum(axis=-1), np.median(treatment / baseline, axis=-1)


def coverage_shares(population: Population, samples: int, draws: int) -> tuple[float, float]:
    """Return the share of draws whose interval holds the ratio of sums, and the median head's ratio."""
    source, truth, held = np.random.default_rng(1), ratios(*population.sums()), np.zeros(2)
    for start in range(0, draws, _CHUNK):
        sides = population.draw(source, min(_CHUNK, draws - start), samples)
        values = ratios(*(side.sum(axis=0) for side in sides))
        each = [ratios(*(side.sum(axis=0) - side[one] for side in sides)) for one in range(samples)]
        for place, value in enumerate(values):
            low, high = intervals.jackknife(value, np.stack([left_out[place] for left_out in each]), intervals.RATIO)
            held[place] += int(((low <= truth[place]) & (truth[place] <= high)).sum())
    return float(held[0]) / draws, float(held[1]) / draws


def tables(draws: int) -> Iterator[Table]:
    """Yield the table: a population per row, then the worst and the median of those with rare prompts."""
    heads = [f"n = {samples}: {what}" for samples in SAMPLES for what in ("Σ", "median head")]
    rows, shares = [], []
    for population in POPULATIONS:
        held = [share for samples in SAMPLES for share in coverage_shares(population, samples, draws)]
        truths = [f"{float(truth):.2f}" for truth in ratios(*population.sums())]
        rows.append([population.name, *truths, *_cells(held)])
        shares += [held] if population.heads else []
    rows.append(["worst of these", "", "", *_cells(np.min(shares, axis=0))])
    rows.append(["median of these", "", "", *_cells(np.median(shares, axis=0))])
    yield "coverage", ["rare prompts", "Σ, truth", "median head, truth", *heads], rows


def _cells(shares: object) -> list[str]:
    """Return shares in percent: '92 %'."""
    return [f"{100 * share:.0f} %" for share in np.asarray(shares)]


if __name__ == "__main__":
    simulate(__doc__ or "", tables, DRAWS, FEW)
