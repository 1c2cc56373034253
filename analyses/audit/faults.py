"""The first difference between an audited eviction and what its kept sets imply (METHOD: Audit, 1 to 3)."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan, nan

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, record
from perturbkv.audit_trace import SITUATIONS, AuditRun, CacheEntries, DecodeDistances

FLOORS = 4
"""Number of noise floors above which a distance is a difference (METHOD: Audit)."""
_LARGE = 1e4


@record
class Fault(Record):
    """The first difference of one prompt in one situation."""

    sample: str = column("of the prompt")
    situation: str = column("single, block or batch")
    row: int = column("of the batch")
    what: str = column("what is wrong")
    layer: int = column("the first that differs, from 0; −1 where it is of none", default=-1)
    head: int = column(
        "a kept set of the cache where its entries differ, else a query head; −1 where it is of none", default=-1
    )
    step: int = column("forward pass after the eviction, from 0; −1 where it is of none", default=-1)
    floors: float = column(
        "noise floors between decoding and its reference in that layer at that step; null where none was measured",
        default=nan,
    )

    def location(self) -> str:
        """Return layer, head and step as text, without unknown parts: 'layer 3, head 1'."""
        parts = (("layer", self.layer), ("head", self.head), ("step", self.step))
        return ", ".join(f"{name} {index}" for name, index in parts if index >= 0)


def floors_text(floors: float) -> str:
    """Return a number of noise floors as text: '0.7', '120', '3e6'."""
    if isnan(floors):
        return "–"
    if floors >= _LARGE:
        return f"{floors:.0e}".replace("e+0", "e")
    return f"{floors:,.1f}" if floors < 100 else f"{floors:,.0f}"


def fault_of_run(run: AuditRun) -> Fault | None:
    """Return the first difference of a run from its reference; None without a difference."""
    entries = None if run.entries is None else _entry_difference(run.entries)
    decoded = None if run.decoded is None else _decoding_difference(run.decoded)
    first = min(filter(None, (entries, decoded)), key=lambda difference: (difference[2], difference[0]), default=None)
    if first is None:
        return Fault(run.sample, run.situation, run.row, run.failed) if run.failed else None
    layer, head, step, what = first
    return Fault(run.sample, run.situation, run.row, what, layer, head, step, _floors_at(run.decoded, layer, step))


Difference = tuple[int, int, int, str]
"""Layer, head, step, description."""


def _entry_difference(entries: CacheEntries) -> Difference | None:
    """Return the first difference, by layer and head, between a cache's entries and the full cache's."""
    return min(_entry_differences(entries), key=lambda difference: difference[:2], default=None)


def _entry_differences(entries: CacheEntries) -> Iterator[Difference]:
    """Yield all differences between a cache's entries and the full cache's, kind by kind."""
    for layer in entries.repeated:
        times = _repetitions_text(entries)
        yield layer, 0, 0, f"every entry is cached {times}, once per query head (repeat_kv before caching)"
    yield from _counted_differences(entries.padded, "{} of padding attended to")
    yield from _counted_differences(entries.strangers, "{} like none of the prompt's")
    for layer, heads in enumerate(entries.altered):
        for head, words in enumerate(heads):
            if words:
                yield layer, head, 0, words
    yield from _counted_differences(entries.duplicates, "{} kept twice")


def _counted_differences(counts: NDArray[np.int64], template: str) -> Iterator[Difference]:
    """Yield a difference per positive count in `counts` (layer, kept set); its text is `template` with the count."""
    for layer, head in np.argwhere(counts > 0):
        count = int(counts[layer, head])
        yield int(layer), int(head), 0, template.format(f"{count:,} {'entry' if count == 1 else 'entries'}")


def _repetitions_text(entries: CacheEntries) -> str:
    """Return how often the first repeated layer holds its first kept set, as text: '4 times'."""
    sets = entries.kept[entries.repeated[0]]
    group = 1
    while group < len(sets) and np.array_equal(sets[group], sets[0]):
        group += 1
    return f"{group} times"


def _decoding_difference(decoded: DecodeDistances) -> Difference | None:
    """Return the first step, layer and head where decoding differs from the reference."""
    heads = np.argwhere(head_floors(decoded) > FLOORS)
    if len(heads):
        step, layer, head = map(int, heads[0])
        return layer, head, step, _cause_text(decoded, step)
    hidden = np.argwhere(decoded.hidden / decoded.hidden_floor > FLOORS)
    if len(hidden):
        step, layer = map(int, hidden[0])
        return layer, -1, step, "the residual stream differs from the reference's"
    logits = np.argwhere(logit_floors(decoded) > FLOORS)
    return (-1, -1, int(logits[0, 0]), "the logits differ from the reference's") if len(logits) else None


def _cause_text(decoded: DecodeDistances, step: int) -> str:
    """Return the cause of a decoding difference as text: positions, masks, or unknown."""
    lag = float(decoded.behind[step])
    if lag:
        return _position_error_text(lag)
    if decoded.sees_later:
        return "the mask of a block lets its tokens see those behind them"
    if decoded.hides:
        return "the mask of a block hides kept entries from some of its tokens"
    return "decoding differs from the masked reference, its entries do not"


def _position_error_text(lag: float) -> str:
    """Return an error in new tokens' positions as text; `lag`: positions too early, NaN for wrong rotation."""
    if isnan(lag):
        return "keys of new tokens are not rotated to their positions"
    count = abs(lag)
    side = "early" if lag > 0 else "late"
    return f"new tokens stand {count:,.0f} {'position' if count == 1 else 'positions'} too {side}"


def head_floors(decoded: DecodeDistances) -> NDArray[np.float64]:
    """Return the distances of head outputs in noise floors, (step, layer, head)."""
    return np.asarray(decoded.head / decoded.head_floor[:, None])


def layer_floors(decoded: DecodeDistances) -> NDArray[np.float64]:
    """Return each layer's distance in noise floors, (step, layer): the larger of its worst head's and its stream's."""
    return np.asarray(np.fmax(head_floors(decoded).max(axis=-1), decoded.hidden / decoded.hidden_floor))


def logit_floors(decoded: DecodeDistances) -> NDArray[np.float64]:
    """Return the distances of the logits in noise floors, (step,)."""
    return np.asarray(decoded.logits / decoded.logits_floor)


def worst_floors(decoded: DecodeDistances) -> float:
    """Return the largest distance in noise floors over all steps, of layers and logits."""
    return float(np.nanmax(np.concatenate([layer_floors(decoded).ravel(), logit_floors(decoded)])))


def _floors_at(decoded: DecodeDistances | None, layer: int, step: int) -> float:
    """Return the distance of a layer (−1: of the logits) at a step, in noise floors; NaN where not measured."""
    if decoded is None or step >= len(decoded.logits):
        return nan
    return float(logit_floors(decoded)[step] if layer < 0 else layer_floors(decoded)[step, layer])


def fault_order(fault: Fault) -> tuple[int, int]:
    """Return the sort key of faults: by situation, then by row."""
    return list(SITUATIONS).index(fault.situation), fault.row
