"""What comparisons let a reader say: less, more, alike or not decided, in plain words with the numbers behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.naming import apart, counted
from perturbkv.analyses.sentences import decided
from perturbkv.analyses.stats.intervals import LEAST, Scalar
from perturbkv.configs.eviction import EvictionConfig

LESS, MORE, ALIKE, UNDECIDED, FEW = "less", "more", "alike", "undecided", "few"


@dataclass(frozen=True)
class Outcome:
    """What one comparison says.

    Attributes:
        name: what tells it from the others, such as 'at budget 64'; empty where it stands alone.
        verdict: LESS, MORE, ALIKE (no difference beyond rounding), UNDECIDED (the interval holds both), FEW (too few
            samples for an interval).
        value: the number that says it: smallest to largest is the order in which outcomes are told.
        shown: the same as text, with its interval.
    """

    name: str
    verdict: str
    value: float
    shown: str


def by_ratio(name: str, ratio: float, interval: Scalar, tied: bool, samples: int) -> Outcome:
    """Of treatment over baseline: decided where its interval leaves 1 out; `tied` where rounding explains it."""
    verdict = ALIKE if tied else _side(interval, 1.0, samples)
    return Outcome(name, verdict, ratio, text.decimal(ratio, interval))


def by_share(name: str, share: float, interval: Scalar, samples: int) -> Outcome:
    """Of a share that is better: MORE than half of all, LESS, or undecided."""
    return Outcome(name, _side(interval, 0.5, samples), share, text.percent(share, interval))


def _side(interval: Scalar, middle: float, samples: int) -> str:
    """On which side of the middle an interval lies."""
    side = decided(interval, middle)
    if side is None:
        return FEW if samples < LEAST else UNDECIDED
    return (UNDECIDED, MORE, LESS)[side]


def of_many(outcomes: Sequence[Outcome], who: str, words: Mapping[str, str], samples: int) -> str:
    """'two-stage moves it less than attention in 3 of 8 comparisons, more in 2, not decided in 3 (8 samples, …)'.

    `who` stands before the counts, `words` say what LESS and MORE are, the one that is counted first in front.
    """
    counts = f"{counted(samples, 'sample')}, each comparison at 95 %"
    question = f"whether {who} {next(iter(words.values()))}"
    if any(one.verdict == FEW for one in outcomes):
        return f"{too_few(samples)} in any of {len(outcomes)} comparisons {question}"
    if all(one.verdict == UNDECIDED for one in outcomes):
        return f"in none of {len(outcomes)} comparisons is it decided {question} ({counts})"
    return f"{who} {tally(outcomes, words)} ({counts})"


def tally(outcomes: Sequence[Outcome], words: Mapping[str, str]) -> str:
    """'less in 3 of 8 comparisons, more in 2, not decided in 3'; what is none is left out but for the first."""
    said = {**words, ALIKE: "no difference beyond rounding", UNDECIDED: "not decided"}
    count = {verdict: sum(one.verdict == verdict for one in outcomes) for verdict in said}
    first, *others = said
    told = [f"{said[verdict]} in {count[verdict]}" for verdict in others if count[verdict]]
    return ", ".join([f"{said[first]} in {count[first]} of {len(outcomes)} comparisons", *told])


def ends(outcomes: Sequence[Outcome]) -> str:
    """'from 0.61 [0.50, 0.70] at budget 64 to 1.20 [1.10, 1.30] at budget 128': the least and the largest."""
    told = sorted((one for one in outcomes if not np.isnan(one.value)), key=lambda one: one.value)
    return f"from {' to '.join(f'{one.shown} {one.name}' for one in (told[0], told[-1]))}" if told else "no number"


def too_few(samples: int) -> str:
    """Who cannot decide: 'One sample is too few to decide'."""
    return f"{'One sample is' if samples == 1 else f'{samples} samples are'} too few to decide"


def settings(configs: Sequence[EvictionConfig], *without: str) -> list[str]:
    """Of each configuration what tells it from the others beside its selection: 'with adakv at budget 64'; or nothing.

    Choices of `without` are left out.
    """
    return [_setting(config, told) for config, told in zip(configs, apart(configs, "selection", *without), strict=True)]


def _setting(config: EvictionConfig, told: Mapping[str, str]) -> str:
    words = [
        f"budget {config.budget}" if choice == "budget" else word for choice, word in told.items() if choice != "policy"
    ]
    return " ".join([*([f"with {told['policy']}"] if "policy" in told else []), *(["at"] if words else []), *words])
