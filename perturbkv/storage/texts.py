"""The text of a run's prompts: put into its samples, or taken out of them, when they come together in a trace.

Text is no number: no other variable depends on it, so that samples which were measured without it can have it later,
and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perturbkv.errors import TraceError
from perturbkv.schema import TEXT, VARIABLES
from perturbkv.storage.merge import Shapes
from perturbkv.trace import FailedSample, SampleTrace

Texts = Mapping[str, Mapping[str, NDArray[Any]]]
"""Sample id -> the variables of its text. An empty one takes the text out of every sample."""


def pieces_of(sample: SampleTrace) -> list[str]:
    """The text of each token of the sample's prompt; none where it is stored without.

    Raises TraceError where the tokens do not begin within the text, one after the other.
    """
    if not set(TEXT) <= set(sample.arrays):
        return []
    text, starts = str(sample.arrays["prompt_text"]), np.asarray(sample.arrays["prompt_start"]).tolist()
    ends = [*starts[1:], len(text)]
    if starts[:1] != [0] or any(first > last for first, last in zip(starts, ends, strict=True)):
        msg = (
            f"expected prompt_start to ascend from 0 within the text of '{sample.sample_id}', got other places; the "
            "trace was changed since it was made; make it again"
        )
        raise TraceError(msg)
    return [text[first:last] for first, last in zip(starts, ends, strict=True)]


def with_text(sample: SampleTrace | FailedSample, texts: Texts | None) -> SampleTrace | FailedSample:
    """The sample with the text that `texts` has of it and no other; as it is where `texts` is None."""
    if texts is None or isinstance(sample, FailedSample):
        return sample
    others = {name: array for name, array in sample.arrays.items() if name not in TEXT}
    return SampleTrace(sample.sample_id, {**others, **texts.get(sample.sample_id, {})})


def with_text_shapes(sample_id: str, shapes: Shapes, texts: Texts | None) -> Shapes:
    """Variable name -> shape of what `with_text` makes of a sample of these shapes."""
    if texts is None:
        return shapes
    others = {name: shape for name, shape in shapes.items() if name not in TEXT}
    own = texts.get(sample_id, {})
    length = {True: (len(own["prompt_token"]),), False: ()} if own else {}
    return {**others, **{name: length[VARIABLES[name].in_rows] for name in own}}  # what is decoded need not be yet
