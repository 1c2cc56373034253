"""What an audit measured, as JSON holds it."""

from __future__ import annotations

from typing import Any

import numpy as np

from perturbkv.analyses.audit import audit_faults
from perturbkv.analyses.json_values import config_object
from perturbkv.audit_trace import Audited, AuditTrace, Decoded, Entries


def document(trace: AuditTrace) -> dict[str, Any]:
    """Everything but the verdict."""
    return {
        "eviction": trace.eviction,
        "kind": trace.kind,
        "about": dict(trace.about),
        "layers": trace.layers,
        "query_heads": trace.query_heads,
        "kv_heads": trace.kv_heads,
        "unreadable": trace.unreadable,
        "runs": [_run(trace, run) for run in trace.runs],
        "plain_use": None if trace.plain is None else vars(trace.plain),
        "losses": [vars(loss) for loss in trace.losses],
        "lossless": trace.lossless,
        "protected_first": trace.protected[0],
        "protected_recent": trace.protected[1],
        "controls_protect_less": trace.freed,
        "configs": [config_object(config) for config in trace.configs],
    }


def _run(trace: AuditTrace, run: Audited) -> dict[str, Any]:
    return {
        **{
            name: getattr(run, name)
            for name in ("sample", "situation", "row", "tokens", "padding", "failed", "refused")
        },
        "entries": None if run.entries is None else _entries(trace, run, run.entries),
        "steps": [] if run.decoded is None else [_step(run, run.decoded, step) for step in range(len(run.forwards))],
    }


def _entries(trace: AuditTrace, run: Audited, entries: Entries) -> dict[str, Any]:
    kept = [[len(one) for one in layer] for layer in entries.kept]
    return {
        "held_share": sum(map(sum, kept)) / (trace.layers * trace.kv_heads * run.tokens),
        "kept": kept,
        "without_first": sum(0 not in one for layer in entries.kept for one in layer),
        "without_last": sum(run.tokens - 1 not in one for layer in entries.kept for one in layer),
        **{name: getattr(entries, name) for name in ("padded", "strangers", "duplicates")},
        "unordered": [layer for layer, heads in enumerate(entries.unordered) if np.any(heads)],
        "repeated": list(entries.repeated),
        "changed": list(entries.changed),
        "altered": [
            {"layer": layer, "head": head, "what": words}
            for layer, heads in enumerate(entries.altered) for head, words in enumerate(heads) if words
        ],
        "key_floors": _units(entries.key_distance, entries.key_floor),
        "value_floors": _units(entries.value_distance, entries.value_floor),
    }  # fmt: skip


def _units(distance: Any, floor: Any) -> list[float]:
    """(layer,) the worst head's distance in floors; 0 where there is no distance."""
    worst = distance.max(axis=-1)
    return list(np.divide(worst, floor, out=np.zeros_like(worst), where=worst > 0))


def _step(run: Audited, decoded: Decoded, step: int) -> dict[str, Any]:
    return {
        "tokens": run.forwards[step],
        "heads": audit_faults.head_floors(decoded)[step].max(axis=-1),
        "hidden": decoded.hidden[step] / decoded.hidden_floor,
        "logits": float(audit_faults.logit_floors(decoded)[step]),
        "same_token": bool(decoded.agrees[step]),
        "behind": float(decoded.behind[step]),
    }
