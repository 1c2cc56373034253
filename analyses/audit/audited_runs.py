"""The records of an audit: each run, the entries of its cache, its decoding, plain use and losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.audit.faults import (
    Fault,
    floors_text,
    head_floors,
    logit_floors,
    worst_floors,
)
from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.measurements import Floats
from perturbkv.audit_trace import AuditRun, AuditTrace, CacheEntries, DecodeDistances
from perturbkv.escaping import escape_line

_LAYERS = ("layer",)
_SETS = ("layer", "kept set")
Integers = NDArray[np.int64]


@record
class Alteration(Record):
    """A kept set with entries that are not the full cache's."""

    layer: int = column("from 0")
    head: int = column("kept set")
    kind: str = column("kind of the change")
    what: str = column("what was done to keys or values, where it is known")
    entry: int = column("position in the prompt of the first entry concerned; −1 where it is of none")


@record
class AuditedEntries(Record):
    """The entries of an audited cache.

    Attributes:
        ends: (kept set of any layer, 2) how many first and last entries a set holds without a gap.
    """

    cache_share: float = column("entries over those of the full cache", key="held_share", heading="#cache\nshare")
    kept: list[list[int]] = column("(layer, kept set) entries of the prompt")
    without_first: int = column("kept sets that lack the first entry, a sink")
    without_last: int = column("kept sets that lack the most recent entry")
    padded: Integers = column("(layer, kept set) entries of padding that are attended to", dims=_SETS)
    strangers: Integers = column("(layer, kept set) entries like none of the prompt's", dims=_SETS)
    duplicates: Integers = column("(layer, kept set) entries whose position another one has", dims=_SETS)
    hidden: Integers = column(
        "(layer, kept set) entries of the prompt that the cache holds and a mask hides", dims=_SETS
    )
    unordered: list[int] = column("layers whose entries lie in another order than in the prompt")
    repeated: list[int] = column("layers that hold every entry once per query head")
    changed: list[int] = column("forward passes at which entries of the prompt went or changed")
    altered: list[Alteration] = column("entries that are not the full cache's")
    key_floors: Floats = column(
        "(layer) distance of the worst key from the full cache's, in noise floors", dims=_LAYERS
    )
    value_floors: Floats = column("(layer) the same of values", dims=_LAYERS)
    ends: Integers

    @derived(heading="#per set", json=False)
    def per_set(self) -> str:
        """Entries per kept set, fewest and most."""
        return _range_text([count for layer in self.kept for count in layer])

    @derived(heading="#first", json=False)
    def first(self) -> str:
        """Entries of the prompt's beginning that a kept set holds without a gap."""
        return _range_text(self.ends[:, 0].tolist())

    @derived(heading="#last", json=False)
    def last(self) -> str:
        """Entries of the prompt's end that a kept set holds without a gap."""
        return _range_text(self.ends[:, 1].tolist())

    @derived(heading="odd", json=False)
    def odd(self) -> str:
        """Oddities of the entries: padding, duplicates, another order, changes."""
        named = (
            (self.padded, "padding"),
            (self.strangers, "unlike any"),
            (self.duplicates, "twice"),
            (self.hidden, "hidden by a mask"),
        )
        words = [f"{int(counts.sum())} {word}" for counts, word in named if counts.sum()]
        words += ["in another order"] if self.unordered else []
        words += [f"changes from step {self.changed[0]} on"] if self.changed else []
        return ", ".join(words)

    @property
    def sets(self) -> int:
        """Kept sets of all layers."""
        return sum(map(len, self.kept))


@record
class AuditedStep(Record):
    """A forward pass after the eviction, against the masked reference."""

    step: int = column("forward pass after the eviction, from 0", heading="#step", json=False)
    tokens: int = column("of the forward pass", heading="#tokens")
    heads: Floats = column(
        "(layer) distance of the worst head from the masked reference, in noise floors", dims=_LAYERS
    )
    hidden: Floats = column("(layer) the same of the residual stream", dims=_LAYERS)
    logits: float = column(
        "distance of the logits, in noise floors", heading="#logits", text=lambda floors, _: floors_text(floors)
    )
    same_token: bool = column(
        "whether the most likely token is the reference's",
        heading="token",
        text=lambda same: "same" if same else "another",
    )
    behind: float = column("positions that the new tokens stand too early; null where their keys are rotated otherwise")

    @derived(heading="#heads", json=False, text=lambda floors, _: floors_text(floors))
    def worst_head(self) -> float:
        """Distance of the worst head of all layers, in noise floors."""
        return float(self.heads.max())

    @derived(heading="#hidden", json=False, text=lambda floors, _: floors_text(floors))
    def worst_hidden(self) -> float:
        """Distance of the residual stream where it is largest, in noise floors."""
        return float(self.hidden.max())


