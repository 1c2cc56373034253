"""Better, worse, equivalent or undecided: verdicts on the ratio of two sums over samples (METHOD: the protocol, 13).

The number is the ratio of a method's sum to its control's, its interval that of `intervals.RATIO`:

- Better, or worse: the 95 % interval lies below 1, or above.
- Equivalent within δ: two one-sided tests at 5 % each (Schuirmann, 1987) reject that the ratio is at most 1/(1 + δ),
  and that it is at least 1 + δ; that is, the 90 % interval lies between these. Both are equally far from 1 on the
  logarithm, where the interval is made, so that it does not matter which of the two sums is called the control's.
- Undecided: neither. The n that would decide is the smallest of which a run decides in four of five cases, were ratio
  and spread what they are in this one: the ratio's logarithm is then taken as normal, with the spread over √n.

A difference can be decided and smaller than δ, too. The spread is the standard error of the ratio's logarithm times √n:
of samples of equal weight, the standard deviation of their own ratios' logarithms.
"""

from __future__ import annotations

import dataclasses
import math

from scipy import special

from perturbkv.analyses.columns import Record, column, record
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats import intervals, one_sided
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.stats.intervals import MIN_SAMPLES, RATIO, OptionalInterval
from perturbkv.analyses.verdicts import ALIKE, EQUIVALENT, LESS, MARGIN, MORE, UNDECIDED, ratio_verdict

BETTER, WORSE = "better", "worse"
ONE_SIDED = dataclasses.replace(RATIO, level=1 - 2 * one_sided.RISK)
"""A ratio's interval whose ends are one-sided bounds at 5 % each: 90 %."""
POWER = 0.8
"""How often a run decides that has the n, or the effect, which is told."""
MOST_SAMPLES = 10_000
"""Of larger numbers of samples that would decide it is only told that they are larger."""
TYPICAL_SPREAD = 0.3
"""Spread of a method's propagated sum over SnapKV's, the median of 23 methods (docs/explanation/statistics.md)."""


def margin_text(margin: float) -> str:
    """Return δ in percent: '5 %', '2.5 %'."""
    return f"{100 * margin:.4g} %"


@record
class ControlVerdict(Record, section="verdict against a control"):
    """The verdict on a method's sum over its control's."""

    verdict: str = column("better, worse, equivalent (within the margin, and no difference decided), or undecided")
    within_margin: bool = column("whether two one-sided tests find the ratio within the margin; of any verdict")
    equivalence_interval: OptionalInterval = column("90 % interval of the ratio, by which these tests decide")
    samples_to_decide: int | None = column(
        "samples like these of which four of five runs decide a difference or equivalence; null where one is decided, "
        "and below five samples"
    )

    def words(self, margin: float) -> str:
        """Return the verdict as text: 'better', 'better by < 5 %', 'within 5 %', 'undecided, n ≈ 60'."""
        share = margin_text(margin)
        if self.verdict in (BETTER, WORSE):
            return f"{self.verdict} by < {share}" if self.within_margin else self.verdict
        if self.verdict == EQUIVALENT:
            return f"within {share}"
        if self.samples_to_decide is None:
            return UNDECIDED
        if self.samples_to_decide > MOST_SAMPLES:
            return f"{UNDECIDED},\nn > {MOST_SAMPLES:,}"
        step = 10 ** max(0, len(str(self.samples_to_decide)) - 2)
        about = -(-self.samples_to_decide // step) * step  # two digits: it is an estimate
        return f"{UNDECIDED},{' ' if about < 1000 else chr(10)}n ≈ {about:,}"


def decide(method: Floats, control: Floats, margin: float = MARGIN, tied: bool = False) -> ControlVerdict:
    """Return the verdict on Σ method / Σ control, of (sample,) values each; smaller is better.

    Args:
        method: summed over heads, of each sample.
        control: likewise.
        margin: δ, as `check_margin` accepts it.
        tied: whether rounding explains every difference: then none is decided.

    Undecided for fewer than five samples.
    """
    if len(method) < MIN_SAMPLES:
        return ControlVerdict(UNDECIDED, False, None, None)
    value = float(ratio(method.sum(), control.sum()))
    whole, bounds = intervals.of_ratio(method, control), intervals.of_ratio(method, control, ONE_SIDED)
    least, most = 1 / (1 + margin), 1 + margin
    within = tied or (bounds is not None and least <= bounds.low and bounds.high <= most)
    side = ratio_verdict(value, whole, tied)
    verdict = {LESS: BETTER, MORE: WORSE, ALIKE: EQUIVALENT}.get(side, EQUIVALENT if within else UNDECIDED)
    needed = None
    if verdict == UNDECIDED and whole is not None and whole.low > 0:
        # on the logarithm, half of the interval is t standard errors
        spread = math.log(whole.high / whole.low) / 2 * math.sqrt(len(method)) / RATIO.t_quantile(len(method))
        needed = samples_to_decide(value, spread, margin, len(method))
    return ControlVerdict(verdict, within, bounds, needed)


def samples_to_decide(value: float, spread: float, margin: float = MARGIN, more_than: int = MIN_SAMPLES) -> int | None:
    """Return the fewest samples, above `more_than`, that decide a ratio with this spread in four of five runs.

    None beyond a million.
    """
    return one_sided.samples_for(lambda samples: chance_to_decide(value, spread, samples, margin) >= POWER, more_than)


def chance_to_decide(value: float, spread: float, samples: int, margin: float = MARGIN) -> float:
    """Return how often a run of so many samples decides a difference, or equivalence, at this ratio and spread."""
    distance, error = abs(math.log(value)), spread / math.sqrt(samples)
    differs, within = RATIO.t_quantile(samples) * error, math.log1p(margin) - ONE_SIDED.t_quantile(samples) * error

    def nearer_than(end: float) -> float:
        """Return how often the logarithm of a run's ratio is nearer to 0 than `end`."""
        return float(special.ndtr((end - distance) / error) - special.ndtr((-end - distance) / error))

    return 1 - nearer_than(differs) + nearer_than(min(max(within, 0.0), differs))


@record
class SmallestEffect(Record, section="smallest effect"):
    """The smallest difference of two sums that a number of samples can show, told before they are measured."""

    samples: int = column("n")
    spread: float = column("spread between prompts that is assumed, that of the logarithm of the sums' ratio")
    better_below: float | None = column(
        "a true ratio of this is decided in four of five runs, as any below; null below five samples"
    )
    worse_above: float | None = column("likewise, as any above")
    margin: float | None = column("within which sums are equivalent; null where that is not asked")
    equivalent_spread: float | None = column(
        "largest spread at which four of five runs find equal sums equivalent; null likewise"
    )


def smallest_effect(samples: int, margin: float | None = None, spread: float = TYPICAL_SPREAD) -> SmallestEffect:
    """Return the smallest effect that `samples` can show; `margin` where equivalence is asked, too."""
    if samples < MIN_SAMPLES:
        return SmallestEffect(samples, spread, None, None, margin, None)
    reach = RATIO.t_quantile(samples) + float(special.ndtri(POWER))
    factor = math.exp(min(reach * spread / math.sqrt(samples), 700))  # beyond it a float overflows
    both = ONE_SIDED.t_quantile(samples) + float(special.ndtri((1 + POWER) / 2))  # of equal sums, to either side
    widest = None if margin is None else math.log1p(margin) * math.sqrt(samples) / both
    return SmallestEffect(samples, spread, 1 / factor, factor, margin, widest)
