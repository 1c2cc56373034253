"""A token's fate: which words of a prompt a head keeps and evicts, and which evicted ones add most to its output.

Which tokens of a long prompt are shown: those that differ and what stands around them.

How a prompt's tokens are told: a sentence, the heads that change most, the prompt itself, and what is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from perturbkv.analyses import text as numbers
from perturbkv.analyses.identity import identity
from perturbkv.analyses.pairing import Pair, checked, counted, pair_columns, pairs, side_names
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.tokens.fates import (
    BASELINE,
    BOTH,
    NEITHER,
    QUESTION,
    TREATMENT,
    ChangedHead,
    Loss,
    TokenFates,
    changed_head,
    changed_heads,
    fates,
    held_of,
    losses,
    prompt_of,
)
from perturbkv.configs.entry_counts import Budget
from perturbkv.display import Part, Table
from perturbkv.errors import ConfigError, TraceError
from perturbkv.escaping import Passage, Span, line, visible
from perturbkv.trace import Trace

AROUND = 8
"""Tokens before and after one that differs."""
MOST = 1200
"""Tokens that are shown of a folded prompt: some six screens."""
_SHORTEST = 16
"""Fewer tokens are not folded: the line that tells of them is as long."""


def shown_parts(differs: Sequence[bool], everything: bool = False) -> list[tuple[int, int, bool]]:
    """(first, end, whether it is shown) of every part of the prompt, in its order.

    Where nothing differs both ends are shown.
    """
    count = len(differs)
    if everything or count <= 4 * AROUND:
        return [(0, count, True)]
    wanted = [place for place, one in enumerate(differs) if one] or [0, count - 1]
    return _with_gaps(_limited(_merged(wanted, count)), count)


def _merged(wanted: Sequence[int], count: int) -> list[tuple[int, int]]:
    """What stands around the places, parts that nearly touch as one."""
    parts: list[tuple[int, int]] = []
    for place in wanted:
        first, end = max(0, place - AROUND), min(count, place + AROUND + 1)
        first, end = 0 if first < _SHORTEST else first, count if count - end < _SHORTEST else end
        if parts and first - parts[-1][1] < _SHORTEST:
            parts[-1] = (parts[-1][0], end)
        else:
            parts.append((first, end))
    return parts


def _limited(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first parts that are no more than `MOST` tokens together."""
    found: list[tuple[int, int]] = []
    room = MOST
    for first, end in parts:
        if room > 0:
            found.append((first, min(end, first + room)))
        room -= end - first
    return found


def _with_gaps(parts: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int, bool]]:
    found: list[tuple[int, int, bool]] = []
    reached = 0
    for first, end in parts:
        found += [(reached, first, False)] if first > reached else []
        found.append((first, end, True))
        reached = end
    return found + ([(reached, count, False)] if reached < count else [])


LOOKS = {BOTH: "kept", BASELINE: "lost", TREATMENT: "gained", NEITHER: "dropped", QUESTION: "plain"}
"""Fate -> how a token looks."""
_AROUND = 14
"""Characters before and after a lost token."""
_HALF = "·"


def conclusion(found: TokenFates) -> str:
    """What the treatment keeps instead, and what becomes of the head's output."""
    head, (first, second) = found.shown, side_names(found.baseline, found.treatment)
    why = {"": "", "layer": " changes most in its layer", "model": " changes most of all"}[found.chosen]
    opening = f"Of '{line(found.prompt.sample)}', head {head.layer}-{head.head}{why}:"
    if not head.baseline_only and not head.treatment_only:
        return (
            f"{opening} {second} keeps the same {counted(head.both, 'token')} as {first} (b = {found.baseline.budget})."
        )
    kept = head.both + head.baseline_only
    moved = f"{numbers.percent(head.treatment)} of its norm instead of {numbers.percent(head.baseline)}"
    return (
        f"{opening} {second} keeps {head.both:,} of the {counted(kept, 'token')} that {first} keeps, and "
        f"{counted(head.treatment_only, 'other')}; its output moves by {moved} (isolated, b = {found.baseline.budget})."
    )


