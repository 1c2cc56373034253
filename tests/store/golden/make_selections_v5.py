"""Made selections-v5.h5, once: a real run of a tiny random model, for commands that need numbers which fit together.

Of what MAY be absent it holds the kept positions alone, so that every analysis meets a trace that lacks the rest. Its
numbers are those that format 4 held.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.models.loading import load_model
from perturbkv.schema import KEPT, VARIABLES
from perturbkv.selection.grid import configuration
from perturbkv.storage.run.writer import TraceWriter
from perturbkv.trace import FailedSample, SampleTrace
from tests.support.folders import model_folder
from tests.support.resolved import trace_sample

SELECTIONS = ("attention", "attention-unpooled", "two-stage-uniform", "two-stage", "value", "random", "hindsight")


def configs() -> tuple[EvictionConfig, ...]:
    """Two budgets of every selection, σ > 0.5 in most heads at the larger one; the group's other product at one."""
    shared = {"window": 8, "granularity": "kv", "alpha": 0.75}
    made = [configuration(budget, selection=name, **shared) for budget in (16, 80) for name in SELECTIONS]
    return (*made, configuration(16, product="mean-of-products", **shared))


def lean(sample: SampleTrace) -> SampleTrace:
    """The sample without what MAY be absent, but for its kept positions."""
    held = {name for name, variable in VARIABLES.items() if not variable.optional} | set(KEPT)
    return SampleTrace(sample.sample_id, {name: array for name, array in sample.arrays.items() if name in held})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        adapter = load_model(str(model_folder(Path(folder) / "tiny", positions=512)))
    run = RunConfig(model="tiny", dataset="random", configs=configs(), samples=4, random_weights=True)
    tokens = torch.randint(0, adapter.model.config.vocab_size, (3, 96), generator=torch.Generator().manual_seed(0))
    samples = [
        lean(trace_sample(adapter, Prompt(f"s{place}", tuple(row.tolist()), 0), run))
        for place, row in enumerate(tokens)
    ]
    broken = FailedSample("broken", "planted failure")
    names = [*(sample.sample_id for sample in samples), broken.sample_id]
    path = Path(__file__).with_name("selections-v5.h5")
    writer = TraceWriter(path, run, names, {"model": "tiny", "random_weights": "true"})
    for sample in (*samples, broken):
        writer.append(sample)
    writer.finish()
