"""Fates of a prompt's tokens in one head: kept or evicted, with the evicted entries that add most to its output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from perturbkv.analyses import text
from perturbkv.analyses.columns import Derived, Line, Record, attribute, column, derived, record, table
from perturbkv.analyses.conclusions import Case, Claim
from perturbkv.analyses.identity import RunIdentity, identity
from perturbkv.analyses.names import PairRecord, pair_columns
from perturbkv.analyses.result import Result
from perturbkv.analyses.sides import choose_sides, pairs
from perturbkv.analyses.tokens.fates import (
    BASELINE,
    BOTH,
    NEITHER,
    QUESTION,
    TREATMENT,
    ChangedHead,
    Loss,
    PromptText,
    Token,
    cache_shares,
    changed_head,
    changed_heads,
    evicted_attention,
    fates,
    losses,
    prompt_of,
    text_change,
    text_effects,
)
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.display import Part, plural
from perturbkv.errors import ConfigError, TraceError
from perturbkv.escaping import HighlightedText, Span, escape_line, show_control_characters
from perturbkv.trace import Trace

ANALYSIS = "tokens"
AROUND = 8
"""Tokens that are shown before and after one that differs."""
MOST = 1200
"""Largest number of tokens that are shown of a folded prompt: some six screens."""
_SHORTEST = 16
"""Smallest number of tokens that are folded: the line that replaces them is as long."""


def shown_parts(differs: Sequence[bool], everything: bool = False) -> list[tuple[int, int, bool]]:
    """Return (first token, end, shown) of the parts into which a prompt is folded on the screen.

    Shown are tokens that differ and those around them; where none differs, both ends; with `everything`, all.
    """
    count = len(differs)
    shown = np.full(count, everything or count <= 4 * AROUND)
    for position in np.flatnonzero(differs) if any(differs) else (0, count - 1):
        shown[max(0, position - AROUND) : position + AROUND + 1] = True
    for first, end, _ in _runs(shown):
        if end - first < _SHORTEST:
            shown[first:end] = True
    return _runs(shown if everything else shown & (shown.cumsum() <= MOST))


def _runs(shown: NDArray[np.bool_]) -> list[tuple[int, int, bool]]:
    """Return (first, end, value) of the runs of equal values in a mask."""
    edges = [0, *(np.flatnonzero(np.diff(shown)) + 1).tolist(), len(shown)]
    return [(first, end, bool(shown[first])) for first, end in pairwise(edges)]


LOOKS = {BOTH: "kept", BASELINE: "lost", TREATMENT: "gained", NEITHER: "dropped", QUESTION: "plain"}
"""Fate of a token -> its look."""
_CONTEXT_CHARACTERS = 14
"""Characters shown before and after an evicted token."""
_HALF = "·"
"""Stands for a token that is a part of a character."""
_COSTLY = 10
"""Largest number of tokens in the table of what costs the text most."""
_HEADS = 5
"""Largest number of heads in the table."""


@record
class Context(Record):
    """The text around an entry."""

    context: str = column("the entry between ‹ and ›, with the characters around it", heading="in its context")


@record
class Tokens(
    Result,
    PairRecord,
    section="tokens",
    document="of a trace",
    rows="tokens",
    shown=("baseline", "treatment", "both", "baseline_only", "treatment_only"),
    first="head",
):
    """The fates of one prompt's tokens in one head under two configurations.

    Attributes:
        identity: of the run, with this one sample.
        prompt: the sample's tokens and their text.
        cache_shares: entries of each side's cache over those of the full cache; NaN where the trace does not tell.
        evicted_attention: 1 − S of the head at the first decode step, of each side.
        chosen: heads among which the treatment changes this one's output most: `layer` or `model`; "" where the head
            was given.
        fates: who keeps each token: `both`, `baseline`, `treatment`, `neither`; `question` is not compressed.
        losses: evicted entries of both sides that add most to the output; None where the trace does not tell.
        effects: with each side what losing a token in all heads that evict it changes the text's log p by, to first
            order, in nat; NaN where the trace does not tell.
        text_changes: what the text's log p did change by with each side's cache, in nat; NaN where not measured.
        everything: whether the prompt is shown whole.
    """

    identity: RunIdentity
    prompt: PromptText
    baseline: EvictionConfig = column("what is compared with")
    treatment: EvictionConfig = column("what is compared")
    cache_shares: tuple[float, float]
    evicted_attention: tuple[float, float]
    shown: ChangedHead = column("the head whose kept sets these are")
    chosen: str
    heads: tuple[ChangedHead, ...] = column(
        "heads that the treatment changes most, that first; none where a head was given"
    )
    fates: tuple[str, ...]
    losses: tuple[tuple[Loss, ...], tuple[Loss, ...]] | None
    effects: tuple[tuple[float, ...], tuple[float, ...]]
    text_changes: tuple[float, float]
    other_pairs: int = column("further pairs of these sides in the trace", default=0)
    everything: bool = False

    sample: ClassVar[Derived[str]] = attribute("prompt.sample", "The sample whose prompt this is")
    cache_share_baseline: ClassVar[Derived[float]] = attribute(
        "cache_shares.0",
        "Entries that the baseline's cache holds over those of the full cache",
        key="held_over_full_baseline",
    )
    cache_share_treatment: ClassVar[Derived[float]] = attribute(
        "cache_shares.1",
        "Entries that the treatment's cache holds over those of the full cache",
        key="held_over_full_treatment",
    )
    evicted_attention_baseline: ClassVar[Derived[float]] = attribute(
        "evicted_attention.0",
        "The head's attention on entries that the baseline evicts, 1 − S, first decode step",
        unit="share",
    )
    evicted_attention_treatment: ClassVar[Derived[float]] = attribute(
        "evicted_attention.1",
        "The head's attention on entries that the treatment evicts, 1 − S, first decode step",
        unit="share",
    )

    @derived()
    def chosen_among(self) -> str | None:
        """Heads among which the shown one changes most: of its layer or of the model; null where the head was given."""
        return self.chosen or None

    cut_tokens: ClassVar[Derived[int]] = attribute("prompt.cut_tokens", "Tokens cut out of the prompt's middle")
    cut_after: ClassVar[Derived[int | None]] = attribute(
        "prompt.cut_index", "Tokens before the cut; null where there is none"
    )

    @derived()
    def counts(self) -> dict[str, int]:
        """Number of tokens of each fate."""
        return dict(Counter(self.fates))

    @derived()
    def tokens(self) -> tuple[Token, ...]:
        """Tokens of the whole prompt, whatever is folded on the screen."""
        columns = zip(self.prompt.tokens, self.prompt.pieces, self.fates, *self.effects, strict=True)
        return tuple(Token(position, *values) for position, values in enumerate(columns))

    @derived()
    def baseline_losses(self) -> tuple[Loss, ...] | None:
        """Evicted entries of the baseline that add most to the output, the largest first; null: not in the trace."""
        return self.losses and self.losses[0]

    @derived()
    def treatment_losses(self) -> tuple[Loss, ...] | None:
        """Evicted entries of the treatment that add most to the output, the largest first; null: not in the trace."""
        return self.losses and self.losses[1]

    def claims(self) -> Sequence[Claim]:
        """Return how many tokens both sides keep, and by how much the head's output moves with each side."""
        head, (first, second) = self.shown, self.sides
        kept = f"{head.both:,} of the {plural(head.both + head.baseline_only, 'token')} that {first} keeps"
        others = f", and {plural(head.treatment_only, 'other')}"
        moved = Case("", head.treatment, text.percent(head.treatment))
        instead = f" of its norm, with {first} by {text.percent(head.baseline)}"
        return [
            Claim(second, "keeps", [Case("", head.both, kept)], where=others, is_name=True),
            Claim("the head's output", "moves by", [moved], where=instead),
        ]

    def scope(self) -> Sequence[str]:
        """Return what the claims are of: one head of one prompt."""
        why = {"": "", "layer": ", which changes most in its layer", "model": ", which changes most of all"}
        head = f"head {self.shown.name} of '{escape_line(self.sample)}'{why[self.chosen]}"
        return [head, f"isolated, b = {self.baseline.budget}"]

    def title(self) -> str:
        """Return the table's title: both sides, and the way in which its heads were chosen."""
        first, second = self.sides
        layer = f" of layer {self.shown.layer}" if self.chosen == "layer" else ""
        listed = f": heads{layer} that change most, the first is shown" if self.heads else ""
        return f"{second} against {first}{listed}"

    def lines(self) -> Sequence[Line]:
        """Return a line per head that changes most, or one for the given head."""
        return [Line(head.name, (head,)) for head in self.heads or (self.shown,)]

    def body(self) -> list[Part]:
        """Return the table of heads, why the shown one's output moves, and the prompt with the fate of its tokens."""
        differs = [fate in (BASELINE, TREATMENT) for fate in self.fates]
        spans: list[Span] = []
        for first, end, shown in shown_parts(differs, self.everything):
            spans += self._spans(first, end) if shown else [Span(f"── {self._fold_note(first, end)} ──", "aside")]
        names = self._fate_names()
        looks = [Span(f"{names[fate]} {self.counts[fate]:,}", LOOKS[fate]) for fate in names if fate in self.counts]
        return [
            self.table(),
            self._reason(),
            *self._cost(),
            HighlightedText([part for span in looks for part in (span, Span("  ", "plain"))][:-1]),
            HighlightedText(spans),
        ]

    def interval_note(self) -> str:
        """Return an empty note: numbers of one sample have no intervals."""
        return ""

    def caveats(self) -> Sequence[str]:
        """Return notes on the window, which both sides keep, and on further pairs of the same sides."""
        others = f"{plural(self.other_pairs, 'more pair')} of these sides in the trace: --budget chooses one."
        return ["Both sides keep the window, the prompt's last tokens.", *([others] if self.other_pairs else [])]

    def details(self) -> Sequence[Part]:
        """Return the evicted entries that add most to the output, and both sides' cache shares."""
        shares = " → ".join(map(text.decimal, self.cache_shares))
        costs = np.nan_to_num(self.effects).min(axis=0)
        places = [int(place) for place in costs.argsort(kind="stable")[:_COSTLY] if costs[place] < 0]
        lines = [Line(str(place), (Context(self._context(place)), self.tokens[place])) for place in places]
        title = "tokens whose loss lowers the text's log p most: nat, to first order, isolated, all heads"
        columns = ("context", "baseline_effect", "treatment_effect")
        return [
            *self._loss_tables(),
            *([table(title, lines, columns, "position")] if lines else []),
            f"Entries of the evicted cache over those of the full one: {shares}.",
        ]

    def _reason(self) -> str:
        """Return how much of the head's attention each side evicts, and which of its evicted entries adds most."""
        (first, second), evicted = self.sides, [text.percent(share) for share in self.evicted_attention]
        shares = f"{first} evicts {evicted[0]} of head {self.shown.name}'s attention, {second} {evicted[1]}."
        if not self.losses or not all(self.losses):
            return f"Why: {shares}\n"
        largest = (f"‹{self._piece(lost[0].position)}› at {lost[0].position:,}" for lost in self.losses)
        return f"Why: {shares} Of what each evicts, most to the output adds {', and '.join(largest)}.\n"

    def _cost(self) -> list[str]:
        """Return what eviction with each side costs the text, as a list; empty where the trace does not tell."""
        told = []
        for name, change, effects in zip(self.sides, self.text_changes, np.nan_to_num(self.effects), strict=True):
            place = int(effects.argmin())
            worst = f"‹{self._piece(place)}› at {place:,} costs most, {text.three_digits(effects[place])}"
            first_order = text.three_digits(effects.sum()) + (f" ({worst})" if effects[place] < 0 else "")
            told += [f"{name} {text.three_digits(change)}, to first order {first_order}"] if effects.any() else []
        if not told:
            return []
        by_gradient = text.FIRST_ORDER_NOTES[self.identity.effect_gradient]
        return [f"Change of the text's log p by eviction, in nat: {'; '.join(told)}. {by_gradient}\n"]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per token, in the prompt's order."""
        labels = {
            **pair_columns(self.baseline, self.treatment),
            "sample": self.sample,
            "layer": self.shown.layer,
            "head": self.shown.head,
        }
        return [
            {
                **labels,
                "position": token.position,
                "token": token.id,
                "text": token.text,
                "fate": token.fate,
                "baseline_effect": token.baseline_effect,
                "treatment_effect": token.treatment_effect,
            }
            for token in self.tokens
        ]

    def _fate_names(self) -> dict[str, str]:
        """Return fate -> its name on the screen: 'attention alone'."""
        first, second = self.sides
        return {BOTH: "both keep", BASELINE: f"{first} alone", TREATMENT: f"{second} alone", NEITHER: "both evict",
                QUESTION: "question, not compressed"}  # fmt: skip

    def _fold_note(self, first: int, end: int) -> str:
        """Return the note that replaces folded tokens: their number, and the number per fate."""
        counts, names = Counter(self.fates[first:end]), self._fate_names()
        present = [fate for fate in names if counts[fate]]
        listed = ", ".join(f"{counts[fate]:,} {names[fate]}" for fate in present)
        return f"{plural(end - first, 'token')}: {listed if len(present) > 1 else names[present[0]]}"

    def _spans(self, first: int, end: int) -> Iterator[Span]:
        """Yield a span per run of tokens with equal fate, and notes at the prompt's cut and its question."""
        cut, question = self.prompt.cut_index, self.prompt.compressed
        borders = {index for index in (cut, question) if index is not None and first <= index < end}
        for start, stop in pairwise([first, *sorted(borders - {first}), end]):
            if start == cut:
                yield Span(f"── {plural(self.cut_tokens, 'token')} cut out here ──", "aside")
            if start == question:
                yield Span("── the question, which is not compressed ──", "aside")
            for fate, group in groupby(range(start, stop), key=self.fates.__getitem__):
                shown = "".join(self._shown_piece(position) for position in group)
                if shown:
                    yield Span(shown, LOOKS[fate])

    def _shown_piece(self, position: int) -> str:
        """Return a token's text; for part of a character, a dot if its fate differs from the whole character's."""
        pieces, fates = self.prompt.pieces, self.fates
        if pieces[position]:
            return pieces[position]
        complete = next((later for later in range(position, len(pieces)) if pieces[later]), position)
        return _HALF if fates[complete] != fates[position] else ""

    def _loss_tables(self) -> list[Part]:
        """Return a table per side of the evicted entries that add most to the output, and their note."""
        if self.losses is None:
            return ["what evicted entries add to the output is not in this trace: an older version measured the sample"]
        named = zip(self.sides, self.losses, strict=True)
        return [
            *(self._loss_table(name, lost) if lost else f"{name} evicts nothing" for name, lost in named),
            (
                "A ν = ‖A_i 𝒱_i‖₁: what an entry adds to the output under full attention, first decode step; C: its "
                "sum over all. The output moves otherwise where it goes, as what stays is weighted anew."
            ),
        ]

    def _loss_table(self, name: str, lost: Sequence[Loss]) -> Part:
        """Return the table of one side's evicted entries that add most to the output."""
        share = text.percent(sum(loss.share for loss in lost))
        entries = "evicted entry that adds" if len(lost) == 1 else f"{len(lost)} evicted entries that add"
        title = f"{name}: the {entries} most to the output, {share} of C"
        lines = [Line(str(loss.position), (Context(self._context(loss.position)), loss)) for loss in lost]
        return table(title, lines, ("context", "output", "share", "kept_by_other"), "position")

    def _context(self, position: int) -> str:
        """Return the token between ‹ and › with nearby text, in one line."""
        pieces = self.prompt.pieces
        before = _one_line("".join(pieces[max(0, position - _CONTEXT_CHARACTERS) : position]))[-_CONTEXT_CHARACTERS:]
        after = _one_line("".join(pieces[position + 1 : position + 1 + _CONTEXT_CHARACTERS]))[:_CONTEXT_CHARACTERS]
        return f"{before}‹{self._piece(position)}›{after}"

    def _piece(self, position: int) -> str:
        """Return a token's text in one line; a dot for part of a character."""
        return _one_line(self.prompt.pieces[position] or _HALF)


