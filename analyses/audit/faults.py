"""The first difference between an audited eviction and what its kept sets imply (METHOD: Audit, 1 to 3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isnan, nan

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.columns import Record, column, record
from perturbkv.audit_trace import CHANGES, FLOORS, SITUATIONS, AuditRun, CacheEntries, DecodeDistances

_LARGE = 1e4
KINDS: Mapping[str, str] = {
    "model": "the eviction changed the model, so that nothing can be compared any more",
    "uneven": "a layer was not evicted, and the others were",
    "empty": "a layer keeps no entry of the prompt",
    "row": CHANGES["row"],
    "padding": "padding is attended to",
    "repeated": "every entry is cached once per query head",
    "foreign": "entries like none of the prompt's",
    **{kind: meaning for kind, meaning in CHANGES.items() if kind not in ("row", "changed")},
    "duplicate": "an entry is cached several times",
    "hidden": "a mask hides entries that the cache holds",
    "positions": "new tokens stand at wrong positions",
    "mask": "the mask of a block does not fit",
    "raised": "reading or decoding raises an error",
    "changed": CHANGES["changed"],
    "decoding": "decoding differs, for no reason that was looked for",
}
"""Kind of a fault -> its meaning, the most telling first."""


@record
class Fault(Record):
    """The first difference of one prompt in one situation."""

    sample: str = column("of the prompt")
    situation: str = column("single, block or batch")
    row: int = column("of the batch")
    kind: str = column(f"kind of the difference: {', '.join(KINDS)}")
    what: str = column("what is wrong")
    layer: int = column("the first that differs, from 0; −1 where it is of none", default=-1)
    head: int = column(
        "a kept set of the cache where its entries differ, else a query head; −1 where it is of none", default=-1
    )
    step: int = column("forward pass after the eviction, from 0; −1 where it is of none", default=-1)
    entry: int = column("position in the prompt of the first entry concerned; −1 where it is of none", default=-1)
    floors: float = column(
        "noise floors between decoding and its reference in that layer at that step; null where none was measured",
        default=nan,
    )

    def location(self) -> str:
        """Return layer, head, entry and step as text, without unknown parts: 'layer 3, head 1'."""
        parts = (("layer", self.layer), ("head", self.head), ("entry", self.entry), ("step", self.step))
        return ", ".join(f"{name} {index}" for name, index in parts if index >= 0)


def floors_text(floors: float) -> str:
    """Return a number of noise floors as text: '0.7', '120', '3e6'."""
    if isnan(floors):
        return "–"
    if floors >= _LARGE:
        return f"{floors:.0e}".replace("e+0", "e")
    return f"{floors:,.1f}" if floors < 100 else f"{floors:,.0f}"


@dataclass(frozen=True)
class Difference:
    """A difference of a run from its reference, with the fields of a `Fault`."""

    kind: str
    what: str
    layer: int = -1
    head: int = -1
    step: int = -1
    entry: int = -1


def fault_of_run(run: AuditRun, allowed: Collection[str] = ()) -> Fault | None:
    """Return the first difference of a run from its reference; None without a difference.

    Changes of the kinds `allowed` are none; decoding is then compared with the plain model on the changed entries.
    """
    if run.damage:
        raised = f", and {run.failed}" if run.failed else ""
        return Fault(run.sample, run.situation, run.row, "model", f"{run.damage}{raised}")
    entries = [] if run.entries is None else [*_entry_differences(run.entries)]
    refused = [difference for difference in entries if difference.kind not in allowed]
    decoded = run.decoded if len(refused) == len(entries) or run.on_own_entries is None else run.on_own_entries
    decoding = None if decoded is None else _decoding_difference(decoded)
    differences = [*refused, *([] if decoding is None else [decoding])]
    first = min(differences, key=_order_in_run, default=None)
    if run.failed and (first is None or first.kind == "decoding"):
        kind = "uneven" if run.failed_layer >= 0 else "raised"
        first = Difference(kind, run.failed, run.failed_layer)
    if first is None:
        return None
    floors = _floors_at(run.decoded, first.layer, first.step)
    return Fault(run.sample, run.situation, run.row, floors=floors, **asdict(first))


def _order_in_run(difference: Difference) -> tuple[int, int, int, int]:
    """Return the sort key of a run's differences: by step, layer, kind and head."""
    return difference.step, difference.layer, list(KINDS).index(difference.kind), difference.head


def _entry_differences(entries: CacheEntries) -> Iterator[Difference]:
    """Yield all differences between a cache's entries and the full cache's, kind by kind."""
    for layer in entries.repeated:
        times = _repetitions_text(entries)
        what = f"every entry is cached {times}, once per query head (repeat_kv before caching)"
        yield Difference("repeated", what, layer, 0, 0)
    for layer, sets in enumerate(entries.kept):
        if not any(map(len, sets)) and not entries.strangers[layer].any() and not entries.padded[layer].any():
            yield Difference("empty", "no entry of the prompt is kept", layer, step=0)
    yield from _counted_differences("padding", entries.padded, "{} of padding attended to")
    yield from _counted_differences("foreign", entries.strangers, "{} like none of the prompt's")
    for layer, heads in enumerate(entries.altered):
        for head, changes in enumerate(heads):
            for change in changes:
                yield Difference(change.kind, change.what, layer, head, 0, change.entry)
    yield from _counted_differences("duplicate", entries.duplicates, "{} kept twice", entries.duplicated)
    hidden = "a mask hides {} that the cache holds"
    yield from _counted_differences("hidden", entries.hidden, hidden, entries.first_hidden)


def _counted_differences(
    kind: str, counts: NDArray[np.int64], template: str, first: NDArray[np.int64] | None = None
) -> Iterator[Difference]:
    """Yield a difference per positive count in `counts` (layer, kept set); its text is `template` with the count.

    `first` are the positions of the first entries concerned.
    """
    for layer, head in np.argwhere(counts > 0):
        count = int(counts[layer, head])
        what = template.format(f"{count:,} {'entry' if count == 1 else 'entries'}")
        yield Difference(kind, what, int(layer), int(head), 0, -1 if first is None else int(first[layer, head]))


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
        kind, what = _cause(decoded, step)
        return Difference(kind, what, layer, head, step)
    hidden = np.argwhere(decoded.hidden / decoded.hidden_floor > FLOORS)
    if len(hidden):
        step, layer = map(int, hidden[0])
        return Difference("decoding", "the residual stream differs from the reference's", layer, -1, step)
    logits = np.argwhere(logit_floors(decoded) > FLOORS)
    if len(logits):
        return Difference("decoding", "the logits differ from the reference's", step=int(logits[0, 0]))
    return None


def _cause(decoded: DecodeDistances, step: int) -> tuple[str, str]:
    """Return the cause of a decoding difference as its kind and as text: positions, masks, or unknown."""
    lag = float(decoded.behind[step])
    if lag:
        return "positions", _position_error_text(lag)
    if decoded.sees_later:
        return "mask", "the mask of a block lets its tokens see those behind them"
    if decoded.hides:
        return "mask", "the mask of a block hides kept entries from some of its tokens"
    return "decoding", "decoding differs from the masked reference, its entries do not"


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


def fault_order(fault: Fault) -> tuple[int, int, int]:
    """Return the sort key of faults: the most telling kind first, then by situation and row."""
    return list(KINDS).index(fault.kind), list(SITUATIONS).index(fault.situation), fault.row
