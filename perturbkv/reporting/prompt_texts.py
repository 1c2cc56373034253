"""The prompts of a page: text, share of heads that keep each token, attention, and each head's kept tokens and losses.

Kept tokens, losses and attention of a head are a bundle; the page stores as many bundles as its size allows.
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
from perturbkv.analyses.tokens.fates import prompt_of, relative_perturbations
from perturbkv.errors import TraceError
from perturbkv.escaping import escape_control_characters
from perturbkv.reporting.page_blocks import Blocks, block_bytes, deflate, encode_shares
from perturbkv.reporting.sides import IndexPair
from perturbkv.trace import Trace

LONGEST, SHOWN = 500, 400
"""Most characters of a token that is shown whole, and the characters that are shown of a longer one."""
ATTENTION_STEP, ATTENTION_CODES = 0.08, 255
"""Logarithmic step and largest code of attention."""
HeadIndex = tuple[int, int]
"""Layer and head."""


def prompt_block(trace: Trace, sample: int) -> bytes | None:
    """Return the compressed block of a prompt's text; None where the trace lacks it."""
    try:
        prompt = prompt_of(trace, trace.sample_ids[sample])
    except TraceError:
        return None
    document = {
        "pieces": [token_text(one) for one in prompt.pieces],
        "compressed": prompt.compressed,
        "cut": prompt.cut_index,
        "cut_tokens": prompt.cut_tokens,
        "cut_pieces": any(len(escape_control_characters(one)) > LONGEST for one in prompt.pieces),
    }
    return deflate(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode())


def token_text(text: str) -> str:
    """Return a token's text for display: escaped, and shortened if it is longer than `LONGEST`."""
    shown = escape_control_characters(text)
    if len(shown) <= LONGEST:
        return shown
    return f"{shown[:SHOWN]}… [{len(shown) - SHOWN:,} more characters]"


def prompt_attention(trace: Trace, sample: int) -> Floats | None:
    """Return the first decode step's attention (layer, head, token) to the prompt; None if it is not stored."""
    if "attention_full" not in trace.arrays:
        return None
    tokens = int(trace.arrays["prompt_tokens"][sample])
    return np.asarray(trace.arrays["attention_full"][sample, 0, ..., :tokens], dtype=np.float64)


def attention_codes(attention: Floats) -> NDArray[np.uint8]:
    """Return attention weights as one-byte codes: weight ≈ exp((code − 255) · 0.08), code 0 for 0."""
    return encode_shares(attention, ATTENTION_STEP, ATTENTION_CODES).astype(np.uint8)


LOSS_STEP, LOSS_CODES = 0.0005, 65535
"""Logarithmic step and largest code of losses."""
_LEVEL = 7
"""Compression level of bundles: 9 takes five times as long and saves 1.4 %."""
_LOST = ("lost_position", "lost_output", "weighted_norm")


def loss_count(trace: Trace) -> int:
    """Return the number of lost entries stored per head; 0 if the trace has no losses."""
    return int(trace.arrays["lost_position"].shape[-1]) if set(_LOST) <= set(trace.arrays) else 0


@dataclass(frozen=True)
class SampleHeads:
    """The contents of a sample's bundles, under all configurations.

    Attributes:
        masks: (config, layer, head, byte) bit masks of the kept sets over the prompt, the first entry the lowest bit of
            the first byte.
        share: (config, token) share of the heads that keep the token, 255 being all.
        losses: the evicted entries that would add most to each head's output, (config, layer, head, entry) each:
            positions, the largest contribution first and −1 past the last, and codes of A ν / C, 0 or
            exp((code − 65535) · 0.0005); None where the trace lacks them.
        attention: (layer, head, token); None likewise.
    """

    masks: NDArray[np.uint8]
    share: NDArray[np.uint8]
    losses: tuple[NDArray[np.int32], NDArray[np.uint16]] | None
    attention: Floats | None


