"""The prompts of a page: their text, which share of the heads keeps each token, how much attention it gets."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.tokens.prompt_text import PromptText, prompt_of
from perturbkv.errors import TraceError
from perturbkv.reporting.page_blocks import deflated
from perturbkv.reporting.quantising import logarithm_below_one
from perturbkv.trace import Trace
from perturbkv.visible import plain

LONGEST, SHOWN = 500, 400
"""Characters of a token's piece: of a longer one so many are shown."""
ATTENTION_STEP, ATTENTION_CODES = 0.08, 255


@dataclass(frozen=True)
class Kept:
    """What one sample's configurations keep.

    Attributes:
        masks: (config, layer, head, byte) bit masks over the prompt, the first entry the lowest bit of the first byte.
        share: (config, token) of the heads that keep the token, 255 of all.
    """

    masks: NDArray[np.uint8]
    share: NDArray[np.uint8]


def text_of(trace: Trace, sample: int) -> bytes | None:
    """The block of a prompt's text, deflated; None where the trace lacks it."""
    try:
        prompt = prompt_of(trace, trace.sample_ids[sample])
    except TraceError:
        return None
    return deflated(json.dumps(_told(prompt), ensure_ascii=False, separators=(",", ":")).encode())


def why_without_text(trace: Trace) -> str:
    """What to do for the prompts' text; empty where a complete sample has it."""
    try:
        prompt_of(trace)
    except TraceError as error:
        return str(error)
    return ""


def piece(text: str) -> str:
    """A token's text as it may be shown: nothing in it is obeyed, and a very long one is cut."""
    shown = plain(text)
    if len(shown) <= LONGEST:
        return shown
    return f"{shown[:SHOWN]}… [{len(shown) - SHOWN:,} more characters]"


def kept_of(trace: Trace, sample: int) -> Kept | None:
    """What every configuration keeps of a sample, decoded one after the other; None where the trace lacks it."""
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
    """(layer, head, token) attention of the first decode step to the prompt's entries; None where it is not stored."""
    if "attention_full" not in trace.arrays:
        return None
    tokens = int(trace.arrays["prompt_tokens"][sample])
    return np.asarray(trace.arrays["attention_full"][sample, 0, ..., :tokens], dtype=np.float64)


def attention_codes(attention: Floats) -> NDArray[np.uint8]:
    """Attention in a byte each: 0, or exp((code − 255) · 0.08)."""
    return logarithm_below_one(attention, ATTENTION_STEP, ATTENTION_CODES).astype(np.uint8)


def _told(prompt: PromptText) -> dict[str, object]:
    pieces = [piece(one) for one in prompt.pieces]
    return {
        "pieces": pieces,
        "compressed": prompt.compressed,
        "cut": prompt.cut_place,
        "cut_tokens": prompt.cut_tokens,
        "cut_pieces": any(len(plain(one)) > LONGEST for one in prompt.pieces),
    }
