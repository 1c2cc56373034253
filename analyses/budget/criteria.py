"""Criteria of safe budgets: a limit on a mean over samples, and the verdict on a curve of budgets.

Budgets are tested from the largest down, until one fails. The order is fixed before any number is seen, so every test
may take the whole risk of 5 %: the first budget that is really unsafe is reached at most once, and passes with at most
that probability (fixed-sequence testing). A search in an order that follows the numbers would need other samples for
its verdict. What lies below the first failure is not tested, even where it would pass.

So a larger budget that fails takes their verdict from all smaller ones, and must not fail for being better. A
lognormal's bound is larger for KL far below the limit than for KL close below it where it goes over more powers of ten.
Therefore KL below a hundredth of the limit counts as that much, and a budget whose KL is no larger than a smaller one's
on any prompt has at most the smaller one's bound: adding it never takes that one's verdict. Mean KL is assumed not to
rise with the budget, so that the smaller one's bound is one of the larger one's mean too. Of a text's perplexity over
the full cache's the excess over 1 is judged as KL is: the ratio itself lies near 1 and is no lognormal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from perturbkv.analyses.budget.budget_axis import Axis
from perturbkv.analyses.columns import Derived, Record, attribute, column, derived, record
from perturbkv.analyses.conclusions import NOTHING_TO_LOSE, cut_off_claim
from perturbkv.analyses.measurements import Floats, Measurements, is_cut_off, scores, text_log_p
from perturbkv.analyses.stats import one_sided
from perturbkv.analyses.stats.intervals import MIN_SAMPLES
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, TraceError

ANALYSIS = "budget"
_QUANTITIES = {
    "kl": "mean KL",
    "perplexity": "mean perplexity over the full cache's",
    "drop": "mean drop of the score",
    "top1": "mean share of the same token",
}
"""Name of a criterion -> the quantity that it limits."""
_SHORT = {"kl": "KL", "perplexity": "perplexity / full", "drop": "drop of score", "top1": "same token"}
"""Name of a limited quantity in a narrow table."""
_UNITS = {"kl": " nat", "perplexity": "", "drop": " points", "top1": ""}
LOGNORMAL = {"kl": "KL", "perplexity": "excess perplexity"}
"""Criteria without an upper end, whose bound assumes that a loss is lognormal -> what a note calls that loss."""
_NEGLIGIBLE = 0.01
"""Share of a limit on these losses: less counts as that much, as it hardly bears on the mean, and much on its bound."""
_SMALLEST = 1e-12
"""Least KL in nat: less is rounding, whose logarithm means nothing."""


@dataclass(frozen=True)
class Criterion:
    """A limit that the mean over samples must keep to.

    Attributes:
        name: `kl` (nat, at most), `perplexity` (ratio to the full cache's, at most), `drop` (of the score, in [0, 1],
            at most), `top1` (share, at least).
        limit: in that unit.
    """

    name: str
    limit: float

    def __str__(self) -> str:
        sign = "≥" if self.is_lower_limit else "≤"
        return f"{_QUANTITIES[self.name]} {sign} {self.format(self.limit)}{_UNITS[self.name]}"

    @property
    def quantity(self) -> str:
        """The name of the limited quantity: 'mean KL'."""
        return _QUANTITIES[self.name]

    def format(self, value: float) -> str:
        """Return a mean or a bound as text in the limit's unit, a drop in points of 100; '∞' for infinity."""
        if math.isinf(value):
            return "∞"
        if self.name == "drop":
            return f"{100 * value:.3g}".replace("-", "−")
        return f"{value:.3g}" if self.name in LOGNORMAL else f"{value:.4g}"

    @property
    def is_lower_limit(self) -> bool:
        """True where means must be at least the limit."""
        return self.name == "top1"

    def allows(self, value: float) -> bool:
        """Return whether a mean, or a bound of a mean, meets the limit."""
        return value >= self.limit if self.is_lower_limit else value <= self.limit

    def sample_means(self, measured: Measurements) -> Floats:
        """Return the limited quantity of each sample, (sample, config): a mean over its steps, or its drop of score.

        KL below its noise floor counts as the floor; perplexity leaves out samples whose text has no token that counts.
        Raises TraceError where the trace lacks the quantity, for a drop where the full cache scores nothing, and for
        perplexity where no text has such a token.
        """
        if self.name == "drop":
            graded = scores(measured.trace, ANALYSIS)
            if not graded.full.any():
                source, cut_off = measured.trace.source or "this trace", int(is_cut_off(measured.trace).sum())
                who, why = "the full cache", f"{NOTHING_TO_LOSE}; "
                if cut_off:
                    who = f"{cut_off_claim(cut_off, len(graded.full), [measured.trace.run.generate]).clause()}, and it"
                    why = "allow longer answers (quality --max-new-tokens), "
                raise TraceError(
                    f"{who} answers none of the {len(graded.full)} prompts of {source} (score 0): {why}limit KL or the "
                    "same token, or take prompts that the model answers"
                )
            return graded.drop
        if self.name == "top1":
            return measured["top1_agreement"]
        if self.name == "perplexity":
            log_p = text_log_p(measured.trace, ANALYSIS)
            return np.exp(log_p.full[:, None] - log_p.evicted)
        floor = np.maximum(measured["logit_kl_noise_floor"], _SMALLEST)
        return np.asarray(np.maximum(measured["logit_kl"], floor[:, None]))

    def bound(self, each: Floats, samples: int | None = None) -> float:
        """Return the one-sided 95 % bound of the mean of (sample,) values: lower for a lower limit, else upper.

        `samples`: as if there were that many.
        """
        if self.name in LOGNORMAL:
            return self._lossless + one_sided.mean_at_most(self._losses(each), samples)
        if self.name == "drop":  # a drop lies in [−1, 1], and its upper bound mirrors a lower one in [0, 1]
            return 1 - 2 * one_sided.mean_at_least((1 - each) / 2, samples)
        if np.isin(each, (0, 1)).all():
            return one_sided.share_at_least(each > 0, samples)
        return one_sided.mean_at_least(each, samples)

    def bound_last(self, each: Floats) -> float:
        """Return the bound of the mean at the last budget of (sample, budget) values, the smallest budget first.

        Of KL and perplexity the least bound of those budgets whose own is no less on any prompt. Other bounds never
        rise where values fall: their own is the least.
        """
        if self.name not in LOGNORMAL:
            return self.bound(each[:, -1])
        losses = self._losses(each).T
        return min(
            self.bound(values) for values, lost in zip(each.T, losses, strict=True) if (lost >= losses[-1]).all()
        )

    @property
    def _lossless(self) -> float:
        """KL or perplexity over the full cache's without any loss: 0 or 1."""
        return _RANGES[self.name][1]

    def _losses(self, each: Floats) -> Floats:
        """Return what KL or perplexity exceeds its lossless value by, at least a hundredth of what the limit does."""
        return np.maximum(each - self._lossless, _NEGLIGIBLE * (self.limit - self._lossless))

    def samples_for(self, each: Floats) -> int | None:
        """Return the number of samples like these at which the bound would meet the limit; None if unknown."""
        return one_sided.samples_for(lambda count: self.allows(self.bound(each, count)), len(each))


