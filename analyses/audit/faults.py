"""What an audit found, in a sentence and in tables.

Where an audited eviction first does what its kept sets do not imply, and what it is (METHOD: Audit, 1 to 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan, nan

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.pairing import counted
from perturbkv.audit_trace import SITUATIONS, Audited, AuditTrace, Decoded, Entries, PlainUse
from perturbkv.display import Table
from perturbkv.escaping import line

FLOORS = 4
"""More noise floors than this are a difference (METHOD: Audit)."""


@dataclass(frozen=True)
class Fault:
    """The first difference of one prompt in one situation.

    Attributes:
        sample, situation, row: of which run.
        what: in words.
        layer, head, step: where, from 0; −1 where it is of none. A step is a forward pass after the eviction, a head
            a kept set of the cache where its entries differ and else a query head.
        floors: noise floors between decoding and its reference in that layer at that step; NaN where none was measured.
    """

    sample: str
    situation: str
    row: int
    what: str
    layer: int = -1
    head: int = -1
    step: int = -1
    floors: float = nan

    def where(self) -> str:
        """Layer, head and step, as far as it has them."""
        places = (("layer", self.layer), ("head", self.head), ("step", self.step))
        return ", ".join(f"{name} {place}" for name, place in places if place >= 0)


def fault_of_run(run: Audited) -> Fault | None:
    """The first difference of a run; None where there is none."""
    held = None if run.entries is None else _of_entries(run.entries)
    decoded = None if run.decoded is None else _of_decoding(run.decoded)
    found = min(filter(None, (held, decoded)), key=lambda one: (one[2], one[0]), default=None)
    if found is None:
        return Fault(run.sample, run.situation, run.row, run.failed) if run.failed else None
    layer, head, step, what = found
    return Fault(
        run.sample, run.situation, run.row, what, layer, head, step, _audit_faults_floors(run.decoded, layer, step)
    )


Place = tuple[int, int, int, str]
"""Layer, head, step, what."""


def _of_entries(entries: Entries) -> Place | None:
    """The first layer whose entries are not the full cache's, with its first head."""
    return min(_entry_faults(entries), key=lambda one: one[:2], default=None)


def _entry_faults(entries: Entries) -> Iterator[Place]:
    for layer in entries.repeated:
        yield layer, 0, 0, f"every entry is cached {_times(entries)}, once per query head (repeat_kv before caching)"
    yield from _counted(entries.padded, "{} of padding attended to")
    yield from _counted(entries.strangers, "{} like none of the prompt's")
    for layer, words_of in enumerate(entries.altered):
        for head, words in enumerate(words_of):
            if words:
                yield layer, head, 0, words
    yield from _counted(entries.duplicates, "{} kept twice")


def _counted(counts: NDArray[np.int64], words: str) -> Iterator[Place]:
    for layer, head in np.argwhere(counts > 0):
        count = int(counts[layer, head])
        yield int(layer), int(head), 0, words.format(f"{count:,} {'entry' if count == 1 else 'entries'}")


def _times(entries: Entries) -> str:
    """How often an entry is there: query heads over sets that differ within the first repeated layer."""
    sets = entries.kept[entries.repeated[0]]
    group = 1
    while group < len(sets) and np.array_equal(sets[group], sets[0]):
        group += 1
    return f"{group} times"


def _of_decoding(decoded: Decoded) -> Place | None:
    """The first step, layer and head where decoding is not the reference's."""
    units = head_floors(decoded)
    far = np.argwhere(units > FLOORS)
    if len(far):
        step, layer, head = map(int, far[0])
        return layer, head, step, _cause(decoded, step)
    hidden = np.argwhere(decoded.hidden / decoded.hidden_floor > FLOORS)
    if len(hidden):
        step, layer = map(int, hidden[0])
        return layer, -1, step, "the residual stream differs from the reference's"
    logits = np.argwhere(logit_floors(decoded) > FLOORS)
    return (-1, -1, int(logits[0, 0]), "the logits differ from the reference's") if len(logits) else None


