"""What mixtures of two configurations' kept sets did to a prompt, as plain numbers and as lines of JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from perturbkv.configs.mixture import Mixture

PER_STEP = ("drift", "final_drift", "kl", "top1", "propagated")
"""Of each decode step: L1 drift after the last measured layer and after the final norm, KL(full ‖ evicted) in nat,
whether the most probable token is the full run's, Σ over heads of the propagated L1 perturbation."""
Heads = list[list[list[float]]]
"""(step, layer, head), of query heads."""


@dataclass(frozen=True)
class SwapRow:
    """What one mixture did.

    Attributes:
        mixture: who has which kept set.
        held: entries of its cache over those of the full one.
        values: each of `PER_STEP`, per step.
        score: of its answer, 0 to 1; NaN where none was asked for.
        heads: propagated L1 perturbation; None where heads were not asked for.
    """

    mixture: Mixture
    held: float
    values: Mapping[str, tuple[float, ...]]
    score: float = math.nan
    heads: Heads | None = None


@dataclass(frozen=True)
class SwapBatch:
    """Mixtures that were decoded together.

    Attributes:
        sample: its id.
        rows: one per mixture.
        floors: each of `PER_STEP`, per step: what the row showed that keeps everything.
        full_score: of the full cache's answer; NaN where none was asked for.
        head_floors, head_norms: noise floor and L1 norm of o_h per head, where any row tells its heads.
    """

    sample: str
    rows: tuple[SwapRow, ...]
    floors: Mapping[str, tuple[float, ...]]
    full_score: float = math.nan
    head_floors: Heads | None = None
    head_norms: Heads | None = None

    def record(self) -> dict[str, Any]:
        """As a line holds it: NaN is null, every number whole."""
        rows = [{"mixture": str(row.mixture), **_plain(row, "held", "values", "score", "heads")} for row in self.rows]
        return {
            "sample": self.sample,
            "rows": rows,
            **_plain(self, "floors", "full_score", "head_floors", "head_norms"),
        }

    @classmethod
    def of(cls, record: Mapping[str, Any], kept_heads: int) -> Self:
        """What `record` made. Raises KeyError, TypeError, ValueError for what it did not make."""
        rows = tuple(
            SwapRow(
                Mixture.parse(one["mixture"], kept_heads), float(one["held"]), _values(one["values"]),
                _number(one["score"]), one["heads"],
            )
            for one in record["rows"]
        )  # fmt: skip
        told = (record["head_floors"], record["head_norms"])
        return cls(str(record["sample"]), rows, _values(record["floors"]), _number(record["full_score"]), *told)


def _plain(held: Any, *names: str) -> dict[str, Any]:
    found = {name: getattr(held, name) for name in names}
    return {name: None if isinstance(one, float) and math.isnan(one) else one for name, one in found.items()}


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _values(told: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(map(float, told[name])) for name in PER_STEP}
