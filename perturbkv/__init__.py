"""perturbkv: what KV-cache eviction does to attention outputs, measured per head and per layer.

Public names are loaded when they are first used: importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    "Budget": "perturbkv.configs.budget",
    "EvictionConfig": "perturbkv.configs.eviction",
    "RunConfig": "perturbkv.configs.run",
    "grid": "perturbkv.selection.grid",
    "Resources": "perturbkv.configs.resources",
    "PerturbkvError": "perturbkv.errors",
    "SampleTrace": "perturbkv.trace",
    "Trace": "perturbkv.trace",
    "read_trace": "perturbkv.storage.trace_file",
    "TraceWriter": "perturbkv.storage.writer",
    "CompactCache": "perturbkv.cache.compact",
    "Prompt": "perturbkv.datasets.encode",
    "load_model": "perturbkv.api",
    "load_prompts": "perturbkv.api",
    "measure": "perturbkv.api",
    "generate": "perturbkv.api",
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
