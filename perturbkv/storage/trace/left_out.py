"""Kept positions taken out of a sample: what is left of them tells equal sets apart from others, and no more.

Positions are measured, so that what was stored without them gets none later.
"""

from __future__ import annotations

from perturbkv.schema import DIGEST, KEPT
from perturbkv.storage.run.merge import Shapes, digests
from perturbkv.trace import FailedSample, SampleTrace


def without_kept(sample: SampleTrace | FailedSample) -> SampleTrace | FailedSample:
    """The sample with digests for its kept positions; as it is where it has none."""
    if isinstance(sample, FailedSample) or KEPT[0] not in sample.arrays:
        return sample
    others = {name: array for name, array in sample.arrays.items() if name not in KEPT}
    return SampleTrace(sample.sample_id, {**others, DIGEST: digests(sample.arrays)})


def without_kept_shapes(shapes: Shapes) -> Shapes:
    """Variable name -> shape of what `without_kept` makes of a sample of these shapes."""
    others = {name: shape for name, shape in shapes.items() if name not in KEPT}
    return {**others, DIGEST: shapes["kept_count"]} if KEPT[0] in shapes else shapes
