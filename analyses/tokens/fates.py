"""Fates (kept or evicted) of a prompt's tokens in one head under two configurations, and evicted entries' shares."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perturbkv.analyses import text
from perturbkv.analyses.columns import Record, column, derived, record
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.analyses.text import three_digits
from perturbkv.errors import TraceError
from perturbkv.schema import TEXT
from perturbkv.storage.trace.texts import token_texts
from perturbkv.trace import SampleTrace, Trace


@dataclass(frozen=True)
class PromptText:
    """The prompt of one sample: its tokens and their text.

    Attributes:
        sample: its id.
        index: the sample's index along the trace's axis `sample`.
        tokens: token ids; in a context-only run those of the question are last.
        pieces: text of each token; empty for a token that is a part of the next one's character.
        compressed: n, the number of tokens in the cache before eviction.
        cut_tokens: number of tokens cut out of the prompt's middle.
    """

    sample: str
    index: int
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    compressed: int
    cut_tokens: int

    @property
    def cut_index(self) -> int | None:
        """Number of tokens before the cut, the first ⌈half⌉; None without a cut."""
        return len(self.tokens) - len(self.tokens) // 2 if self.cut_tokens else None


def prompt_of(trace: Trace, sample: str | None = None) -> PromptText:
    """Return the prompt of a sample, by default of the first that is complete and has its text.

    Raises TraceError for an unknown or failed sample, where the trace holds no text, and for a text that was changed.
    """
    counts = trace.arrays["prompt_count"] if set(TEXT) <= set(trace.arrays) else np.zeros(len(trace.sample_ids))
    known = [name for name, count in zip(trace.sample_ids, counts, strict=True) if count and name not in trace.failures]
    name = next(iter(known), None) if sample is None else sample
    if name is None or (name in trace.sample_ids and name not in trace.failures and name not in known):
        owner, command = "the prompts" if name is None else f"'{name}'", "pk.measure with prompts=True and another path"
        if trace.source:
            command = (
                "the command that made it, without --no-prompts and with another --output (perturbkv … --model "
                f"{trace.run.model} --dataset {trace.run.dataset} …),"
            )
        raise TraceError(
            f"expected the text of {owner} in {trace.source or 'this trace'}, got a trace without it (--no-prompts, or "
            f"an older version); {command} measures it with its text"
        )
    measured = trace.sample(name)
    if not isinstance(measured, SampleTrace):
        raise TraceError(
            f"expected one of the complete samples ({', '.join(known)}), got '{name}', which failed: {measured.reason}"
        )
    return PromptText(
        sample=measured.sample_id,
        index=trace.sample_ids.index(measured.sample_id),
        tokens=tuple(np.asarray(measured.arrays["prompt_token"]).tolist()),
        pieces=tuple(token_texts(measured.arrays, measured.sample_id)),
        compressed=int(measured.arrays["prompt_tokens"]),
        cut_tokens=int(measured.arrays["cut_tokens"]),
    )


BOTH, BASELINE, TREATMENT, NEITHER, QUESTION = "both", "baseline", "treatment", "neither", "question"
"""Fates of a token: which side keeps it. The question of a context-only run is not compressed."""
_LOST = ("lost_position", "lost_output", "weighted_norm")


@record
class Token(Record):
    """A token of the prompt."""

    position: int = column("in the prompt, from 0")
    id: int = column("of the tokenizer")
    text: str = column("its piece of the prompt; empty for a part of the next one's character")
    fate: str = column("who keeps it: both, baseline, treatment or neither; question: it is not compressed")
    baseline_effect: float = column(
        "first-order change of the text's log p by losing the token in every head that evicts it, with the baseline, "
        "isolated; null without `--save effect`",
        unit="nat",
        heading="#log p,\nbaseline",
        text=three_digits,
    )
    treatment_effect: float = column(
        "the same with the treatment; null likewise", unit="nat", heading="#log p,\ntreatment", text=three_digits
    )


@record
class Loss(Record):
    """An evicted entry and its contribution to the head's output."""

    position: int = column("of the entry in the prompt")
    output: float = column(
        "A ν = ‖A_i 𝒱_i‖₁ of the first decode step: what the entry adds to the output under full attention; not how "
        "far the output moves without it, as what stays is weighted anew",
        unit="L1",
        heading="#A ν",
        text=text.three_digits,
    )
    share: float = column("of C = Σ A ν over all entries", unit="share", heading="#of C")
    kept_by_other: bool = column(
        "whether the other configuration keeps it",
        heading="other side",
        text=lambda kept: "keeps" if kept else "evicts",
    )


@record
class ChangedHead(Record):
    """A head's perturbation and numbers of kept tokens under both configurations."""

    layer: int = column("from 0")
    head: int = column("query head, from 0")
    baseline: float = column(
        "isolated perturbation of the baseline over ‖o_h‖₁, first decode step",
        heading="#output moved,\nbaseline",
        text=text.percent,
    )
    treatment: float = column("the same of the treatment", heading="#output moved,\ntreatment", text=text.percent)
    both: int = column("tokens that both keep, the window included", heading="#both\nkeep")
    baseline_only: int = column("tokens that the baseline alone keeps", heading="#baseline\nalone")
    treatment_only: int = column("tokens that the treatment alone keeps", heading="#treatment\nalone")

    @derived(json=False)
    def name(self) -> str:
        """The head as layer-head."""
        return f"{self.layer}-{self.head}"


