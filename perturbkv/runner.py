"""The one pipeline: prefill once, decode from the full cache, evict for every configuration, decode, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perturbkv import measure, theory
from perturbkv.cache import CompactCache, CompactLayer
from perturbkv.config import RunConfig
from perturbkv.datasets.encode import EncodedPrompt
from perturbkv.datasets.scoring import exact_number, leading_digits
from perturbkv.decoding import StepRecord, decode_evicted, decode_full
from perturbkv.errors import ActivationError
from perturbkv.generation import end_tokens, generate
from perturbkv.measure import Arrays, LayerMasks, to_numpy
from perturbkv.models import Adapter
from perturbkv.norms import DEFAULT_CHUNK_BYTES, projected_value_norms
from perturbkv.prefill import Prefill, prefill
from perturbkv.ragged import borrow, gather
from perturbkv.selection import KeptSets, select
from perturbkv.trace import VARIABLES, FailedSample, SampleTrace


@dataclass(frozen=True)
class _LayerResult:
    """One layer after selection: its compact cache, kept positions per kept set, isolated quantities per step."""

    cache: CompactLayer
    positions: list[list[Tensor]]
    stage1_counts: list[Tensor]
    isolated: list[dict[str, Tensor]]
    attention: list[Tensor]


def trace(
    adapter: Adapter,
    prompts: Iterable[EncodedPrompt],
    run: RunConfig,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    finished: Callable[[SampleTrace | FailedSample], None] = lambda sample: None,
) -> list[FailedSample]:
    """Measure prompts one after the other; `finished` gets each as it is ready. Returns those that failed.

    A sample whose activations are not finite is marked failed and the run goes on.
    """
    failed = []
    for prompt in prompts:
        try:
            finished(trace_sample(adapter, prompt, run, chunk_bytes))
        except ActivationError as error:
            failed.append(FailedSample(prompt.sample_id, str(error)))
            finished(failed[-1])
    return failed


@torch.inference_mode()
def trace_sample(
    adapter: Adapter, prompt: EncodedPrompt, run: RunConfig, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> SampleTrace:
    """Measure every configuration of `run` on one prompt (METHOD: the protocol).

    `chunk_bytes` bounds the working memory of the value norms.

    Raises ActivationError for NaN or Inf, BudgetError where a budget leaves nothing beside the window, DatasetError
    for a prompt that the scenario cannot take apart.
    """
    rows, sample = len(run.configs) + 1, prompt.sample_id
    context, question = prompt.parts(run.scenario)
    before = prefill(adapter, context, run.configs, chunk_bytes, sample, run.head_scores)
    full, tokens = decode_full(adapter, before, question, run.steps, rows, sample)
    layers = [_evict_layer(adapter, before, full, run, layer, chunk_bytes) for layer in range(len(adapter.layers))]
    cache = CompactCache([layer.cache for layer in layers])
    arrays = _cache_arrays(cache)
    evicted = decode_evicted(adapter, cache, question, tokens, rows, sample)
    arrays |= _sample_arrays(prompt, run, tokens) | _isolated_arrays(layers) | _kept_arrays(adapter, layers)
    arrays |= _step_arrays([measure.propagated(adapter, *step) for step in zip(full, evicted, strict=True)])
    if run.generate:
        cache.forget()
        made = generate(adapter, cache, question, before.logits, run.generate, end_tokens(adapter))
        arrays |= _answer_arrays(adapter, prompt, made, run.generate)
    if "outputs" in run.save:
        arrays |= _step_arrays([measure.raw_outputs(*step) for step in zip(full, evicted, strict=True)])
        arrays |= _attention_array(layers)
    return SampleTrace(prompt.sample_id, arrays)


def _evict_layer(
    adapter: Adapter,
    before: Prefill,
    full: Sequence[StepRecord],
    run: RunConfig,
    layer: int,
    chunk_bytes: int,
) -> _LayerResult:
    """Select in one layer, copy out what stays, and measure the isolated quantities of every step."""
    keys, values = before.cache.layers[layer].keys[0], before.cache.layers[layer].values[0]
    n, w_o, configs = before.statistics.tokens, adapter.output_projection(layer), run.configs
    seen = [keys.shape[1] - len(full) + step + 1 for step in range(len(full))]
    attention = [
        theory.decode_attention(record.query[layer][0], keys[:, :count], adapter.scale(layer))
        for record, count in zip(full, seen, strict=True)
    ]
    sets = [select(config, before.statistics.of(config, layer, attention[0]), n) for config in configs]
    positions = [kept_sets.positions() for kept_sets in sets]
    entries = [borrow(keys[:, :n], values[:, :n])]
    entries += [gather(keys[:, :n], values[:, :n], kept) for kept in positions]
    decoded = projected_value_norms(values[:, n:], w_o, chunk_bytes)
    norms = torch.cat([before.statistics.norms[layer], decoded], dim=-1)
    masks = _per_query_head(sets, adapter.heads)
    isolated = [
        measure.isolated(step, values[:, :count], norms[:, :count], w_o, masks, configs)
        for step, count in zip(attention, seen, strict=True)
    ]
    stage1_counts = [
        sets_.stage1.sum(dim=-1) - min(config.window, n) for config, sets_ in zip(configs, sets, strict=True)
    ]
    cache = CompactLayer(entries, adapter.heads, n, run.cache)
    return _LayerResult(cache, positions, stage1_counts, isolated, attention)


def _cache_arrays(cache: CompactCache) -> Arrays:
    """Bytes of the evicted caches of all configurations; the run that keeps everything borrows the full cache's."""
    whole = sum(sum(map(_nbytes, layer.borrowed[0].rectangle or ())) for layer in cache.layers)
    held = {"cache_bytes": cache.nbytes - whole, "cache_padding_bytes": cache.padding_nbytes}
    return {name: to_numpy(torch.tensor(value), VARIABLES[name].dtype) for name, value in held.items()}


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes


