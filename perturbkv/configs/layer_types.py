"""Which layers of a model see the whole prompt, as its configuration says. No torch here.

A model that mixes full attention with sliding windows is measured in its full layers alone: a sliding layer holds its
window whatever is evicted elsewhere. A model of one kind of layer is measured in all of them.
"""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"


def measured(config: Any) -> tuple[int, ...]:
    """The layers whose cache is evicted and whose outputs are measured, by their indices in the model."""
    types = getattr(config, "layer_types", None) or ()
    full = tuple(place for place, kind in enumerate(types) if kind == FULL)
    return full or tuple(range(int(config.num_hidden_layers)))


def is_mixed(config: Any) -> bool:
    """Whether some layers are left alone, because they hold a sliding window of their own."""
    return len(measured(config)) < int(config.num_hidden_layers)


def told(config: Any) -> str:
    """For example `5 11 17 of 18`; empty where every layer is measured."""
    return f"{' '.join(map(str, measured(config)))} of {config.num_hidden_layers}" if is_mixed(config) else ""


def parsed(text: str) -> tuple[tuple[int, ...], int]:
    """Indices and number of all layers of what `told` says. Raises ValueError for any other text."""
    indices, _, count = text.partition(" of ")
    return tuple(map(int, indices.split())), int(count)


def sliding_window(config: Any) -> int | None:
    """The window that measured layers use; None where every measured layer sees all entries."""
    types = getattr(config, "layer_types", None)
    if types is not None and FULL in types or not getattr(config, "use_sliding_window", True):
        return None
    return own_window(config)


def own_window(config: Any) -> int | None:
    """How many entries a sliding layer sees, its query's own among them; None where the configuration says none."""
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)