def sample_heads(trace: Trace, sample: int) -> SampleHeads | None:
    """Return a sample's kept sets, losses and attention; None where the trace has no kept positions."""
    masks, shares, losses = [], [], None
    try:
        for config in range(len(trace.run.configs)):
            kept = trace.kept_masks(sample, config)
            masks.append(np.packbits(kept, axis=-1, bitorder="little"))
            shares.append(np.round(255 * kept.mean(axis=(0, 1))).astype(np.uint8))
    except TraceError:
        return None
    if set(_LOST) <= set(trace.arrays):
        positions, output, total = (np.asarray(trace.arrays[name][sample]) for name in _LOST)
        lost = np.asarray(ratio(output, np.nan_to_num(total)[:, :, None]))
        codes = encode_shares(np.where(positions >= 0, lost, 0), LOSS_STEP, LOSS_CODES)
        losses = positions.astype("<i4"), codes.astype("<u2")
    return SampleHeads(np.stack(masks), np.stack(shares), losses, prompt_attention(trace, sample))


def kept_bundle(heads: SampleHeads, layer: int, head: int) -> bytes:
    """Return the compressed bundle of a head: masks, each XORed with its predecessor, then losses and attention."""
    kept = heads.masks[:, layer, head]
    masks = kept.copy()
    masks[1:] ^= kept[:-1]
    parts = [masks, *(part[:, layer, head] for part in heads.losses or ())]
    if heads.attention is not None:
        parts.append(attention_codes(heads.attention[layer, head]))
    return deflate(b"".join(part.tobytes() for part in parts), _LEVEL)


def heads_by_change(trace: Trace, sample: int, pairs: Sequence[IndexPair], excluded: HeadIndex) -> list[HeadIndex]:
    """Return a sample's heads (layer, head), without `excluded`, in descending order of the largest change in any pair.

    The change is that of the isolated perturbation over ‖o_h‖₁, of pairs in which it was measured. Without such pairs
    the heads are in order.
    """
    both_sides = [relative_perturbations(trace, sample, pair) for pair in pairs]
    shape = trace.arrays["output_norm"].shape[-2:]
    change = np.fmax.reduce([np.zeros(shape), *(np.abs(second - first) for first, second in both_sides)])
    order = np.stack(np.unravel_index(np.argsort(-change, axis=None, kind="stable"), shape), axis=1).tolist()
    heads = [(int(layer), int(head)) for layer, head in order]
    return [one for one in heads if one != excluded]


_JSON_BYTES = 14
"""Bytes of the entry of a bundle in the page's JSON."""


@dataclass
class SampleBlocks:
    """A sample's ids of blocks, None for a missing one, and its bundles; `kept`: it has kept positions."""

    index: int
    text: str | None = None
    share: str | None = None
    attention: str | None = None
    kept: bool = False
    bundles: list[tuple[HeadIndex, bytes]] = field(default_factory=list)

    def to_dict(self, blocks: Blocks, number: int, heads: int) -> dict[str, Any]:
        """Store the bundles as one block; return the sample's JSON object for the page.

        `number`: the sample's among the complete ones; `heads`: number of heads of a layer.
        """
        contents = [content for _, content in self.bundles]
        block_id = None
        if contents:
            block_id = f"{blocks.prefix}-heads{number}"
            blocks.blocks[block_id] = b"".join(contents)
        return {
            "text": self.text,
            "share": self.share,
            "attention": self.attention,
            "heads": block_id,
            "held": [layer * heads + head for (layer, head), _ in self.bundles],
            "ends": np.cumsum([len(one) for one in contents], dtype=np.int64).tolist(),
        }


def put_texts(trace: Trace, blocks: Blocks) -> list[str | None]:
    """Store every complete sample's text; return block ids, None for a sample without text."""
    texts = [prompt_block(trace, int(sample)) for sample in np.flatnonzero(trace.ok)]
    return [None if text is None else blocks.put(f"text{number}", text) for number, text in enumerate(texts)]


