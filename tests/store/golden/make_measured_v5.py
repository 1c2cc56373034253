"""Made measured-v5.h5, once: a real run of a tiny random model whose kept positions are codes.

Its numbers are those that format 4 held.
"""

from __future__ import annotations

from pathlib import Path

from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.selection.grid import grid
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.trace import FailedSample
from tests.support.models import tiny_adapter, token_ids
from tests.support.resolved import trace_sample

LENGTHS = {"first": 48, "second": 301}
CONFIGS = grid((10, 0.5), window=4, policy=["snapkv", "adakv"], selection="two-stage", granularity=["query", "kv"])
RUN = RunConfig(model="tiny", dataset="random", configs=CONFIGS, samples=3, random_weights=True)

if __name__ == "__main__":
    path = Path(__file__).with_name("measured-v5.h5")
    writer = TraceWriter(path, RUN, [*LENGTHS, "broken"], {"model": "tiny", "random_weights": "true"})
    for seed, (name, tokens) in enumerate(LENGTHS.items(), start=2):
        writer.append(trace_sample(tiny_adapter(), Prompt(name, token_ids(tokens, seed=seed), 0), RUN))
    writer.append(FailedSample("broken", "planted failure"))
    writer.finish()