def _cause(decoded: Decoded, step: int) -> str:
    """Why decoding differs, where its positions or its masks say so."""
    behind = float(decoded.behind[step])
    if behind:
        return _displaced(behind)
    if decoded.sees_later:
        return "the mask of a block lets its tokens see those behind them"
    if decoded.hides:
        return "the mask of a block hides kept entries from some of its tokens"
    return "decoding differs from the masked reference, its entries do not"


def _displaced(behind: float) -> str:
    if isnan(behind):
        return "keys of new tokens are not rotated to their positions"
    count = abs(behind)
    side = "early" if behind > 0 else "late"
    return f"new tokens stand {count:,.0f} {'position' if count == 1 else 'positions'} too {side}"


def head_floors(decoded: Decoded) -> NDArray[np.float64]:
    """(step, layer, head) noise floors of head outputs."""
    return np.asarray(decoded.head / decoded.head_floor[:, None])


def layer_floors(decoded: Decoded) -> NDArray[np.float64]:
    """(step, layer) noise floors of a layer: of its worst head, or of the residual stream after it."""
    return np.asarray(np.fmax(head_floors(decoded).max(axis=-1), decoded.hidden / decoded.hidden_floor))


def logit_floors(decoded: Decoded) -> NDArray[np.float64]:
    """(step,) noise floors of the logits."""
    return np.asarray(decoded.logits / decoded.logits_floor)


def worst_floors(decoded: Decoded) -> float:
    """The most noise floors of everything that was compared."""
    return float(np.nanmax(np.concatenate([layer_floors(decoded).ravel(), logit_floors(decoded)])))


def _audit_faults_floors(decoded: Decoded | None, layer: int, step: int) -> float:
    if decoded is None or step >= len(decoded.logits):
        return nan
    return float(logit_floors(decoded)[step] if layer < 0 else layer_floors(decoded)[step, layer])


def fault_order(fault: Fault) -> tuple[int, int]:
    """Faults in the order in which one looks for them: by situation, then by row."""
    return list(SITUATIONS).index(fault.situation), fault.row


_OFTEN = 1e4


def title(trace: AuditTrace) -> str:
    """What was audited, and on what."""
    about = trace.about
    random = ("random weights",) if about["random_weights"] == "true" else ()
    prompts = counted(int(about["samples"]), "prompt")
    named = f"{trace.eviction} ({trace.kind})"
    return " · ".join(map(line, (named, about["model"], about["dtype"], about["dataset"], prompts, *random)))


def verdict(trace: AuditTrace, faults: Sequence[Fault], unreadable: str) -> str:
    """What stands behind the verdict's word."""
    if unreadable:
        return unreadable
    if faults:
        return _first(faults)
    decoded = [run.decoded for run in trace.runs if run.decoded is not None]
    gone = _gone(trace)
    if not decoded:
        return f"nothing was decoded, so only its kept sets are looked at{gone}"
    most = max(map(worst_floors, decoded))
    return (
        f"only lossy, as its kept sets imply: at most {_floors(most)} noise floors from the masked reference in "
        f"{counted(len(decoded), 'run')}{gone}"
    )


def _first(faults: Sequence[Fault]) -> str:
    first = faults[0]
    others = [name for name in dict.fromkeys(fault.situation for fault in faults) if name != first.situation]
    where = f"{first.where()}: " if first.where() else ""
    far = "" if isnan(first.floors) else f", {_floors(first.floors)} noise floors"
    row = f", row {first.row}" if first.situation == "batch" else ""
    also = f"; also in {' and '.join(others)}" if others else ""
    return f"{where}{first.what} ({first.situation}{row}{far}){also}"


def _floors(value: float) -> str:
    if isnan(value):
        return "–"
    return (
        f"{value:.0e}".replace("e+0", "e") if value >= _OFTEN else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
    )


