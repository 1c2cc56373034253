"""The verdict on an external eviction: broken, or only lossy (METHOD: Audit)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isnan
from typing import Any, ClassVar
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses.audit.audited_runs import AuditedEntries, AuditedRun, AuditLoss, CacheUse, audited_run
from perturbkv.analyses.audit.faults import (
    Fault,
    fault_of_run,
    fault_order,
    floors_text,
    layer_floors,
    worst_floors,
)
from perturbkv.analyses.columns import Line, column, derived, record, table
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.pairing import plural
from perturbkv.analyses.result import Result
from perturbkv.audit_trace import FLOORS, IN_CACHE, SITUATIONS, AuditRun, AuditTrace, CacheEntries, DecodeDistances
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part
from perturbkv.escaping import escape_line

EXACT, DIFFERS, UNREADABLE, IDLE, UNCOMPARED = "exact", "differs", "unreadable", "did nothing", "not compared"
EXIT_CODES = {EXACT: 0, DIFFERS: 1, IDLE: 1, UNREADABLE: 2, UNCOMPARED: 2}
_KEPT = ("tokens", "cache_share", "per_set", "first", "last", "odd")
_STEPS = ("step", "tokens", "worst_head", "worst_hidden", "logits", "same_token")
_LOSSES = ("cache_share", "isolated", "propagated", "drift", "kl")


@record
class Audit(Result):
    """The verdict on an external eviction, with its measurements.

    Attributes:
        trace: the measurements.
        identity: of the run.
    """

    SECTION: ClassVar[str] = "audit"
    DOCUMENT: ClassVar[str] = "of an audit"
    ROWS: ClassVar[str] = "layers"
    SHOWN: ClassVar[tuple[str, ...]] = ("cache_share", "intact", "worst", "difference")
    FIRST: ClassVar[str] = "prompt"

    trace: AuditTrace
    faults: tuple[Fault, ...] = column(
        "the first difference of each prompt, situation and row that has one, the one to look at first first"
    )
    identity: RunIdentity

    @derived()
    def verdict(self) -> str:
        """`exact` (only lossy), `differs`, `did nothing`, `unreadable` or `not compared`."""
        if self.obstacle:
            return UNREADABLE
        if self.faults:
            return DIFFERS
        if not any(run.entries.evicted for run in self.trace.runs if run.entries):
            return IDLE
        return EXACT if self.compared else UNCOMPARED

    @derived()
    def exit_code(self) -> int:
        """Exit code of the process: 0 exact; 1 differs, did nothing; 2 unreadable, not compared."""
        return EXIT_CODES[self.verdict]

    @derived(key="conclusion")
    def summary(self) -> str:
        """The verdict in one line."""
        clauses = {
            UNREADABLE: lambda: self.obstacle, DIFFERS: self._differs_clause, EXACT: self._exact_clause,
            IDLE: self._idle_clause, UNCOMPARED: self._uncompared_clause,
        }  # fmt: skip
        return f"{self.verdict}: {clauses[self.verdict]()}"

    @derived()
    def eviction(self) -> str:
        """The eviction that was audited, as it was written."""
        return self.trace.eviction

    @derived()
    def kind(self) -> str:
        """Function, cache class, press or positions file."""
        return self.trace.kind

    @derived()
    def about(self) -> dict[str, str]:
        """Model, data, dtype, device, versions."""
        return dict(self.trace.about)

    @derived()
    def layers(self) -> int:
        """Layers of the model."""
        return self.trace.layers

    @derived()
    def query_heads(self) -> int:
        """Query heads per layer of the model."""
        return self.trace.query_heads

    @derived()
    def kv_heads(self) -> int:
        """Key/value heads per layer of the model."""
        return self.trace.kv_heads

    @derived()
    def unreadable(self) -> str:
        """Reason why nothing could be audited; empty where something was."""
        return self.trace.unreadable

    @derived()
    def runs(self) -> tuple[AuditedRun, ...]:
        """One per prompt, situation and row of its batch."""
        by_run = {(fault.sample, fault.situation, fault.row): fault for fault in self.faults}
        return tuple(
            audited_run(self.trace, run, by_run.get((run.sample, run.situation, run.row))) for run in self.trace.runs
        )

    @derived()
    def plain_use(self) -> CacheUse | None:
        """Plain use of the cache with transformers, where no positions are given."""
        return None if self.trace.plain is None else CacheUse(**asdict(self.trace.plain))

    @derived()
    def losses(self) -> tuple[AuditLoss, ...]:
        """The loss of the kept sets, then of controls that hold as much."""
        return tuple(
            AuditLoss(loss.name, loss.held, loss.isolated, loss.propagated, loss.drift, loss.kl)
            for loss in self.trace.losses
        )

    @derived()
    def lossless(self) -> str:
        """Reason why no loss was measured."""
        return self.trace.lossless

    @derived()
    def protected_first(self) -> int:
        """First entries that every kept set holds."""
        return self.trace.protected[0]

    @derived()
    def protected_recent(self) -> int:
        """Most recent entries that every kept set holds."""
        return self.trace.protected[1]

    @derived()
    def controls_protect_less(self) -> bool:
        """True if controls protect fewer entries, as the eviction keeps hardly more than it protects."""
        return self.trace.freed

    @derived()
    def configs(self) -> tuple[EvictionConfig, ...]:
        """The configuration of the kept sets, then those of the controls."""
        return self.trace.configs

    @property
    def obstacle(self) -> str:
        """Reason why there is no verdict; empty if the audit has a verdict."""
        runs = self.trace.runs
        judged = any(run.entries is not None or run.damage for run in runs)
        if judged and (self.faults or not self.trace.unreadable):
            return ""
        if self.trace.unreadable or not runs:
            return self.trace.unreadable
        return runs[0].failed or f"it refuses every situation: {runs[0].refused}"

    @property
    def compared(self) -> list[tuple[AuditRun, CacheEntries, DecodeDistances]]:
        """The runs whose decoding was compared with the reference, with their entries and distances."""
        return [(run, run.entries, run.decoded) for run in self.trace.runs if run.entries and run.decoded]

    @property
    def has_figure(self) -> bool:
        """True if something was compared or measured that a figure shows."""
        return bool(self.compared) or any(run.entries is not None for run in self.trace.runs)

    def conclusion(self) -> str:
        """Return the verdict in one line."""
        return self.summary

    def title(self) -> str:
        """Return the table's title: the eviction and its reference."""
        return escape_line(f"{self.eviction} ({self.kind}, {self.about['dtype']}) against the masked reference")

    def lines(self) -> Sequence[Line]:
        """Return a line per prompt, situation and row."""
        return [Line(run.name, (run,)) for run in self.runs]

    def interval_note(self) -> str:
        """Return an empty note, as no number of an audit is a mean over samples."""
        return ""

    def caveats(self) -> Sequence[str]:
        """Return the note on how many noise floors a difference must exceed, where distances were measured."""
        known = any(run.worst is not None for run in self.runs)
        return (
            [f"Floors are of the plain model with the same entries kept; more than {FLOORS} are a difference."]
            if known
            else []
        )

    def explain(self) -> list[Part]:
        """Return the meaning of every column and the further tables; nothing where no situation was run."""
        return super().explain() if self.runs else []

    def details(self) -> Sequence[Part]:
        """Return tables of kept entries, decoding steps and losses, and a note on plain use."""
        situations = {run.situation for run in self.runs}
        return [
            *(f"{name}: {meaning}." for name, meaning in SITUATIONS.items() if name in situations),
            *self._kept_table(),
            *self._steps_table(),
            *([self.plain_use.summary()] if self.plain_use else []),
            *self._loss_table(),
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per prompt, situation, row of the batch, step and layer."""
        return [
            {
                "sample": run.sample, "situation": run.situation, "row": run.row, "step": step, "layer": layer,
                "floors": float(floors), "kept": sum(len(kept_set) for kept_set in entries.kept[layer]),
                "altered": "; ".join(change.what for changes in entries.altered[layer] for change in changes),
            }
            for run, entries, decoded in self.compared
            for step, layers in enumerate(layer_floors(decoded))
            for layer, floors in enumerate(layers)
        ]  # fmt: skip

    def to_junit(self) -> str:
        """Return the audit as a JUnit report, which CI systems show: a test case per prompt, situation and row."""
        suite = ElementTree.Element("testsuite", name="perturbkv audit")
        for run in self.runs:
            case = ElementTree.SubElement(suite, "testcase", classname=escape_line(self.eviction), name=run.name)
            if run.fault is not None:
                message = escape_line(run.difference)
                failure = ElementTree.SubElement(case, "failure", type=run.fault.kind, message=message)
                failure.text = _fault_clause(run.fault)
            elif run.refused:
                ElementTree.SubElement(case, "skipped", message=escape_line(run.refused))
        if self.verdict not in (EXACT, DIFFERS) or self.trace.unreadable:
            case = ElementTree.SubElement(suite, "testcase", classname=escape_line(self.eviction), name="verdict")
            kind = UNREADABLE if self.trace.unreadable else self.verdict
            tag = "failure" if kind == IDLE else "error"
            ElementTree.SubElement(case, tag, type=kind, message=escape_line(self.summary))
        counts = {tag: str(len(suite.findall(f"testcase/{tag}"))) for tag in ("failure", "error", "skipped")}
        suite.attrib |= {
            "tests": str(len(suite)), "failures": counts["failure"], "errors": counts["error"],
            "skipped": counts["skipped"],
        }  # fmt: skip
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"

    def kept_share(self, most: int) -> NDArray[np.float64]:
        """Return the share of positions that are kept, (layer, bin), mean over kept sets and prompts.

        Bins are equal shares of each prompt: `most` of them, fewer where a prompt is shorter. NaN without entries.
        """
        whole = [(run.entries, run.tokens) for run in self.trace.runs if run.entries and run.row == 0]
        if not whole:
            return np.full((self.trace.layers, 1), np.nan)
        bins = min(most, *(tokens for _, tokens in whole))
        return np.asarray(np.mean([_kept_shares(entries, tokens, bins) for entries, tokens in whole], axis=0))

    def by_layer(self) -> dict[str, NDArray[np.float64]]:
        """Return situation -> largest distance in noise floors over prompts, rows and steps, (layer,)."""
        worst: dict[str, NDArray[np.float64]] = {}
        for run, _, decoded in self.compared:
            floors = layer_floors(decoded).max(axis=0)
            worst[run.situation] = np.fmax(worst.get(run.situation, floors), floors)
        return worst

    def _differs_clause(self) -> str:
        """Return a clause on the most telling fault and the other situations with faults."""
        first = self.faults[0]
        others = [name for name in dict.fromkeys(fault.situation for fault in self.faults) if name != first.situation]
        also = f"; also in {' and '.join(others)}" if others else ""
        then = f"; then unreadable: {self.trace.unreadable}" if self.trace.unreadable else ""
        return f"{_fault_clause(first)}{also}{then}"

    def _exact_clause(self) -> str:
        """Return a clause that the eviction is exact, with its largest distance from the reference."""
        decoded = [run.on_own_entries or run.decoded for run in self.trace.runs if run.decoded is not None]
        most = floors_text(max(worst_floors(one) for one in decoded if one is not None))
        return (
            f"only lossy, as its kept sets imply: at most {most} noise floors from the masked reference in "
            f"{plural(len(decoded), 'run')}{self._positions_clause()}{self._allowed_clause()}"
            f"{self._evicted_ends_clauses()}{self._idle_runs_clause()}"
        )

    def _idle_runs_clause(self) -> str:
        """Return a clause on the runs in which nothing was evicted; empty where something was in all."""
        pairs = zip(self.runs, self.trace.runs, strict=True)
        idle = [run.name for run, measured in pairs if measured.entries and not measured.entries.evicted]
        return f"; nothing was evicted in {', '.join(idle)}" if idle else ""

    def _positions_clause(self) -> str:
        """Return a clause that keys stand at their places in the cache; empty where they do not."""
        moved = any(run.positions == IN_CACHE for run in self.trace.runs)
        return "; keys stand at their places in the cache, new tokens after them" if moved else ""

    def _idle_clause(self) -> str:
        """Return a clause that nothing was evicted."""
        runs = [run for run in self.trace.runs if run.entries]
        tokens = max(run.tokens for run in runs)
        return f"no entry was evicted in any head or step of {plural(len(runs), 'run')}, of at most {tokens:,} tokens"

    def _uncompared_clause(self) -> str:
        """Return a clause that nothing was decoded."""
        return f"nothing was decoded, so only its kept sets are looked at{self._evicted_ends_clauses()}"

    def _allowed_clause(self) -> str:
        """Return a clause on allowed changes and the distance from the reference that they cause; empty for none."""
        changed = [
            (change, run) for run in self.trace.runs if run.entries
            for layer in run.entries.altered for changes in layer for change in changes
        ]  # fmt: skip
        if not changed:
            return ""
        words = " and ".join(dict.fromkeys(change.what for change, _ in changed))
        most = max(worst_floors(run.decoded) for _, run in changed if run.decoded is not None)
        return f"; {words}, as allowed, which moves it by at most {floors_text(most)}"

    def _evicted_ends_clauses(self) -> str:
        """Return clauses with the number of kept sets that lack the first or the most recent entry; empty for none.

        They are of every prompt's first situation, and of other rows only where these lack more.
        """
        runs = {}
        for run in reversed(self.runs):
            if run.entries:
                runs[run.sample, run.row] = run.entries
        return "".join(
            _missing_clause(words, {key: getattr(entries, name) for key, entries in runs.items()}, runs)
            for words, name in (
                ("the first entry, a sink,", "without_first"),
                ("the most recent entry", "without_last"),
            )
        )

    def _kept_table(self) -> list[Part]:
        """Return a table of the entries that each run keeps, with a note; empty where no run has entries."""
        lines = [Line(run.name, (run, run.entries)) for run in self.runs if run.entries]
        if not lines:
            return []
        note = "first, last: entries of the prompt's beginning and end that a kept set holds without a gap."
        return [table("what it keeps", lines, _KEPT, self.FIRST), note]

    def _steps_table(self) -> list[Part]:
        """Return a table of the decoding steps of each situation's first prompt, by the worst of its layers."""
        first = {(run.situation, run.row): run for run in reversed(self.runs) if run.steps}
        shown = [run for run in self.runs if first.get((run.situation, run.row)) is run]
        lines = [Line("" if step.step else run.name, (step,)) for run in shown for step in run.steps]
        return [table("step by step, the first prompt, in noise floors", lines, _STEPS, self.FIRST)] if lines else []

    def _loss_table(self) -> list[Part]:
        """Return the table of losses with a note, or the reason why no loss was measured."""
        if not self.losses:
            return [f"no loss measured: {self.lossless}"] if self.lossless else []
        lines = [Line(loss.name, (loss,)) for loss in self.losses]
        sets = f"every kept set holds the first {self.protected_first} and the last {self.protected_recent} entries"
        less = "; controls protect less, as it keeps hardly more" if self.controls_protect_less else ""
        controls = less or ", and so do the controls'"
        prompts = plural(self.identity.samples, "prompt")
        return [
            table("what the loss is, first decoding step", lines, _LOSSES, "kept sets"),
            f"isolated, propagated: L1 perturbation of all heads over Σ ‖o_h‖₁; mean over {prompts}; {sets}{controls}.",
        ]


def conclude(trace: AuditTrace) -> Audit:
    """Return the verdict on the measurements of an audit."""
    faults = [fault for run in trace.runs if (fault := fault_of_run(run, trace.allowed)) is not None]
    return Audit(trace, tuple(sorted(faults, key=fault_order)), _identity(trace))


def _fault_clause(fault: Fault) -> str:
    """Return a clause on a fault: layer, head, entry and step, what it is, where it was found, how far it lies."""
    where = f"{fault.location()}: " if fault.location() else ""
    far = "" if isnan(fault.floors) else f", {floors_text(fault.floors)} noise floors"
    row = f", row {fault.row}" if fault.situation == "batch" else ""
    return f"{where}{fault.what} ({escape_line(fault.sample)}, {fault.situation}{row}{far})"


def _missing_clause(
    what: str, missing: Mapping[tuple[str, int], int], entries: Mapping[tuple[str, int], AuditedEntries]
) -> str:
    """Return a clause on the kept sets that lack an entry, by prompt and row of a batch; empty where none does."""
    for row in sorted({row for _, row in missing}):
        keys = [key for key in missing if key[1] == row]
        if count := sum(missing[key] for key in keys):
            where = f" of row {row} of a batch" if row else ""
            return f"; {what} goes in {count} of {sum(entries[key].sets for key in keys)} kept sets{where}"
    return ""


def _kept_shares(entries: CacheEntries, tokens: int, bins: int) -> NDArray[np.float64]:
    """Return the share of positions that one prompt's kept sets hold, (layer, bin)."""
    edges = np.linspace(0, tokens, bins + 1).round()
    counts = [np.histogram(np.concatenate(sets), edges)[0] / len(sets) for sets in entries.kept]
    return np.asarray(counts / np.diff(edges))


def _identity(trace: AuditTrace) -> RunIdentity:
    """Return the identity of an audit's run."""
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
