"""The verdict on an engine's cache, from a dump of it (METHOD: Engines' caches)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import isnan, nan
from typing import Any

import numpy as np

from perturbkv.analyses.audit.audit import (
    DIFFERS,
    EXACT,
    EXIT_CODES,
    UNREADABLE,
    AuditLoss,
    JunitCase,
    junit_xml,
    loss_table,
)
from perturbkv.analyses.audit.audited_runs import floors_text
from perturbkv.analyses.audit.cache_entries import FLOORS, Integers
from perturbkv.analyses.columns import Line, Record, column, derived, record
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.result import Result
from perturbkv.configs.audit_settings import ORIGINAL
from perturbkv.display import Part, plural
from perturbkv.escaping import escape_line

DUMP_FLOORS: Mapping[str, int] = {"float32": 17, "bfloat16": 7, "float16": 7}
"""Type of the model -> `FLOORS` for an entry of an engine, whose kernels are others; chosen in the same page."""
DUMP_FAULTS: Mapping[str, str] = {
    "infinite": "keys or values that are infinite or NaN",
    "missing": "entries whose keys or values are zero, or that are in no block",
    "duplicate": "a token's entries several times",
    "swapped": "keys where values belong",
    "scale": "keys or values times a constant, or read by attention with another scale than theirs",
    "clipped": "keys or values clipped at the largest number of the type that they are stored in, or at a smaller one",
    "request": "entries of another request",
    "stale": "entries of a request that has ended",
    "token": "entries of other tokens of the same request",
    "shifted": "entries of the next tokens, or of those before",
    "head": "another head's entries",
    "layer": "another layer's entries",
    "rotation": "keys rotated to other positions, or with another base",
    "layout": "entries in another layout than the one named",
    "rounded": "keys or values that went through fewer bits than the type that is named, or rounded towards zero",
    "grouping": "entries computed by attention whose query heads read other key/value heads than their own",
    "context": "entries that are right in the first layer, and above it computed after other text",
    "changed": "keys or values that differ otherwise",
    "coarse": "entries that are all farther from the plain model's than rounding explains",
    "unknown": "entries of no token of the dump",
    "decoding": "probabilities of tokens that the plain model does not give them",
}
"""Kind of a fault of a dump -> its meaning."""
_LAYERS, _KINDS = "layer", "keys, values"
_MOST_FAULTS = 3
"""Faults that are shown beside the first."""


def dump_floors(dtype: str) -> int:
    """Return the number of noise floors above which an engine's entry differs, for a model of this type."""
    return DUMP_FLOORS.get(dtype, FLOORS)


def token_range(first: int, last: int) -> str:
    """Return a range of tokens, both ends included, in words: 'tokens 3 to 5'."""
    return f"token {first}" if first == last else f"tokens {first} to {last}"


def _percent(share: float, _: Any = None) -> str:
    """Return a share as text: '0.031 %', without decimals from about 100 % on; '∞ %', and a dash for NaN.

    The second argument is the interval that a column's text is given; these have none.
    """
    if isnan(share):
        return "–"
    return f"{100 * share:.0f} %" if 0.995 <= share < 1e4 else f"{100 * share:.2g} %".replace("inf", "∞")


@record
class DumpFault(Record):
    """Entries of a request that are not the plain model's.

    Attributes:
        count: number of entries that differ so; 0 where none was compared.
    """

    request: str = column("its id; empty for a fault of the whole dump")
    kind: str = column(f"kind of the fault: {', '.join(DUMP_FAULTS)}")
    what: str = column("what is there instead")
    first: int = column("first token whose entries differ; 0 in a fault of the whole dump", default=0)
    last: int = column("last token whose entries differ; likewise", default=0)
    blocks: tuple[int, ...] = column("ids of the blocks that hold them", default=())
    layers: tuple[int, ...] = column("indices of layers", default=())
    heads: tuple[int, ...] = column("indices of key/value heads", default=())
    count: int = 0

    def clause(self, layers: int) -> str:
        """Return the fault in words: where it is, and what is there; `layers`: number of layers of the model."""
        where = []
        if self.request:
            shown = ", ".join(map(str, self.blocks[:4])) + (", …" if len(self.blocks) > 4 else "")
            blocks = f" ({'block' if len(self.blocks) == 1 else 'blocks'} {shown})" if self.blocks else ""
            where += [f"request {self.request}", f"{token_range(self.first, self.last)}{blocks}"]
        if len(self.layers) == layers:
            where.append("all layers")
        elif self.layers:
            first, last = self.layers[0], self.layers[-1]
            if last - first + 1 > len(self.layers):
                where.append(f"{len(self.layers)} layers, the first {first}")
            else:
                where.append(f"layer {first}" if first == last else f"layers {first} to {last}")
        if self.kind == "head" or len(self.heads) == 1:
            heads = ", ".join(map(str, self.heads))
            where.append(f"head {heads}" if len(self.heads) == 1 else f"heads {heads}")
        return f"{', '.join(where)}: {self.what}" if where else self.what


