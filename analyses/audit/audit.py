"""The verdict on an external eviction: broken, or only lossy (METHOD: Audit)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import isnan
from typing import Any
from xml.etree import ElementTree

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.audit.audited_runs import AuditedRun, Fault, floors_text, worst_floors
from perturbkv.analyses.audit.cache_entries import FLOORS, ROUNDING, UNMEASURED
from perturbkv.analyses.columns import Line, Record, column, derived, record, table
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.result import Result
from perturbkv.configs.audit_settings import IDLE, IN_CACHE, LOSSY, PLAIN_USE, SITUATIONS, UNKNOWN
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part, plural
from perturbkv.escaping import escape_line
from perturbkv.schema import MEASURED_LAYERS

EXACT, DIFFERS, DID_NOTHING = "exact", "differs", "did nothing"
UNREADABLE, UNCOMPARED = "unreadable", "not compared"
"""Verdicts of an audit, beside `LOSSY` and `UNKNOWN`."""
EXIT_CODES = {EXACT: 0, LOSSY: 1, UNKNOWN: 1, DIFFERS: 1, DID_NOTHING: 1, UNREADABLE: 2, UNCOMPARED: 2}
_ALLOWS = {LOSSY: LOSSY, UNKNOWN: UNKNOWN, IDLE: DID_NOTHING}
"""What a user allows -> the verdict that then makes no exit code 1; what plain use does is a part of `DIFFERS`."""
_KEPT = ("tokens", "cache_share", "per_set", "leading_entries", "trailing_entries", "oddities")
_STEPS = ("step", "tokens", "worst_head", "worst_hidden", "logits", "same_token")
_MOST_WORDS = 2
"""Most ways of rounding that a verdict names; where heads differ, none was found of all."""
_LOSSES = ("cache_share", "isolated", "propagated", "drift", "kl")


@record
class PlainUse(Record):
    """Plain use of the cache with transformers, where no positions are given."""

    position: int | None = column("where the model puts the next token that it reads into the cache; null: it fails")
    expected: int = column("where it belongs: at n")

    def summary(self) -> str:
        """Return where `model(token)` puts the next token, as text."""
        if self.position is None:
            return "model(token) fails: the cache does not say how many tokens it has seen"
        if self.position == self.expected:
            return f"model(token) is right: the next token stands at {self.expected}"
        return (
            f"model(token) is wrong: the next token stands at {self.position}, not {self.expected}; give position_ids"
        )


@record
class AuditLoss(Record):
    """The loss of the audited kept sets, or of a control, at the first decoding step, mean over prompts."""

    name: str = column("its kept sets, or a control of the same cache share and protection")
    cache_share: float = column("entries over those of the full cache", key="held", heading="#cache\nshare")
    isolated: float = column(
        "L1 perturbation of all heads over Σ ‖o_h‖₁, each layer cut on its own",
        heading="#isolated",
        text=text.three_digits,
    )
    propagated: float = column(
        "the same with every earlier layer's error included", heading="#propagated", text=text.three_digits
    )
    drift: float = column(
        "L1 distance of the last layer's residual stream, over its norm", heading="#drift", text=text.three_digits
    )
    kl: float = column("KL(full ‖ evicted) of the logits", unit="nat", heading="#KL", text=text.three_digits)


def loss_table(title: str, losses: Sequence[AuditLoss]) -> list[Part]:
    """Return the table of losses, as a list; empty without losses."""
    lines = [Line(loss.name, (loss,)) for loss in losses]
    return [table(title, lines, _LOSSES, "kept sets")] if lines else []


JunitCase = tuple[str, str, Mapping[str, str], str]
"""Name of a test case, then its tag (failure, error, skipped, or empty), the tag's attributes, and its text."""


def junit_xml(classname: str, cases: Iterable[JunitCase]) -> str:
    """Return a JUnit report as XML, with the numbers of its test cases and of those with each tag."""
    suite = ElementTree.Element("testsuite", name="perturbkv audit")
    for name, tag, about, text_of_tag in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=escape_line(classname), name=name)
        if tag:
            found = ElementTree.SubElement(case, tag, {key: escape_line(value) for key, value in about.items()})
            found.text = text_of_tag or None
    names = {"failure": "failures", "error": "errors", "skipped": "skipped"}
    counts = {name: str(len(suite.findall(f"testcase/{tag}"))) for tag, name in names.items()}
    suite.attrib |= {"tests": str(len(suite)), **counts}
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


