"""A token's fate: which words of a prompt a head keeps and evicts, and which evicted ones add most to its output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from perturbkv.analyses.identity import identity
from perturbkv.analyses.pairing import Pair, checked, pair_columns, pairs
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.tokens import tokens_told
from perturbkv.analyses.tokens.fates import TokenFates, changed_head, changed_heads, fates, held_of, losses
from perturbkv.analyses.tokens.prompt_text import prompt_of
from perturbkv.configs.entry_counts import Budget
from perturbkv.display import Part
from perturbkv.errors import ConfigError, TraceError
from perturbkv.trace import Trace

ANALYSIS = "tokens"
_HEADS = 5
"""Heads that a summary lists."""


@dataclass(frozen=True, repr=False)
class Tokens(TokenFates, Result):
    """What one head does with every token of one prompt under two configurations."""

    def conclusion(self) -> str:
        """What the treatment keeps instead, and how much less or more the head's output moves with it."""
        return tokens_told.conclusion(self)

    def tables(self) -> Sequence[Part]:
        """The heads that change most, the prompt by fate, and the evicted entries that add most to the output."""
        return tokens_told.parts(self)

    def notes(self) -> str:
        """What the numbers are."""
        return tokens_told.notes(self)

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
