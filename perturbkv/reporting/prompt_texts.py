"""A page's prompts: text, the share of heads that keep each token, attention, and each head's kept tokens and losses.

Kept tokens, losses and attention of one head are a bundle; as many bundles are stored as the page's size allows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.tokens.fates import PromptText, changes, prompt_of
from perturbkv.errors import TraceError
from perturbkv.escaping import escape_control_characters
from perturbkv.reporting.page_blocks import Blocks, deflated, logarithm_below_one, size_of
from perturbkv.reporting.sides import Places
from perturbkv.trace import Trace

LONGEST, SHOWN = 500, 400
"""Characters of a token's text: of one longer than LONGEST, SHOWN are shown."""
ATTENTION_STEP, ATTENTION_CODES = 0.08, 255


@dataclass(frozen=True)
class Kept:
    """One sample's kept sets, by configuration.

    Attributes:
        masks: (config, layer, head, byte) bit masks over the prompt, the first entry the lowest bit of the first byte.
        share: (config, token) share of the heads that keep the token, 255 being all.
    """

    masks: NDArray[np.uint8]
    share: NDArray[np.uint8]


def text_of(trace: Trace, sample: int) -> bytes | None:
    """Return the block of a prompt's text, deflated; None where the trace lacks it."""
    try:
        prompt = prompt_of(trace, trace.sample_ids[sample])
    except TraceError:
        return None
    return deflated(json.dumps(_text_document(prompt), ensure_ascii=False, separators=(",", ":")).encode())


def why_without_text(trace: Trace) -> str:
    """Return the command that adds the prompts' text; empty where a complete sample has it."""
    try:
        prompt_of(trace)
    except TraceError as error:
        return str(error)
    return ""


def piece(text: str) -> str:
    """Return a token's text for display: escaped, and shortened where it is very long."""
    shown = escape_control_characters(text)
    if len(shown) <= LONGEST:
        return shown
    return f"{shown[:SHOWN]}… [{len(shown) - SHOWN:,} more characters]"


def kept_of(trace: Trace, sample: int) -> Kept | None:
    """Return a sample's kept sets by configuration; None where the trace lacks them."""
    masks, shares = [], []
    for config in range(len(trace.run.configs)):
        try:
            found = trace.kept_masks(sample, config)
        except TraceError:
            return None
        masks.append(np.packbits(found, axis=-1, bitorder="little"))
        shares.append(np.round(255 * found.mean(axis=(0, 1))).astype(np.uint8))
    return Kept(np.stack(masks), np.stack(shares))


def attention_of(trace: Trace, sample: int) -> Floats | None:
    """Return the first decode step's attention (layer, head, token) to the prompt; None where it is not stored."""
    if "attention_full" not in trace.arrays:
        return None
    tokens = int(trace.arrays["prompt_tokens"][sample])
    return np.asarray(trace.arrays["attention_full"][sample, 0, ..., :tokens], dtype=np.float64)


def attention_codes(attention: Floats) -> NDArray[np.uint8]:
    """Return attention in a byte each: 0, or exp((code − 255) · 0.08)."""
    return logarithm_below_one(attention, ATTENTION_STEP, ATTENTION_CODES).astype(np.uint8)


def _text_document(prompt: PromptText) -> dict[str, object]:
    pieces = [piece(one) for one in prompt.pieces]
    return {
        "pieces": pieces,
        "compressed": prompt.compressed,
        "cut": prompt.cut_index,
        "cut_tokens": prompt.cut_tokens,
        "cut_pieces": any(len(escape_control_characters(one)) > LONGEST for one in prompt.pieces),
    }


LOSS_STEP, LOSS_CODES = 0.0005, 65535
_LEVEL = 7
"""Level of deflate: for bit masks 9 takes five times as long and saves 1.4 %."""
_LOST = ("lost_position", "lost_output", "weighted_norm")


