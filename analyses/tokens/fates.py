"""What one head keeps and evicts of one prompt under two configurations, and what it evicts adds to its output.

A sample's prompt as a trace holds it: its tokens, and the piece of text that each of them is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.stats.arithmetic import ratio
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import TraceError
from perturbkv.schema import TEXT
from perturbkv.storage.trace.texts import pieces_of
from perturbkv.trace import SampleTrace, Trace


@dataclass(frozen=True)
class PromptText:
    """The prompt of one sample.

    Attributes:
        sample: its id.
        place: along the trace's `sample` axis.
        tokens: ids, the question of a context-only run behind what is compressed.
        pieces: the text of each; empty for one that is a part of the character of the next.
        compressed: n, how many of them were in the cache that is evicted from.
        cut_tokens: how many its middle lost.
    """

    sample: str
    place: int
    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    compressed: int
    cut_tokens: int

    @property
    def cut_place(self) -> int | None:
        """How many tokens stand before the cut, which leaves the first ⌈half⌉; None where there is none."""
        return len(self.tokens) - len(self.tokens) // 2 if self.cut_tokens else None


def prompt_of(trace: Trace, sample: str | None = None) -> PromptText:
    """The prompt of a sample, by default of the first that is complete and has its text.

    Raises TraceError for an unknown or failed sample, where the trace holds no text, and for one that was changed.
    """
    counts = trace.arrays["prompt_count"] if set(TEXT) <= set(trace.arrays) else np.zeros(len(trace.sample_ids))
    held = [name for name, count in zip(trace.sample_ids, counts, strict=True) if count and name not in trace.failures]
    name = next(iter(held), None) if sample is None else sample
    if name is None or (name in trace.sample_ids and name not in trace.failures and name not in held):
        raise TraceError(_without(trace, name))
    found = trace.sample(name)
    if not isinstance(found, SampleTrace):
        msg = f"expected one of the complete samples ({', '.join(held)}), got '{name}', which failed: {found.reason}"
        raise TraceError(msg)
    return _read(trace, found)


def _without(trace: Trace, name: str | None) -> str:
    whose = "the prompts" if name is None else f"'{name}'"
    return (
        f"expected the text of {whose} in {trace.source or 'this trace'}, got a trace without it (--no-text, or an "
        f"older version); {_how(trace)} adds it and measures nothing again"
    )


def _how(trace: Trace) -> str:
    """What to run for the text; which command made the trace, and its other options, the user knows."""
    if not trace.source:
        return "pk.measure with text=True and the path of its trace"
    path = Path(trace.source)
    output = path.parent if path.name == "trace.h5" else path
    return (
        "the command that made it, without --no-text and with the same --output (perturbkv … --model "
        f"{trace.run.model} --dataset {trace.run.dataset} … --output {output}),"
    )


def _read(trace: Trace, sample: SampleTrace) -> PromptText:
    return PromptText(
        sample=sample.sample_id,
        place=trace.sample_ids.index(sample.sample_id),
        tokens=tuple(np.asarray(sample.arrays["prompt_token"]).tolist()),
        pieces=tuple(pieces_of(sample)),
        compressed=int(sample.arrays["prompt_tokens"]),
        cut_tokens=int(sample.arrays["cut_tokens"]),
    )


BOTH, BASELINE, TREATMENT, NEITHER, QUESTION = "both", "baseline", "treatment", "neither", "question"
"""A token's fate: who keeps it. The question of a context-only run is not compressed."""
_LOST = ("lost_position", "lost_output", "weighted_norm")


@dataclass(frozen=True)
class Loss:
    """An evicted entry.

    Attributes:
        position: in the prompt.
        output: A ν = ‖A_i 𝒱_i‖₁, what it adds to the output under full attention, first decode step.
        share: of C = Σ A ν over all entries.
        kept_by_other: whether the other configuration keeps it.
    """

    position: int
    output: float
    share: float
    kept_by_other: bool


@dataclass(frozen=True)
class ChangedHead:
    """A head under both configurations.

    Attributes:
        layer, head: which.
        baseline, treatment: isolated perturbation over ‖o_h‖₁, at the first decode step.
        both, baseline_only, treatment_only: kept tokens, window included.
    """

    layer: int
    head: int
    baseline: float
    treatment: float
    both: int
    baseline_only: int
    treatment_only: int