def _per_query_head(sets: Sequence[KeptSets], heads: int) -> LayerMasks:
    def spread(mask: Tensor) -> Tensor:
        return mask.repeat_interleave(heads // mask.shape[0], dim=0)

    return LayerMasks(
        kept=torch.stack([spread(kept_sets.kept) for kept_sets in sets]),
        stage1=torch.stack([spread(kept_sets.stage1) for kept_sets in sets]),
    )


def _sample_arrays(prompt: EncodedPrompt, run: RunConfig, tokens: Sequence[int]) -> Arrays:
    n = len(prompt.parts(run.scenario)[0])
    evicted = [config.tokens(n) < n for config in run.configs]
    values: dict[str, object] = {
        "prompt_tokens": n,
        "question_tokens": len(prompt.token_ids) - n,
        "cut_tokens": prompt.cut_tokens,
        "token_id": list(tokens),
        "evicted": evicted,
    }
    return {name: to_numpy(torch.as_tensor(value), VARIABLES[name].dtype) for name, value in values.items()}


def _isolated_arrays(layers: Sequence[_LayerResult]) -> Arrays:
    """(config, step, layer, head) from per layer, per step (config, head); the noise floor without config."""
    arrays = {}
    for name in layers[0].isolated[0]:
        stacked = torch.stack([torch.stack([step[name].cpu() for step in layer.isolated]) for layer in layers], dim=1)
        configured = stacked if stacked.ndim == 3 else stacked.permute(2, 0, 1, 3)
        arrays[name] = to_numpy(configured, VARIABLES[name].dtype)
    return arrays


def _step_arrays(steps: Sequence[dict[str, Tensor]]) -> Arrays:
    """Stack steps along the `step` axis, which comes first or behind `config`."""
    arrays = {}
    for name in steps[0]:
        axis = VARIABLES[name].dims.index("step")
        arrays[name] = to_numpy(torch.stack([step[name] for step in steps], dim=axis), VARIABLES[name].dtype)
    return arrays


def _kept_arrays(adapter: Adapter, layers: Sequence[_LayerResult]) -> Arrays:
    """Kept positions of all configurations and layers in one row; heads of a shared kept set share their place."""
    shape = (len(layers[0].positions), len(layers), adapter.heads)
    offsets, counts, stage1 = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    rows, start = [], 0
    for config in range(shape[0]):
        for index, layer in enumerate(layers):
            positions = layer.positions[config]
            sharing = adapter.heads // len(positions)
            lengths = torch.tensor([len(kept) for kept in positions])
            first = start + lengths.cumsum(0) - lengths
            offsets[config, index] = first.repeat_interleave(sharing)
            counts[config, index] = lengths.repeat_interleave(sharing)
            stage1[config, index] = layer.stage1_counts[config].cpu().repeat_interleave(sharing)
            rows += [kept.cpu() for kept in positions]
            start += int(lengths.sum())
    kept = {"kept_offset": offsets, "kept_count": counts, "stage1_count": stage1, "kept_position": torch.cat(rows)}
    return {name: to_numpy(tensor, VARIABLES[name].dtype) for name, tensor in kept.items()}


def _answer_arrays(adapter: Adapter, prompt: EncodedPrompt, made: Sequence[Sequence[int]], most: int) -> Arrays:
    """What each row generated, the full cache's first, and whether it is right."""
    full, *evicted = [[*tokens, *[-1] * (most - len(tokens))] for tokens in made]
    texts = [adapter.tokenizer.decode(list(tokens)) for tokens in made]
    values: dict[str, object] = {"generated_full": full, "generated": evicted}
    for name, grade in (("score", exact_number), ("digits", leading_digits)):
        values[f"{name}_full"], *values[name] = (grade(text, prompt.answers) for text in texts)
    return {name: to_numpy(torch.tensor(value), VARIABLES[name].dtype) for name, value in values.items()}


def _attention_array(layers: Sequence[_LayerResult]) -> Arrays:
    """Reference attention (step, layer, head, key), NaN past the entries a step sees."""
    longest = layers[0].attention[-1].shape[-1]
    padded = [
        torch.stack([torch.nn.functional.pad(a, (0, longest - a.shape[-1]), value=torch.nan) for a in layer.attention])
        for layer in layers
    ]
    return {"attention_full": to_numpy(torch.stack(padded, dim=1), VARIABLES["attention_full"].dtype)}