def criteria(
    max_kl: float | None, max_drop: float | None, min_top1: float | None, max_perplexity: float | None = None
) -> tuple[Criterion, ...]:
    """Return the criteria of the given limits; `max_drop` in points of 100. Raises ConfigError for invalid limits."""
    limits = {"kl": max_kl, "perplexity": max_perplexity, "drop": max_drop, "top1": min_top1}
    if all(limit is None for limit in limits.values()):
        raise ConfigError(
            "expected what a safe budget may cost, got nothing; give max_kl (--max-kl 0.1), max_perplexity "
            "(--max-perplexity 1.05), max_drop (--max-drop 1, points of 100) or min_top1 (--min-top1 0.99)"
        )
    found = []
    for name, limit in ((name, limit) for name, limit in limits.items() if limit is not None):
        option, least, most, unit = _RANGES[name]
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not least < limit < most:
            end = f" and below {most:g}" if most < math.inf else ", finite"
            raise ConfigError(f"expected {option} above {least}{end} ({unit}), got {limit}")
        found.append(Criterion(name, limit / 100 if name == "drop" else float(limit)))
    return tuple(found)


_RANGES = {
    "kl": ("max_kl (--max-kl)", 0, math.inf, "nat"),
    "perplexity": ("max_perplexity (--max-perplexity)", 1, math.inf, "a ratio to the full cache's, such as 1.05"),
    "drop": ("max_drop (--max-drop)", 0, 100, "points of 100"),
    "top1": ("min_top1 (--min-top1)", 0, 1, "a share of tokens, such as 0.99"),
}
"""Limit -> its option, the numbers that it lies above and below, and its unit."""


SAFE, FEW, NONE = "safe", "too few samples", "none"
"""States of a limit or a selection: some budget is safe; more samples could make the largest so; no budget is."""


@record
class TestedBudget(Record, section="tested budget"):
    """One budget tested under one limit."""

    __test__ = False

    config: EvictionConfig = column("the configuration")
    cache_share: float = column("entries of its cache over those of the full cache", key="held")
    mean: float = column("mean over samples of the limited quantity")
    bound: float = column(
        "one-sided 95 % bound of the mean, of KL and perplexity if KL and perplexity's excess over 1 are lognormal and "
        "their means do not rise with the budget; null of fewer than five samples"
    )
    above: float | None = column(
        "of KL and perplexity: exact one-sided 95 % bound of the share of samples whose own exceeds the limit; else "
        "null"
    )
    tested: bool = column("false below the first failure")
    holds: bool = column("whether the bound keeps to the limit; of a budget that was not tested false")


