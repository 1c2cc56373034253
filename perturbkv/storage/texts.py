"""The text of a run's prompts: put into its samples, or taken out of them, when they come together in a trace.

Text is no number: no other variable depends on it, so that samples which were measured without it can have it later,
and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from perturbkv.schema import TEXT
from perturbkv.storage.merge import Shapes
from perturbkv.trace import FailedSample, SampleTrace

Texts = Mapping[str, Mapping[str, NDArray[Any]]]
"""Sample id -> the variables of its text. An empty one takes the text out of every sample."""


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
    return {**others, **{name: array.shape for name, array in texts.get(sample_id, {}).items()}}
