"""The presets of METHOD's table."""

from __future__ import annotations

from typing import Any

_RELEASED = {
    "alpha": 0.5,
    "split": "total",
    "score": "pooled",
    "epsilon": 1e-4,
    "pool": "average",
    "kernel": 5,
    "granularity": "kv",
    "safeguard": "guaranteed",
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "paper-v2": {"alpha": 0.5, "score": "pooled", "epsilon": 1e-4, "granularity": "kv"},
    "released-v2": _RELEASED,
    "kvpress": {**_RELEASED, "window": 64, "line": "total"},
}
"""METHOD's table of presets, as differences from the defaults, which are `paper`; each goes to whatever has it."""
