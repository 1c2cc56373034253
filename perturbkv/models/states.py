"""Recurrent states in transformers' caches: of linear attention, Mamba and short convolutions, in a layer of their own.

Versions before `LEAST` keep them elsewhere, in a way for each family; there no cache layer has a state.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor
from transformers import cache_utils

LEAST = "5.5"
"""Oldest version of transformers whose caches have layers for recurrent states."""
LAYER: Any = getattr(cache_utils, "LinearAttentionLayer", None)
"""Class of cache layers with a recurrent state; None before `LEAST`."""
ATTENTION_LAYER: Any = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)
"""Class of cache layers with a recurrent state beside keys and values; None before `LEAST`."""


def version_note() -> str:
    """Return which transformers a model with recurrent layers needs, as a refusal's end; empty where it is here."""
    here = f" (models with recurrent layers need transformers {LEAST} or newer, this is {transformers.__version__})"
    return "" if LAYER is not None else here


def size(layer: Any) -> int:
    """Return the number of numbers in the recurrent state of a cache layer's first row; 0 without a state."""
    kinds = [getattr(layer, name, None) for name in ("conv_states", "recurrent_states")]
    held = [tensor for kind in kinds for tensor in (kind.values() if isinstance(kind, dict) else [kind])]
    return sum(tensor[:1].numel() for tensor in held if isinstance(tensor, Tensor))
