"""The measurements of an audit of an external eviction, as NumPy arrays, without verdicts (METHOD: Audit).

Distances are relative: ‖measured − reference‖₂ / ‖reference‖₂, the largest over the tokens of a forward pass; floors
are the same distance between runs of the plain model that keep the same entries and round otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError
from perturbkv.user_files import MIB, FileKind, is_path

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SITUATIONS: Mapping[str, str] = {
    "single": "a single prompt, decoded step by step",
    "block": "a block of 8 tokens after it, then step by step",
    "batch": "a left-padded batch of it and of a shorter one",
}
"""Situation -> its description, in the order in which they are tested."""


AUTO, ORIGINAL, IN_CACHE = "auto", "original", "in-cache"
POSITIONS: Mapping[str, str] = {
    AUTO: "whichever of both fits the keys better",
    ORIGINAL: "keys as they were cached, new tokens at n, n + 1, …",
    IN_CACHE: "keys rotated to 0, 1, …, new tokens after them",
}
"""Convention of positions -> its meaning."""
KEPT_SUFFIXES = (".npz", ".json")
KEPT_FILE = FileKind("a file of kept positions", ConfigError, 1024 * MIB, "choose another path")
"""What another program kept, as a file with one of these suffixes (`auditing.positions_file`)."""
DUMP_HEADER = "dump.json"
"""The file in a dump's folder that describes it (`auditing.dumps.dump_file`)."""
SLOT_MAGIC = b"qsgg"
"""How a session file of llama.cpp begins (`auditing.dumps.llamacpp_slot`)."""


def is_dump(path: Path) -> bool:
    """Return whether a path is a dump's folder or its header, or a slot file of llama.cpp."""
    if path.name == DUMP_HEADER:
        return True
    return is_path(path / DUMP_HEADER) and ((path / DUMP_HEADER).is_file() or is_slot(path))


def is_slot(path: Path) -> bool:
    """Return whether a file begins like a session file of llama.cpp."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as stream:
            return stream.read(len(SLOT_MAGIC)) == SLOT_MAGIC
    except OSError:
        return False


FLOORS = 6
"""Number of noise floors above which a distance is a difference; chosen in docs/results/audit.md (METHOD: Audit)."""
DUMP_FLOORS: Mapping[str, int] = {"float32": 17, "bfloat16": 7, "float16": 7}
"""Type of the model -> the same number for an entry of an engine, whose kernels are others; chosen in the same page."""


def dump_floors(dtype: str) -> int:
    """Return the number of noise floors above which an engine's entry differs, for a model of this type."""
    return DUMP_FLOORS.get(dtype, FLOORS)


def token_range(first: int, last: int) -> str:
    """Return a range of tokens in words."""
    return f"token {first}" if first == last else f"tokens {first} to {last}"


@dataclass(frozen=True)
class Change:
    """A change to the keys or values of a kept set.

    Attributes:
        kind: a key of `CHANGES`.
        what: its description.
        entry: position in the prompt of the first entry that is changed.
    """

    kind: str
    what: str
    entry: int


CHANGES: Mapping[str, str] = {
    "row": "entries of another prompt of the batch",
    "infinite": "keys or values that are infinite or NaN",
    "head": "entries of another head",
    "mismatch": "values of other entries than their keys",
    "rotation": "keys rotated to other positions, or with another base",
    "scale": "keys or values times a constant",
    "rounded": "keys or values that went through a coarser floating-point type",
    "quantised": "keys or values that went through 8, 4 or 2 bits",
    "changed": "keys or values that differ otherwise",
}
"""Kind of a change -> its meaning; the first is looked for first."""
ALLOWED = ("rounded", "quantised")
"""Kinds of changes that a user may allow, as they save memory on purpose."""


@dataclass(frozen=True)
class CacheEntries:
    """The entries in the cache of one prompt at the first forward pass after the eviction.

    Attributes:
        kept: per layer and kept set, positions in the prompt, ascending.
        heads: kept sets per layer: those of the model's key/value heads, or one per query head.
        padded: (layer, kept_head) number of padding entries that are attended to.
        strangers: (layer, kept_head) number of entries that match no entry of the prompt.
        duplicates: (layer, kept_head) number of entries at a position that another entry has.
        duplicated: (layer, kept_head) the first such position; −1 without one.
        hidden: (layer, kept_head) number of the prompt's entries that the cache holds and a mask hides from all new
            tokens, though the eviction does not say that it masks.
        first_hidden: (layer, kept_head) the first such position; −1 without one.
        unordered: (layer, kept_head) True where the entries are not in the order of the prompt.
        key_distance, value_distance: (layer, kept_head) largest distance of an entry from the full cache's, over the
            root mean square norm of the head's entries.
        key_floor, value_floor: (layer,) the same distance between two ways of prefilling the prompt.
        altered: per layer and kept set the changes to keys and to values; empty where they are intact.
        repeated: layers that hold every entry once per query head, though all heads of a group keep the same.
        changed: forward passes at which entries of the prompt were removed or changed.
        evicted: entries of the prompt that are not attended to, summed over kept sets, the most of all forward passes.
    """

    kept: tuple[tuple[Integers, ...], ...]
    padded: Integers
    strangers: Integers
    duplicates: Integers
    duplicated: Integers
    hidden: Integers
    first_hidden: Integers
    unordered: NDArray[np.bool_]
    key_distance: Floats
    value_distance: Floats
    key_floor: Floats
    value_floor: Floats
    altered: tuple[tuple[tuple[Change, ...], ...], ...]
    repeated: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    evicted: int = 0

    @property
    def heads(self) -> int:
        """Number of kept sets of a layer."""
        return len(self.kept[0])