@record
class AuditedRun(Record):
    """The audit of one prompt in one situation: its entries, decoding steps and first difference.

    Attributes:
        fault: its first difference.
        worst: largest distance in noise floors; None where nothing was decoded.
    """

    sample: str = column("of the prompt")
    situation: str = column("single, block or batch")
    row: int = column("of the batch")
    tokens: int = column("tokens of the prompt (n), padding not counted", heading="#tokens")
    padding: int = column("entries of padding before the prompt")
    positions: str = column("original, or in-cache: keys at 0, 1, … and new tokens after them")
    failed: str = column("what the eviction or its decoding raised, and where")
    refused: str = column("what an eviction that does not take this situation said")
    entries: AuditedEntries | None = column("what the cache keeps")
    steps: tuple[AuditedStep, ...] = column("forward passes after the eviction")
    fault: Fault | None
    worst: float | None = column(
        "distance from the masked reference in noise floors, the worst of heads, layers and steps",
        heading="#floors",
        text=lambda floors, _: floors_text(floors),
        json=False,
    )

    @derived(heading="#cache\nshare", json=False)
    def cache_share(self) -> float | None:
        """Entries over those of the full cache."""
        return None if self.entries is None else self.entries.cache_share

    @derived(heading="keys and values", json=False)
    def intact(self) -> str | None:
        """Text on the kept keys and values: as in the full cache, or in how many kept sets they are not."""
        if self.entries is None:
            return None
        return (
            f"{len({(one.layer, one.head) for one in self.entries.altered})} of {self.entries.sets} sets altered"
            if self.entries.altered
            else "intact"
        )

    @derived(heading="first difference", json=False)
    def difference(self) -> str:
        """The first difference from the reference."""
        if self.fault is None:
            return f"refused: {self.refused}" if self.refused else "none"
        where = self.fault.location()
        return f"{where}: {self.fault.what}" if where else self.fault.what

    @property
    def name(self) -> str:
        """The prompt, the situation and the row of a batch, as text."""
        return f"{escape_line(self.sample)}: {self.situation}{f', row {self.row}' if self.situation == 'batch' else ''}"


@record
class CacheUse(Record):
    """Plain use of the cache with transformers, where no positions are given."""

    SECTION: ClassVar[str] = "plain use"

    position: int | None = column("where `model(token, past_key_values=cache)` puts the next token; null: it fails")
    expected: int = column("where it belongs: at n")
    fed: int = column("tokens that `generate` feeds when it gets all ids and the first new one: 1 is right")
    continued: str = column("what `generate` with the last id alone raises; empty where it goes on")
    failed: str = column("what `generate` with all ids raises; empty where it goes on")

    def summary(self) -> str:
        """Return the outcomes of a forward pass and two calls of `generate` as text, one per line."""
        again = f"wrong: feeds the prompt's last {self.fed - 1} tokens again"
        fed = "right: feeds the new token alone" if self.fed == 1 else again
        return "\n".join([
            "plain use of this cache",
            f"model(token): {self._next_token_text()}",
            f"generate(all ids): {f'fails: {self.failed}' if self.failed else fed}",
            f"generate(last id): {f'fails: {self.continued}' if self.continued else 'goes on'}",
        ])  # fmt: skip

    def _next_token_text(self) -> str:
        """Return the position that the next token gets, and whether it is right, as text."""
        if self.position is None:
            return "fails: the cache does not say how many tokens it has seen"
        if self.position == self.expected:
            return f"right: the next token stands at {self.expected}"
        return f"wrong: the next token stands at {self.position}, not {self.expected}; give position_ids"