def parts(found: TokenFates) -> list[Part]:
    """Everything between the conclusion and the notes."""
    return [*_heads(found), "", _legend(found), _passage(found), *_losses(found)]


def notes(found: TokenFates) -> str:
    """What the numbers are, a line each."""
    others = f"{counted(found.others, 'more pair')} of these sides in the trace: a budget, or options, name another."
    lines = [
        "Both sides keep the window. Output moved: isolated perturbation L over ‖o_h‖₁, first decode step.",
        "A ν = ‖A_i 𝒱_i‖₁: what an entry adds to the output under full attention, first decode step; C: its sum over "
        "all. The output moves otherwise where it goes, as what stays is weighted anew.",
        f"{numbers.ABOUT_HELD} Here {numbers.held(found.held[0])} → {numbers.held(found.held[1])}.",
        others if found.others else "",
    ]
    return "\n".join(filter(None, lines))


def _heads(found: TokenFates) -> list[Part]:
    if not found.heads:
        return []
    first, second = side_names(found.baseline, found.treatment)
    columns = [
        "head",
        f"#output moved,\n{first}",
        f"#output moved,\n{second}",
        "#both\nkeep",
        f"#{first}\nalone",
        f"#{second}\nalone",
    ]
    where = f"of layer {found.shown.layer} " if found.chosen == "layer" else ""
    return [
        Table(
            f"heads {where}that the treatment changes most; the first is shown", columns, list(map(_head, found.heads))
        )
    ]


def _head(one: ChangedHead) -> list[str]:
    moved = [numbers.percent(value) for value in (one.baseline, one.treatment)]
    counts = [f"{count:,}" for count in (one.both, one.baseline_only, one.treatment_only)]
    return [f"{one.layer}-{one.head}", *moved, *counts]


def _legend(found: TokenFates) -> Passage:
    """What each look means, with how many tokens have it."""
    said, counts = _said(found), Counter(found.fates)
    spans = [Span(f"{said[fate]} {counts[fate]:,}", LOOKS[fate]) for fate in said if counts[fate]]
    return Passage([one for span in spans for one in (span, Span("  ", "plain"))][:-1])


def _passage(found: TokenFates) -> Passage:
    """The prompt, long parts in which nothing differs folded."""
    differs = [fate in (BASELINE, TREATMENT) for fate in found.fates]
    spans: list[Span] = []
    for first, end, shown in shown_parts(differs, found.everything):
        if shown:
            spans += _spans(found, first, end)
        else:
            spans.append(Span(f"── {_folded(found, first, end)} ──", "aside"))
    return Passage(spans)


def _folded(found: TokenFates, first: int, end: int) -> str:
    counts, said = Counter(found.fates[first:end]), _said(found)
    told = [f"{counts[fate]:,} {said[fate]}" for fate in said if counts[fate]]
    (whole, *others) = [said[fate] for fate in said if counts[fate]]
    return f"{counted(end - first, 'token')}: {', '.join(told) if others else whole}"


def _said(found: TokenFates) -> dict[str, str]:
    """Fate -> in words."""
    first, second = side_names(found.baseline, found.treatment)
    return {BOTH: "both keep", BASELINE: f"{first} alone", TREATMENT: f"{second} alone", NEITHER: "both evict",
            QUESTION: "question, not compressed"}  # fmt: skip


def _spans(found: TokenFates, first: int, end: int) -> Iterator[Span]:
    """Tokens of one look together; a remark where the prompt was cut, and where its question begins."""
    cut, question = found.prompt.cut_place, found.prompt.compressed
    borders = {place for place in (cut, question) if place is not None and first <= place < end}
    for start, stop in _between([first, *sorted(borders - {first}), end]):
        if start == cut:
            yield Span(f"── {counted(found.prompt.cut_tokens, 'token')} cut out here ──", "aside")
        if start == question:
            yield Span("── the question, which is not compressed ──", "aside")
        for fate, group in groupby(range(start, stop), key=found.fates.__getitem__):
            said = "".join(_piece(found, place) for place in group)
            if said:
                yield Span(said, LOOKS[fate])