@record
class DumpedRequest(Record):
    """One request's entries, against the plain model's.

    Distances are over the root mean square norm of the head's keys or values.

    Attributes:
        distances: (layer, kind) largest distance of keys and of values that do not differ; NaN where all differ.
        kept: per layer and head the positions of its entries, where some are gone; empty otherwise.
    """

    request: str = column("its id")
    tokens: int = column("of the prompt and decoded ones", heading="#tokens")
    compared: int = column("entries compared, over layers and heads", heading="#entries")
    differing: int = column("entries that differ", heading="#differ")
    removed: int = column("entries that are gone, over layers and heads", heading="#gone")
    distances: Floats
    differing_distances: Floats = column(
        "largest distance of a key, and of a value, that differs; null where none does or one is infinite or NaN",
        dims=(_LAYERS, _KINDS),
    )  # fmt: skip
    perturbations: Floats = column("‖Δo_h‖₁ / ‖o_h‖₁ of every layer and head", dims=(_LAYERS, "head"))
    logprobs: float = column(
        "largest difference of a token's log-probability from the plain model's, nats; null where the dump has none",
        heading="#log p", text=lambda value, _: "–" if isnan(value) else f"{value:.2g}",
    )  # fmt: skip
    logprobs_floor: float = column("largest difference where the plain model reads the tokens in 2 or 3 parts")
    positions: str = column("original, or in-cache: entries are gone, and keys stand at 0, 1, …", default=ORIGINAL)
    kept: tuple[tuple[Integers, ...], ...] = ()

    @derived(heading="#keys", text=_percent)
    def key_distance(self) -> float:
        """Largest distance of a key that does not differ, over the root mean square norm of its head's keys.

        Null where all differ.
        """
        return float(np.fmax.reduce(self.distances[:, 0]))  # keys

    @derived(heading="#values", text=_percent)
    def value_distance(self) -> float:
        """Largest distance of a value that does not differ, over its head's values' norm, as of keys."""
        return float(np.fmax.reduce(self.distances[:, 1]))  # values

    @derived(heading="#outputs", text=_percent)
    def perturbation(self) -> float:
        """Median over layers and heads of ‖Δo_h‖₁ / ‖o_h‖₁ of the last token's query.

        On the dumped entries instead of the plain model's; null where entries are gone, or infinite.
        """
        known = self.perturbations[~np.isnan(self.perturbations)]
        return float(np.median(known)) if known.size else nan

    @derived(heading="#worst", text=_percent)
    def worst_perturbation(self) -> float:
        """The largest of all layers and heads."""
        known = self.perturbations[~np.isnan(self.perturbations)]
        return float(known.max()) if known.size else nan


