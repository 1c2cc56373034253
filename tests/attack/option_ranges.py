"""What each numeric option of the command line may be, written down apart from the code that refuses the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

_LONGEST = 2**63 - 1


@dataclass(frozen=True)
class Range:
    """Least and largest number, and whether only whole ones are meant; `share`: a decimal point makes it one, ≤ 1."""

    low: float
    high: float = _LONGEST
    whole: bool = True
    open: bool = False
    share: bool = False

    def holds(self, text: str) -> bool:
        """Whether a text is such a number, as Python reads numbers: `1_6` and ` 5` are, `0x10` is not."""
        number, was_whole = _read(text)
        if number is None or (self.whole and not was_whole and not self.share):
            return False
        high = 1 if self.share and not was_whole else self.high
        return (number > self.low if self.open else number >= self.low) and number <= high


def _read(text: str) -> tuple[Fraction | None, bool]:
    """The number that a text is, and whether it is written without a point."""
    try:
        return Fraction(int(text)), True
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None, False
    return (Fraction(value) if math.isfinite(value) else None), False


RANGES: Mapping[str, Range] = {
    "--samples": Range(1),
    "--seed": Range(-_LONGEST),
    "--length": Range(128),
    "--depth": Range(0, 1, whole=False),
    "--max-tokens": Range(2),
    "--budget": Range(0, open=True, share=True),
    "--alpha": Range(0, 1, whole=False),
    "--window": Range(1),
    "--protect-first": Range(0, share=True),
    "--protect-recent": Range(0, share=True),
    "--steps": Range(1),
    "--chunk-mib": Range(1),
    "--step": Range(0),
    "--columns": Range(1, 2),
    "--max-new-tokens": Range(1),
    "--compress-every": Range(1),
    "--tokens": Range(1),
    "--sample": Range(0),
    "--layer": Range(0),
    "--head": Range(0),
    "--repeats": Range(1),
    "--entries": Range(1),
    "--tolerance": Range(0, math.inf, whole=False),
    "--right": Range(0, math.nextafter(1, 0), whole=False),
    "--lost": Range(0, 1, whole=False, open=True),
    "--max-kl": Range(0, math.inf, whole=False, open=True),
    "--max-drop": Range(0, 100, whole=False, open=True),
    "--min-top1": Range(0, 1, whole=False, open=True),
    "--for-length": Range(1),
    "--for-batch": Range(1),
    "--permutations": Range(0, 100_000),
    "--greedy": Range(0, 100_000),
}
"""Option -> its range. A number in it may still be refused, for it has to fit the others."""
