"""The verdict on an engine's cache, from a dump of it (METHOD: Engines' caches)."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import Any, ClassVar
from xml.etree import ElementTree

import numpy as np

from perturbkv.analyses.audit.audit import DIFFERS, EXACT, EXIT_CODES, UNREADABLE
from perturbkv.analyses.audit.audited_runs import AuditLoss
from perturbkv.analyses.audit.faults import floors_text
from perturbkv.analyses.columns import Line, Record, column, derived, record, table
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import plural
from perturbkv.analyses.result import Result
from perturbkv.audit_trace import (
    DUMP_FAULTS,
    IN_CACHE,
    ORIGINAL,
    DumpedRequest,
    DumpFault,
    DumpTrace,
    dump_floors,
    token_range,
)
from perturbkv.display import Part
from perturbkv.escaping import escape_line

_LAYERS, _KINDS = "layer", "keys, values"
_MOST_FAULTS = 3
"""Faults that are shown beside the first."""
_LOSSES = ("cache_share", "isolated", "propagated", "drift", "kl")


def _percent(share: float, _: Any = None) -> str:
    """Return a small share as text: '0.031 %'; a dash without a number."""
    if isnan(share):
        return "–"
    return f"{100 * share:.0f} %" if 0.995 <= share < 1e4 else f"{100 * share:.2g} %".replace("inf", "∞")


@record
class FaultOfDump(Record):
    """Entries of a request that are not the plain model's."""

    request: str = column("its id; empty for a fault of the whole dump")
    kind: str = column(f"kind of the fault: {', '.join(DUMP_FAULTS)}")
    what: str = column("what is there instead")
    first: int = column("first token whose entries differ; 0 in a fault of the whole dump")
    last: int = column("last token whose entries differ; likewise")
    blocks: list[int] = column("ids of the blocks that hold them")
    layers: list[int] = column("indices of layers")
    heads: list[int] = column("indices of key/value heads")


@record
class RequestAudit(Record):
    """One request's entries, against the plain model's."""

    request: str = column("its id")
    tokens: int = column("of the prompt and decoded ones", heading="#tokens")
    compared: int = column("entries compared, over layers and heads", heading="#entries")
    differing: int = column("entries that differ", heading="#differ")
    removed: int = column("entries that are gone, over layers and heads", heading="#gone")
    key_distance: float = column(
        "largest distance of a key that does not differ, over the root mean square norm of its head's keys; null where "
        "all differ",
        heading="#keys", text=_percent,
    )  # fmt: skip
    value_distance: float = column("the same of values", heading="#values", text=_percent)
    differing_distances: Floats = column(
        "largest distance of a key, and of a value, that differs; null where none does or one is infinite or NaN",
        dims=(_LAYERS, _KINDS),
    )  # fmt: skip
    perturbation: float = column(
        "median over layers and heads of ‖Δo_h‖₁ / ‖o_h‖₁ of the last token's query, on the dumped entries instead of "
        "the plain model's; null where entries are gone, or infinite",
        heading="#outputs", text=_percent,
    )  # fmt: skip
    worst_perturbation: float = column("the largest of all layers and heads", heading="#worst", text=_percent)
    perturbations: Floats = column("‖Δo_h‖₁ / ‖o_h‖₁ of every layer and head", dims=(_LAYERS, "head"))
    logprobs: float = column(
        "largest difference of a token's log-probability from the plain model's, nats; null where the dump has none",
        heading="#log p", text=lambda value, _: "–" if isnan(value) else f"{value:.2g}",
    )  # fmt: skip
    logprobs_floor: float = column("largest difference where the plain model reads the tokens in 2 or 3 parts")
    positions: str = column("original, or in-cache: entries are gone, and keys stand at 0, 1, …")


