"""Which tokens one head keeps, what it loses with the others, and where it looks: a bundle per sample and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.tokens.fates import changes
from perturbkv.reporting.page_blocks import deflated
from perturbkv.reporting.prompt_texts import Kept, attention_codes, attention_of, kept_of
from perturbkv.reporting.quantising import logarithm_below_one
from perturbkv.reporting.sides import Places
from perturbkv.trace import Trace

LOSS_STEP, LOSS_CODES = 0.0005, 65535
_LEVEL = 7
"""Of deflate: for bit masks 9 takes five times as long and gives 1.4 % less."""
_LOST = ("lost_position", "lost_output", "weighted_norm")


@dataclass(frozen=True)
class Losses:
    """What a sample's heads lose most.

    Attributes:
        positions: (config, layer, head, entry) evicted entries, that which adds most first; −1 past the last.
        shares: (config, layer, head, entry) codes of A ν / C: 0, or exp((code − 65535) · 0.0005).
    """

    positions: NDArray[np.int32]
    shares: NDArray[np.uint16]


def losses_of(trace: Trace, sample: int) -> Losses | None:
    """The evicted entries that add most to each head's output; None where the trace does not hold them."""
    if not set(_LOST) <= set(trace.arrays):
        return None
    positions, output, total = (np.asarray(trace.arrays[name][sample]) for name in _LOST)
    shares = np.asarray(ratio(output, np.nan_to_num(total)[:, :, None]))
    codes = logarithm_below_one(np.where(positions >= 0, shares, 0), LOSS_STEP, LOSS_CODES)
    return Losses(positions.astype("<i4"), codes.astype("<u2"))


def listed(trace: Trace) -> int:
    """How many lost entries a head has; 0 where the trace does not hold them."""
    return int(trace.arrays["lost_position"].shape[-1]) if set(_LOST) <= set(trace.arrays) else 0


@dataclass(frozen=True)
class OfSample:
    """Everything that the bundles of one sample are made of; `attention` is (layer, head, token)."""

    kept: Kept
    losses: Losses | None
    attention: Floats | None


def of_sample(trace: Trace, sample: int) -> OfSample | None:
    """What a sample's heads keep, lose and look at; None where the trace does not tell what they keep."""
    kept = kept_of(trace, sample)
    return None if kept is None else OfSample(kept, losses_of(trace, sample), attention_of(trace, sample))


def bundle(of: OfSample, layer: int, head: int) -> bytes:
    """One head, deflated: each configuration's mask XORed with that before it, losses, attention."""
    own, losses, attention = of.kept.masks[:, layer, head], of.losses, of.attention
    masks = own.copy()
    masks[1:] ^= own[:-1]
    parts = [masks.tobytes()]
    if losses is not None:
        parts += [losses.positions[:, layer, head].tobytes(), losses.shares[:, layer, head].tobytes()]
    if attention is not None:
        parts.append(attention_codes(attention[layer, head]).tobytes())
    return deflated(b"".join(parts), _LEVEL)


def by_change(trace: Trace, sample: int, pairs: Sequence[Places], first: Places) -> list[Places]:
    """(layer, head) of a sample, all but the `first`, that which a pair changes most before the others.

    What changes is the isolated perturbation over ‖o_h‖₁; of several pairs the largest change counts.
    """
    both = [changes(trace, sample, pair) for pair in pairs]
    shape = trace.arrays["output_norm"].shape[-2:]
    moved = np.max([np.abs(second - one) for one, second in both], axis=0) if both else np.zeros(shape)
    order = np.stack(np.unravel_index(np.argsort(-moved, axis=None, kind="stable"), shape), axis=1).tolist()
    found = [(int(layer), int(head)) for layer, head in order]
    return [one for one in found if one != first]