@dataclass(frozen=True, repr=False)
class TokenFates:
    """What one head does with every token of one prompt under two configurations.

    Attributes:
        identity: of the run, of this one sample.
        prompt: the sample's tokens and their text.
        baseline, treatment: the configurations.
        held: entries that each side's cache holds over those of the full cache; NaN where the trace does not tell.
        shown: the head, and its isolated perturbation.
        chosen: whether it was chosen as the one whose output the treatment changes most, and among which: "" for a head
            that was asked for, else `layer` or `model`.
        heads: those that the treatment changes most, where no head was asked for.
        fates: of every token: `both` keep it, `baseline` or `treatment` alone, `neither`; `question` is not compressed.
        losses: of both sides, the evicted entries that add most to the output; None where the trace does not tell.
        others: further pairs of the trace that were not shown.
        everything: whether the prompt is shown whole.
    """

    identity: RunIdentity
    prompt: PromptText
    baseline: EvictionConfig
    treatment: EvictionConfig
    held: tuple[float, float]
    shown: ChangedHead
    chosen: str
    heads: tuple[ChangedHead, ...]
    fates: tuple[str, ...]
    losses: tuple[tuple[Loss, ...], tuple[Loss, ...]] | None
    others: int = 0
    everything: bool = False


def changes(trace: Trace, sample: int, sides: tuple[int, int]) -> tuple[Floats, Floats]:
    """(layer, head) isolated perturbation over ‖o_h‖₁ of both sides, at the first decode step; 0 without an output."""
    moved = trace.arrays["perturbation_isolated"][sample]
    norm = trace.arrays["output_norm"][sample, 0]
    first, second = (np.nan_to_num(ratio(moved[side, 0], norm)) for side in sides)
    return first, second


def changed_heads(trace: Trace, sample: int, sides: tuple[int, int], layer: int | None, most: int) -> list[ChangedHead]:
    """The heads, of one layer or of all, whose perturbation the treatment changes most, that first."""
    first, second = changes(trace, sample, sides)
    moved = np.abs(second - first)
    if layer is not None:
        moved[np.arange(len(moved)) != layer] = -1
    order = np.argsort(-moved, axis=None, kind="stable")[: min(most, int((moved >= 0).sum()))]
    return [
        changed_head(trace, sample, sides, int(place) // moved.shape[1], int(place) % moved.shape[1]) for place in order
    ]


def changed_head(trace: Trace, sample: int, sides: tuple[int, int], layer: int, head: int) -> ChangedHead:
    """One head under both configurations."""
    moved = [float(side[layer, head]) for side in changes(trace, sample, sides)]
    one, other = (set(trace.kept(sample, side, layer, head).tolist()) for side in sides)
    named = trace.layer_name(layer)
    return ChangedHead(named, head, moved[0], moved[1], len(one & other), len(one - other), len(other - one))


def held_of(trace: Trace, sample: int, sides: tuple[int, int]) -> tuple[float, float]:
    """Entries that each side's cache holds over those of the full cache; NaN where the trace does not tell."""
    if "held_share" not in trace.arrays:
        return float("nan"), float("nan")
    first, second = (float(trace.arrays["held_share"][sample, side]) for side in sides)
    return first, second


def fates(trace: Trace, prompt: PromptText, sides: tuple[int, int], layer: int, head: int) -> tuple[str, ...]:
    """Every token's fate."""
    one, other = (set(trace.kept(prompt.place, side, layer, head).tolist()) for side in sides)
    names = {(True, True): BOTH, (True, False): BASELINE, (False, True): TREATMENT, (False, False): NEITHER}
    compressed = [names[place in one, place in other] for place in range(prompt.compressed)]
    return (*compressed, *[QUESTION] * (len(prompt.tokens) - prompt.compressed))


def losses(
    trace: Trace, sample: int, sides: tuple[int, int], layer: int, head: int
) -> tuple[tuple[Loss, ...], tuple[Loss, ...]] | None:
    """The evicted entries of each side that add most to the output, the largest first; None where it is not known."""
    where = [(sample, side, layer, head) for side in sides]
    if not set(_LOST) <= set(trace.arrays) or np.isnan(trace.arrays["weighted_norm"][sample, layer, head]):
        return None
    total = float(trace.arrays["weighted_norm"][sample, layer, head])
    kept = [set(trace.kept(*place).tolist()) for place in where]
    first, second = (
        tuple(
            Loss(position, output, float(ratio(output, total)), position in others)
            for position, output in zip(
                trace.arrays["lost_position"][place].tolist(), trace.arrays["lost_output"][place].tolist(), strict=True
            )
            if position >= 0
        )
        for place, others in zip(where, reversed(kept), strict=True)
    )
    return first, second
