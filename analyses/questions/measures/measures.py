"""Does another distance change what is concluded? L2 and cosine beside L1, measured and selecting (appendix G)."""

from __future__ import annotations

from typing import Any

from perturbkv.analyses.distances import DISTANCES
from perturbkv.analyses.of_settings import OfSettings, by_head
from perturbkv.analyses.pairing import Sides
from perturbkv.analyses.questions.measures import measure_tables, measure_told
from perturbkv.analyses.questions.measures.measure_settings import Setting, settings
from perturbkv.display import Table
from perturbkv.trace import Trace


class Measures(OfSettings[Setting]):
    """Every setting of a trace in which something is compared with the baseline, in L1, L2 and 1 − cos.

    A setting: configurations that share budget, granularity and protection.
    """

    def conclusion(self) -> str:
        """Whether verdicts, orders and links are others in another distance, and what selecting by L2 brings."""
        return measure_told.conclusion(self.settings, self.identity.samples)

    def tables(self) -> list[Table | str]:
        """Of each setting ratios, better heads, verdicts, places, links, and what selects."""
        return [part for setting in self.settings for part in measure_tables.tables(setting)]

    def notes(self) -> str:
        """What rows and columns mean."""
        return measure_told.notes(self.settings, self.identity.samples)

    def records(self) -> list[dict[str, Any]]:
        """A row per comparison, distance, kind, layer and head: means over samples, their floor and the verdict.

        `part` is `treatment` against the baseline, or `norm`: L2 norms against L1 norms. A verdict is 1 (better), 0
        (tied) or −1 (worse).
        """
        return [
            one
            for setting in self.settings
            for part, rows in (("treatment", setting.rows), ("norm", setting.norms))
            for row in rows
            for distance in DISTANCES
            for one in by_head(row.heads[distance], setting=setting.name, part=part, distance=distance)
        ]


def measures(trace: Trace, baseline: str = "attention", treatments: Sides | None = None, *, step: int = 0) -> Measures:
    """Does another distance than L1 change what is concluded?.

    Compared are, in L1, L2 and as 1 − cos (METHOD: measures beside L1): every treatment with the baseline, head by
    head; all configurations of a prompt by rank; their ranks with KL of the same step and, where the trace holds
    answers, with the answers' scores (METHOD: the protocol, 7); and selections by L2 norms with the same by L1 norms.

    Args:
        trace: from `measure` or `read_trace`.
        baseline: a selection, a policy, or both (`adakv:attention`).
        treatments: likewise, one or several; by default two-stage and hindsight by both norms, attention-unpooled and
            random, as far as the trace holds them.
        step: which decode step, from 0.

    Raises TraceError where the trace lacks a side or a distance, or has no complete sample; ConfigError where it has no
    such step, and for sides that are no names.

    Example, of a `trace` of attention and two-stage of one budget:
        >>> import perturbkv as pk
        >>> row = pk.measures(trace, treatments="two-stage").settings[0].rows[0]
        >>> list(row.heads), [one.distance for one in row.against]
        (['l1', 'l2', 'cosine'], ['l2', 'cosine', 'l2', 'cosine'])
    """
    return Measures.of(trace, settings(trace, baseline, treatments, step), step)