@record
class Audit(
    Result,
    section="audit",
    document="of an audit",
    rows="layers",
    shown=("cache_share", "alterations", "worst", "difference"),
    first="prompt",
):
    """The verdict on an external eviction, with its measurements."""

    eviction: str = column("the eviction that was audited, as it was written")
    kind: str = column("function, cache class, press or positions file")
    about: dict[str, str] = column("model, data, dtype, device, versions")
    layers: int = column("layers of the model that are evicted and measured")
    query_heads: int = column("query heads per layer of the model")
    kv_heads: int = column("key/value heads per layer of the model")
    runs: tuple[AuditedRun, ...] = column("one per prompt, situation and row of its batch", default=())
    unreadable: str = column("reason why nothing could be audited; empty where something was", default="")
    plain_use: PlainUse | None = column(
        "plain use of the cache with transformers, where no positions are given", default=None
    )
    losses: tuple[AuditLoss, ...] = column("the loss of the kept sets, then of controls that hold as much", default=())
    expected: str = column("kept sets that were meant: a file's or a policy's; empty where none were named", default="")
    lossless: str = column("reason why no loss was measured", default="")
    protected_first: int = column("first entries that every kept set holds", default=0)
    protected_recent: int = column("most recent entries that every kept set holds", default=0)
    controls_protect_less: bool = column(
        "true if controls protect fewer entries, as the eviction keeps hardly more than it protects", default=False
    )
    configs: tuple[EvictionConfig, ...] = column(
        "the configuration of the kept sets, then those of the controls", default=()
    )

    @cached_property
    def identity(self) -> RunIdentity:  # type: ignore[override]  # as read-only as a frozen field
        """The identity of the run."""
        about = self.about
        return RunIdentity(
            model=about["model"], dataset=about.get("dataset", "prompts"), samples=int(about["samples"]), failed=0,
            configs=self.configs, trace="", random_weights=about["random_weights"] == "true",
            made_with=f"perturbkv {about['perturbkv_version']}", measured_layers=about.get(MEASURED_LAYERS, ""),
        )  # fmt: skip

    @derived()
    def faults(self) -> tuple[Fault, ...]:
        """The first difference of each prompt, situation and row that has one, the one to look at first first."""
        return tuple(sorted((run.fault for run in self.runs if run.fault is not None), key=Fault.sort_key))

    @derived()
    def verdict(self) -> str:
        """`exact` (loses what its kept sets imply), `lossy` (is rounded, too), `unknown` (holds what matches nothing),
        `differs`, `did nothing`, `unreadable` or `not compared`.
        """
        if self.obstacle:
            return UNREADABLE
        if any(run.fault and not run.is_unknown for run in self.runs) or self.misplaces_new_tokens:
            return DIFFERS
        if any(run.is_unknown for run in self.runs):
            return UNKNOWN
        if self.idle_prompts:
            return DID_NOTHING
        if any(run.is_rounded for run in self.runs):
            return LOSSY
        return EXACT if self.compared_runs else UNCOMPARED

    @derived()
    def exit_code(self) -> int:
        """Exit code of the process: 0 exact, or allowed; 1 lossy, unknown, differs, did nothing; 2 unreadable, not
        compared.
        """
        allowed = {_ALLOWS[name] for run in self.runs for name in run.allowed if name in _ALLOWS}
        holds = {
            LOSSY: any(run.is_rounded for run in self.runs), UNKNOWN: any(run.is_unknown for run in self.runs),
            DID_NOTHING: bool(self.idle_prompts), self.verdict: True,
        }  # fmt: skip
        return max((EXIT_CODES[one] for one, held in holds.items() if held and one not in allowed), default=0)

    @property
    def misplaces_new_tokens(self) -> bool:
        """True where transformers puts new tokens at wrong positions and raises nothing, unless that is allowed."""
        plain, allowed = self.plain_use, any(PLAIN_USE in run.allowed for run in self.runs)
        return plain is not None and plain.position not in (None, plain.expected) and not allowed

    @derived()
    def idle_prompts(self) -> list[str]:
        """Prompts of which nothing was evicted or changed, in any situation."""
        seen = [run for run in self.runs if run.entries]
        changed = {
            run.sample
            for run in seen
            if (run.entries and run.entries.evicted) or run.is_rounded or run.fault or run.is_unknown
        }
        return [sample for sample in dict.fromkeys(run.sample for run in seen) if sample not in changed]

    @derived(key="conclusion")
    def summary(self) -> str:
        """The verdict in one line."""
        clauses: dict[str, Callable[[], str]] = {
            UNREADABLE: lambda: self.obstacle, DIFFERS: self._differs_clause, DID_NOTHING: self._idle_clause,
            UNCOMPARED: lambda: (
                f"nothing was decoded, so only its kept sets are looked at{self._evicted_ends_clauses()}"
            ),
        }  # fmt: skip
        return f"{self.verdict}: {clauses.get(self.verdict, self._right_clause)()}"

    @property
    def obstacle(self) -> str:
        """Reason why there is no verdict; empty if the audit has a verdict."""
        any_judged = any(
            run.entries is not None or run.damage or any(one.kind == UNMEASURED for one in run.others)
            for run in self.runs
        )
        if any_judged and (self.faults or not self.unreadable):
            return ""
        if self.unreadable or not self.runs:
            return self.unreadable
        first = self.runs[0]
        return first.failed or f"it refuses every situation: {first.refused}"

    @property
    def compared_runs(self) -> list[AuditedRun]:
        """The runs whose decoding was compared with the reference."""
        return [run for run in self.runs if run.entries and run.steps]

    @property
    def has_figure(self) -> bool:
        """True if something was compared or measured that a figure shows."""
        return bool(self.compared_runs) or any(run.entries is not None for run in self.runs)

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
        """Return how many noise floors make a difference, where distances were measured, and a loss near random's."""
        note = f"Floors are of the plain model with the same entries kept; more than {FLOORS} are a difference."
        notes = [note] * any(run.steps for run in self.runs)
        lost = {loss.name: loss.isolated for loss in self.losses}
        if {"attention", "random"} <= set(lost):
            own = self.losses[0].isolated
            shown = {"isolated": own, "random": lost["random"], "attention": lost["attention"]}
            numbers = ", ".join(f"{name} {text.three_digits(number, None)}" for name, number in shown.items())
            if own - lost["attention"] > lost["random"] - own:
                notes.append(f"It loses about what random entries do, or more: {numbers}.")
        return notes

    def explain(self) -> list[Part]:
        """Return the meaning of every column and the further tables; nothing where no situation was run."""
        return super().explain() if self.runs else []

    def details(self) -> Sequence[Part]:
        """Return tables of kept entries, decoding steps of the first prompt and losses, and a note on plain use."""
        situations = {run.situation for run in self.runs}
        parts: list[Part] = [f"{name}: {meaning}." for name, meaning in SITUATIONS.items() if name in situations]
        if kept := [Line(run.name, (run, run.entries)) for run in self.runs if run.entries]:
            note = "first, last: entries of the prompt's beginning and end that a kept set holds without a gap."
            parts += [table("what it keeps", kept, _KEPT, self.FIRST), note]
        shown: dict[tuple[str, int], AuditedRun] = {}
        for run in self.runs:
            if run.steps:
                shown.setdefault((run.situation, run.row), run)  # the first prompt's
        if steps := [Line("" if step.step else run.name, (step,)) for run in shown.values() for step in run.steps]:
            parts.append(table("step by step, the first prompt, in noise floors", steps, _STEPS, self.FIRST))
        if self.plain_use:
            parts.append(self.plain_use.summary())
        if self.losses:
            parts += [*loss_table("what the loss is, first decoding step", self.losses), self._loss_note()]
        elif self.lossless:
            parts.append(f"no loss measured: {self.lossless}")
        return parts

    def _loss_note(self) -> str:
        """Return what the numbers of the table of losses are, and what kept sets and controls protect."""
        controls = ", and so do the controls'"
        if self.controls_protect_less:
            controls = "; controls protect less, as it keeps hardly more"
        return (
            "isolated, propagated: L1 perturbation of all heads over Σ ‖o_h‖₁; mean over "
            f"{plural(self.identity.samples, 'prompt')}; every kept set holds the first {self.protected_first} and the "
            f"last {self.protected_recent} entries{controls}."
        )

    def records(self) -> list[dict[str, Any]]:
        """Return a row per prompt, situation, row of the batch, step and layer."""
        return [
            {
                "sample": run.sample, "situation": run.situation, "row": run.row, "step": step.step,
                "layer": run.layer_number(layer),
                "floors": float(floors), "kept": sum(run.entries.kept[layer]),
                "altered": "; ".join(change.what for change in run.entries.altered if change.layer == layer),
            }
            for run in self.compared_runs if run.entries
            for step in run.steps
            for layer, floors in enumerate(step.layer_floors)
        ]  # fmt: skip

    def to_junit(self) -> str:
        """Return the audit as a JUnit report, which CI systems show: a test case per prompt, situation and row."""
        return junit_xml(self.eviction, self._junit_cases())

    def _junit_cases(self) -> Iterator[JunitCase]:
        """Yield a test case per run, and one of the verdict where that is no fault of a run."""
        for run in self.runs:
            if run.fault is not None:
                about = {"type": run.fault.kind, "message": run.difference}
                yield run.name, "failure", about, _fault_clause(run.fault)
            else:
                skipped = run.refused or ("nothing was evicted" if run.sample in self.idle_prompts else "")
                yield run.name, "skipped" if skipped else "", {"message": skipped}, ""
        any_failed = any(run.fault for run in self.runs)
        if (self.exit_code and not any_failed) or self.unreadable:
            kind = UNREADABLE if self.unreadable else self.verdict
            tag = "failure" if EXIT_CODES[kind] == 1 else "error"
            yield "verdict", tag, {"type": kind, "message": self.summary}, ""

    def kept_share(self, most: int) -> Floats:
        """Return the share of positions that are kept, (layer, bin), mean over kept sets and prompts.

        Bins are equal shares of each prompt: `most` of them, fewer where a prompt is shorter. Of a batch the first row
        counts. Without entries there is one bin, of NaN.
        """
        caches = [run.entries for run in self.runs if run.entries and run.row == 0]
        if not caches:
            return np.full((self.layers, 1), np.nan)
        bins = min(most, *(entries.tokens for entries in caches))
        shares = []
        for entries in caches:
            edges = np.linspace(0, entries.tokens, bins + 1).round()
            counts = [np.histogram(np.concatenate(sets), edges)[0] / len(sets) for sets in entries.kept_sets]
            shares.append(np.asarray(counts / np.diff(edges)))
        return np.asarray(np.mean(shares, axis=0))

    def floors_by_layer(self) -> dict[str, Floats]:
        """Return situation -> largest distance in noise floors over prompts, rows and steps, (layer,).

        Situations whose decoding was not compared are absent; NaN where only logits were.
        """
        worst: dict[str, Floats] = {}
        for run in self.compared_runs:
            floors = np.array([step.layer_floors for step in run.steps]).max(axis=0)
            worst[run.situation] = np.fmax(worst.get(run.situation, floors), floors)
        return worst

    def _differs_clause(self) -> str:
        """Return a clause on the most telling fault, the other situations with faults, and what could not be read.

        Where there is no fault, or only entries that match none, wrong positions in plain use come first.
        """
        if self.misplaces_new_tokens and not any(run.fault and not run.is_unknown for run in self.runs):
            return f"{self._plain_use_clause()}; else {self._right_clause()}"
        first = self.faults[0]
        others = [name for name in dict.fromkeys(fault.situation for fault in self.faults) if name != first.situation]
        also = f"; also in {' and '.join(others)}" if others else ""
        also += f"; {self._plain_use_clause()}" if self.misplaces_new_tokens else ""
        then = f"; then unreadable: {self.unreadable}" if self.unreadable else ""
        return f"{_fault_clause(first)}{also}{then}"

    def _plain_use_clause(self) -> str:
        """Return a clause on where transformers puts the next token."""
        assert self.plain_use is not None
        places = f"{self.plain_use.position:,}, not {self.plain_use.expected:,}"
        return f"without position_ids transformers puts the next token at {places} (give them, or a decode)"

    def _right_clause(self) -> str:
        """Return a clause on runs without a fault: what is not known, rounded or only lost, and how near decoding is.

        The first entries that match none are named, else how far entries are rounded.
        """
        says = ""
        if unknown := [run.first_unmatched for run in self.runs if run.is_unknown]:
            where = f"({escape_line(unknown[0].sample)}, {unknown[0].situation})"
            says = f"{unknown[0].place_and_cause()} {where}"
        elif any(run.is_rounded for run in self.runs):
            says = self._rounding_clause()
        if says:
            return f"{says}; {self._decoding_clause('the plain model with the same entries')}"
        meant = f", those of {self.expected}," if self.expected else ""
        return f"it loses what its kept sets{meant} imply: {self._decoding_clause('the masked reference')}"

    def _decoding_clause(self, reference: str) -> str:
        """Return a clause on how near decoding is to its reference, with where keys stand and what is evicted."""
        decoded = [run.compared_steps for run in self.runs if run.steps]
        most = floors_text(max(map(worst_floors, decoded)))
        in_cache = any(run.positions == IN_CACHE and run.entries and run.entries.evicted for run in self.runs)
        moved = "; keys stand at their places in the cache, new tokens after them" if in_cache else ""
        most_parts = max((run.parts for run in self.runs), default=1)
        moved += (
            f"; the prompt is read in {most_parts} parts, with what is left of the earlier ones"
            if most_parts > 1
            else ""
        )
        unevicted = [run.name for run in self.runs if run.entries and not run.entries.evicted and not run.is_rounded]
        idle = f"; nothing was evicted in {', '.join(unevicted)}" if unevicted else ""
        gone = max((run.entries.evicted_new for run in self.runs if run.entries), default=0)
        generated = f"; of generated tokens {plural(gone, 'entry', 'entries')} went" if gone else ""
        return (
            f"at most {most} noise floors from {reference} in {plural(len(decoded), 'run')}{moved}"
            f"{self._evicted_ends_clauses()}{generated}{idle}"
        )

    def _rounding_clause(self) -> str:
        """Return a clause on what was rounded, by how it was where that is known, and by how much."""
        rounded = [run for run in self.runs if run.is_rounded and run.entries]
        changes = [change for run in rounded if run.entries for change in run.entries.altered]
        words = dict.fromkeys(change.what for change in changes if change.kind in ROUNDING)
        known = 0 < len(words) <= _MOST_WORDS and not any(what.endswith(" rounded") for what in words)
        caches = [run.entries for run in rounded if run.entries]
        held = [(entries.distances.max(axis=-1), entries.floors) for entries in caches]
        new = [
            (step.new_error, run.entries.floors)
            for run in rounded
            if run.entries and run.rounds_new_tokens
            for step in run.own_steps
        ]
        off, kinds = [], set[str]()
        for what, errors in (("the prompt", held if words else []), ("new tokens", new)):
            moved = {
                name: _percent(max(float(error[kind].max()) for error, _ in errors))
                for kind, name in enumerate(("keys", "values"))
                if any(bool((error[kind] > FLOORS * floors[kind]).any()) for error, floors in errors)
            }
            kinds |= moved.keys()
            if moved:
                off.append(f"of {what} by at most {' and '.join(moved.values())}")
        named = " and ".join(words) if known else f"{' and '.join(sorted(kinds)) or 'keys and values'} rounded"
        return ", ".join([named, *off])

    def _idle_clause(self) -> str:
        """Return a clause that nothing was evicted, in some prompts or in all."""
        runs = [run for run in self.runs if run.entries]
        idle = self.idle_prompts
        if len(idle) < len({run.sample for run in runs}):
            elsewhere = self._decoding_clause("the reference")
            return f"nothing was evicted of {escape_line(', '.join(idle))}; elsewhere {elsewhere}"
        tokens = max(run.tokens for run in runs)
        return f"no entry was evicted in any head or step of {plural(len(runs), 'run')}, of at most {tokens:,} tokens"

    def _evicted_ends_clauses(self) -> str:
        """Return clauses with the number of kept sets that lack the first or the most recent entry; empty for none.

        Each is counted over the prompts in the lowest row of a batch with such sets, in the first situation that ran.
        Caches with changed or rounded entries are left out: which positions these have is not sure enough.
        """
        caches = {
            (run.sample, run.row): run.entries
            for run in reversed(self.runs)  # the first wins
            if run.entries and not run.entries.altered
        }
        clauses = []
        for what, name in (("the first entry, a sink,", "without_first"), ("the most recent entry", "without_last")):
            for row in sorted({row for _, row in caches}):
                in_row = [entries for (_, own_row), entries in caches.items() if own_row == row]
                if count := sum(getattr(entries, name) for entries in in_row):
                    where = f" of row {row} of a batch" if row else ""
                    sets = sum(entries.set_count for entries in in_row)
                    clauses.append(f"; {what} goes in {count} of {sets} kept sets{where}")
                    break
        return "".join(clauses)


def _fault_clause(fault: Fault) -> str:
    """Return a clause on a fault: layer, head, entry and step, what it is, where it was found, how far it lies."""
    far = "" if isnan(fault.floors) else f", {floors_text(fault.floors)} noise floors"
    row = f", row {fault.row}" if fault.situation == "batch" else ""
    return f"{fault.place_and_cause()} ({escape_line(fault.sample)}, {fault.situation}{row}{far})"


def _percent(share: float) -> str:
    """Return a share as a percentage of two significant digits."""
    return f"{100 * share:.2g} %"