def tokens_part(
    trace: Trace, blocks: Blocks, texts: Sequence[str | None], pairs: Sequence[IndexPair], first: HeadIndex
) -> dict[str, Any]:
    """Return the page's JSON fields `prompts` and `held_heads`, and store the blocks whose ids they contain.

    Args:
        trace: the trace whose complete samples are shown.
        blocks: the blocks, stored while bytes remain.
        texts: the result of `put_texts`.
        pairs: pairs of configurations whose changes determine the order of heads.
        first: layer and head that come first.
    """
    samples = [SampleBlocks(int(sample), text) for sample, text in zip(np.flatnonzero(trace.ok), texts, strict=True)]
    _put_first_bundles(trace, blocks, samples, first)
    _put_attention(trace, blocks, samples)
    _put_bundles(trace, blocks, samples, pairs, first)
    layers, heads = trace.arrays["kept_count"].shape[2:]
    prompts = {str(number): one.to_dict(blocks, number, heads) for number, one in enumerate(samples)}
    total, stored = layers * heads * sum(one.kept for one in samples), sum(len(one.bundles) for one in samples)
    why = f"{total - stored:,} of {total:,} heads' tokens left out to keep the page small; --full keeps all"
    counts = {"of": total, "held": stored, "why": why if stored < total else ""}
    return {"prompts": prompts, "held_heads": counts}


def _put_first_bundles(trace: Trace, blocks: Blocks, samples: Sequence[SampleBlocks], first: HeadIndex) -> None:
    """Store the bundle of the head `first` and the per-token share of keeping heads, for every sample."""
    for number, one in enumerate(samples):
        heads = sample_heads(trace, one.index)
        one.kept = heads is not None
        if heads is not None:
            _append_bundle(blocks, one, first, kept_bundle(heads, *first))
            one.share = blocks.offer(f"share{number}", deflate(heads.share.tobytes()))


def _put_attention(trace: Trace, blocks: Blocks, samples: Sequence[SampleBlocks]) -> None:
    """Store every sample's attention per token, averaged over heads, while bytes remain."""
    for number, one in enumerate(samples):
        attention = prompt_attention(trace, one.index)
        if attention is not None:
            codes: NDArray[np.uint8] = attention_codes(attention.mean(axis=(0, 1)))
            one.attention = blocks.offer(f"attention{number}", deflate(codes.tobytes()))


def _put_bundles(
    trace: Trace, blocks: Blocks, samples: Sequence[SampleBlocks], pairs: Sequence[IndexPair], first: HeadIndex
) -> None:
    """Store the bundles of all samples, within equal shares of the bytes; masks are read sample by sample."""
    orders = [heads_by_change(trace, one.index, pairs, first) for one in samples]
    for number, (one, order) in enumerate(zip(samples, orders, strict=True)):
        _put_sample_bundles(trace, blocks, one, order, blocks.room / (len(samples) - number))


def _put_sample_bundles(
    trace: Trace, blocks: Blocks, sample: SampleBlocks, order: Sequence[HeadIndex], room: float
) -> None:
    """Store bundles of a sample's heads, in the order `order`, until `room` bytes are used."""
    heads = sample_heads(trace, sample.index) if sample.kept and room > 0 else None
    if heads is None:
        return
    for head in order:
        bundle = kept_bundle(heads, *head)
        room -= _bundle_bytes(bundle)
        if room < 0:
            return
        _append_bundle(blocks, sample, head, bundle)


def _append_bundle(blocks: Blocks, sample: SampleBlocks, head: HeadIndex, bundle: bytes) -> None:
    """Append a head's bundle to its sample, and subtract its bytes from the remaining ones."""
    blocks.room -= _bundle_bytes(bundle) + (0 if sample.bundles else block_bytes(b""))
    sample.bundles.append((head, bundle))


def _bundle_bytes(bundle: bytes) -> int:
    """Return the bytes that a bundle occupies in a page, as a part of its sample's block."""
    return block_bytes(bundle) - block_bytes(b"") + _JSON_BYTES