def relative_perturbations(trace: Trace, sample: int, sides: tuple[int, int]) -> tuple[Floats, Floats]:
    """Return each side's isolated perturbation over ‖o_h‖₁ at the first decode step, (layer, head).

    0 where ‖o_h‖₁ is 0, NaN where the perturbation was not measured, as for some caches of the user's own.
    `sample` and `sides` are indices along the trace's axes `sample` and `config`.
    """
    perturbation = trace.arrays["perturbation_isolated"][sample]
    norm = trace.arrays["output_norm"][sample, 0]
    first, second = (np.where(norm == 0, 0.0, ratio(perturbation[side, 0], norm)) for side in sides)
    return first, second


def changed_heads(trace: Trace, sample: int, sides: tuple[int, int], layer: int | None, most: int) -> list[ChangedHead]:
    """Return up to `most` heads, of the layer at an index or of all, whose perturbation the treatment changes most."""
    first, second = relative_perturbations(trace, sample, sides)
    change = np.nan_to_num(np.abs(second - first))  # 0 where one was not measured
    if layer is not None:
        change[np.arange(len(change)) != layer] = -1  # below every change
    order = np.argsort(-change, axis=None, kind="stable")[: min(most, int((change >= 0).sum()))]
    heads = change.shape[1]
    return [changed_head(trace, sample, sides, int(index) // heads, int(index) % heads) for index in order]


def changed_head(trace: Trace, sample: int, sides: tuple[int, int], layer: int, head: int) -> ChangedHead:
    """Return a head's perturbation and numbers of kept tokens under both configurations."""
    baseline, treatment = (float(side[layer, head]) for side in relative_perturbations(trace, sample, sides))
    first, second = (set(trace.kept(sample, side, layer, head).tolist()) for side in sides)
    counts = len(first & second), len(first - second), len(second - first)
    return ChangedHead(trace.layers[layer], head, baseline, treatment, *counts)


def cache_shares(trace: Trace, sample: int, sides: tuple[int, int]) -> tuple[float, float]:
    """Return each side's cache share; NaN where the trace does not hold it."""
    if "held_share" not in trace.arrays:
        return float("nan"), float("nan")
    first, second = (float(trace.arrays["held_share"][sample, side]) for side in sides)
    return first, second


def evicted_attention(trace: Trace, sample: int, sides: tuple[int, int], layer: int, head: int) -> tuple[float, float]:
    """Return each side's share of a head's attention that is on evicted entries, 1 − S, at the first decode step."""
    first, second = (1 - float(trace.arrays["retained_mass"][sample, side, 0, layer, head]) for side in sides)
    return first, second


def fates(trace: Trace, prompt: PromptText, sides: tuple[int, int], layer: int, head: int) -> tuple[str, ...]:
    """Return who keeps each token in a head: BOTH, BASELINE, TREATMENT, NEITHER, or QUESTION where not compressed."""
    first, second = (set(trace.kept(prompt.index, side, layer, head).tolist()) for side in sides)
    names = {(True, True): BOTH, (True, False): BASELINE, (False, True): TREATMENT, (False, False): NEITHER}
    compressed = [names[position in first, position in second] for position in range(prompt.compressed)]
    return (*compressed, *[QUESTION] * (len(prompt.tokens) - prompt.compressed))


def text_effects(trace: Trace, prompt: PromptText, side: int) -> tuple[float, ...]:
    """Return what losing each token of the prompt changes log p of the text by, all heads; NaN where not measured."""
    effects = np.full(len(prompt.tokens), np.nan)
    if "entry_effect" in trace.arrays:
        effects[: prompt.compressed] = trace.arrays["entry_effect"][prompt.index, side, : prompt.compressed]
    return tuple(effects.tolist())


def text_change(trace: Trace, prompt: PromptText, side: int) -> float:
    """Return what log p of the text's predicted tokens changed by with a side's cache; NaN where not measured."""
    if "text_logp" not in trace.arrays:
        return np.nan
    known = np.asarray(trace.arrays["next_token_id"][prompt.index], dtype=np.int64) >= 0
    evicted, full = trace.arrays["text_logp"][prompt.index, side], trace.arrays["text_logp_full"][prompt.index]
    return float(np.where(known, evicted - full, 0).sum())


def losses(
    trace: Trace, sample: int, sides: tuple[int, int], layer: int, head: int
) -> tuple[tuple[Loss, ...], tuple[Loss, ...]] | None:
    """Return each side's evicted entries with the largest contributions to a head's output; None where not measured."""
    cells = [(sample, side, layer, head) for side in sides]
    if not set(_LOST) <= set(trace.arrays) or np.isnan(trace.arrays["weighted_norm"][sample, layer, head]):
        return None
    total = float(trace.arrays["weighted_norm"][sample, layer, head])
    kept = [set(trace.kept(*cell).tolist()) for cell in cells]
    first, second = (
        tuple(
            Loss(position, output, float(ratio(output, total)), position in kept_by_other)
            for position, output in zip(
                trace.arrays["lost_position"][cell].tolist(), trace.arrays["lost_output"][cell].tolist(), strict=True
            )
            if position >= 0
        )
        for cell, kept_by_other in zip(cells, reversed(kept), strict=True)
    )
    return first, second