@dataclass(frozen=True)
class Losses:
    """The evicted entries that add most to each head of a sample.

    Attributes:
        positions: (config, layer, head, entry) evicted entries, the largest contribution first; −1 past the last.
        shares: (config, layer, head, entry) codes of A ν / C: 0, or exp((code − 65535) · 0.0005).
    """

    positions: NDArray[np.int32]
    shares: NDArray[np.uint16]


def losses_of(trace: Trace, sample: int) -> Losses | None:
    """Return the evicted entries that add most to each head's output; None where the trace does not have them."""
    if not set(_LOST) <= set(trace.arrays):
        return None
    positions, output, total = (np.asarray(trace.arrays[name][sample]) for name in _LOST)
    shares = np.asarray(ratio(output, np.nan_to_num(total)[:, :, None]))
    codes = logarithm_below_one(np.where(positions >= 0, shares, 0), LOSS_STEP, LOSS_CODES)
    return Losses(positions.astype("<i4"), codes.astype("<u2"))


def listed(trace: Trace) -> int:
    """Return the number of lost entries per head; 0 where the trace does not have them."""
    return int(trace.arrays["lost_position"].shape[-1]) if set(_LOST) <= set(trace.arrays) else 0


@dataclass(frozen=True)
class SampleHeads:
    """The contents of one sample's bundles; `attention` is (layer, head, token)."""

    kept: Kept
    losses: Losses | None
    attention: Floats | None


def kept_heads_of_sample(trace: Trace, sample: int) -> SampleHeads | None:
    """Return a sample's kept sets, losses and attention; None where the trace has no kept positions."""
    kept = kept_of(trace, sample)
    return None if kept is None else SampleHeads(kept, losses_of(trace, sample), attention_of(trace, sample))


def kept_bundle(of: SampleHeads, layer: int, head: int) -> bytes:
    """Return one head's bundle, deflated: each configuration's mask XORed with the previous one, losses, attention."""
    own, losses, attention = of.kept.masks[:, layer, head], of.losses, of.attention
    masks = own.copy()
    masks[1:] ^= own[:-1]
    parts = [masks.tobytes()]
    if losses is not None:
        parts += [losses.positions[:, layer, head].tobytes(), losses.shares[:, layer, head].tobytes()]
    if attention is not None:
        parts.append(attention_codes(attention[layer, head]).tobytes())
    return deflated(b"".join(parts), _LEVEL)


def heads_by_change(trace: Trace, sample: int, pairs: Sequence[Places], first: Places) -> list[Places]:
    """Return (layer, head) of a sample but the `first`, sorted by the largest change in any pair, descending.

    The change is that of the isolated perturbation over ‖o_h‖₁.
    """
    both = [changes(trace, sample, pair) for pair in pairs]
    shape = trace.arrays["output_norm"].shape[-2:]
    moved = np.max([np.abs(second - one) for one, second in both], axis=0) if both else np.zeros(shape)
    order = np.stack(np.unravel_index(np.argsort(-moved, axis=None, kind="stable"), shape), axis=1).tolist()
    found = [(int(layer), int(head)) for layer, head in order]
    return [one for one in found if one != first]


_TOLD = 14
"""Bytes of each bundle's entry in the page's JSON."""


@dataclass
class Sample:
    """One sample's block ids, or None, and its bundles so far; `kept`: whether the trace has its kept positions."""

    place: int
    text: str | None = None
    share: str | None = None
    attention: str | None = None
    kept: bool = False
    bundles: list[tuple[Places, bytes]] = field(default_factory=list)

    def to_dict(self, blocks: Blocks, number: int, heads: int) -> dict[str, Any]:
        """Return the sample for the page's JSON, and store its bundles as one block."""
        own = [one for _, one in self.bundles]
        together = None
        if own:
            together = f"{blocks.prefix}-heads{number}"
            blocks.blocks[together] = b"".join(own)
        return {
            "text": self.text,
            "share": self.share,
            "attention": self.attention,
            "heads": together,
            "held": [layer * heads + head for (layer, head), _ in self.bundles],
            "ends": np.cumsum([len(one) for one in own], dtype=np.int64).tolist(),
        }


