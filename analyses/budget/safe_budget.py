"""How small may a budget be? The smallest at which perturbation or score keep to a limit, and the bytes it saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perturbkv.analyses import first_token, naming
from perturbkv.analyses.budget import safe_budget_told
from perturbkv.analyses.budget.budget_axis import axis
from perturbkv.analyses.budget.cache_sizes import CacheSize, cache_size, check_size
from perturbkv.analyses.budget.criteria import ANALYSIS, criteria
from perturbkv.analyses.budget.fixed_sequence import FEW, NONE, SAFE, SafeBudget, verdict, worst
from perturbkv.analyses.first_token import only_alike
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import columns_of
from perturbkv.analyses.measurements import at_step
from perturbkv.analyses.pairing import Sides, checked, sweeps
from perturbkv.analyses.result import Result
from perturbkv.analyses.several import Sequenced
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.display import Table
from perturbkv.trace import Trace

_EXIT_CODES = {SAFE: 0, NONE: 1, FEW: 2}


@dataclass(frozen=True, repr=False)
class SafeBudgets(Sequenced[SafeBudget], Result):
    """The smallest safe budget of every selection of a run.

    Attributes:
        members: one per selection and setting.
        size: caches of the length and batch asked for; None where none was.
        dtype: the run's number type, in which caches are counted.
        identity: of the run.
        alike: samples whose answer all caches begin alike and the full one ends there; 0 where no score is limited.
    """

    members: tuple[SafeBudget, ...]
    size: CacheSize | None
    dtype: str
    identity: RunIdentity
    alike: int = 0

    @property
    def exit_code(self) -> int:
        """0 where every selection has a safe budget; 1 where one has none; else 2 where samples are too few to tell."""
        return _EXIT_CODES[worst(one.state for one in self.members)]

    def conclusion(self) -> str:
        """The smallest safe budgets, who has none, and of whom it cannot be told."""
        return safe_budget_told.conclusion(self.members, self.identity.samples)

    def tables(self) -> list[Table | str]:
        """Of each criterion a row per selection; then the bytes."""
        return safe_budget_told.tables(self.members, self.size, self.dtype)

    def notes(self) -> str:
        """What bounds are, how budgets are tested, what caches hold."""
        told = safe_budget_told.notes(self.members, self.size, self.identity.samples)
        return "\n".join(filter(None, (told, first_token.about(self.alike, self.identity.samples))))

    def records(self) -> list[dict[str, Any]]:
        """A row per selection, criterion and budget, the largest budget first.

        `mean` and `bound` are nats, a drop of the score in [0, 1], or a share; `above`, of KL, is the exact bound of
        the share of prompts above the limit; `tested` is 0 below the first failure, and `holds` tells nothing there.
        """
        return [
            {"name": one.name, **columns_of(at.config), "criterion": told.criterion.name, "limit": told.criterion.limit,
             "held": at.held, "mean": at.mean, "bound": at.bound, "above": at.above, "tested": int(at.tested),
             "holds": int(at.holds)}
            for one in self.members for told in one.verdicts for at in told.budgets
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {"exit_code": self.exit_code, "cache": self._cache(), "selections": [self._told(one) for one in self]}
        )
        return found

    def _cache(self) -> dict[str, Any] | None:
        return None if self.size is None else {**vars(self.size), "dtype": self.dtype, "full_bytes": self.size.full}

    def _told(self, one: SafeBudget) -> dict[str, Any]:
        safe, verdicts = one.safe, [told.to_dict() for told in one.verdicts]
        document: dict[str, Any] = {"name": one.name, "state": one.state, "verdicts": verdicts}
        if safe is None:
            return document | dict.fromkeys(("budget", "config", "held", "evicted_bytes"))
        taken = None if self.size is None else self.size.evicted(safe.config, safe.held)
        found = {"budget": safe.config.budget, "config": safe.config, "held": safe.held}
        return {**document, **found, "evicted_bytes": taken}


def safe_budget(
    trace: Trace,
    *,
    max_kl: float | None = None,
    max_drop: float | None = None,
    min_top1: float | None = None,
    sides: Sides | None = None,
    for_length: int | None = None,
    for_batch: int = 1,
) -> SafeBudgets:
    """How small may the budget be? Per selection the smallest at which the limits hold with one-sided 95 % bounds.

    Budgets are tested from the largest down, up to the first that fails; of several limits all must hold. Each
    selection by itself: that one of many is wrong is likelier than 5 %.

    Args:
        trace: from `measure` or `read_trace`, all budgets entries or all shares. Only complete samples.
        max_kl: mean KL(full ‖ evicted) of the next token, in nats, over the measured steps of each sample; its bound
            assumes that KL is lognormal.
        max_drop: mean drop of the score of whole answers, in points of 100.
        min_top1: mean share of measured steps whose likeliest token is the full cache's.
        sides: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`), or several; by default all.
        for_length: entries of a prompt for which the caches' bytes are told.
        for_batch: number of such prompts.

    Returns the verdicts as one result, whose `exit_code` says them all.

    Raises ConfigError for no limit or one out of its range, and for budgets of both kinds; TraceError where the trace
    has no complete sample, no such side, or lacks what is limited.

    >>> import perturbkv as pk
    >>> found = pk.safe_budget(trace, max_kl=100.0)
    >>> [(one.name, str(one.safe.config.budget)) for one in found]
    [('attention', '40'), ('two-stage', '40')]
    """
    limits = criteria(max_kl, max_drop, min_top1)
    check_size(for_length, for_batch)
    named = checked(trace, "", "" if sides is None else sides)
    wanted = [None] if sides is None else named
    held = at_step(trace, ANALYSIS, 0)
    found = dict.fromkeys(tuple(places) for side in wanted for places in sweeps(held.run, side))
    curves = [axis(held, places, ANALYSIS) for places in found]
    each = {limit: limit.each(held) for limit in limits}
    names = naming.curves([one.configs[0] for one in curves])
    members = tuple(
        SafeBudget(name, tuple(verdict(limit, each[limit], curve) for limit in limits))
        for name, curve in zip(names, curves, strict=True)
    )
    size = None if for_length is None else cache_size(held, for_length, for_batch)
    shown = [config for curve in curves for config in curve.configs]
    alike = 0 if max_drop is None else int(only_alike(held).sum())
    return SafeBudgets(members, size, held.run.dtype, identity(held, shown), alike)