def _gone(trace: AuditTrace) -> str:
    """Whether sinks or recent entries went, of prompts that are read alone."""
    alone = {run.sample: (run.entries, run.tokens) for run in reversed(trace.runs) if run.entries and run.row == 0}
    sets = [(one, n) for entries, n in alone.values() for layer in entries.kept for one in layer]
    first = sum(0 not in one for one, _ in sets)
    last = sum(n - 1 not in one for one, n in sets)
    words = (("the first entry, a sink,", first), ("the most recent entry", last))
    return "".join(f"; {what} goes in {count} of {len(sets)} kept sets" for what, count in words if count)


def tables(trace: AuditTrace, faults: Sequence[Fault]) -> list[Table | str]:
    """What it keeps, how it decodes, what plain use does, what it costs."""
    found: list[Table | str] = []
    if any(run.entries is not None for run in trace.runs):
        found.append(_kept(trace))
    if trace.runs:
        found.append(_runs(trace, faults))
    if any(run.decoded is not None for run in trace.runs):
        found.append(_steps(trace))
    if trace.plain is not None:
        found.append(Table("Plain use of this cache", ["", ""], list(_plain(trace.plain))))
    if trace.losses:
        found.append(_losses(trace))
    elif trace.lossless:
        found.append(f"no loss measured: {trace.lossless}\n")
    return found


def _kept(trace: AuditTrace) -> Table:
    rows = []
    for run in trace.runs:
        if run.entries is not None:
            counts = [len(one) for layer in run.entries.kept for one in layer]
            ends = np.array([_ends(one, run.tokens) for layer in run.entries.kept for one in layer])
            held = sum(counts) / (trace.layers * trace.kv_heads * run.tokens)
            span = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)}–{max(counts)}"
            rows.append((_name(run), f"{run.tokens}", text.held(held), span, *_range(ends), _odd(run.entries)))
    heads = ["", "#tokens", "#held / full", "#per set", "#first", "#last", "odd"]
    return Table("What it keeps", heads, rows)


def _ends(kept: np.ndarray, tokens: int) -> tuple[int, int]:
    """How many first and last entries a set holds without a gap."""
    first = int(np.append(kept != np.arange(len(kept)), True).argmax())
    last = int(np.append(tokens - 1 - kept[::-1] != np.arange(len(kept)), True).argmax())
    return first, last


def _range(ends: np.ndarray) -> Iterator[str]:
    for column in ends.T:
        yield f"{column.min()}" if column.min() == column.max() else f"{column.min()}–{column.max()}"


def _odd(entries: Entries) -> str:
    """What is unusual about the entries, in few words."""
    words = [
        f"{int(counts.sum())} {word}"
        for word, counts in (
            ("padding", entries.padded),
            ("unlike any", entries.strangers),
            ("twice", entries.duplicates),
        )
        if counts.sum()
    ]
    words += ["in another order"] if entries.unordered.any() else []
    words += [f"changes from step {entries.changed[0]} on"] if entries.changed else []
    return ", ".join(words)


def _runs(trace: AuditTrace, faults: Sequence[Fault]) -> Table:
    told = {(fault.sample, fault.situation, fault.row): fault for fault in faults}
    rows = []
    for run in trace.runs:
        fault = told.get((run.sample, run.situation, run.row))
        worst = "–" if run.decoded is None else _floors(worst_floors(run.decoded))
        rows.append((_name(run), _intact(run), worst, _said(run, fault)))
    return Table("Against the masked reference", ["", "entries", "#floors", "first difference"], rows)


def _intact(run: Audited) -> str:
    if run.entries is None:
        return "–"
    heads = sum(bool(words) for layer in run.entries.altered for words in layer)
    return f"{heads} of {sum(map(len, run.entries.altered))} altered" if heads else "intact"


