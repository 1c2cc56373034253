"""Head by head, one baseline against one or several treatments: the result that a notebook holds (paper, figure 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from perturbkv.analyses.heads import heads_told
from perturbkv.analyses.heads.head_comparison import HeadComparison, summarise
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.pairing import Sides, checked, pair_columns, pairs
from perturbkv.analyses.result import Result
from perturbkv.analyses.several import Sequenced
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Table
from perturbkv.errors import ConfigError
from perturbkv.trace import Trace


@dataclass(frozen=True, repr=False)
class HeadComparisons(Sequenced[HeadComparison], Result):
    """Comparisons of two configurations each, head by head; a sequence of them, whose slices are results again.

    `plot` draws of one pair a scatter per kind, a point per head; of several a panel each, propagated.

    Attributes:
        members: the comparisons, those of one baseline together.
        identity: of the run, with every configuration that is compared.
    """

    members: tuple[HeadComparison, ...]
    identity: RunIdentity

    def __post_init__(self) -> None:
        if not self.members:
            msg = "expected at least one comparison, got none; take a slice that holds one"
            raise ConfigError(msg)

    @overload
    def __getitem__(self, place: int) -> HeadComparison: ...

    @overload
    def __getitem__(self, place: slice) -> HeadComparisons: ...

    def __getitem__(self, place: int | slice) -> HeadComparison | HeadComparisons:
        if not isinstance(place, slice):
            return self.members[place]
        held = self.members[place]
        return HeadComparisons(held, replace(self.identity, configs=_shown(held)))

    def conclusion(self) -> str:
        """Whether the treatment moves the attention output less, propagated and isolated, with intervals and n."""
        return heads_told.conclusion(self.members)

    def tables(self) -> Sequence[Table | str]:
        """Of one pair a table per kind of perturbation; of several one table, two rows each."""
        return heads_told.tables(self.members)

    def notes(self) -> str:
        """What intervals, ties and columns mean, a line each."""
        return heads_told.notes(self.members)

    def to_dict(self) -> dict[str, Any]:
        """`comparisons`: one object per pair, as `docs/json.md` says."""
        return {"comparisons": [pair.to_dict() for pair in self.members]}

    def records(self) -> list[dict[str, Any]]:
        """A row per pair × kind × layer × head.

        Means over samples and the noise floor are in the distance's unit; `verdict` is that of the means, `decided`
        that of the corrected tests: 1 less than the baseline, 0 tied or undecided, −1 more; `flagged`: σ ≤ 0.5.
        """
        return [row for pair in self.members for kind in ("isolated", "propagated") for row in _rows(pair, kind)]


def compare_heads(
    trace: Trace,
    baseline: str = "attention",
    treatments: Sides = "two-stage",
    *,
    step: int = 0,
    distance: str = "l1",
) -> HeadComparisons:
    """Which heads does a selection help, and by how much? Perturbation per query head (paper, figure 2; METHOD).

    Every treatment is compared with the baseline wherever the trace holds both with the same budget, α and so on: one
    pair each. Only complete samples that have the step count.

    Args:
        trace: from `measure` or `read_trace`.
        baseline: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`).
        treatments: likewise, one or several.
        step: which decode step, from 0.
        distance: `l1`, `l2` or `cosine`: between a head's contribution to the attention output with the full cache and
            with the evicted one, each of d_model numbers; L1 and L2 in the output's own unit, cosine from 0 to 2.

    Returns the pairs as one result. Its arrays are (layer, head), means over samples.

    Raises TraceError where the trace has no complete sample or no such pair, or lacks the distance; ConfigError for a
    step that it does not have, and for sides that are no names; UnknownNameError for an unknown distance.

    >>> import perturbkv as pk
    >>> found = pk.compare_heads(trace, "attention", "two-stage")
    >>> len(found), found[0].propagated.verdict.shape  # (layer, head)
    (1, (2, 2))
    >>> shown = found.to_frame().query("kind == 'propagated'")
    >>> shown["verdict"].tolist() == found[0].propagated.verdict.ravel().tolist()
    True
    """
    found = [
        pair for treatment in checked(trace, baseline, treatments) for pair in pairs(trace.run, baseline, treatment)
    ]
    order = list(dict.fromkeys(first for first, _ in found))
    found.sort(key=lambda pair: order.index(pair[0]))
    compared = tuple(summarise(trace, *pair, step=step, distance=distance) for pair in found)
    return HeadComparisons(compared, identity(trace, _shown(compared), step))


def _shown(pairs: Sequence[HeadComparison]) -> tuple[EvictionConfig, ...]:
    """Every configuration once."""
    return tuple(dict.fromkeys(side for pair in pairs for side in (pair.baseline, pair.treatment)))


def _rows(pair: HeadComparison, name: str) -> Iterator[dict[str, Any]]:
    kind = getattr(pair, name)
    about = {**pair_columns(pair.baseline, pair.treatment), "distance": pair.distance, "step": pair.step, "kind": name}
    for here in np.ndindex(kind.verdict.shape):
        yield {
            **about,
            "layer": pair.identity.layer(here[0]),
            "head": here[1],
            "baseline_mean": float(kind.baseline_mean[here]),
            "treatment_mean": float(kind.treatment_mean[here]),
            "noise_floor": float(kind.floor_mean[here]),
            "verdict": int(kind.verdict[here]),
            "decided": int(kind.decided.verdict[here]),
            "p": float(kind.decided.p[here]),
            "flagged": bool(pair.flagged[here]),
        }