@record
class DumpAudit(
    Result,
    section="audit DUMP",
    document="of an audit",
    rows="layers",
    shown=(
        "tokens",
        "compared",
        "differing",
        "key_distance",
        "value_distance",
        "perturbation",
        "worst_perturbation",
        "logprobs",
    ),
    first="request",
):
    """The verdict on an engine's cache, with its measurements."""

    dump: str = column("path of the dump")
    engine: str = column("name and version of the engine, as the dump says")
    about: dict[str, str] = column("model, dtype, device, versions")
    layers: int = column("layers of the model")
    requests: tuple[DumpedRequest, ...] = column("the requests that were compared")
    faults: tuple[DumpFault, ...] = column(
        "faults, the lowest layer's earliest first; clipped entries behind a fault of more"
    )
    layout: str = column("axes of the block tensors in which entries were found; empty in a dump of rows")
    named_layout: str = column("layout that the dump names; empty where it names none")
    stored: str = column("type of the stored numbers")
    typical: Floats = column("median distance of keys, and of values, from the plain model's", dims=(_LAYERS, _KINDS))
    floors: Floats = column(
        "noise floors: the largest distance where the plain model reads the tokens in parts or by another kernel",
        dims=(_LAYERS, _KINDS),
    )
    limits: Floats = column(
        "distances above which a single key, or value, differs; blocks have lower ones. Null: each has its own",
        dims=(_LAYERS, _KINDS),
    )
    losses: tuple[AuditLoss, ...] = column(
        "the loss of the entries that are gone, then of controls that hold as much", default=()
    )
    following: tuple[int, ...] = column(
        "layers without faults of their own that follow from faults below: the model computes them from those entries",
        default=(),
    )

    @cached_property
    def identity(self) -> RunIdentity:  # type: ignore[override]  # as read-only as a frozen field
        """The identity of the audit."""
        about = self.about
        return RunIdentity(
            model=about["model"], dataset="", samples=int(about["samples"]), failed=0, configs=(), trace=self.dump,
            source="dump", unit="request", random_weights=about["random_weights"] == "true",
            made_with=f"perturbkv {about['perturbkv_version']}",
        )  # fmt: skip

    @derived()
    def verdict(self) -> str:
        """`exact` (the plain model's entries but for rounding, or some of them), `differs` or `unreadable`."""
        if not self.requests:
            return UNREADABLE
        return DIFFERS if self.faults else EXACT

    @derived()
    def exit_code(self) -> int:
        """Exit code of the process: 0 exact; 1 differs; 2 unreadable."""
        return EXIT_CODES[self.verdict]

    @derived(key="conclusion")
    def summary(self) -> str:
        """The verdict in one line."""
        clause = "nothing was compared: no unfinished request of the dump has entries"
        if self.verdict == EXACT:
            clause = self._exact_clause()
        elif self.verdict == DIFFERS:
            more = len(self.faults) - 1
            follow = len(self.following)
            clause = self.faults[0].clause(self.layers)
            clause += f"; {plural(follow, 'layer')} after it {'follows' if follow == 1 else 'follow'}" if follow else ""
            clause += f"; and {plural(more, 'more fault')}" if more else ""
        return escape_line(f"{self.verdict}: {clause}")

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
        """Return further faults, and what the distances are relative to; nothing where no request was compared."""
        if not self.requests:
            return []
        units = ["keys, values: largest distance of one that does not differ, over its head's root mean square norm"]
        if not all(isnan(request.perturbation) for request in self.requests):
            units.append("outputs, worst: median and largest ‖Δo_h‖₁ / ‖o_h‖₁ of all layers and heads")
        if not all(isnan(request.logprobs) for request in self.requests):
            units.append("log p: largest difference, nats")
        others = [escape_line(fault.clause(self.layers)) for fault in self.faults[1:]]
        hidden = [f"{len(others) - _MOST_FAULTS} more: --explain"] if len(others) > _MOST_FAULTS else []
        also = [f"Also {'; '.join([*others[:_MOST_FAULTS], *hidden])}."] if others else []
        return [*also, f"{'; '.join(units)}."]

    def details(self) -> Sequence[Part]:
        """Return all faults, and a table of losses."""
        faults = [escape_line(fault.clause(self.layers)) for fault in self.faults]
        return [*faults, *loss_table("loss at the first decoding step", self.losses)]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per request, layer and kind of entry."""
        return [
            {
                "request": request.request, "layer": layer, "kind": kind,
                "distance": float(request.distances[layer, index]),
                "differing": float(request.differing_distances[layer, index]),
                "typical": float(self.typical[layer, index]), "floor": float(self.floors[layer, index]),
                "limit": float(self.limits[layer, index]),
            }
            for request in self.requests
            for layer in range(self.layers)
            for index, kind in enumerate(("keys", "values"))
        ]  # fmt: skip

    def to_junit(self) -> str:
        """Return the audit as a JUnit report: a test case per compared request, and one for the whole dump."""
        return junit_xml(self.dump, self._junit_cases())

    def _junit_cases(self) -> Iterator[JunitCase]:
        """Yield a test case per request with entries or faults, then that of the whole dump."""
        by_request: dict[str, list[DumpFault]] = {name: [] for name in (*(one.request for one in self.requests), "")}
        for fault in self.faults:
            by_request.setdefault(fault.request, []).append(fault)
        for name, faults in by_request.items():
            shown = escape_line(name) or "verdict"
            differs = any(request.request == name and request.differing for request in self.requests)
            if faults or differs:  # entries that differ may be told by a fault of the whole dump
                fault = (faults or by_request[""] or self.faults)[0]
                yield shown, "failure", {"type": fault.kind, "message": fault.clause(self.layers)}, ""
            else:
                is_error = not name and self.verdict == UNREADABLE
                yield shown, "error" if is_error else "", {"type": UNREADABLE, "message": self.summary}, ""

    def _exact_clause(self) -> str:
        """Return how near the entries are to the plain model's, and how many are gone."""
        floors = max(float(np.nanmax(request.distances / self.floors)) for request in self.requests)
        gone, entries = (sum(getattr(request, name) for request in self.requests) for name in ("removed", "compared"))
        whose = f"the entries of {plural(len(self.requests), 'request')}, {self.layers} layers, are the plain model's"
        near = f"at most {floors_text(floors)} noise floors away"
        if floors > dump_floors(self.about["dtype"]):
            keys, values = (_percent(float(np.median(self.typical[:, kind]))) for kind in range(2))
            near = f"up to rounding to {self.stored}: keys typically {keys} away, values {values}"
        removed = f"; {_percent(gone / (gone + entries))} are evicted" if gone else ""
        in_cache = any(request.positions != ORIGINAL for request in self.requests)
        moved = ", keys stand at their places in the cache" if in_cache else ""
        return f"{whose}, {near}{removed}{moved}"