@dataclass(frozen=True)
class DecodeDistances:
    """The distances between decoding from the evicted cache and the masked reference.

    Attributes:
        head: (forward, layer, head) distance of the head's output before the output projection, over the larger of
            its own norm and the layer's root mean square norm.
        head_floor: (layer,) its floor.
        hidden: (forward, layer) distance of the residual stream after the layer.
        hidden_floor: (layer,) its floor.
        logits: (forward,) distance of the logits, each less their mean.
        logits_floor: its floor.
        agrees: (forward,) whether the most likely token is the same, at the last token of the forward pass.
        behind: (forward,) difference of the tokens' positions from the correct ones; NaN where it is no whole number,
            0 where they are correct.
        sees_later: whether a token of a block attends to later tokens.
        hides: whether a token of a block misses an entry that the last token attends to.
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
class AuditRun:
    """The audit of one prompt in one situation.

    Attributes:
        sample: the sample's id.
        situation: a key of `SITUATIONS`.
        row: the row in the batch.
        tokens: n of this row, without padding.
        padding: padding entries before the prompt.
        forwards: number of tokens of each forward pass after the eviction.
        positions: `original`, or `in-cache` where keys stand at 0, 1, … and new tokens after them.
        entries: the cache's entries; None where they could not be read.
        decoded: the distances of decoding; None where nothing was decoded.
        on_own_entries: the distances of decoding from the plain model with the cache's own entries; None where those
            are the full cache's, or no change is allowed.
        failed: the error that the eviction or the decoding raised, and where; empty without one.
        failed_layer: the layer that explains the error, as it was not evicted; −1 without one.
        damage: what the eviction changed in the model, in words; empty where it is as before.
        refused: the message of an eviction that does not support this situation (NotImplementedError).
    """

    sample: str
    situation: str
    row: int
    tokens: int
    padding: int
    forwards: tuple[int, ...]
    positions: str = ORIGINAL
    entries: CacheEntries | None = None
    decoded: DecodeDistances | None = None
    on_own_entries: DecodeDistances | None = None
    failed: str = ""
    failed_layer: int = -1
    refused: str = ""
    damage: str = ""


@dataclass(frozen=True)
class PlainUse:
    """The behaviour of transformers with this cache when the caller passes no positions.

    Attributes:
        position: the position that `model(token, past_key_values=cache)` gives the next token; None where it fails.
        expected: the correct position, n.
        fed: number of tokens that `generate` feeds when it gets all ids and the first new one; 1 is correct.
        continued: the error of `generate` with the last id alone; empty where it works.
        failed: the error of the call with all ids; empty where it works.
    """

    position: int | None
    expected: int
    fed: int
    continued: str
    failed: str


@dataclass(frozen=True)
class Loss:
    """The loss that an eviction or a control causes, in METHOD's measures, mean over the prompts.

    Attributes:
        name: the eviction, or one of our controls with the same cache share and the same protected entries.
        held: cache share: entries over those of the full cache.
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
    """The measurements of a whole audit.

    Attributes:
        eviction: the eviction as the user wrote it.
        kind: the kind of eviction: function, cache class, positions file, press.
        about: model, dataset, dtype and versions, as text.
        layers, query_heads, kv_heads: the model's numbers of these.
        runs: one per prompt, situation and row of its batch.
        plain: the behaviour of transformers with the cache, for the first prompt; None for another kind of cache, or
            where it was not tried.
        losses: the eviction, then controls; empty where losses were not requested or cannot be measured.
        protected: numbers of first and most recent entries that are in every kept set.
        unreadable: why the cache cannot be audited; empty where it can.
        lossless: why no loss was measured; empty where it was, or was not requested.
        configs: the configuration of the eviction's own kept sets, then the controls'.
        freed: whether the controls protect fewer entries than the eviction, which protects all that it keeps.
        allowed: kinds of changed entries that are no fault.
    """

    eviction: str
    kind: str
    about: Mapping[str, str]
    layers: int
    query_heads: int
    kv_heads: int
    runs: tuple[AuditRun, ...] = ()
    plain: PlainUse | None = None
    losses: tuple[Loss, ...] = ()
    protected: tuple[int, int] = (0, 0)
    unreadable: str = ""
    lossless: str = ""
    configs: tuple[EvictionConfig, ...] = ()
    freed: bool = False
    allowed: tuple[str, ...] = ()


