"""The measured layers of a model, those whose attention sees the whole prompt, from its configuration. No torch here.

In a model that mixes full attention with sliding windows only the full layers are measured: a sliding layer holds its
window whatever is evicted elsewhere. In a model with one kind of layer all are measured.
"""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"


def measured_layers(config: Any) -> tuple[int, ...]:
    """Return the indices of the layers whose cache is evicted and whose outputs are measured."""
    types = getattr(config, "layer_types", None) or ()
    full = tuple(index for index, kind in enumerate(types) if kind == FULL)
    return full or tuple(range(int(config.num_hidden_layers)))


def is_mixed(config: Any) -> bool:
    """Return whether some layers are not measured, because they hold a sliding window of their own."""
    return len(measured_layers(config)) < int(config.num_hidden_layers)


def format_measured(config: Any) -> str:
    """Format the measured layers, such as `5 11 17 of 18`; empty where every layer is measured."""
    return f"{' '.join(map(str, measured_layers(config)))} of {config.num_hidden_layers}" if is_mixed(config) else ""


def parse_measured(text: str) -> tuple[tuple[int, ...], int]:
    """Parse the text of `format_measured` into indices and the number of all layers. Raises ValueError."""
    indices, _, count = text.partition(" of ")
    return tuple(map(int, indices.split())), int(count)


def sliding_window(config: Any) -> int | None:
    """Return the sliding window of the measured layers, in entries; None where each of them sees all entries."""
    types = getattr(config, "layer_types", None)
    if types is not None and FULL in types or not getattr(config, "use_sliding_window", True):
        return None
    return configured_window(config)


def configured_window(config: Any) -> int | None:
    """Return the number of entries that a sliding layer sees, the query's own included; None without a window."""
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)