def _between(borders: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(borders, borders[1:], strict=False))


def _piece(found: TokenFates, place: int) -> str:
    """A token's text; a dot for a part of a character whose fate is not that of the part that shows it."""
    pieces, fates = found.prompt.pieces, found.fates
    if pieces[place]:
        return pieces[place]
    shows = next((later for later in range(place, len(pieces)) if pieces[later]), place)
    return _HALF if fates[shows] != fates[place] else ""


def _losses(found: TokenFates) -> list[Part]:
    if found.losses is None:
        return ["what evicted entries add to the output is not in this trace: an older version measured the sample"]
    names = side_names(found.baseline, found.treatment)
    both = zip(names, reversed(names), found.losses, strict=True)
    return [_lost(found, name, other, lost) if lost else f"{name} evicts nothing" for name, other, lost in both]


def _lost(found: TokenFates, name: str, other: str, lost: Sequence[Loss]) -> Table:
    together = numbers.percent(sum(one.share for one in lost))
    which = "evicted entry that adds" if len(lost) == 1 else f"{len(lost)} evicted entries that add"
    title = f"{name}: the {which} most to the output, {together} of C"
    columns = ["#position", "in its context", "#A ν", "#of C", other]
    return Table(title, columns, [_loss(found, one) for one in lost])


def _loss(found: TokenFates, one: Loss) -> list[str]:
    share = f"{100 * one.share:.2g} %"
    return [
        str(one.position),
        _context(found, one.position),
        f"{one.output:.3g}",
        share,
        "keeps" if one.kept_by_other else "evicts",
    ]


def _context(found: TokenFates, place: int) -> str:
    """The token between ‹ and › in one line, with some characters before and after it."""
    pieces = found.prompt.pieces
    before = _line("".join(pieces[max(0, place - _AROUND) : place]))[-_AROUND:]
    after = _line("".join(pieces[place + 1 : place + 1 + _AROUND]))[:_AROUND]
    return f"{before}‹{_line(pieces[place] or _HALF)}›{after}"


def _line(text: str) -> str:
    return visible(text).replace("\n", "")


ANALYSIS = "tokens"
_HEADS = 5
"""Heads that a summary lists."""


