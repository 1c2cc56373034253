"""What an audit found, in a sentence and in tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.audit import audit_faults
from perturbkv.analyses.audit.audit_faults import Fault
from perturbkv.analyses.naming import counted
from perturbkv.audit_trace import SITUATIONS, Audited, AuditTrace, Decoded, Entries, PlainUse
from perturbkv.display import Table
from perturbkv.visible import line

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
    most = max(map(audit_faults.worst, decoded))
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
        worst = "–" if run.decoded is None else _floors(audit_faults.worst(run.decoded))
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
    for step, heads in enumerate(audit_faults.head_floors(decoded)):
        yield (
            f"{step}", f"{run.forwards[step]}", _floors(float(heads.max())), _floors(float(hidden[step].max())),
            _floors(float(audit_faults.logit_floors(decoded)[step])), "same" if decoded.agrees[step] else "another",
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
            f"that keep everything, the worst of heads, layers and steps; more than {audit_faults.FLOORS} is a "
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
