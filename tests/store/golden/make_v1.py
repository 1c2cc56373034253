"""Made trace-v1.h5, once. A later format gets a file of its own; this one is never made again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perturbkv.storage.writer import TraceWriter
from perturbkv.trace import FailedSample, SampleTrace
from tests.support.traces import run_config, sample_trace


def counted(name: str, base: int) -> SampleTrace:
    """theta counts from `base` + 100, prompts are 70 and 71 tokens long, the rest is random."""
    arrays = dict(sample_trace(name, seed=base).arrays)
    arrays["theta"] = base + 100.0 + np.arange(8.0).reshape(2, 1, 2, 2)
    arrays["prompt_tokens"] = np.asarray(70 + base // 1000)
    return SampleTrace(name, arrays)


if __name__ == "__main__":
    samples = [counted("first", 0), counted("second", 1000), FailedSample("broken", "planted failure")]
    writer = TraceWriter(
        Path(__file__).with_name("trace-v1.h5"), run_config(3), [s.sample_id for s in samples], {"model": "m"}
    )
    for sample in samples:
        writer.append(sample)
    writer.finish()
