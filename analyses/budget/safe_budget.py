"""Safe budgets: the smallest at which perturbation or score keep to a limit, and the bytes that they save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perturbkv.analyses import columns, measurements, text, verdicts
from perturbkv.analyses.budget.budget_axis import above_full_caveat, named_axes
from perturbkv.analyses.budget.criteria import (
    ANALYSIS,
    FEW,
    LOGNORMAL,
    NONE,
    SAFE,
    Criterion,
    TestedBudget,
    Verdict,
    criteria,
    judge_curve,
    worst_state,
)
from perturbkv.analyses.columns import Line, Record, column, derived, record
from perturbkv.analyses.conclusions import Case, Claim
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.json_values import config_columns
from perturbkv.analyses.measurements import Measurements, has_only_first_token
from perturbkv.analyses.result import MemberSequence, Result
from perturbkv.analyses.sides import Sides, check_sides
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import check_number
from perturbkv.display import Part, plural
from perturbkv.errors import ConfigError
from perturbkv.trace import Trace

_GIB = 2**30
_BOUNDS = {
    "kl": "KL: the larger bound of Student's t and of a lognormal, where less than a hundredth of the limit counts as "
    "that much. It holds a lognormal's mean in 95 % of simulated draws of 8 to 40 samples, but only in 74 to 90 % "
    "where one sample in ten carries the mean. A budget whose KL is no larger on any prompt than a smaller one's has "
    "at most that one's bound.",
    "perplexity": "Perplexity: of each sample over the full cache's, by the same tokens. Its excess over 1 has the "
    "larger bound of Student's t and of a lognormal, where less than a hundredth of the limit's excess counts as that "
    "much. It holds the mean of skewed excesses in at least 96 % of simulated draws of 8 to 40 samples. A budget whose "
    "perplexity is no larger on any prompt than a smaller one's has at most that one's bound.",
    "drop": "Drop: a bound for any distribution of scores; {few}.",
    "top1": "Same token: exact for single steps, for means over steps a bound for any distribution.",
}
_VERDICTS = {SAFE: verdicts.MORE, NONE: verdicts.LESS, FEW: verdicts.FEW}
"""State of a selection -> verdict of its claim."""


@record
class CacheSize(Record, section="cache size"):
    """The bytes of full caches of one length and batch, in the model's shape and the run's number type.

    Windows and recurrent states count as the trace's prompts have them, whatever the length.
    """

    length: int = column("entries of a prompt")
    batch: int = column("prompts at once")
    token_bytes: float = column("bytes of one entry's keys and values in all measured layers of the full cache")
    entries: float = column("mean entries of the trace's prompts")
    dtype: str = column("type of the numbers that are counted")
    unmeasured_bytes: float = column("bytes of a prompt's sliding windows and recurrent states", default=0.0)

    @derived()
    def full_bytes(self) -> float:
        """Bytes of the full caches."""
        return (self.token_bytes * self.length + self.unmeasured_bytes) * self.batch

    def evicted_bytes(self, config: EvictionConfig, cache_share: float) -> float:
        """Return the bytes of a configuration's evicted caches; `cache_share`: its cache share on the trace's prompts.

        A budget that is a share of the prompt has the same cache share at every length. A budget in entries keeps as
        many entries at every length, so that its share falls with the length; what stays is the number of kept sets
        per key/value head: 1, or more where every query head keeps a set of its own.
        """
        unmeasured = self.unmeasured_bytes / self.token_bytes  # in entries
        kept = cache_share * (self.entries + unmeasured) - unmeasured
        if isinstance(config.budget.value, float):
            kept *= self.length / self.entries
        else:
            kept *= min(config.budget.value, self.length) / min(config.budget.value, self.entries)
        return (self.token_bytes * kept + self.unmeasured_bytes) * self.batch


def check_size(length: int | None, batch: int) -> None:
    """Raise ConfigError for a length or batch that is no number or below 1, and for a batch without a length."""
    if length is None and batch != 1:
        raise ConfigError(f"for_batch (--for-batch {batch}) has no effect without for_length (--for-length); give both")
    for name, number in (("for_length (--for-length)", length), ("for_batch (--for-batch)", batch)):
        if number is not None:
            check_number(name, number)
            if number < 1:
                raise ConfigError(f"{name} must be at least 1, got {number}")


def cache_size(measured: Measurements, length: int, batch: int) -> CacheSize:
    """Return the size of full caches of another length and batch, by the bytes of an entry in the trace's caches.

    Bytes of an entry are the bytes of the run's evicted caches, of all configurations and without padding, over their
    entries. Raises TraceError where the trace lacks the caches' bytes.
    """
    cache_bytes = measured["cache_bytes"] - measured["cache_padding_bytes"]
    tokens, unmeasured = measured["prompt_tokens"], np.zeros(1)  # in entries of all measured layers of the full cache
    if "unmeasured_bytes" in measured:
        unmeasured = tokens * measured["unmeasured_bytes"] / (measured["full_bytes"] - measured["unmeasured_bytes"])
    entries = measured["held_share"] * (tokens + unmeasured)[:, None] - unmeasured[:, None]
    token_bytes = float(cache_bytes.sum() / entries.sum())
    others = token_bytes * float(unmeasured.mean())
    return CacheSize(length, batch, token_bytes, float(tokens.mean()), measured.trace.run.dtype, others)


@record
class SafeBudget(Record, section="safe budget"):
    """The verdicts of all limits on one selection over its budgets.

    Attributes:
        size: caches of the reader's length and batch, or None.
    """

    name: str = column("what distinguishes it from the other selections")
    verdicts: tuple[Verdict, ...] = column("one per limit")
    size: CacheSize | None = None

    @derived()
    def state(self) -> str:
        """Worst of its limits: safe, too few samples, or none."""
        return worst_state(verdict.state for verdict in self.verdicts)

    @property
    def safe(self) -> TestedBudget | None:
        """The smallest budget at which all limits hold; None if some limit holds at no budget."""
        known = [verdict.safe for verdict in self.verdicts if verdict.safe is not None]
        return max(known, key=lambda tested: tested.config.budget.value) if len(known) == len(self.verdicts) else None

    @derived()
    def budget(self) -> Budget | None:
        """Smallest budget at which every limit holds; an integer is entries, another number a share of the prompt."""
        return None if self.safe is None else self.safe.config.budget

    @derived()
    def config(self) -> EvictionConfig | None:
        """Configuration of that budget."""
        return None if self.safe is None else self.safe.config

    @derived(key="held")
    def cache_share(self) -> float | None:
        """Entries that its cache holds over those of the full cache."""
        return None if self.safe is None else self.safe.cache_share

    def case(self) -> Case:
        """Return the smallest safe budget as a case, or the first limit that fails, at the largest budget."""
        if self.safe is not None:
            return Case("", self.safe.config.budget.value, f"{self.safe.config.budget} or more", _VERDICTS[SAFE])
        failing = next(verdict for verdict in self.verdicts if verdict.state == self.state)
        budget, _, why = " ".join(failing.failure.split()).replace(";", ",").partition(": ")
        text = f"at {budget}, the largest, {failing.criterion.quantity} is {why}"
        return Case("", 0.0, text, _VERDICTS[self.state])

    @derived()
    def evicted_bytes(self) -> float | None:
        """Bytes of its caches at the length and batch of `cache`."""
        return None if self.safe is None or self.size is None else self.size.evicted_bytes(
            self.safe.config, self.safe.cache_share)  # fmt: skip

    @derived(heading="#evicted /\nfull bytes", json=False)
    def evicted_shown(self) -> str:
        """Bytes of the caches at the smallest budget that every limit allows, over those of the full caches."""
        if self.size is None:
            return ""
        full = _format_gib(self.size.full_bytes)
        return f"– / {full}" if self.evicted_bytes is None else f"{_format_gib(self.evicted_bytes)} /\n{full} GiB"


@record
class SafeBudgets(
    MemberSequence[SafeBudget],
    Result,
    section="budget",
    shown=(
        "limit_shown",
        "budget",
        "cache_share",
        "mean_shown",
        "failure",
        "evicted_shown",
    ),
    first="selection",
):
    """The smallest safe budget of every selection of a run; a sequence of them.

    Attributes:
        alike: samples whose full answer has no token but one that all caches share; 0 where no score is limited.
        left_out: samples that perplexity leaves out; 0 where it is not limited.
    """

    members: tuple[SafeBudget, ...] = column("one per selection and setting", key="selections")
    size: CacheSize | None = column("caches of the length and batch of the request", key="cache")
    identity: RunIdentity
    alike: int = 0
    left_out: int = column(
        "complete samples that a limit on perplexity leaves out: their text is a single token, which the prefill gives",
        default=0,
    )

    @derived()
    def exit_code(self) -> int:
        """0 every selection has a safe budget, 1 one has none, 2 there are too few samples to decide."""
        return {SAFE: 0, NONE: 1, FEW: 2}[worst_state(selection.state for selection in self.members)]

    def claims(self) -> Sequence[Claim]:
        """Return the smallest safe budget of each selection, or why it has none."""
        return [
            Claim(
                one.name,
                "has",
                [one.case()],
                {verdicts.MORE: "a safe budget", verdicts.LESS: "no safe budget"},
                is_name=True,
            )
            for one in self.members
        ]

    def scope(self) -> Sequence[str]:
        """Return what is safe, the kind of bounds, and the number of samples."""
        limits = " and ".join(str(verdict.criterion) for verdict in self[0].verdicts)
        bounds_answers = any(verdict.criterion_name == "drop" for verdict in self[0].verdicts)
        safe = f"safe: {limits}{'' if bounds_answers else ', which bounds no answer'}"
        return [safe, f"95 % bounds{_kl_assumption(self)}", self._sample_note()]

    def title(self) -> str:
        """Return the table's title, with the caches whose bytes are counted."""
        size = self.size
        caches = f"; caches of {size.length:,} entries × {size.batch:,} in {size.dtype}" if size else ""
        return f"smallest budget under each limit{caches}"

    def lines(self) -> Sequence[Line]:
        """Return a line per limit and selection."""
        return [
            Line(selection.name, (selection.verdicts[index], selection))
            for index in range(len(self[0].verdicts))
            for selection in self.members
        ]

    def interval_note(self) -> str:
        """Return the note on the number of samples, and on the kind and level of the bounds."""
        return f"{self._sample_note()}; bounds are one-sided, 95 %{_kl_assumption(self)}."

    def _sample_note(self) -> str:
        """Return the number of samples, and that of perplexity where it is another."""
        samples = self.identity.samples
        of_perplexity = f", of perplexity {samples - self.left_out:,}" if self.left_out else ""
        return f"n = {plural(samples, 'sample')}{of_perplexity}"

    def caveats(self) -> Sequence[str]:
        """Return notes on answers that eviction cannot change, on texts of one token, and on cache shares above 1."""
        shares = [tested.cache_share for selection in self for tested in selection.verdicts[0].budgets]
        return [
            *measurements.first_token_caveat(self.alike, self.identity.samples),
            *measurements.one_token_caveat(self.left_out),
            *above_full_caveat(shares),
        ]

    def details(self) -> Sequence[Part]:
        """Return a table of samples above the limit, and notes on the order of tests, the bounds and cache shares."""
        names = [verdict.criterion_name for verdict in self[0].verdicts]
        samples = self.identity.samples
        room = 100 * Criterion("drop", 1.0).bound(np.zeros(samples))
        few = f"{samples} samples without any loss leave room for {room:.3g} points"
        above = [
            Line(selection.name, (verdict,))
            for selection in self
            for verdict in selection.verdicts
            if verdict.above_shown
        ]
        shares = [tested.cache_share for selection in self for tested in selection.verdicts[0].budgets]
        if self.size is not None:
            shares += [
                selection.evicted_bytes / self.size.full_bytes
                for selection in self
                if selection.evicted_bytes is not None
            ]
        return [
            *(
                [columns.table("samples above the limit", above, ("budget", "above_shown"), self.FIRST)]
                if above
                else []
            ),
            (
                "Budgets are tested from the largest down, up to the first that fails, so that each selection's "
                "verdict errs about as often as one bound does; verdicts on several selections are not corrected for "
                "their number."
            ),
            *(_BOUNDS[name].format(few=few) for name in names),
            *filter(None, [measurements.first_token_note(self.alike, samples)]),
            text.cache_share_note(shares),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per selection, limit and budget, the largest budget first.

        `mean` and `bound` are nats, a ratio, a drop of the score in [0, 1], or a share; `above`, of KL and perplexity,
        is the exact bound of the share of samples above the limit; `tested` is 0 below the first failure, and `holds`
        means nothing there.
        """
        return [
            {"name": selection.name, **config_columns(tested.config), "criterion": verdict.criterion_name,
             "limit": verdict.limit, "held": tested.cache_share, "mean": tested.mean, "bound": tested.bound,
             "above": tested.above, "tested": int(tested.tested), "holds": int(tested.holds)}
            for selection in self.members for verdict in selection.verdicts for tested in verdict.budgets
        ]  # fmt: skip


def _kl_assumption(result: SafeBudgets) -> str:
    """Return the assumption of the bounds on KL and perplexity, as a phrase; empty without such a limit."""
    names = [LOGNORMAL[verdict.criterion_name] for verdict in result[0].verdicts if verdict.criterion_name in LOGNORMAL]
    return f", of {text.join_names(names)} if lognormal" if names else ""


def _format_gib(size: float) -> str:
    """Return a number of bytes in GiB, as text without the unit."""
    return f"{size / _GIB:.3g}".replace("-", "−")


def safe_budget(
    trace: Trace,
    *,
    max_kl: float | None = None,
    max_perplexity: float | None = None,
    max_drop: float | None = None,
    min_top1: float | None = None,
    sides: Sides | None = None,
    for_length: int | None = None,
    for_batch: int = 1,
) -> SafeBudgets:
    """Find each selection's smallest budget at which the limits hold with one-sided 95 % bounds.

    Budgets are tested from the largest down, up to the first that fails; of several limits all must hold. Each
    selection by itself: that one of many is wrong is likelier than 5 %.

    Args:
        trace: from `measure` or `read_trace`, all budgets entries or all shares. Only complete samples.
        max_kl: mean KL(full ‖ evicted) of the next token, in nats, over the measured steps of each sample; its bound
            assumes that KL is lognormal.
        max_perplexity: mean over samples of the text's perplexity over the full cache's; its bound assumes
            that the excess over 1 is lognormal. Samples whose text has no token that counts are left out.
        max_drop: mean drop of the score of whole answers, in points of 100.
        min_top1: mean share of measured steps whose likeliest token is the full cache's.
        sides: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`), or several; by default all.
        for_length: entries of a prompt whose caches' bytes are counted.
        for_batch: number of such prompts.

    Returns the verdicts as one result, whose `exit_code` says them all.

    Raises ConfigError for no limit or one out of its range, and for budgets of both kinds; TraceError where the trace
    has no complete sample, no such side, or lacks what is limited.

    >>> import perturbkv as pk
    >>> result = pk.safe_budget(trace, max_kl=100.0)
    >>> [(one.name, str(one.safe.config.budget)) for one in result]
    [('attention', '40'), ('two-stage', '40')]
    """
    limits = criteria(max_kl, max_drop, min_top1, max_perplexity)
    check_size(for_length, for_batch)
    named = check_sides(trace, "", "" if sides is None else sides)
    measured = Measurements(trace, ANALYSIS)
    curves = named_axes(measured, None if sides is None else named)
    each = {limit: limit.sample_means(measured) for limit in limits}
    size = None if for_length is None else cache_size(measured, for_length, for_batch)
    members = tuple(
        SafeBudget(name, tuple(judge_curve(limit, each[limit], curve) for limit in limits), size)
        for name, curve in curves
    )
    configs = [config for _, curve in curves for config in curve.configs]
    alike = 0 if max_drop is None else int(has_only_first_token(measured.trace).sum())
    left_out = measured.samples - min(map(len, each.values()))  # by perplexity
    return SafeBudgets(members, size, identity(measured.trace, configs), alike, left_out)
