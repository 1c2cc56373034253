"""Is an eviction that is not ours broken, or only lossy? (METHOD: Audit.)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.audit import audit_faults
from perturbkv.analyses.audit import faults as audit_told
from perturbkv.analyses.audit.audit_faults import Fault
from perturbkv.analyses.identity import RunIdentity
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
        said = audit_told.verdict(self.trace, self.faults, self.unreadable)
        return f"{self.verdict}: {said}"

    def title(self) -> str:
        """What was audited, and on what."""
        return audit_told.title(self.trace)

    def tables(self) -> Sequence[Table | str]:
        """What it keeps, how it decodes, what plain use does, what it costs."""
        return audit_told.tables(self.trace, self.faults)

    def notes(self) -> str:
        """What the columns mean."""
        return audit_told.notes(self.trace)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON holds it."""
        from perturbkv.analyses.audit.audit_document import document

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
            for step, layers in enumerate(audit_faults.layer_floors(decoded))
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
            floors = audit_faults.layer_floors(decoded).max(axis=0)
            found[run.situation] = np.fmax(found.get(run.situation, floors), floors)
        return found


def _shares(entries: Entries, tokens: int, bins: int) -> NDArray[np.float64]:
    """(layer, bin) of one prompt."""
    edges = np.linspace(0, tokens, bins + 1).round()
    counts = [np.histogram(np.concatenate(sets), edges)[0] / len(sets) for sets in entries.kept]
    return np.asarray(counts / np.diff(edges))


def conclude(trace: AuditTrace) -> AuditResult:
    """The verdict on what an audit measured."""
    found = [fault for run in trace.runs if (fault := audit_faults.of_run(run)) is not None]
    return AuditResult(trace, tuple(sorted(found, key=audit_faults.order)), _identity(trace))


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