@record
class DumpAudit(Result):
    """The verdict on an engine's cache, with its measurements.

    Attributes:
        trace: the measurements.
        identity: of the audit.
    """

    SECTION: ClassVar[str] = "audit DUMP"
    DOCUMENT: ClassVar[str] = "of an audit"
    ROWS: ClassVar[str] = "layers"
    SHOWN: ClassVar[tuple[str, ...]] = (
        "tokens",
        "compared",
        "differing",
        "key_distance",
        "value_distance",
        "perturbation",
        "worst_perturbation",
        "logprobs",
    )
    FIRST: ClassVar[str] = "request"

    trace: DumpTrace
    identity: RunIdentity

    @derived()
    def verdict(self) -> str:
        """`exact` (the plain model's entries but for rounding, or some of them), `differs` or `unreadable`."""
        if not any(request.compared for request in self.trace.requests):
            return UNREADABLE
        return DIFFERS if self.trace.faults else EXACT

    @derived()
    def exit_code(self) -> int:
        """Exit code of the process: 0 exact; 1 differs; 2 unreadable."""
        return EXIT_CODES[self.verdict]

    @derived(key="conclusion")
    def summary(self) -> str:
        """The verdict in one line."""
        clauses = {UNREADABLE: self._unreadable_clause, DIFFERS: self._differs_clause, EXACT: self._exact_clause}
        return escape_line(f"{self.verdict}: {clauses[self.verdict]()}")

    @derived()
    def dump(self) -> str:
        """Path of the dump."""
        return self.trace.path

    @derived()
    def engine(self) -> str:
        """Name and version of the engine, as the dump says."""
        return self.trace.engine

    @derived()
    def about(self) -> dict[str, str]:
        """Model, dtype, device, versions."""
        return dict(self.trace.about)

    @derived()
    def layers(self) -> int:
        """Layers of the model."""
        return self.trace.layers

    @derived()
    def layout(self) -> str:
        """Axes of the block tensors in which entries were found; empty in a dump of rows."""
        return self.trace.layout

    @derived()
    def named_layout(self) -> str:
        """Layout that the dump names; empty where it names none."""
        return self.trace.named_layout

    @derived()
    def stored(self) -> str:
        """Type of the stored numbers."""
        return self.trace.stored

    @derived(dims=(_LAYERS, _KINDS))
    def typical(self) -> Floats:
        """Median distance of keys, and of values, from the plain model's."""
        return self.trace.typical

    @derived(dims=(_LAYERS, _KINDS))
    def floors(self) -> Floats:
        """Noise floors: the largest distance where the plain model reads the tokens in parts or by another kernel."""
        return self.trace.floors

    @derived(dims=(_LAYERS, _KINDS))
    def limits(self) -> Floats:
        """Distances above which a single key, or value, differs; blocks have lower ones. Null: each has its own."""
        return self.trace.limits

    @derived()
    def requests(self) -> tuple[RequestAudit, ...]:
        """The requests that were compared."""
        return tuple(_request_audit(request) for request in self.trace.requests if request.compared)

    @derived()
    def faults(self) -> tuple[FaultOfDump, ...]:
        """Faults, those in most layers first."""
        return tuple(
            FaultOfDump(
                fault.request, fault.kind, fault.what, fault.first, fault.last, list(fault.blocks), list(fault.layers),
                list(fault.heads),
            )
            for fault in self.trace.faults
        )  # fmt: skip

    @derived()
    def losses(self) -> tuple[AuditLoss, ...]:
        """The loss of the entries that are gone, then of controls that hold as much."""
        return tuple(
            AuditLoss(loss.name, loss.held, loss.isolated, loss.propagated, loss.drift, loss.kl)
            for loss in self.trace.losses
        )

    @property
    def has_figure(self) -> bool:
        """True if something was compared that a figure shows."""
        return bool(self.requests)

    def conclusion(self) -> str:
        """Return the verdict in one line."""
        return self.summary

    def title(self) -> str:
        """Return the table's title: the engine and its reference."""
        name = self.engine or "the dump"
        return escape_line(f"{name} ({self.stored}) against {self.about['model']} ({self.about['dtype']})")

    def lines(self) -> Sequence[Line]:
        """Return a line per compared request."""
        return [Line(request.request, (request,)) for request in self.requests]

    def interval_note(self) -> str:
        """Return an empty note, as no number of an audit is a mean over samples."""
        return ""

    def caveats(self) -> Sequence[str]:
        """Return further faults, and what the distances are relative to."""
        if not self.requests:
            return []
        log_p = "" if all(isnan(request.logprobs) for request in self.requests) else "; log p: largest difference, nats"
        complete = not all(isnan(request.perturbation) for request in self.requests)
        outputs = "; outputs, worst: median and largest ‖Δo_h‖₁ / ‖o_h‖₁ of all layers and heads" if complete else ""
        units = (
            "keys, values: largest distance of one that does not differ, over its head's root mean square norm"
            f"{outputs}{log_p}."
        )
        others = [escape_line(_fault_clause(fault, self.layers)) for fault in self.trace.faults[1:]]
        hidden = [f"{len(others) - _MOST_FAULTS} more: --explain"] if len(others) > _MOST_FAULTS else []
        return [f"Also {'; '.join([*others[:_MOST_FAULTS], *hidden])}."] * bool(others) + [units]

    def details(self) -> Sequence[Part]:
        """Return all faults, and a table of losses."""
        more = [escape_line(_fault_clause(fault, self.layers)) for fault in self.trace.faults]
        lines = [Line(loss.name, (loss,)) for loss in self.losses]
        return [*more, *([table("loss at the first decoding step", lines, _LOSSES, "kept sets")] if lines else [])]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per request, layer and kind of entry."""
        return [
            {
                "request": request.name, "layer": layer, "kind": kind,
                "distance": float(request.distance[layer, index]),
                "differing": float(request.differing_distance[layer, index]),
                "typical": float(self.typical[layer, index]), "floor": float(self.floors[layer, index]),
                "limit": float(self.limits[layer, index]),
            }
            for request in self.trace.requests if request.compared
            for layer in range(self.layers)
            for index, kind in enumerate(("keys", "values"))
        ]  # fmt: skip

    def to_junit(self) -> str:
        """Return the audit as a JUnit report: a test case per compared request, and one for the whole dump."""
        suite = ElementTree.Element("testsuite", name="perturbkv audit")
        by_request: dict[str, list[DumpFault]] = {name: [] for name in (*(one.request for one in self.requests), "")}
        for fault in self.trace.faults:
            by_request.setdefault(fault.request, []).append(fault)
        for name, faults in by_request.items():
            case = ElementTree.SubElement(
                suite, "testcase", classname=escape_line(self.dump), name=escape_line(name) or "verdict"
            )
            differs = any(request.request == name and request.differing for request in self.requests)
            if faults or differs:
                fault = (faults or by_request[""] or self.trace.faults)[0]
                message = escape_line(_fault_clause(fault, self.layers))
                ElementTree.SubElement(case, "failure", type=fault.kind, message=message)
            elif not name and self.verdict == UNREADABLE:
                ElementTree.SubElement(case, "error", type=UNREADABLE, message=escape_line(self.summary))
        counts = {tag: str(len(suite.findall(f"testcase/{tag}"))) for tag in ("failure", "error")}
        suite.attrib |= {"tests": str(len(suite)), "failures": counts["failure"], "errors": counts["error"]}
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"

    def _unreadable_clause(self) -> str:
        """Return why nothing was compared."""
        return "nothing was compared: no unfinished request of the dump has entries"

    def _differs_clause(self) -> str:
        """Return the first fault, and how many more there are."""
        more = len(self.trace.faults) - 1
        also = f"; and {plural(more, 'more fault')}" if more else ""
        return f"{_fault_clause(self.trace.faults[0], self.layers)}{also}"

    def _exact_clause(self) -> str:
        """Return how near the entries are to the plain model's, and how many are gone."""
        compared = [request for request in self.trace.requests if request.compared]
        floors = max(float(np.nanmax(request.distance / self.floors)) for request in compared)
        gone, entries = (sum(getattr(request, name) for request in compared) for name in ("removed", "compared"))
        whose = f"the entries of {plural(len(compared), 'request')}, {self.layers} layers, are the plain model's"
        near = f"at most {floors_text(floors)} noise floors away"
        if floors > dump_floors(self.about["dtype"]):
            keys, values = (_percent(float(np.median(self.typical[:, kind]))) for kind in range(2))
            near = f"up to rounding to {self.stored}: keys typically {keys} away, values {values}"
        removed = f"; {_percent(gone / (gone + entries))} are evicted" if gone else ""
        moved = ", keys stand at their places in the cache" if any(request.moved for request in compared) else ""
        return f"{whose}, {near}{removed}{moved}"


