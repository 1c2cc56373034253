"""Is an eviction that is not ours broken, or only lossy? (METHOD: Audit.).

What an audit measured, as JSON holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.audit import faults
from perturbkv.analyses.audit.faults import Fault
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.json_values import config_object
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.audit_trace import Audited, AuditTrace, Decoded, Entries
from perturbkv.display import Table

EXACT, DIFFERS, UNREADABLE = "exact", "differs", "unreadable"
EXIT_CODES = {EXACT: 0, DIFFERS: 1, UNREADABLE: 2}


@dataclass(frozen=True, repr=False)
class AuditResult(Result):
    """The verdict, and what it rests on.

    Attributes:
        trace: what was measured.
        faults: the first difference of every prompt, situation and row that has one, the one to look at first first.
        identity: of the run.
    """

    trace: AuditTrace
    faults: tuple[Fault, ...]
    identity: RunIdentity

    @property
    def verdict(self) -> str:
        """`exact`: only lossy; `differs`: not what its kept sets imply; `unreadable`."""
        if self.unreadable:
            return UNREADABLE
        return DIFFERS if self.faults else EXACT

    @property
    def exit_code(self) -> int:
        """0, 1 or 2."""
        return EXIT_CODES[self.verdict]

    @property
    def unreadable(self) -> str:
        """Why nothing can be said; empty where something can."""
        runs = self.trace.runs
        if self.trace.unreadable or not runs:
            return self.trace.unreadable
        if any(run.entries is not None for run in runs):
            return ""
        return runs[0].failed or f"it refuses every situation: {runs[0].refused}"

    def conclusion(self) -> str:
        """The verdict in one line."""
        said = faults.verdict(self.trace, self.faults, self.unreadable)
        return f"{self.verdict}: {said}"

    def title(self) -> str:
        """What was audited, and on what."""
        return faults.title(self.trace)

    def tables(self) -> Sequence[Table | str]:
        """What it keeps, how it decodes, what plain use does, what it costs."""
        return faults.tables(self.trace, self.faults)

    def notes(self) -> str:
        """What the columns mean."""
        return faults.notes(self.trace)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON holds it."""
        found: dict[str, Any] = plain(
            {
                "verdict": self.verdict,
                "exit_code": self.exit_code,
                "conclusion": self.conclusion(),
                "faults": [vars(fault) for fault in self.faults],
                **document(self.trace),
            }
        )
        return found

    def records(self) -> list[dict[str, Any]]:
        """A row per prompt, situation, row of the batch, step and layer."""
        return [
            {
                "sample": run.sample, "situation": run.situation, "row": run.row, "step": step, "layer": layer,
                "floors": float(floors), "kept": sum(len(one) for one in entries.kept[layer]),
                "altered": "; ".join(words for words in entries.altered[layer] if words),
            }
            for run, entries, decoded in self.compared
            for step, layers in enumerate(faults.layer_floors(decoded))
            for layer, floors in enumerate(layers)
        ]  # fmt: skip

    @property
    def compared(self) -> list[tuple[Audited, Entries, Decoded]]:
        """The runs whose entries were found and whose decoding was held against the reference."""
        return [(run, run.entries, run.decoded) for run in self.trace.runs if run.entries and run.decoded]

    def kept_share(self, most: int) -> NDArray[np.float64]:
        """(layer, bin) share of each place that is kept, over kept sets and prompts; NaN where none were found.

        A bin is the same share of every prompt: `most` of them, or a position each of a shorter prompt.
        """
        whole = [(run.entries, run.tokens) for run in self.trace.runs if run.entries and run.row == 0]
        if not whole:
            return np.full((self.trace.layers, 1), np.nan)
        bins = min(most, *(tokens for _, tokens in whole))
        return np.asarray(np.mean([_shares(entries, tokens, bins) for entries, tokens in whole], axis=0))

    def by_layer(self) -> dict[str, NDArray[np.float64]]:
        """Situation → (layer,) the most noise floors of all its prompts, rows and steps."""
        found: dict[str, NDArray[np.float64]] = {}
        for run, _, decoded in self.compared:
            floors = faults.layer_floors(decoded).max(axis=0)
            found[run.situation] = np.fmax(found.get(run.situation, floors), floors)
        return found


def _shares(entries: Entries, tokens: int, bins: int) -> NDArray[np.float64]:
    """(layer, bin) of one prompt."""
    edges = np.linspace(0, tokens, bins + 1).round()
    counts = [np.histogram(np.concatenate(sets), edges)[0] / len(sets) for sets in entries.kept]
    return np.asarray(counts / np.diff(edges))


def conclude(trace: AuditTrace) -> AuditResult:
    """The verdict on what an audit measured."""
    found = [fault for run in trace.runs if (fault := faults.fault_of_run(run)) is not None]
    return AuditResult(trace, tuple(sorted(found, key=faults.fault_order)), _identity(trace))


def _identity(trace: AuditTrace) -> RunIdentity:
    about = trace.about
    return RunIdentity(
        model=about["model"],
        dataset=about.get("dataset", "prompts"),
        samples=int(about["samples"]),
        failed=0,
        configs=trace.configs,
        trace="",
        random_weights=about["random_weights"] == "true",
        made_with=f"perturbkv {about['perturbkv_version']}",
    )


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
        "heads": faults.head_floors(decoded)[step].max(axis=-1),
        "hidden": decoded.hidden[step] / decoded.hidden_floor,
        "logits": float(faults.logit_floors(decoded)[step]),
        "same_token": bool(decoded.agrees[step]),
        "behind": float(decoded.behind[step]),
    }
