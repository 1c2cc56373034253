"""How a prompt's tokens are told: a sentence, the heads that change most, the prompt itself, and what is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

from perturbkv.analyses import text as numbers
from perturbkv.analyses.naming import counted, sides
from perturbkv.analyses.tokens import folding
from perturbkv.analyses.tokens.fates import BASELINE, BOTH, NEITHER, QUESTION, TREATMENT, ChangedHead, Loss, TokenFates
from perturbkv.display import Part, Table
from perturbkv.escaping import Passage, Span, visible
from perturbkv.visible import line

LOOKS = {BOTH: "kept", BASELINE: "lost", TREATMENT: "gained", NEITHER: "dropped", QUESTION: "plain"}
"""Fate -> how a token looks."""
_AROUND = 14
"""Characters before and after a lost token."""
_HALF = "·"


def conclusion(found: TokenFates) -> str:
    """What the treatment keeps instead, and what becomes of the head's output."""
    head, (first, second) = found.shown, sides(found.baseline, found.treatment)
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
    first, second = sides(found.baseline, found.treatment)
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
    for first, end, shown in folding.shown(differs, found.everything):
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
    first, second = sides(found.baseline, found.treatment)
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
    names = sides(found.baseline, found.treatment)
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
