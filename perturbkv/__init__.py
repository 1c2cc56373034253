"""perturbkv: what KV-cache eviction does to attention outputs, measured per head and per layer.

Public names are loaded when they are first used: importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Budget": "perturbkv.config",
    "EvictionConfig": "perturbkv.config",
    "RunConfig": "perturbkv.config",
    "grid": "perturbkv.grid",
    "Resources": "perturbkv.resources",
    "PerturbkvError": "perturbkv.errors",
    "SampleTrace": "perturbkv.trace",
    "Trace": "perturbkv.trace",
    "read_trace": "perturbkv.store",
    "TraceWriter": "perturbkv.writer",
    "CompactCache": "perturbkv.cache",
    "load_model": "perturbkv.loading",
    "trace_sample": "perturbkv.runner",
}

__all__ = [*_PUBLIC, "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import the module that holds a public name, the first time that name is asked for (PEP 562)."""
    if name not in _PUBLIC:
        message = f"module 'perturbkv' has no attribute '{name}'"
        raise AttributeError(message)
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