def _said(run: Audited, fault: Fault | None) -> str:
    if run.refused:
        return f"refused: {run.refused}"
    if fault is None:
        return "none"
    return f"{fault.where()}: {fault.what}" if fault.where() else fault.what


def _steps(trace: AuditTrace) -> Table:
    """One prompt of each situation, step by step: the worst of its layers."""
    rows, seen = [], set()
    for run in trace.runs:
        if run.decoded is None or (run.situation, run.row) in seen:
            continue
        seen.add((run.situation, run.row))
        rows += [(_name(run) if step == 0 else "", *cells) for step, cells in enumerate(_cells(run, run.decoded))]
    return Table(
        "Step by step, the first prompt, in noise floors",
        ["", "#step", "#tokens", "#heads", "#hidden", "#logits", "token"],
        rows,
    )


def _cells(run: Audited, decoded: Decoded) -> Iterator[tuple[str, ...]]:
    hidden = decoded.hidden / decoded.hidden_floor
    for step, heads in enumerate(head_floors(decoded)):
        yield (
            f"{step}", f"{run.forwards[step]}", _floors(float(heads.max())), _floors(float(hidden[step].max())),
            _floors(float(logit_floors(decoded)[step])), "same" if decoded.agrees[step] else "another",
        )  # fmt: skip


def _plain(plain: PlainUse) -> Iterator[tuple[str, str]]:
    if plain.position is None:
        yield "model(token)", "fails: the cache does not say how many tokens it has seen"
    elif plain.position == plain.expected:
        yield "model(token)", f"right: the next token stands at {plain.expected}"
    else:
        yield (
            "model(token)",
            (f"wrong: the next token stands at {plain.position}, not {plain.expected}; give position_ids"),
        )
    if plain.failed:
        yield "generate(all ids)", f"fails: {plain.failed}"
    else:
        again = f"wrong: feeds the prompt's last {plain.fed - 1} tokens again"
        yield "generate(all ids)", "right: feeds the new token alone" if plain.fed == 1 else again
    yield "generate(last id)", f"fails: {plain.continued}" if plain.continued else "goes on"


def _losses(trace: AuditTrace) -> Table:
    rows = [
        (one.name, text.held(one.held), *(text.significant(value) for value in
         (one.isolated, one.propagated, one.drift, one.kl)))
        for one in trace.losses
    ]  # fmt: skip
    heads = ["", "#held / full", "#isolated", "#propagated", "#drift", "#KL"]
    return Table("What the loss is, first decoding step", heads, rows)


def _name(run: Audited) -> str:
    row = f", row {run.row}" if run.situation == "batch" else ""
    return f"{line(run.sample)}: {run.situation}{row}"


def notes(trace: AuditTrace) -> str:
    """What the columns mean."""
    ran = {run.situation for run in trace.runs}
    lines = [f"{name}: {what}." for name, what in SITUATIONS.items() if name in ran]
    if any(run.entries is not None for run in trace.runs):
        lines.append("first, last: entries of the prompt's beginning and end that a kept set holds without a gap.")
    if any(run.decoded is not None for run in trace.runs):
        lines.append(
            "floors: distance from the plain model with a mask of exactly the kept entries, in noise floors of runs "
            f"that keep everything, the worst of heads, layers and steps; more than {FLOORS} is a "
            "difference."
        )
    if trace.losses:
        lines.append(_about_losses(trace))
    return "\n".join(lines)


def _about_losses(trace: AuditTrace) -> str:
    first, recent = trace.protected
    prompts = counted(int(trace.about["samples"]), "prompt")
    protects = f"every kept set holds the first {first} and the last {recent} entries"
    beside = "; controls protect less, as it keeps hardly more" if trace.freed else ", and so do the controls'"
    return (
        "isolated, propagated: L1 perturbation of all heads over Σ ‖o_h‖₁; drift: of the last layer's residual "
        f"stream, over its norm; KL in nats; mean over {prompts}; {protects}{beside}."
    )
