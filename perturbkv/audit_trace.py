"""What an audit measured of an eviction that is not ours, as NumPy: no verdict yet (METHOD: Audit).

Distances are relative: ‖found − reference‖₂ / ‖reference‖₂, the largest over the tokens of a forward pass; floors are
the same distance between runs of the plain model that keep everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs.eviction import EvictionConfig

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SITUATIONS: Mapping[str, str] = {
    "single": "a single prompt, decoded step by step",
    "block": "a block of 8 tokens after it, then step by step",
    "batch": "a left-padded batch of it and of a shorter one",
}
"""Where faults hide, in the order in which they are looked for."""


@dataclass(frozen=True)
class Entries:
    """What the cache of one prompt keeps, as it was found at the first forward pass after the eviction.

    Attributes:
        kept: per layer and kept set, positions in the prompt, ascending.
        heads: kept sets per layer: those of the model's key/value heads, or one per query head.
        padded: (layer, kept_head) entries of padding that are attended to.
        strangers: (layer, kept_head) entries that are like none of the prompt's.
        duplicates: (layer, kept_head) entries whose position another one has.
        unordered: (layer, kept_head) whether entries lie in another order than in the prompt.
        key_distance, value_distance: (layer, kept_head) the largest of an entry from the full cache's, over the root
            mean square norm of the head's.
        key_floor, value_floor: (layer,) what another way of reading the prompt shows.
        altered: per layer and kept set what was done to keys and values, in words; empty where they are intact.
        repeated: layers that hold every entry once per query head, though all of a group keep the same.
        changed: forward passes at which entries of the prompt went or changed.
    """

    kept: tuple[tuple[Integers, ...], ...]
    padded: Integers
    strangers: Integers
    duplicates: Integers
    unordered: NDArray[np.bool_]
    key_distance: Floats
    value_distance: Floats
    key_floor: Floats
    value_floor: Floats
    altered: tuple[tuple[str, ...], ...]
    repeated: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()

    @property
    def heads(self) -> int:
        """Kept sets of a layer."""
        return len(self.kept[0])


@dataclass(frozen=True)
class Decoded:
    """How far decoding lies from the masked reference.

    Attributes:
        head: (forward, layer, head) distance of the head's output before the output projection, over its length or
            the layer's root mean square one, whichever is more.
        head_floor: (layer,).
        hidden: (forward, layer) distance of the residual stream after the layer.
        hidden_floor: (layer,).
        logits: (forward,) distance of the logits, each less their mean.
        logits_floor: of the logits.
        agrees: (forward,) whether the most likely token is the same, at the last token of the forward pass.
        behind: (forward,) by how much later tokens stand before their place, NaN where it is no whole number; 0 where
            they stand right.
        sees_later: whether a token of a block sees tokens behind it.
        hides: whether a token of a block does not see an entry that the last one sees.
    """

    head: Floats
    head_floor: Floats
    hidden: Floats
    hidden_floor: Floats
    logits: Floats
    logits_floor: float
    agrees: NDArray[np.bool_]
    behind: Floats
    sees_later: bool = False
    hides: bool = False


@dataclass(frozen=True)
class Audited:
    """One prompt in one situation.

    Attributes:
        sample: its id.
        situation: a key of `SITUATIONS`.
        row: of the batch.
        tokens: n of this row, padding not counted.
        padding: entries of padding before it.
        forwards: tokens of each forward pass after the eviction.
        entries: what the cache keeps; None where nothing could be looked at.
        decoded: None where nothing was decoded.
        failed: what the eviction or the decoding raised, and where.
        refused: what an eviction that does not take this situation said (NotImplementedError).
    """

    sample: str
    situation: str
    row: int
    tokens: int
    padding: int
    forwards: tuple[int, ...]
    entries: Entries | None = None
    decoded: Decoded | None = None
    failed: str = ""
    refused: str = ""


@dataclass(frozen=True)
class PlainUse:
    """What transformers does with this cache where nobody says positions.

    Attributes:
        position: at which `model(token, past_key_values=cache)` puts the next token; None where it fails.
        expected: n.
        fed: tokens that `generate` feeds when it is given all ids and the first new one: 1 is right.
        continued: what becomes of `generate` with the last id alone: empty where it goes on.
        failed: what the call with all ids raised; empty where it goes on.
    """

    position: int | None
    expected: int
    fed: int
    continued: str
    failed: str


@dataclass(frozen=True)
class Loss:
    """What a kept set costs, as METHOD measures it, mean over the prompts.

    Attributes:
        name: the eviction, or a control of ours with the same held / full and the same protection.
        held: entries over those of the full cache.
        isolated, propagated: L1 perturbation summed over layers and heads, over the same sum of ‖o_h‖₁.
        drift: L1 distance of the residual stream after the last layer, over its norm.
        kl: KL(full ‖ evicted) of the logits, in nats.
    """

    name: str
    held: float
    isolated: float
    propagated: float
    drift: float
    kl: float


@dataclass(frozen=True)
class AuditTrace:
    """Everything that an audit measured.

    Attributes:
        eviction: as it was written.
        kind: what it is: function, cache class, positions file, press.
        about: model, dataset, dtype, versions: as text.
        layers, query_heads, kv_heads: of the model.
        runs: one per prompt, situation and row of its batch.
        plain: what plain use of the cache does, for the first prompt; None where there is no cache of transformers'.
        losses: the eviction, then controls; empty where they were not asked for, or cannot be measured.
        protected: first and most recent entries that every kept set holds.
        unreadable: why nothing can be said; empty where something can.
        lossless: why no loss was measured; empty where it was, or was not asked for.
        configs: the kept sets' own configuration, then the controls'.
        freed: whether the controls protect less than the eviction, which protects all that it keeps.
    """

    eviction: str
    kind: str
    about: Mapping[str, str]
    layers: int
    query_heads: int
    kv_heads: int
    runs: tuple[Audited, ...] = ()
    plain: PlainUse | None = None
    losses: tuple[Loss, ...] = ()
    protected: tuple[int, int] = (0, 0)
    unreadable: str = ""
    lossless: str = ""
    configs: tuple[EvictionConfig, ...] = ()
    freed: bool = False
