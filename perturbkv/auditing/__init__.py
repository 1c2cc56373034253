"""Audits of external evictions and of engines' caches, held against the plain model (METHOD: Audit, Engines' caches).

Everything that others import of it, each name loaded when it is first used; `tests/house` holds that nobody imports
the modules inside. An audit fills the records of `perturbkv.analyses.audit`, from which its verdict follows.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perturbkv.auditing.dumps.dump_audit import audit_dump as audit_dump
    from perturbkv.auditing.dumps.dump_file import write_dump as write_dump
    from perturbkv.auditing.dumps.llamacpp import open_dump as open_dump
    from perturbkv.auditing.dumps.vllm_audit import DEFAULT_SITUATIONS as DEFAULT_SITUATIONS
    from perturbkv.auditing.dumps.vllm_audit import EngineProgress as EngineProgress
    from perturbkv.auditing.dumps.vllm_audit import audit_vllm as audit_vllm
    from perturbkv.auditing.dumps.vllm_engine import EngineRequest as EngineRequest
    from perturbkv.auditing.dumps.vllm_engine import dump_vllm as dump_vllm
    from perturbkv.auditing.eviction_audit import audit_eviction as audit_eviction
    from perturbkv.auditing.evictions import load_eviction as load_eviction
    from perturbkv.auditing.positions_file import KeptFile as KeptFile

_MODULES = {
    "audit_dump": "dumps.dump_audit",
    "write_dump": "dumps.dump_file",
    "open_dump": "dumps.llamacpp",
    "DEFAULT_SITUATIONS": "dumps.vllm_audit",
    "EngineProgress": "dumps.vllm_audit",
    "audit_vllm": "dumps.vllm_audit",
    "EngineRequest": "dumps.vllm_engine",
    "dump_vllm": "dumps.vllm_engine",
    "audit_eviction": "eviction_audit",
    "load_eviction": "evictions",
    "KeptFile": "positions_file",
}
"""Public name -> the module inside that has it."""
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'perturbkv.auditing' has no attribute '{name}'")
    return getattr(importlib.import_module(f"perturbkv.auditing.{_MODULES[name]}"), name)
