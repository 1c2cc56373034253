"""Where an audited eviction first does what its kept sets do not imply, and what it is (METHOD: Audit, 1 to 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan, nan

import numpy as np
from numpy.typing import NDArray

from perturbkv.audit_trace import SITUATIONS, Audited, Decoded, Entries

FLOORS = 4
"""More noise floors than this are a difference (METHOD: Audit)."""


@dataclass(frozen=True)
class Fault:
    """The first difference of one prompt in one situation.

    Attributes:
        sample, situation, row: of which run.
        what: in words.
        layer, head, step: where, from 0; −1 where it is of none. A step is a forward pass after the eviction, a head
            a kept set of the cache where its entries differ and else a query head.
        floors: noise floors between decoding and its reference in that layer at that step; NaN where none was measured.
    """

    sample: str
    situation: str
    row: int
    what: str
    layer: int = -1
    head: int = -1
    step: int = -1
    floors: float = nan

    def where(self) -> str:
        """Layer, head and step, as far as it has them."""
        places = (("layer", self.layer), ("head", self.head), ("step", self.step))
        return ", ".join(f"{name} {place}" for name, place in places if place >= 0)


def of_run(run: Audited) -> Fault | None:
    """The first difference of a run; None where there is none."""
    held = None if run.entries is None else _of_entries(run.entries)
    decoded = None if run.decoded is None else _of_decoding(run.decoded)
    found = min(filter(None, (held, decoded)), key=lambda one: (one[2], one[0]), default=None)
    if found is None:
        return Fault(run.sample, run.situation, run.row, run.failed) if run.failed else None
    layer, head, step, what = found
    return Fault(run.sample, run.situation, run.row, what, layer, head, step, _floors(run.decoded, layer, step))


Place = tuple[int, int, int, str]
"""Layer, head, step, what."""


def _of_entries(entries: Entries) -> Place | None:
    """The first layer whose entries are not the full cache's, with its first head."""
    return min(_entry_faults(entries), key=lambda one: one[:2], default=None)


def _entry_faults(entries: Entries) -> Iterator[Place]:
    for layer in entries.repeated:
        yield layer, 0, 0, f"every entry is cached {_times(entries)}, once per query head (repeat_kv before caching)"
    yield from _counted(entries.padded, "{} of padding attended to")
    yield from _counted(entries.strangers, "{} like none of the prompt's")
    for layer, words_of in enumerate(entries.altered):
        for head, words in enumerate(words_of):
            if words:
                yield layer, head, 0, words
    yield from _counted(entries.duplicates, "{} kept twice")


def _counted(counts: NDArray[np.int64], words: str) -> Iterator[Place]:
    for layer, head in np.argwhere(counts > 0):
        count = int(counts[layer, head])
        yield int(layer), int(head), 0, words.format(f"{count:,} {'entry' if count == 1 else 'entries'}")


def _times(entries: Entries) -> str:
    """How often an entry is there: query heads over sets that differ within the first repeated layer."""
    sets = entries.kept[entries.repeated[0]]
    group = 1
    while group < len(sets) and np.array_equal(sets[group], sets[0]):
        group += 1
    return f"{group} times"


def _of_decoding(decoded: Decoded) -> Place | None:
    """The first step, layer and head where decoding is not the reference's."""
    units = head_floors(decoded)
    far = np.argwhere(units > FLOORS)
    if len(far):
        step, layer, head = map(int, far[0])
        return layer, head, step, _cause(decoded, step)
    hidden = np.argwhere(decoded.hidden / decoded.hidden_floor > FLOORS)
    if len(hidden):
        step, layer = map(int, hidden[0])
        return layer, -1, step, "the residual stream differs from the reference's"
    logits = np.argwhere(logit_floors(decoded) > FLOORS)
    return (-1, -1, int(logits[0, 0]), "the logits differ from the reference's") if len(logits) else None


def _cause(decoded: Decoded, step: int) -> str:
    """Why decoding differs, where its positions or its masks say so."""
    behind = float(decoded.behind[step])
    if behind:
        return _displaced(behind)
    if decoded.sees_later:
        return "the mask of a block lets its tokens see those behind them"
    if decoded.hides:
        return "the mask of a block hides kept entries from some of its tokens"
    return "decoding differs from the masked reference, its entries do not"


def _displaced(behind: float) -> str:
    if isnan(behind):
        return "keys of new tokens are not rotated to their positions"
    count = abs(behind)
    side = "early" if behind > 0 else "late"
    return f"new tokens stand {count:,.0f} {'position' if count == 1 else 'positions'} too {side}"


def head_floors(decoded: Decoded) -> NDArray[np.float64]:
    """(step, layer, head) noise floors of head outputs."""
    return np.asarray(decoded.head / decoded.head_floor[:, None])


def layer_floors(decoded: Decoded) -> NDArray[np.float64]:
    """(step, layer) noise floors of a layer: of its worst head, or of the residual stream after it."""
    return np.asarray(np.fmax(head_floors(decoded).max(axis=-1), decoded.hidden / decoded.hidden_floor))


def logit_floors(decoded: Decoded) -> NDArray[np.float64]:
    """(step,) noise floors of the logits."""
    return np.asarray(decoded.logits / decoded.logits_floor)


def worst(decoded: Decoded) -> float:
    """The most noise floors of everything that was compared."""
    return float(np.nanmax(np.concatenate([layer_floors(decoded).ravel(), logit_floors(decoded)])))


def _floors(decoded: Decoded | None, layer: int, step: int) -> float:
    if decoded is None or step >= len(decoded.logits):
        return nan
    return float(logit_floors(decoded)[step] if layer < 0 else layer_floors(decoded)[step, layer])


def order(fault: Fault) -> tuple[int, int]:
    """Faults in the order in which one looks for them: by situation, then by row."""
    return list(SITUATIONS).index(fault.situation), fault.row
