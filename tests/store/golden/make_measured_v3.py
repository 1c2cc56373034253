"""Made measured-v3.h5, once: a real run of a tiny random model, whose configurations own their options."""

from __future__ import annotations

from pathlib import Path

from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.pipeline.samples import trace_sample
from perturbkv.selection.grid import grid
from perturbkv.storage.writer import TraceWriter
from perturbkv.trace import FailedSample
from tests.support.models import tiny_adapter, token_ids

NAMES = ("first", "second")
CONFIGS = (
    *grid(
        16,
        window=8,
        policy=["snapkv(pool=average, kernel=5)", "adakv(floor=0.5)"],
        selection=["attention", "two-stage"],
    ),
    *grid(16, window=8, granularity="kv(product=mean-of-products)", selection="two-stage(alpha=0.5)"),
    *grid(0.5, window=8, selection=["random(seed=3)", "streaming-llm(sinks=2, positions=in-cache)"]),
)
RUN = RunConfig(model="tiny", dataset="random", configs=CONFIGS, samples=3, random_weights=True)

if __name__ == "__main__":
    path = Path(__file__).with_name("measured-v3.h5")
    writer = TraceWriter(path, RUN, [*NAMES, "broken"], {"model": "tiny", "random_weights": "true"})
    for seed, name in enumerate(NAMES, start=2):
        writer.append(trace_sample(tiny_adapter(), Prompt(name, token_ids(48, seed=seed), 0), RUN))
    writer.append(FailedSample("broken", "planted failure"))
    writer.finish()
