"""One prompt of a run: its prefill and its decode steps from the full cache, the reference of all configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.cache.makers import Maker
from perturbkv.configs.resources import Resources
from perturbkv.configs.selections import FIRST_STEP
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.generation import end_tokens
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.sample.decoding import StepRecord, decode_full
from perturbkv.pipeline.sample.effect import add_gradients
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.prefill import Prefill, layer_value_norms, prefill
from perturbkv.pipeline.variants.external_caches import Control, ExternalCache, read_caches, read_control
from perturbkv.pipeline.variants.given_sets import KeptMasks, sources
from perturbkv.pipeline.variants.readers import Reader, maker_of, readers_of
from perturbkv.scoring.value_norms import euclidean_value_norms
from perturbkv.selection.resolved_config import ResolvedConfig, ResolvedRun


@dataclass(frozen=True, eq=False)
class FullRun:
    """The decode steps from the full cache, up to the end of the text.

    Attributes:
        steps: records of the steps.
        tokens: the decoded tokens of the text, which step 0 begins.
        next_tokens: the text's token after each step; −1 where the text ends.
        logits: those after the prompt and its question, from which the first token comes.
        rows: number of identical rows in the batch.
    """

    steps: list[StepRecord]
    tokens: Int[Tensor, " step"]
    next_tokens: Int[Tensor, " step"]
    logits: Float[Tensor, " vocab"]
    rows: int

    @property
    def text(self) -> Int[Tensor, " text"]:
        """The decoded tokens and the one that follows, −1 for none: what the steps read, and what they predict."""
        return torch.cat([self.tokens, self.next_tokens[-1:]])


def full_run(
    adapter: Adapter,
    prefilled: Prefill,
    question: Sequence[int],
    steps: int,
    rows: int,
    text: Sequence[int] = (),
) -> FullRun:
    """Decode the question and at most `steps` steps from the full cache, and return the reference run.

    The steps read `text`, or without one the full run's greedy choices. The batch has `rows` identical rows. Steps
    after the end of the text are left out.
    """
    with phase("reference"):
        return FullRun(*decode_full(adapter, prefilled, question, steps, rows, end_tokens(adapter), text), rows)


@dataclass(frozen=True, eq=False)
class SampleRun:
    """A prompt with its prefill and its reference from the full cache.

    Attributes:
        adapter: the model.
        run: the run and its configurations.
        resources: memory and kernels.
        prompt: the prompt.
        prefill: its full cache and the statistics of its context.
        full: the reference.
        caches: configuration -> somebody's cache of the context.
        control: a plain cache that was called as some of these are; None where none is.
    """

    adapter: Adapter
    run: ResolvedRun
    resources: Resources
    prompt: Prompt
    prefill: Prefill
    full: FullRun
    caches: Mapping[ResolvedConfig, ExternalCache] = field(default_factory=dict)
    control: Control | None = None

    @classmethod
    def read(
        cls,
        adapter: Adapter,
        prompt: Prompt,
        run: ResolvedRun,
        resources: Resources,
        rows: int,
        masks: KeptMasks = MappingProxyType({}),
    ) -> SampleRun:
        """Return a prompt after its prefill and the reference decoding in a batch of `rows` identical rows.

        `masks` are external kept sets. Raises what `sources` raises, and DatasetError for a prompt that the scenario
        cannot split.
        """
        context, question = prompt.parts(run.scenario)
        external = sources(adapter, context, run.configs, masks)
        prefilled = prefill(adapter, prompt, run, resources, external)
        full = full_run(adapter, prefilled, question, run.steps, rows, prompt.forced_tokens(run.text))
        if "effect" in run.save:
            with phase("effect"):
                add_gradients(adapter, prefilled, question, full.steps, full.text)
        reading = (context, question, full.tokens, prefilled, full.steps)
        caches = read_caches(adapter, run.configs, *reading)
        called = [config for config, cache in caches.items() if cache.is_called]
        if called and run.averages_gradients:
            raise ConfigError(
                f"policy '{called[0].policy}' decodes for itself, and no gradient goes through it: use "
                "--effect-gradient full"
            )
        control = read_control(adapter, *reading) if called else None
        external |= {config: cache.kept_set for config, cache in caches.items()}
        sample = cls(adapter, run, resources, prompt, prefilled, full, caches, control)
        sample._add_hindsight_norms()
        return sample

    def _add_hindsight_norms(self) -> None:
        """Add the value norms under the first step's gate to the statistics, where a selection with hindsight is."""
        if not self.adapter.has_gates or all(config.gate_window != FIRST_STEP for config in self.run.configs):
            return
        statistics, chunk_bytes = self.prefill.statistics, self.resources.chunk_bytes
        for layer in map(self.layer, self.adapter.holders):
            values, w_o = layer.prompt_values, layer.projection_at(self.full.steps[0])
            statistics.norms.setdefault(FIRST_STEP, []).append(layer_value_norms(values, w_o, self.resources))
            if statistics.euclidean:
                norms = euclidean_value_norms(values, w_o, chunk_bytes)
                statistics.euclidean.setdefault(FIRST_STEP, []).append(norms)

    @cached_property
    def makers(self) -> tuple[Maker, ...]:
        """Makers of the configurations' caches."""
        return tuple(self.caches.get(config) or maker_of(config) for config in self.run.configs)

    @cached_property
    def readers(self) -> list[type[Reader]]:
        """Kinds of readers of the full cache among the configurations."""
        return readers_of(self.run.configs)

    @property
    def context(self) -> Sequence[int]:
        """Token ids of the prompt's part that is compressed."""
        return self.prompt.parts(self.run.scenario)[0]

    @property
    def question(self) -> Sequence[int]:
        """Token ids of the prompt's uncompressed rest, which is read over the compressed cache."""
        return self.prompt.parts(self.run.scenario)[1]

    @property
    def tokens(self) -> int:
        """Number of tokens in the context, n."""
        return self.prefill.statistics.tokens

    def layer(self, index: int) -> FullLayer:
        """Return the full layer with measured-layer index `index`."""
        return FullLayer.from_prefill(self.adapter, self.prefill, index)

    def first_step_attention(self, index: int) -> Float[Tensor, "head key"]:
        """Return the attention weights A of the first decode step in the measured layer with index `index`."""
        weights, _ = self.layer(index).weights(self.full.steps[0])
        return weights
