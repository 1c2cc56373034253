"""Made measured-v2.h5, once: a real run of a tiny random model, one of whose texts ends before its steps do."""

from __future__ import annotations

from pathlib import Path

from perturbkv.configs.budget import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.samples import trace_sample
from perturbkv.storage.writer import TraceWriter
from perturbkv.trace import FailedSample, SampleTrace
from tests.support.models import tiny_adapter, token_ids

STEPS, NAMES = 4, ("ends", "goes-on")
CONFIGS = tuple(
    EvictionConfig(budget=Budget(16), selection=name, window=8, granularity=granularity)
    for name, granularity in (("attention", "kv"), ("two-stage", "query"))
)
RUN = RunConfig(model="tiny", dataset="random", configs=CONFIGS, samples=3, steps=STEPS, random_weights=True)


def ending(adapter: Adapter, *tokens: int) -> Adapter:
    """The model, its texts ended by these tokens."""
    adapter.tokenizer.eos_token_id = None
    adapter.model.generation_config.eos_token_id = list(tokens)
    return adapter


def samples() -> list[SampleTrace]:
    """The first one's text ends with the token of its third step."""
    prompts = [Prompt(name, token_ids(48, seed=seed), 0) for seed, name in enumerate(NAMES, start=2)]
    free = [trace_sample(ending(tiny_adapter()), prompt, RUN).arrays["token_id"].tolist() for prompt in prompts]
    end = free[0][2]
    assert end not in free[0][:2] + free[1]
    return [trace_sample(ending(tiny_adapter(), end), prompt, RUN) for prompt in prompts]


if __name__ == "__main__":
    path = Path(__file__).with_name("measured-v2.h5")
    writer = TraceWriter(path, RUN, [*NAMES, "broken"], {"model": "tiny", "random_weights": "true"})
    for sample in (*samples(), FailedSample("broken", "planted failure")):
        writer.append(sample)
    writer.finish()