def _request_audit(request: DumpedRequest) -> RequestAudit:
    """Return the columns of one request."""
    distance, outputs = request.distance, request.perturbation
    known = outputs[~np.isnan(outputs)]
    median, worst = (float(np.median(known)), float(known.max())) if known.size else (np.nan, np.nan)
    keys, values = (float(np.fmax.reduce(by_layer)) for by_layer in distance.T)
    return RequestAudit(
        request.name, request.tokens, request.compared, request.differing, request.removed,
        keys, values, request.differing_distance, median, worst, outputs,
        request.logprob_distance, request.logprob_floor, IN_CACHE if request.moved else ORIGINAL,
    )  # fmt: skip


def _fault_clause(fault: DumpFault, layers: int) -> str:
    """Return a fault in words: where, and what is there."""
    where = [f"request {fault.request}"] if fault.request else []
    if fault.request:
        shown = ", ".join(map(str, fault.blocks[:4])) + (", …" if len(fault.blocks) > 4 else "")
        held = f" ({'block' if len(fault.blocks) == 1 else 'blocks'} {shown})" if fault.blocks else ""
        where.append(f"{token_range(fault.first, fault.last)}{held}")
    count = len(fault.layers)
    if count:
        where.append("all layers" if count == layers else f"layer {fault.layers[0]}" if count == 1 else
                     f"{count} layers, the first {fault.layers[0]}")  # fmt: skip
    if fault.kind == "head" or (fault.heads and len(fault.heads) == 1):
        where.append(f"head {fault.heads[0]}" if len(fault.heads) == 1 else f"heads {', '.join(map(str, fault.heads))}")
    return f"{', '.join(where)}: {fault.what}" if where else fault.what


def conclude(trace: DumpTrace) -> DumpAudit:
    """Return the verdict on a dump."""
    about = trace.about
    identity = RunIdentity(
        model=about["model"], dataset="", samples=len(trace.requests), failed=0, configs=(), trace=trace.path,
        source="dump", unit="request",
        random_weights=about["random_weights"] == "true", made_with=f"perturbkv {about['perturbkv_version']}",
    )  # fmt: skip
    return DumpAudit(trace, identity)
