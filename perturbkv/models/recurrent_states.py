"""Recurrent states in transformers' caches: of linear attention, Mamba and short convolutions, in a layer of their own.

Versions before 5.5 keep them elsewhere, in a way for each family; there no cache layer has a state. Before `LEAST` most
families do not read on from a state with more than one token, which the proof refuses.
"""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor
from transformers import cache_utils

LEAST = "5.18"
"""Version of transformers from which on families with recurrent layers read on from the state that is in the cache."""
LAYER: Any = getattr(cache_utils, "LinearAttentionLayer", None)
"""Class of cache layers with a recurrent state; None before 5.5."""
ATTENTION_LAYER: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
"""Class of cache layers with a recurrent state beside keys and values; None before 5.5."""


def version_note() -> str:
    """Return which transformers recurrent layers need, as the end of a refusal; empty where this one is new enough."""
    here = transformers.__version__
    needs = f" (models with recurrent layers need transformers {LEAST} or newer, this is {here})"
    return needs if Version(here) < Version(LEAST) else ""


def tensors(layer: Any) -> list[Tensor]:
    """Return the tensors (row, …) of a cache layer's recurrent state, convolutions' first; none without a state."""
    kinds = [getattr(layer, name, None) for name in ("conv_states", "recurrent_states")]
    held = [tensor for kind in kinds for tensor in (kind.values() if isinstance(kind, dict) else [kind])]
    return [tensor for tensor in held if isinstance(tensor, Tensor)]


def size(layer: Any) -> int:
    """Return how many numbers the recurrent state of a cache layer's first row has; 0 without a state."""
    return sum(tensor[:1].numel() for tensor in tensors(layer))
