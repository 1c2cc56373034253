"""What a budget has to keep to be called safe: a limit of a mean over samples, and the bound that must hold it.

The smallest budget that keeps to a limit: budgets tested from the largest down, up to the first that fails.

The order is fixed before anything is seen, so every test may take the whole risk of 5 %: the first budget that is
really unsafe is reached at most once, and passes with at most that probability (fixed-sequence testing). A search that
tried budgets in an order of its own finding would need other samples for its verdict. What lies below the first failure
is not tested, even where it would pass.

How many bytes a cache takes at a length and a batch of the reader's own: full, and evicted to a budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.budget.budget_axis import Axis
from perturbkv.analyses.measurements import Floats, measured_steps, scores, values
from perturbkv.analyses.stats import one_sided
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import check_number
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

ANALYSIS = "budget"
_SMALLEST = 1e-12
"""Nat: less is rounding, and has no logarithm worth the name."""


@dataclass(frozen=True)
class Criterion:
    """A limit that the mean over samples keeps to.

    Attributes:
        name: `kl` (nat, at most), `drop` (of the score, in [0, 1], at most), `top1` (share, at least).
        limit: in that unit.
    """

    name: str
    limit: float

    @property
    def least(self) -> bool:
        """Whether the limit is one from below."""
        return self.name == "top1"

    def keeps(self, value: float) -> bool:
        """Whether a mean, or its bound, keeps to the limit."""
        return value >= self.limit if self.least else value <= self.limit

    def each(self, trace: Trace) -> Floats:
        """(sample, config) what is limited, a mean over each sample's measured steps. Raises TraceError."""
        if self.name == "drop":
            return _drop(trace)
        steps = np.arange(trace.run.steps) < measured_steps(trace)[:, None]
        if self.name == "top1":
            return _mean(values(trace, "top1_agreement", ANALYSIS), steps[:, None])
        floor = _mean(values(trace, "logit_kl_noise_floor", ANALYSIS), steps)
        kl = _mean(values(trace, "logit_kl", ANALYSIS), steps[:, None])
        return np.asarray(np.maximum(kl, np.maximum(floor, _SMALLEST)[:, None]))

    def bound(self, each: Floats, samples: int | None = None) -> float:
        """The one-sided bound of the mean of (sample,) values, 95 %; as of so many `samples` like these."""
        if self.name == "kl":
            return one_sided.mean_at_most(each, samples)
        if self.name == "drop":
            return 1 - 2 * one_sided.mean_at_least((1 - each) / 2, samples)
        if np.isin(each, (0, 1)).all():
            return one_sided.share_at_least(each > 0, samples)
        return one_sided.mean_at_least(each, samples)

    def above(self, each: Floats) -> float | None:
        """Of KL the exact bound of the share of samples (sample,) that exceed the limit: its mean has none."""
        return 1 - one_sided.share_at_least(each <= self.limit) if self.name == "kl" else None

    def samples_for(self, each: Floats) -> int | None:
        """With how many samples like these the bound would keep to the limit; None where no number is known."""
        return one_sided.samples_for(lambda count: self.keeps(self.bound(each, count)), len(each))


def _drop(trace: Trace) -> Floats:
    """(sample, config) what eviction cost in score. Raises TraceError where there was nothing to lose."""
    found = scores(trace, ANALYSIS)
    if not found.full.any():
        msg = (
            f"the full cache answers none of the {len(found.full)} prompts of {trace.source or 'this trace'} (score "
            "0): there is nothing that eviction can lose; limit KL or the same token, or take prompts that the model "
            "answers"
        )
        raise TraceError(msg)
    return found.drop


def _mean(array: Floats, measured: NDArray[np.bool_]) -> Floats:
    """Over the steps that each sample has."""
    return np.asarray(np.mean(array, axis=-1, where=np.broadcast_to(measured, array.shape)))


def criteria(max_kl: float | None, max_drop: float | None, min_top1: float | None) -> tuple[Criterion, ...]:
    """The limits that are given; `max_drop` in points of 100. Raises ConfigError for none, or one out of its range."""
    asked = {"kl": max_kl, "drop": max_drop, "top1": min_top1}
    if all(limit is None for limit in asked.values()):
        msg = (
            "expected what a safe budget may cost, got nothing; give max_kl (--max-kl 0.1), max_drop (--max-drop 1, "
            "points of 100) or min_top1 (--min-top1 0.99)"
        )
        raise ConfigError(msg)
    return tuple(_criterion(name, limit) for name, limit in asked.items() if limit is not None)


_RANGES = {
    "kl": ("max_kl (--max-kl)", math.inf, "nat"),
    "drop": ("max_drop (--max-drop)", 100, "points of 100"),
    "top1": ("min_top1 (--min-top1)", 1, "a share of tokens, such as 0.99"),
}
"""What each limit is called, what it lies below, and its unit."""


def _criterion(name: str, limit: float) -> Criterion:
    said, most, unit = _RANGES[name]
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit < most:
        end = f" and below {most:g}" if most < math.inf else ", finite"
        msg = f"expected {said} above 0{end} ({unit}), got {limit}"
        raise ConfigError(msg)
    return Criterion(name, limit / 100 if name == "drop" else float(limit))


SAFE, FEW, NONE = "safe", "too few samples", "none"