def put_texts(trace: Trace, blocks: Blocks) -> list[str | None]:
    """Store each complete sample's text, which every page has; return block ids, None for a sample without text."""
    found = [text_of(trace, int(place)) for place in np.flatnonzero(trace.ok)]
    return [None if text is None else blocks.put(f"text{number}", text) for number, text in enumerate(found)]


def tokens_part(
    trace: Trace, blocks: Blocks, texts: Sequence[str | None], pairs: Sequence[Places], first: Places
) -> dict[str, Any]:
    """Return `prompts` and `held_heads` of the page's JSON.

    Args:
        trace: the trace, whose complete samples are shown.
        blocks: stores blocks while bytes remain.
        texts: the result of `put_texts`.
        pairs: configurations whose changes determine the order of heads.
        first: layer and head with the highest priority.
    """
    samples = [Sample(int(place), text) for place, text in zip(np.flatnonzero(trace.ok), texts, strict=True)]
    _begin(trace, blocks, samples, first)
    _attention(trace, blocks, samples)
    _bundles(trace, blocks, samples, pairs, first)
    layers, heads = trace.arrays["kept_count"].shape[2:]
    told = {str(number): one.to_dict(blocks, number, heads) for number, one in enumerate(samples)}
    return {"prompts": told, "held_heads": _count(samples, layers * heads)}


def _begin(trace: Trace, blocks: Blocks, samples: Sequence[Sample], first: Places) -> None:
    """Store each sample's bundle of the head that a page shows first, and the share of heads that keep each token."""
    for number, one in enumerate(samples):
        of = kept_heads_of_sample(trace, one.place)
        one.kept = of is not None
        if of is not None:
            _append(blocks, one, first, kept_bundle(of, *first))
            one.share = blocks.offer(f"share{number}", deflated(of.kept.share.tobytes()))


def _attention(trace: Trace, blocks: Blocks, samples: Sequence[Sample]) -> None:
    for number, one in enumerate(samples):
        attention = attention_of(trace, one.place)
        if attention is not None:
            codes: NDArray[np.uint8] = attention_codes(attention.mean(axis=(0, 1)))
            one.attention = blocks.offer(f"attention{number}", deflated(codes.tobytes()))


def _bundles(trace: Trace, blocks: Blocks, samples: Sequence[Sample], pairs: Sequence[Places], first: Places) -> None:
    """Store bundles of every sample, each with an equal part of the bytes, with one sample's masks in memory."""
    orders = [heads_by_change(trace, one.place, pairs, first) for one in samples]
    for number, (one, order) in enumerate(zip(samples, orders, strict=True)):
        _fill(trace, blocks, one, order, blocks.room / (len(samples) - number))


def _fill(trace: Trace, blocks: Blocks, sample: Sample, order: Sequence[Places], room: float) -> None:
    """Store further bundles of one sample, in the order of heads, until `room` bytes are used."""
    of = kept_heads_of_sample(trace, sample.place) if sample.kept and room > 0 else None
    if of is None:
        return
    for place in order:
        found = kept_bundle(of, *place)
        room -= _bundle_bytes(found)
        if room < 0:
            return
        _append(blocks, sample, place, found)


def _append(blocks: Blocks, sample: Sample, place: Places, found: bytes) -> None:
    blocks.room -= _bundle_bytes(found) + (0 if sample.bundles else size_of(b""))
    sample.bundles.append((place, found))


def _bundle_bytes(found: bytes) -> int:
    """Return the bytes that a bundle takes in a page, within its sample's block."""
    return size_of(found) - size_of(b"") + _TOLD


def _count(samples: Sequence[Sample], each: int) -> dict[str, Any]:
    """Return how many bundles the page has, and why not all."""
    every, held = each * sum(one.kept for one in samples), sum(len(one.bundles) for one in samples)
    why = f"{every - held:,} of {every:,} heads' tokens left out to keep the page small; --full keeps all"
    return {"of": every, "held": held, "why": why if held < every else ""}