@record
class Verdict(Record, section="limit's verdict"):
    """The verdict of one limit on one curve."""

    criterion: Criterion
    budgets: tuple[TestedBudget, ...] = column("largest first")
    samples_for: int | None = column(
        "samples like these with which the first failure would pass; null where its mean fails too, where no number is "
        "known, and where nothing failed"
    )

    criterion_name: ClassVar[Derived[str]] = attribute(
        "criterion.name", "Limited quantity: kl, perplexity, drop or top1", key="criterion"
    )
    limit: ClassVar[Derived[float]] = attribute(
        "criterion.limit",
        "Limit, in its unit: nat; ratio to the full cache's perplexity; drop of the score, 0 to 1; share",
    )

    @derived()
    def state(self) -> str:
        """Safe, too few samples (at the largest budget the mean keeps to the limit and its bound does not), or none."""
        if self.safe is not None:
            return SAFE
        return FEW if self.criterion.allows(self.budgets[0].mean) else NONE

    @derived(heading="#smallest\nbudget")
    def budget(self) -> Budget | None:
        """Smallest budget at which the limit holds; null where there is none."""
        return None if self.safe is None else self.safe.config.budget

    @property
    def safe(self) -> TestedBudget | None:
        """The smallest tested budget that passed; None where even the largest fails."""
        passed = [tested for tested in self.budgets if tested.tested and tested.holds]
        return passed[-1] if passed else None

    @property
    def first_failure(self) -> TestedBudget | None:
        """The largest budget that failed, at which the tests ended; None if all budgets passed."""
        return next((tested for tested in self.budgets if tested.tested and not tested.holds), None)

    @derived(heading="limit", json=False)
    def limit_shown(self) -> str:
        """Limit on the mean over samples."""
        sign = "≥" if self.criterion.is_lower_limit else "≤"
        name, limit = self.criterion.name, self.criterion.format(self.criterion.limit)
        return f"{_SHORT[name]} {sign} {limit}{_UNITS[name]}"

    @derived(heading="#cache\nshare", json=False)
    def cache_share(self) -> float | None:
        """Entries of the smallest safe budget's cache over those of the full cache."""
        return None if self.safe is None else self.safe.cache_share

    @derived(heading="#mean\n(bound)", json=False)
    def mean_shown(self) -> str | None:
        """Mean over samples at the smallest safe budget, and its one-sided 95 % bound."""
        return None if self.safe is None else self._mean_and_bound(self.safe)

    @derived(heading="fails at", json=False)
    def failure(self) -> str:
        """First budget that fails, its mean (and bound), and how many samples like these it would take to pass."""
        if self.first_failure is None:
            return "none"
        budget, mean = self.first_failure.config.budget, self.criterion.format(self.first_failure.mean)
        if not self.criterion.allows(self.first_failure.mean):
            return f"{budget}: {mean}"
        if math.isinf(self.first_failure.bound):
            return f"{budget}: {mean};\nn ≥ {MIN_SAMPLES} has a bound"
        enough = "n unknown" if self.samples_for is None else f"n = {self.samples_for:,} would do"
        return f"{budget}: {self._mean_and_bound(self.first_failure)};\n{enough}"

    @derived(heading="#samples above\nthe limit", json=False)
    def above_shown(self) -> str | None:
        """Exact 95 % bound of the share of samples above a limit on KL or perplexity, at the smallest safe budget."""
        return None if self.safe is None or self.safe.above is None else f"≤ {100 * self.safe.above:.0f} %"

    def _mean_and_bound(self, tested: TestedBudget) -> str:
        """Return the mean of a tested budget and its bound as text: '0.08 (≤ 0.1)'."""
        sign = "≥" if self.criterion.is_lower_limit else "≤"
        return f"{self.criterion.format(tested.mean)} ({sign} {self.criterion.format(tested.bound)})"


def worst_state(states: Iterable[str]) -> str:
    """Return the worst state: NONE if present, else FEW, else SAFE."""
    present = set(states)
    return next(state for state in (NONE, FEW, SAFE) if state in present)


def judge_curve(criterion: Criterion, each: Floats, curve: Axis) -> Verdict:
    """Judge a curve's budgets under one limit, from the largest down.

    `each` is the limited quantity (sample, config) of all configurations of the trace.
    """
    budgets: list[TestedBudget] = []
    for place in reversed(range(len(curve.configs))):
        values, is_tested = each[:, curve.indices[place]], all(larger.holds for larger in budgets)
        bound = criterion.bound_last(each[:, list(curve.indices[: place + 1])])
        budgets.append(
            TestedBudget(
                config=curve.configs[place],
                cache_share=float(curve.cache_shares[place]),
                mean=float(values.mean()),
                bound=bound,
                above=1 - one_sided.share_at_least(values <= criterion.limit) if criterion.name in LOGNORMAL else None,
                tested=is_tested,
                holds=is_tested and criterion.allows(bound),
            )
        )
    result = Verdict(criterion, tuple(budgets), None)
    if result.first_failure is None or not criterion.allows(result.first_failure.mean):
        return result
    index = curve.indices[curve.configs.index(result.first_failure.config)]
    return Verdict(criterion, result.budgets, criterion.samples_for(each[:, index]))