@dataclass(frozen=True)
class Tested:
    """One budget.

    Attributes:
        config: the configuration.
        held: entries that its cache holds over those of the full cache; NaN where the trace does not tell.
        mean: of what is limited, over samples; `bound` its one-sided 95 % bound.
        above: of KL the exact one-sided 95 % bound of the share of samples whose own lies above the limit; else None.
        tested: False below the first failure.
        holds: whether the bound keeps to the limit; of a budget that was not tested it says nothing.
    """

    config: EvictionConfig
    held: float
    mean: float
    bound: float
    above: float | None
    tested: bool
    holds: bool


@dataclass(frozen=True)
class Verdict:
    """What one criterion says of one curve.

    Attributes:
        criterion: the limit.
        budgets: every budget, the largest first.
        samples_for: with how many samples like these the bound of the first failure would hold; None where its mean
            fails too, where no number is known, and where nothing failed.
    """

    criterion: Criterion
    budgets: tuple[Tested, ...]
    samples_for: int | None

    @property
    def safe(self) -> Tested | None:
        """The smallest budget that passed; None where the largest fails."""
        passed = [one for one in self.budgets if one.tested and one.holds]
        return passed[-1] if passed else None

    @property
    def failed(self) -> Tested | None:
        """The first budget that failed; None where every one passed."""
        return next((one for one in self.budgets if one.tested and not one.holds), None)

    @property
    def state(self) -> str:
        """SAFE; FEW where at the largest budget the mean keeps to the limit and its bound does not; else NONE."""
        if self.safe is not None:
            return SAFE
        return FEW if self.criterion.keeps(self.budgets[0].mean) else NONE

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, not yet plain."""
        own = {"criterion": self.criterion.name, "limit": self.criterion.limit, "state": self.state}
        safe = None if self.safe is None else self.safe.config.budget
        return {**own, "budget": safe, "samples_for": self.samples_for, "budgets": self.budgets}


@dataclass(frozen=True)
class SafeBudget:
    """One selection over its budgets.

    Attributes:
        name: selection, and whatever tells it from the others.
        verdicts: one per criterion.
    """

    name: str
    verdicts: tuple[Verdict, ...]

    @property
    def state(self) -> str:
        """The worst of its criteria."""
        return worst(one.state for one in self.verdicts)

    @property
    def safe(self) -> Tested | None:
        """The smallest budget at which every criterion holds; None where one holds nowhere."""
        found = [one.safe for one in self.verdicts]
        known = [one for one in found if one is not None]
        return max(known, key=lambda one: one.config.budget.value) if len(known) == len(found) else None


def worst(states: Iterable[str]) -> str:
    """NONE before FEW before SAFE."""
    found = set(states)
    return next(state for state in (NONE, FEW, SAFE) if state in found)


def verdict(criterion: Criterion, each: Floats, curve: Axis) -> Verdict:
    """The verdict on a curve; `each`: (sample, config) of the whole trace."""
    found: list[Tested] = []
    for config, place, held in list(zip(curve.configs, curve.places, curve.held, strict=True))[::-1]:
        mean, bound, above = (
            float(each[:, place].mean()),
            criterion.bound(each[:, place]),
            criterion.above(each[:, place]),
        )
        tested = all(one.holds for one in found)
        found.append(Tested(config, float(held), mean, bound, above, tested, tested and criterion.keeps(bound)))
    made = Verdict(criterion, tuple(found), None)
    if made.failed is None or not criterion.keeps(made.failed.mean):
        return made
    place = curve.places[curve.configs.index(made.failed.config)]
    return Verdict(criterion, made.budgets, criterion.samples_for(each[:, place]))


@dataclass(frozen=True)
class CacheSize:
    """Caches of one length and batch, in the model's shape and the run's number type.

    Attributes:
        length: entries of the prompt.
        batch: prompts at once.
        token_bytes: of one entry's keys and values in all layers of the full cache.
        entries: mean entries of the trace's prompts.
    """

    length: int
    batch: int
    token_bytes: float
    entries: float

    @property
    def full(self) -> float:
        """Bytes of the full caches."""
        return self.token_bytes * self.length * self.batch

    def evicted(self, config: EvictionConfig, held: float) -> float:
        """Bytes of the caches that a configuration evicts to, which held the share `held` of the trace's prompts.

        A budget in entries keeps as many at every length: `held` then tells how many sets of them there are.
        """
        if isinstance(config.budget.value, float):
            return self.full * held
        sets = held * self.entries / min(config.budget.value, self.entries)
        return self.full * sets * min(config.budget.value, self.length) / self.length


def check_size(length: int | None, batch: int) -> None:
    """Raise ConfigError for numbers that are none to count with, and for a batch of no length."""
    if length is None and batch != 1:
        msg = f"for_batch (--for-batch {batch}) has no effect without for_length (--for-length); give both"
        raise ConfigError(msg)
    for name, number in (("for_length (--for-length)", length), ("for_batch (--for-batch)", batch)):
        if number is not None:
            check_number(name, number)
            if number < 1:
                msg = f"{name} must be at least 1, got {number}"
                raise ConfigError(msg)


def cache_size(trace: Trace, length: int, batch: int) -> CacheSize:
    """The size of the trace's caches at another length and batch.

    What an entry takes is what the evicted caches of the run took over what they held. Raises TraceError where the
    trace does not say what its caches took.
    """
    taken = values(trace, "cache_bytes", ANALYSIS) - values(trace, "cache_padding_bytes", ANALYSIS)
    tokens = values(trace, "prompt_tokens", ANALYSIS)
    held = (values(trace, "held_share", ANALYSIS).sum(axis=1) * tokens).sum()
    return CacheSize(length, batch, float(taken.sum() / held), float(tokens.mean()))