@dataclass(frozen=True, repr=False)
class Tokens(TokenFates, Result):
    """What one head does with every token of one prompt under two configurations."""

    def conclusion(self) -> str:
        """What the treatment keeps instead, and how much less or more the head's output moves with it."""
        return conclusion(self)

    def tables(self) -> Sequence[Part]:
        """The heads that change most, the prompt by fate, and the evicted entries that add most to the output."""
        return parts(self)

    def notes(self) -> str:
        """What the numbers are."""
        return notes(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers and text."""
        first, second = self.losses or (None, None)
        found: dict[str, Any] = {
            "sample": self.prompt.sample,
            "baseline": self.baseline,
            "treatment": self.treatment,
            "held_over_full_baseline": self.held[0],
            "held_over_full_treatment": self.held[1],
            "chosen_among": self.chosen or None,
            "shown": self.shown,
            "heads": self.heads,
            "cut_tokens": self.prompt.cut_tokens,
            "cut_after": self.prompt.cut_place,
            "counts": Counter(self.fates),
            "tokens": [
                {"position": place, "id": token, "text": piece, "fate": fate}
                for place, token, piece, fate in self._tokens()
            ],
            "baseline_losses": first,
            "treatment_losses": second,
            "other_pairs": self.others,
        }
        numbers: dict[str, Any] = plain(found)
        return numbers

    def records(self) -> list[dict[str, Any]]:
        """A row per token, in the prompt's order."""
        about = {
            **pair_columns(self.baseline, self.treatment),
            "sample": self.prompt.sample,
            "layer": self.shown.layer,
            "head": self.shown.head,
        }
        return [
            {**about, "position": place, "token": token, "text": piece, "fate": fate}
            for place, token, piece, fate in self._tokens()
        ]

    def _tokens(self) -> list[tuple[int, int, str, str]]:
        return list(zip(range(len(self.fates)), self.prompt.tokens, self.prompt.pieces, self.fates, strict=True))


def tokens(
    trace: Trace,
    sample: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    *,
    baseline: str = "attention",
    treatment: str = "two-stage",
    budget: float | None = None,
    everything: bool = False,
) -> Tokens:
    """Which words of a prompt a head keeps and evicts under two configurations; which it evicts add most to its output.

    Args:
        trace: from `measure` or `read_trace`, with the prompts' text (`text=True`).
        sample: its id; None: the first complete one.
        layer: None: any.
        head: query head of the layer; None: the one, of the layer or of all, whose isolated perturbation over ‖o_h‖₁
            the treatment changes most at the first decode step.
        baseline: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`).
        treatment: likewise.
        budget: of both: an integer is entries, another number a share of the prompt. None: the first that both have.
        everything: show the whole prompt; else what differs and what stands around it.

    Raises TraceError where the trace has no text, no such sample or no such pair, ConfigError for a layer or head that
    the model does not have, and for sides that are no names.

    >>> import perturbkv as pk
    >>> found = pk.tokens(trace, layer=0, head=0)
    >>> [(row["text"], row["fate"]) for row in found.records()][:2]
    [('The', 'baseline'), (' cat', 'both')]
    """
    checked(trace, baseline, treatment)
    prompt = prompt_of(trace, sample)
    named = _layers(trace, layer, head)
    place = None if layer is None else named.index(layer)
    found = _pairs(trace, baseline, treatment, budget)
    first, second = found[0]
    sides = (trace.run.configs.index(first), trace.run.configs.index(second))
    heads = [] if head is not None else changed_heads(trace, prompt.place, sides, place, _HEADS)
    shown = changed_head(trace, prompt.place, sides, place or 0, head) if head is not None else heads[0]
    return Tokens(
        identity=replace(identity(trace, (first, second)), samples=1, failed=0, ended=0),
        prompt=prompt,
        baseline=first,
        treatment=second,
        held=held_of(trace, prompt.place, sides),
        shown=shown,
        chosen="" if head is not None else "model" if layer is None else "layer",
        heads=tuple(heads),
        fates=fates(trace, prompt, sides, named.index(shown.layer), shown.head),
        losses=losses(trace, prompt.place, sides, named.index(shown.layer), shown.head),
        others=len(found) - 1,
        everything=everything,
    )


def _layers(trace: Trace, layer: int | None, head: int | None) -> list[int]:
    """The measured layers. Raises ConfigError where what is asked for is none of them, or of their heads."""
    layers, heads = trace.arrays["kept_count"].shape[2:]
    if head is not None and layer is None:
        msg = f"expected the layer of head {head}, got none; give both: a layer has {heads} heads"
        raise ConfigError(msg)
    named = [trace.layer_name(place) for place in range(layers)]
    for name, wanted, known in (("layer", layer, named), ("head", head, list(range(heads)))):
        if wanted is not None and wanted not in known:
            counted = known == list(range(len(known)))
            expected = f"from 0 to {len(known) - 1}" if counted else f"of {', '.join(map(str, known))}"
            msg = f"expected a {name} {expected}, got {wanted}"
            raise ConfigError(msg)
    return named


def _pairs(trace: Trace, baseline: str, treatment: str, budget: float | None) -> list[Pair]:
    """The pairs of a budget, or all. Raises TraceError where there is none."""
    found = pairs(trace.run, baseline, treatment)
    if budget is None:
        return found
    wanted = [pair for pair in found if pair[1].budget == Budget(budget)]
    if not wanted:
        held = ", ".join(dict.fromkeys(str(pair[1].budget) for pair in found))
        msg = f"expected '{baseline}' and '{treatment}' with a budget of {budget}, got a trace of {held}"
        raise TraceError(msg)
    return wanted
