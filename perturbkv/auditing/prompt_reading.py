"""The reading of the prompts by an eviction, and what the plain model makes of the same reading (METHOD: Audit, 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from perturbkv.analyses.audit.cache_entries import FLOORS, MOST_ROUNDED, Alteration
from perturbkv.auditing.changes import are_among
from perturbkv.auditing.forward_passes import ForwardPass, Situation, sees_otherwise
from perturbkv.auditing.reference import PromptEntries, as_given, entry_distances, read_prompts
from perturbkv.cache.external_cache import Layers
from perturbkv.cache.model_state import ModelState
from perturbkv.models.adapter import Adapter
from perturbkv.models.interface import AttentionFunction


@dataclass(frozen=True, eq=False)
class PromptReading:
    """The reading of the prompts by an eviction.

    Attributes:
        prompts: the entries that the plain model makes of the same reading.
        misread: what no plain model does; empty where it does all of it.
        parts: number of parts that were read, later ones through what was left of earlier ones; else 1.
        rounded: whether the prompt's own attention got rounded entries.
    """

    prompts: PromptEntries
    misread: tuple[Alteration, ...] = ()
    parts: int = 1
    rounded: bool = False


def reading_of(
    adapter: Adapter, situation: Situation, prompts: PromptEntries, calls: Sequence[ForwardPass], before: ModelState
) -> PromptReading:
    """Return how the prompts were read in recorded calls, and the entries that are to be expected of it.

    They are those of `prompts`, the plain reading, unless entries were rounded as they were written, or went between
    two parts of a prompt: these the plain model, as it was `before`, reads again from what was stored. Where the calls
    did not read each token once, in order, or the attention got anything but the tokens' own entries, rounded or not,
    and those of earlier parts, the plain reading is expected, too.
    """
    plain, full, padding = PromptReading(prompts), prompts.full, situation.padding
    new = [call.query[0].shape[2] for call in calls if set(call.key) == set(range(len(full)))]
    shapes = {keys.shape[:2] for call in calls for keys in call.key.values()}
    if len(new) < len(calls) or sum(new) != situation.entries or shapes != {full[0][0].shape[:2]}:
        return plain
    starts = list(accumulate(new[:-1], initial=0))
    for call, first, count in zip(calls, starts, new, strict=True):
        layer, entries = min(call.entries.items(), key=lambda item: item[1])
        what = sees_otherwise(call, first, padding)
        if entries < count:
            what = f"the prompt is read through its own eviction: {entries} of {first + count} entries"
        if what:
            return replace(plain, misread=(Alteration(layer, -1, "reading", what, -1),))
        if max(call.entries.values()) > first + count:
            return plain
    is_cut = any(
        min(call.entries.values()) < first + count for call, first, count in zip(calls, starts, new, strict=True)
    )
    parts = [[call.new_entries(layer) for call in calls] for layer in range(len(full))]
    stored = [
        (torch.cat([keys for keys, _ in layer], dim=2), torch.cat([values for _, values in layer], dim=2))
        for layer in parts
    ]
    if (not is_cut and _are_near(stored, full, prompts, situation, FLOORS)) or (len(calls) > 1 and any(padding)):
        return plain
    if not all(_holds_earlier(call, start, stored) for call, start in zip(calls, starts, strict=True)):
        return plain
    present = ModelState.capture(adapter.model)
    before.restore()
    # what the model makes of each token, given what was stored before it
    attends = [partial(_attend_to_given, adapter, call, situation) for call in calls]
    (read, rest), (other, other_rest) = (
        read_prompts(adapter, situation, new, kernel, attends) for kernel in (None, "eager")
    )
    present.restore()
    if not _are_near(stored, read, prompts, situation):
        return plain
    return PromptReading(
        replace(prompts, full=read, others=(other,) * 2, rests=(rest, *(other_rest,) * 2)),
        parts=len(calls) if is_cut else 1,
        rounded=not _are_near(stored, read, prompts, situation, FLOORS),
    )


def _are_near(layers: Layers, known: Layers, prompts: PromptEntries, situation: Situation, floors: int = 0) -> bool:
    """Return whether all entries but padding's are near others: within noise floors, or by rounding."""
    for layer, (own, full) in enumerate(zip(layers, known, strict=True)):
        for kind in range(2):
            limit = floors * float(prompts.floors[kind, layer]) or MOST_ROUNDED
            for row, first in enumerate(situation.padding):
                one, other = own[kind][row, :, first:], full[kind][row, :, first:]
                if not float(entry_distances(one, other, other).amax()) <= limit:
                    return False
    return True


def _holds_earlier(call: ForwardPass, first: int, stored: Layers) -> bool:
    """Return whether all entries before a part's own are, to the bit, what the parts before it got of theirs."""
    return all(
        are_among(head, known[row, place, :first])
        for layer in range(len(stored))
        for before, known in zip(call.previous_entries(layer), stored[layer], strict=True)
        for row, heads in enumerate(before)
        for place, head in enumerate(heads)
        if len(head)
    )


def _attend_to_given(
    adapter: Adapter, call: ForwardPass, situation: Situation, layer: int,
    stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any,
) -> Any:  # fmt: skip
    """Call the attention with the keys and values of another call, all visible but padding and later tokens.

    So an entry is what the plain model makes of what was stored before it. A call of a part has no padding.
    """
    query, _, _, _, *others = args
    key, value, new = call.key[layer], call.value[layer], query.shape[2]
    padding = situation.attention_mask[:, -new:] == 0
    causal = torch.ones(new, new, dtype=torch.bool, device=padding.device).tril()
    among_new = causal & (~padding.unsqueeze(1) | padding.unsqueeze(2))  # padding sees padding, or is NaN
    shown = F.pad(among_new, (key.shape[2] - new, 0), value=True).unsqueeze(1)
    return stock(module, query, key, value, as_given(adapter, shown, query.dtype), *others, **kwargs)