ENGINE_SITUATIONS: Mapping[str, str] = {
    "plain": "one request",
    "prefix": "a request that takes the blocks of another one's prefix",
    "interleaved": "requests that begin and end at different times",
    "chunked": "a prompt that is read in parts of 64 tokens",
    "preempted": "a request that loses its blocks, and is computed again in others",
    "fp8": "one request, in a cache of 8 bits",
}
"""Situation of an engine -> its meaning, in the order in which they are run (`auditing.dumps.vllm_audit`)."""
DUMP_FAULTS: Mapping[str, str] = {
    "infinite": "keys or values that are infinite or NaN",
    "missing": "entries whose keys or values are zero, or that are in no block",
    "duplicate": "a token's entries several times",
    "swapped": "keys where values belong",
    "scale": "keys or values times a constant",
    "request": "entries of another request",
    "stale": "entries of a request that has ended",
    "token": "entries of other tokens of the same request",
    "shifted": "entries of the next tokens, or of those before",
    "head": "another head's entries",
    "layer": "another layer's entries",
    "rotation": "keys rotated to other positions, or with another base",
    "layout": "entries in another layout than the one named",
    "rounded": "keys or values that went through fewer bits than the type that is named, or rounded towards zero",
    "changed": "keys or values that differ otherwise",
    "coarse": "entries that are all farther from the plain model's than rounding explains",
    "unknown": "entries of no token of the dump",
    "decoding": "probabilities of tokens that the plain model does not give them",
}
"""Kind of a fault of a dump -> its meaning."""


@dataclass(frozen=True)
class DumpFault:
    """Entries of a request that are not the plain model's.

    Attributes:
        request: the request's id; empty for a fault of the whole dump.
        kind: a key of `DUMP_FAULTS`.
        what: what is there instead, in words.
        first, last: first and last token whose entries differ.
        blocks: ids of the blocks that hold them.
        layers, heads: indices of layers and key/value heads.
        count: number of entries that differ so; 0 where none was compared.
    """

    request: str
    kind: str
    what: str
    first: int = 0
    last: int = 0
    blocks: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    count: int = 0


@dataclass(frozen=True)
class DumpedRequest:
    """The comparison of one request's entries.

    Attributes:
        name: the request's id.
        tokens: number of its tokens.
        compared: number of compared entries, over layers and heads; 0 of a request that has ended.
        differing: number of entries that differ.
        distance: (layer, kind) largest distance of keys and of values that do not differ, over the root mean square
            norm of the head's; NaN where all differ.
        differing_distance: the same of those that differ, as they are stored; infinite where one is infinite or NaN,
            NaN where none differs.
        removed: number of entries that are gone, over layers and heads.
        kept: per layer and head the positions of its entries, where some are gone; empty otherwise.
        perturbation: (layer, head) ‖Δo_h‖₁ over ‖o_h‖₁ of the last token's query on the dumped entries instead of the
            plain model's, after the output projection; NaN where entries are gone, infinite where one is infinite or
            NaN.
        logprob_distance: largest difference of a token's log-probability from the plain model's; NaN where the dump has
            none.
        logprob_floor: largest difference where the plain model reads the tokens in 2 or 3 parts instead of one.
        moved: whether some entries are gone and the keys of the others stand at 0, 1, … in the cache.
    """

    name: str
    tokens: int
    compared: int = 0
    differing: int = 0
    distance: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    differing_distance: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    removed: int = 0
    kept: tuple[tuple[Integers, ...], ...] = ()
    perturbation: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    logprob_distance: float = math.nan
    logprob_floor: float = math.nan
    moved: bool = False


@dataclass(frozen=True)
class DumpTrace:
    """The measurements of an audit of a cache dump.

    Attributes:
        path: the dump.
        engine: name and version of the engine, as the dump says.
        about: model, dtype and versions, as text.
        layers: number of the model's.
        requests: one per request of the dump.
        faults: joined over layers, blocks and heads.
        layout: the layout in which blocks were read; empty in a dump of rows.
        named_layout: the layout that the dump names; empty where it names none.
        stored: the type of the stored numbers.
        floors: (layer, kind) noise floors of keys and values.
        typical: (layer, kind) median distances.
        limits: (layer, kind) distances above which a single entry differs; NaN where each entry has its own.
        losses: of the kept sets, then of controls; empty where nothing was removed.
    """

    path: str
    engine: str
    about: Mapping[str, str]
    layers: int
    requests: tuple[DumpedRequest, ...] = ()
    faults: tuple[DumpFault, ...] = ()
    layout: str = ""
    named_layout: str = ""
    stored: str = ""
    floors: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    typical: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    limits: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    losses: tuple[Loss, ...] = ()
