"""A sample's prompt as a trace holds it: its tokens, and the piece of text that each of them is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
