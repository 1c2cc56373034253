"""Everything of a page that shows prompts, as far as there is room for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.reporting import heads_kept, prompt_texts
from perturbkv.reporting.page_blocks import Blocks, deflated, size_of
from perturbkv.reporting.sides import Places
from perturbkv.trace import Trace

_TOLD = 14
"""Bytes that the page's JSON says of each bundle."""


@dataclass
class Sample:
    """One sample's blocks, ids or None, and its bundles so far; `kept`: whether the trace tells what it keeps."""

    place: int
    text: str | None = None
    share: str | None = None
    attention: str | None = None
    kept: bool = False
    bundles: list[tuple[Places, bytes]] = field(default_factory=list)

    def to_dict(self, blocks: Blocks, number: int, heads: int) -> dict[str, Any]:
        """As the page's JSON holds it; the bundles are put behind one another into a block."""
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
    """The ids of the blocks of each complete sample's text, which every page holds; None of one without."""
    found = [prompt_texts.text_of(trace, int(place)) for place in np.flatnonzero(trace.ok)]
    return [None if text is None else blocks.put(f"text{number}", text) for number, text in enumerate(found)]


def tokens_part(
    trace: Trace, blocks: Blocks, texts: Sequence[str | None], pairs: Sequence[Places], first: Places
) -> dict[str, Any]:
    """`prompts` and `held_heads` of the page's JSON.

    Args:
        trace: of which the complete samples are shown.
        blocks: where blocks are held while there is room.
        texts: what `put_texts` gave.
        pairs: configurations whose changes say which heads come first.
        first: layer and head that come first of all.
    """
    samples = [Sample(int(place), text) for place, text in zip(np.flatnonzero(trace.ok), texts, strict=True)]
    _begin(trace, blocks, samples, first)
    _attention(trace, blocks, samples)
    _bundles(trace, blocks, samples, pairs, first)
    layers, heads = trace.arrays["kept_count"].shape[2:]
    told = {str(number): one.to_dict(blocks, number, heads) for number, one in enumerate(samples)}
    return {"prompts": told, "held_heads": _count(samples, layers * heads)}


def _begin(trace: Trace, blocks: Blocks, samples: Sequence[Sample], first: Places) -> None:
    """Of every sample the bundle of the head that a page shows first, and which share of all heads keeps each token."""
    for number, one in enumerate(samples):
        of = heads_kept.of_sample(trace, one.place)
        one.kept = of is not None
        if of is not None:
            _take(blocks, one, first, heads_kept.bundle(of, *first))
            one.share = blocks.offer(f"share{number}", deflated(of.kept.share.tobytes()))


def _attention(trace: Trace, blocks: Blocks, samples: Sequence[Sample]) -> None:
    for number, one in enumerate(samples):
        attention = prompt_texts.attention_of(trace, one.place)
        if attention is not None:
            codes: NDArray[np.uint8] = prompt_texts.attention_codes(attention.mean(axis=(0, 1)))
            one.attention = blocks.offer(f"attention{number}", deflated(codes.tobytes()))


def _bundles(trace: Trace, blocks: Blocks, samples: Sequence[Sample], pairs: Sequence[Places], first: Places) -> None:
    """Give every sample its bundles, each an equal part of the room: one sample's masks are held at a time."""
    orders = [heads_kept.by_change(trace, one.place, pairs, first) for one in samples]
    for number, (one, order) in enumerate(zip(samples, orders, strict=True)):
        _fill(trace, blocks, one, order, blocks.room / (len(samples) - number))


def _fill(trace: Trace, blocks: Blocks, sample: Sample, order: Sequence[Places], room: float) -> None:
    """The further bundles of one sample, the first heads first, until its share of the room is taken."""
    of = heads_kept.of_sample(trace, sample.place) if sample.kept and room > 0 else None
    if of is None:
        return
    for place in order:
        found = heads_kept.bundle(of, *place)
        room -= _taken(found)
        if room < 0:
            return
        _take(blocks, sample, place, found)


def _take(blocks: Blocks, sample: Sample, place: Places, found: bytes) -> None:
    blocks.room -= _taken(found) + (0 if sample.bundles else size_of(b""))
    sample.bundles.append((place, found))


def _taken(found: bytes) -> int:
    """Bytes that a bundle takes of a page, within its sample's block."""
    return size_of(found) - size_of(b"") + _TOLD


def _count(samples: Sequence[Sample], each: int) -> dict[str, Any]:
    """How many bundles the page holds, and why not all."""
    every, held = each * sum(one.kept for one in samples), sum(len(one.bundles) for one in samples)
    why = f"{every - held:,} of {every:,} heads' tokens left out to keep the page small; --full keeps all"
    return {"of": every, "held": held, "why": why if held < every else ""}
