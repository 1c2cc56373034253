"""The smallest budget that keeps to a limit: budgets tested from the largest down, up to the first that fails.

The order is fixed before anything is seen, so every test may take the whole risk of 5 %: the first budget that is
really unsafe is reached at most once, and passes with at most that probability (fixed-sequence testing). A search that
tried budgets in an order of its own finding would need other samples for its verdict. What lies below the first failure
is not tested, even where it would pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from perturbkv.analyses.budget.budget_axis import Axis
from perturbkv.analyses.budget.criteria import Criterion
from perturbkv.analyses.measurements import Floats
from perturbkv.configs.eviction import EvictionConfig

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