def _one_line(text: str) -> str:
    """Return text without line breaks and control characters."""
    return show_control_characters(text).replace("\n", "")


def tokens(
    trace: Trace,
    sample: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    *,
    baseline: str | None = None,
    treatment: str | None = None,
    everything: bool = False,
) -> Tokens:
    """Compare the tokens of a prompt that a head keeps and evicts under two configurations.

    The result also has the evicted entries that add most to the head's output.

    Args:
        trace: from `measure` or `read_trace`, with the prompts' text (`prompts=True`).
        sample: id of the sample; None: the first complete one.
        layer: of the head; None: any layer.
        head: query head of the layer; None: the head, of the layer or of all, whose isolated perturbation over ‖o_h‖₁
            the treatment changes most at the first decode step.
        baseline: a selection (`attention`), a policy (`h2o`), or both (`adakv:attention`); None: attention, or the
            trace's own where it has no two-stage.
        treatment: a side, named like the baseline; None: two-stage, or the first that the trace has. Of several pairs,
            as of several budgets, the first is shown: `trace.sel(budget=128)` has those of one.
        everything: show the whole prompt; else the tokens that differ, with those around them.

    Raises TraceError where the trace has no text, no such sample or no such pair, ConfigError for a layer or head that
    the model does not have, and for sides that are no names.

    >>> import perturbkv as pk
    >>> result = pk.tokens(trace, layer=0, head=0)
    >>> [(token.text, token.fate) for token in result.tokens][:2]
    [('The', 'baseline'), (' cat', 'both')]
    """
    first_side, treatments = choose_sides(trace, baseline, treatment)
    prompt = prompt_of(trace, sample)
    _check_head(trace, layer, head)
    layers = list(trace.layers)
    index = None if layer is None else layers.index(layer)
    matching = pairs(trace.run, first_side, treatments[0])
    first, second = matching[0]
    sides = (trace.run.configs.index(first), trace.run.configs.index(second))
    own = trace.arrays.get("own_entries")
    if own is not None and (without := [side for side in sides if own[prompt.index, side] == 2]):
        raise TraceError(
            f"expected kept sets of both sides, got '{trace.run.configs[without[0]].label()}', whose entries stand for "
            "none of the prompt's"
        )
    heads = [] if head is not None else changed_heads(trace, prompt.index, sides, index, _HEADS)
    # a head is asked for with its layer
    shown = changed_head(trace, prompt.index, sides, index or 0, head) if head is not None else heads[0]
    return Tokens(
        identity=replace(identity(trace, (first, second)), samples=1, failed=0, ended=0),
        prompt=prompt,
        baseline=first,
        treatment=second,
        cache_shares=cache_shares(trace, prompt.index, sides),
        evicted_attention=evicted_attention(trace, prompt.index, sides, layers.index(shown.layer), shown.head),
        shown=shown,
        chosen="" if head is not None else "model" if layer is None else "layer",
        heads=tuple(heads),
        fates=fates(trace, prompt, sides, layers.index(shown.layer), shown.head),
        losses=losses(trace, prompt.index, sides, layers.index(shown.layer), shown.head),
        effects=(text_effects(trace, prompt, sides[0]), text_effects(trace, prompt, sides[1])),
        text_changes=(text_change(trace, prompt, sides[0]), text_change(trace, prompt, sides[1])),
        other_pairs=len(matching) - 1,
        everything=everything,
    )


def _check_head(trace: Trace, layer: int | None, head: int | None) -> None:
    """Raise ConfigError for a layer or a head that was not measured, and for a head without a layer."""
    layers, heads = list(trace.layers), trace.arrays["kept_count"].shape[-1]
    if head is not None and layer is None:
        raise ConfigError(f"expected the layer of head {head}, got none; give both: a layer has {heads} heads")
    for name, given, known in (("layer", layer, layers), ("head", head, list(range(heads)))):
        if given is not None and given not in known:
            consecutive = known == list(range(len(known)))
            expected = f"from 0 to {len(known) - 1}" if consecutive else f"of {', '.join(map(str, known))}"
            raise ConfigError(f"expected a {name} {expected}, got {given}")
