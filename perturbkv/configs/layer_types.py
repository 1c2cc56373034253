"""The measured layers of a model, those whose attention sees the whole prompt, from its configuration. No torch here.

In a model that mixes full attention with sliding windows, recurrent layers or layers without memory, only the full ones
are measured: another holds its window or state whatever is evicted elsewhere. In a model with one kind of layer all are
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FULL, SLIDING, CHUNKED, HYBRID = "full_attention", "sliding_attention", "chunked_attention", "hybrid"
"""Kinds of attention layers in a configuration's `layer_types`; a hybrid one has a recurrent state beside it."""
_RECURRENT = frozenset({"linear_attention", "conv", "mamba", HYBRID, "hybrid_sliding"})
"""Kinds of layers with a recurrent state."""
_SOFT_CAPS = ("attn_logit_softcapping", "attn_logit_softcap", "logit_softcap")
"""Names that configurations give the soft cap of attention's logits."""


def measured_layers(config: Any) -> tuple[int, ...]:
    """Return the indices of the measured layers, whose cache is evicted."""
    types = getattr(config, "layer_types", None) or ()
    full = tuple(index for index, kind in enumerate(types) if kind in (FULL, HYBRID))
    return full or tuple(range(int(config.num_hidden_layers)))


def measured_config(config: Any) -> Any:
    """Return the measured layers' configuration: their own where layers differ in size (Gemma 4), else `config`."""
    differ = getattr(config, "is_heterogeneous", False)
    return config.per_layer_config[measured_layers(config)[0]] if differ else config


def is_mixed(config: Any) -> bool:
    """Return whether the model has unmeasured layers: of sliding windows, recurrent, or without memory."""
    return len(measured_layers(config)) < int(config.num_hidden_layers)


def is_recurrent(config: Any) -> bool:
    """Return whether some layers have a recurrent state, alone or beside attention."""
    return not _RECURRENT.isdisjoint(getattr(config, "layer_types", None) or ())


def sliding_layers(config: Any) -> int:
    """Return the number of unmeasured layers with a cache of a sliding window or chunks."""
    types, readers = getattr(config, "layer_types", None) or (), reading_layers(config)
    own = (kind for index, kind in enumerate(types) if index not in readers)
    return sum(kind in (SLIDING, CHUNKED) for kind in own) if is_mixed(config) else 0


def reading_layers(config: Any) -> frozenset[int]:
    """Return the indices of the layers that, by transformers' own word, read another layer's cache."""
    modes = getattr(config, "kv_sharing_modes", None) or ()
    return frozenset(index for index, mode in enumerate(modes) if mode == "reuse")


def format_measured(config: Any) -> str:
    """Return the indices of the measured layers as text, such as `5 11 17 of 18`; empty if all layers are measured."""
    return f"{' '.join(map(str, measured_layers(config)))} of {config.num_hidden_layers}" if is_mixed(config) else ""


def format_layers(layers: Sequence[int]) -> str:
    """Return ascending layer numbers as ranges, such as `0, 18-23`; `none` for no layers."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def describe_measured(text: str) -> str:
    """Return a text of `format_measured` in words, such as `layer 5 alone measured, of 6`; empty for an empty one."""
    if not text:
        return ""
    indices, count = parse_measured(text)
    return f"layer {indices[0]} alone measured, of {count}" if len(indices) == 1 else f"layers {text} measured"


def parse_measured(text: str) -> tuple[tuple[int, ...], int]:
    """Return the measured layers' indices and the total number of layers from a text of `format_measured`.

    Raises ValueError for any other text.
    """
    indices, _, count = text.partition(" of ")
    return tuple(map(int, indices.split())), int(count)


def sliding_window(config: Any) -> int | None:
    """Return the sliding window of the measured layers, in entries; None if they see all entries."""
    types = getattr(config, "layer_types", None)
    full = types is not None and not {FULL, HYBRID}.isdisjoint(types)
    if full or not getattr(config, "use_sliding_window", True):
        return None
    return configured_window(config)


def configured_window(config: Any) -> int | None:
    """Return the entries that a sliding layer sees, the query's own included, or a chunk has; None without a window."""
    name = "attention_chunk_size" if CHUNKED in (getattr(config, "layer_types", None) or ()) else "sliding_window"
    window = getattr(config, name, None)
    return None if window is None else int(window)


def soft_cap(config: Any) -> float | None:
    """Return the soft cap that a model's configuration names for the logits of its attention; None without one.

    It serves a refusal before the weights are read; which cap a layer has is found by running it.
    """
    return next(filter(None, (getattr(config, name, None) for name in _SOFT_CAPS)), None)