@record
class AuditLoss(Record):
    """The loss of the audited kept sets, or of a control, at the first decoding step, mean over prompts."""

    name: str = column("its kept sets, or a control")
    cache_share: float = column("entries over those of the full cache", key="held", heading="#cache\nshare")
    isolated: float = column(
        "L1 perturbation of all heads over Σ ‖o_h‖₁, each layer cut on its own",
        heading="#isolated",
        text=text.three_digits,
    )
    propagated: float = column(
        "the same with every earlier layer's error included", heading="#propagated", text=text.three_digits
    )
    drift: float = column(
        "L1 distance of the last layer's residual stream, over its norm", heading="#drift", text=text.three_digits
    )
    kl: float = column("KL(full ‖ evicted) of the logits", unit="nat", heading="#KL", text=text.three_digits)


def audited_run(trace: AuditTrace, run: AuditRun, fault: Fault | None) -> AuditedRun:
    """Return the table's record of a run, with its first difference from the reference (`fault`)."""
    decoded = run.decoded
    return AuditedRun(
        sample=run.sample,
        situation=run.situation,
        row=run.row,
        tokens=run.tokens,
        padding=run.padding,
        positions=run.positions,
        failed=run.failed,
        refused=run.refused,
        entries=None if run.entries is None else _audited_entries(trace, run, run.entries),
        steps=() if decoded is None else tuple(_audited_step(run, decoded, step) for step in range(len(run.forwards))),
        fault=fault,
        worst=None if decoded is None else worst_floors(decoded),
    )


def _audited_entries(trace: AuditTrace, run: AuditRun, entries: CacheEntries) -> AuditedEntries:
    """Return the record of a run's cache entries."""
    kept = [[len(kept_set) for kept_set in layer] for layer in entries.kept]
    every = [kept_set for layer in entries.kept for kept_set in layer]
    return AuditedEntries(
        cache_share=sum(map(sum, kept)) / (trace.layers * trace.kv_heads * run.tokens),
        kept=kept,
        without_first=sum(0 not in kept_set for kept_set in every),
        without_last=sum(run.tokens - 1 not in kept_set for kept_set in every),
        padded=entries.padded,
        strangers=entries.strangers,
        duplicates=entries.duplicates,
        hidden=entries.hidden,
        unordered=[layer for layer, heads in enumerate(entries.unordered) if np.any(heads)],
        repeated=list(entries.repeated),
        changed=list(entries.changed),
        altered=[
            Alteration(layer, head, change.kind, change.what, change.entry)
            for layer, heads in enumerate(entries.altered) for head, changes in enumerate(heads) for change in changes
        ],
        key_floors=_worst_head_floors(entries.key_distance, entries.key_floor),
        value_floors=_worst_head_floors(entries.value_distance, entries.value_floor),
        ends=np.array([_gapless_ends(kept_set, run.tokens) for kept_set in every]),
    )  # fmt: skip


def _worst_head_floors(distance: Floats, floor: Floats) -> Floats:
    """Return each layer's largest distance over heads, in noise floors, (layer,); 0 where the distance is 0."""
    worst = distance.max(axis=-1)
    return np.asarray(np.divide(worst, floor, out=np.zeros_like(worst), where=worst > 0))


def _gapless_ends(kept: Integers, tokens: int) -> tuple[int, int]:
    """Return how many first and how many last entries a kept set holds without a gap."""
    first = int(np.append(kept != np.arange(len(kept)), True).argmax())
    last = int(np.append(tokens - 1 - kept[::-1] != np.arange(len(kept)), True).argmax())
    return first, last


def _range_text(counts: Sequence[int]) -> str:
    """Return the least and the largest count as text: '12–48', or '12' where they are equal."""
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low}–{high}"


def _audited_step(run: AuditRun, decoded: DecodeDistances, step: int) -> AuditedStep:
    """Return the record of decoding step `step` of a run."""
    return AuditedStep(
        step=step,
        tokens=run.forwards[step],
        heads=head_floors(decoded)[step].max(axis=-1),
        hidden=decoded.hidden[step] / decoded.hidden_floor,
        logits=float(logit_floors(decoded)[step]),
        same_token=bool(decoded.agrees[step]),
        behind=float(decoded.behind[step]),
    )
