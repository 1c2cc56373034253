"""Assembly of a sample's trace arrays from the measurements on the device, with all axes in their order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from perturbkv import theory
from perturbkv.cache.entries import Lengths
from perturbkv.cache.makers import OwnPrefill
from perturbkv.configs.number_formats import FULL_BITS
from perturbkv.configs.resources import Shape
from perturbkv.datasets.decoded_tokens import token_kinds
from perturbkv.datasets.metrics import leading_digits
from perturbkv.datasets.prompts import decode_answer, grade, metrics_of
from perturbkv.devices import move_to_first_device, stack_on_device
from perturbkv.pipeline.answers.compression import CacheSize
from perturbkv.pipeline.sample.compressed_spans import LaterSets, measured_steps
from perturbkv.pipeline.sample.layer import LayerEffects, LayerResult, config_order, measure_effects
from perturbkv.pipeline.sample.measure import CHANGED_VARIABLES, Arrays, isolated_floors, to_numpy
from perturbkv.pipeline.sample.sample_run import SampleRun
from perturbkv.schema import APART, AT_CHOSEN_STEPS, ISOLATED, OF_COMPRESSIONS, OF_KEPT_SETS, VARIABLES


@dataclass(frozen=True)
class BatchResult:
    """The measurements of one batch of configurations.

    Attributes:
        configs: indices of the configurations in the run.
        steps: per decode step, name -> tensor, configurations first where the variable has them.
        order: indices of the configurations in the order of `kept`.
        kept: per layer what `encode_kept_sets` returns.
        cache_bytes, padding_bytes: bytes of the evicted caches, or of their latents, and of their padding.
        sizes: index of a configuration -> size of its cache in all layers together, with what is stored beside entries.
        generated: index of a configuration -> tokens of its answer; in one of the batches None -> those of the full
            cache; empty where nothing is generated.
        isolated: index of a configuration with entries of its own -> isolated perturbations (step, name, layer, head),
            names as `CHANGED_VARIABLES`; NaN where nothing is changed.
        prefills: index of a configuration with a prefill of its own -> that prefill.
        first_logp: log p of the text's first token, after the question; None without one.
        gradients: per step and layer the gradients (config, head, d_value) by which the configurations' effects are
            measured; empty where it is the full run's for all.
    """

    configs: tuple[int, ...]
    steps: list[dict[str, Tensor]]
    order: tuple[int, ...]
    kept: list[tuple[UInt8[Tensor, "kept_set byte"], Int[Tensor, " kept_set"]]]
    cache_bytes: int
    padding_bytes: int
    sizes: Mapping[int, CacheSize]
    generated: dict[int | None, list[int]]
    isolated: dict[int, Tensor]
    prefills: Mapping[int, OwnPrefill] = field(default_factory=dict)
    first_logp: Float[Tensor, " config"] | None = None
    gradients: list[list[Tensor]] = field(default_factory=list)


def sample_arrays(
    sample: SampleRun, batches: Sequence[BatchResult], lengths: Sequence[Lengths], later: LaterSets
) -> Arrays:
    """Return a sample's token counts, decoded tokens, their kinds, cache bytes, and whether each configuration evicted.

    `lengths` are per layer the numbers of kept entries of all configurations, `later` what later compressions keep.
    """
    n, prompt = sample.tokens, sample.prompt
    compressed = {index for rows in later.values() for index in rows}
    tokens, following = torch.stack([sample.full.tokens, sample.full.next_tokens]).tolist()
    values: dict[str, object] = {
        "prompt_tokens": n,
        "question_tokens": len(prompt.token_ids) - n,
        "cut_tokens": prompt.cut_tokens,
        "token_id": tokens,
        "token_kind": token_kinds(prompt.token_ids, tokens, sample.adapter.tokenizer.decode),
        "next_token_id": following,
        "steps_measured": len(tokens),
        "evicted": [
            index in compressed or any(min(layer[index]) < n for layer in lengths)
            for index in range(len(sample.run.configs))
        ],
        "cache_bytes": sum(batch.cache_bytes for batch in batches),
        "cache_padding_bytes": sum(batch.padding_bytes for batch in batches),
    }
    if given := prompt.forced_tokens(sample.run.text):
        values["text_tokens"] = len(given)
    return _as_arrays(values)


def first_token_arrays(sample: SampleRun, batches: Sequence[BatchResult]) -> Arrays:
    """Return log p of the text's first token in a context-only run; empty in others, whose prefill gives it."""
    if not (evicted := [batch.first_logp for batch in batches if batch.first_logp is not None]):
        return {}
    run_order = _inverse_order([index for batch in batches for index in batch.configs])
    full = theory.token_log_probability(theory.log_probabilities(sample.full.logits), sample.full.tokens[0])
    return {
        "first_logp": to_numpy(torch.cat(evicted), VARIABLES["first_logp"].dtype)[run_order],
        "first_logp_full": to_numpy(full, VARIABLES["first_logp_full"].dtype),
    }


def isolated_arrays(layers: Sequence[LayerResult | LayerEffects], device: torch.device) -> Arrays:
    """Return name -> isolated quantity (config, step, layer, head), or its noise floor (step, layer, head)."""
    run_order = _inverse_order(config_order(layers[0].groups))
    arrays = {}
    for name in layers[0].isolated[0]:
        stacked = stack_on_device(
            device, [torch.stack([step[name] for step in layer.isolated]) for layer in layers], dim=1
        )
        array = to_numpy(stacked, VARIABLES[name].dtype)  # (step, layer, config, head, …), or a floor without config
        arrays[name] = np.moveaxis(array, 2, 0)[run_order] if "config" in VARIABLES[name].dims else array
    return arrays


def compression_arrays(sample: SampleRun, layers: Sequence[LayerResult], arrays: Arrays, later: LaterSets) -> Arrays:
    """Return the variables of runs that compress again; of caches that others compress they hold no numbers.

    Those of chosen steps are NaN at others where the configuration was not compressed, so that they do not depend on
    the other configurations of the run; `later` is what all later compressions keep.

    `missed_attention` is the attention on each of the text's tokens while it is gone (config, step), mean over layers.
    `arrays` are those of `isolated_arrays`.
    """
    missed = stack_on_device(sample.adapter.device, [layer.missed for layer in layers]).mean(dim=0)
    by_config = to_numpy(missed, VARIABLES["missed_attention"].dtype)
    result = {"missed_attention": by_config[_inverse_order(config_order(layers[0].groups))]}
    result |= {name: arrays[name] for name in OF_COMPRESSIONS if name in arrays}
    external = [index for index, config in enumerate(sample.run.configs) if config.is_external]
    for array in result.values() if external else ():
        array[external] = np.nan if array.dtype.kind == "f" else -1
    own = np.zeros((len(sample.run.configs), len(sample.full.steps)), dtype=bool)
    own[:, measured_steps(sample.run, own.shape[1], {})] = True
    for step, rows in later.items():
        own[list(rows), step] = True
    return result | {
        name: np.where(own[:, :, np.newaxis, np.newaxis], arrays[name], np.nan)
        for name in AT_CHOSEN_STEPS
        if name in arrays and "config" in VARIABLES[name].dims
    }


def changed_isolated_arrays(batches: Sequence[BatchResult], arrays: Arrays) -> Arrays:
    """Return the isolated perturbations, with those of moved, quantised and corrected entries substituted.

    The perturbation by eviction alone and by the change alone come with them. Empty where no configuration has such
    entries. `arrays` are those of `isolated_arrays`.
    """
    changed = {index: tensor for batch in batches for index, tensor in batch.isolated.items()}
    if not changed:
        return {}
    by_eviction = arrays["perturbation_isolated"]
    result = {"perturbation_eviction": by_eviction, "perturbation_change": np.zeros_like(by_eviction)}
    result |= {name: arrays[name].copy() for name in CHANGED_VARIABLES if name in arrays}
    by_name = torch.stack(list(changed.values())).unbind(dim=2)  # each (config, step, layer, head)
    for name, tensor in zip(CHANGED_VARIABLES, by_name, strict=False):  # without gradients, without the effect
        for index, array in zip(changed, to_numpy(tensor, VARIABLES[name].dtype), strict=True):
            result[name][index] = np.where(np.isnan(array), result[name][index], array)
    if "entry_effect" in arrays:  # of entries in the cache that are no part of the prompt's
        result["entry_effect"] = arrays["entry_effect"].copy()
        result["entry_effect"][[index for index, tensor in changed.items() if not tensor.isnan().all()]] = np.nan
    return result


def own_entries_arrays(sample: SampleRun, arrays: Arrays) -> Arrays:
    """Return what somebody's caches hold, and the variables that then say nothing about them, with NaN in their places.

    Bounds, and where the kept set's loss ends, need a kept set; an isolated perturbation the plain model's prefill.
    Empty without such a cache. `arrays` are all isolated ones.
    """
    if not sample.caches:
        return {}
    caches = [sample.caches.get(config) for config in sample.run.configs]
    kinds = [0 if cache is None else cache.kind for cache in caches]
    result = _as_arrays({"own_entries": kinds})
    if sample.control is not None:
        for name, called in called_floors(sample, sample.control.outputs).items():
            result[name] = np.maximum(arrays[name], called)
    unmatched = [index for index, kind in enumerate(kinds) if kind == 2]
    misread = [
        index
        for index, cache in enumerate(caches)
        if kinds[index] and cache and not (cache.reads_plainly and cache.attends_plainly)
    ]
    for names, indices in ((OF_KEPT_SETS, unmatched), (ISOLATED, misread), (APART, misread)):
        for name in names if indices else ():
            if name in arrays:
                result[name] = result.get(name, arrays[name].copy())
                result[name][indices] = np.nan
    if unmatched and "lost_output" in arrays:
        result |= {"lost_output": arrays["lost_output"].copy(), "lost_position": arrays["lost_position"].copy()}
        result["lost_output"][unmatched], result["lost_position"][unmatched] = np.nan, -1
    return result


def called_floors(sample: SampleRun, outputs: Mapping[int, Mapping[int, Tensor]]) -> Arrays:
    """Return name -> noise floor (step, layer, head) of isolated perturbations of caches that are called."""
    layers = [
        isolated_floors(sample.layer(index), sample.full.steps, outputs[index])
        for index in range(len(sample.adapter.layers))
    ]
    names = theory.Distances.names("noise_floor_isolated")
    device = sample.adapter.device
    return {
        name: to_numpy(stack_on_device(device, [layer[:, place] for layer in layers], dim=1), VARIABLES[name].dtype)
        for place, name in enumerate(names)
    }


def effect_arrays(sample: SampleRun, batches: Sequence[BatchResult], layers: Sequence[LayerResult]) -> Arrays:
    """Return isolated effects, their floor, and every entry's effect on the text (config, key), NaN past the prompt.

    Empty where the run does not save effects.
    """
    if "effect" not in sample.run.save:
        return {}
    batch_order = _inverse_order([index for batch in batches for index in batch.configs])
    effects = []
    for index, layer in enumerate(layers):
        by_step = zip(*([step[index] for step in batch.gradients] for batch in batches), strict=True)
        gradients = [torch.cat(of_batches)[batch_order] for of_batches in by_step]
        effects.append(measure_effects(sample, index, layer.groups, gradients))
    device, padding = sample.adapter.device, sample.full.steps[-1].entries - sample.tokens
    entries = stack_on_device(device, [layer.entries for layer in effects]).sum(dim=0)
    array = to_numpy(entries, VARIABLES["entry_effect"].dtype)[_inverse_order(config_order(layers[0].groups))]
    padded = np.pad(array, [(0, 0), (0, padding)], constant_values=np.nan)
    return isolated_arrays(effects, device) | {"entry_effect": padded}


def lost_arrays(layers: Sequence[LayerResult], device: torch.device) -> Arrays:
    """Return the largest evicted outputs (config, layer, head, lost_entry) and Σ A ν of all entries (layer, head)."""
    run_order = _inverse_order(config_order(layers[0].groups))
    arrays = {}
    for name in layers[0].lost:
        dims = VARIABLES[name].dims
        stacked = stack_on_device(device, [layer.lost[name] for layer in layers], dim=dims.index("layer"))
        array = to_numpy(stacked, VARIABLES[name].dtype)
        arrays[name] = array[run_order] if "config" in dims else array
    return arrays


def step_arrays(batches: Sequence[BatchResult]) -> Arrays:
    """Return the variables of the decode steps, joined from all batches, in the run's order of configurations.

    Variables without a configuration, floors and norms, are the largest of all batches.
    """
    run_order = _inverse_order([index for batch in batches for index in batch.configs])
    arrays = {}
    for name in batches[0].steps[0]:
        dims = VARIABLES[name].dims
        stacked = [torch.stack([step[name] for step in batch.steps], dim=dims.index("step")) for batch in batches]
        joined = torch.cat(stacked) if "config" in dims else torch.stack(stacked).amax(dim=0)
        array = to_numpy(joined, VARIABLES[name].dtype)
        arrays[name] = array[run_order] if "config" in dims else array
    return arrays


def kept_arrays(
    batches: Sequence[BatchResult], lengths: Sequence[Lengths], layers: Sequence[LayerResult], heads: int
) -> Arrays:
    """Return the variables of the encoded kept positions and their counts, for all configurations and layers.

    Heads with a common kept set refer to the same code.
    """
    shape = (len(lengths[0]), len(layers), heads)
    offsets, sizes, counts = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    codes, start = [], 0
    for batch in batches:
        padded, code_sizes = (torch.cat(move_to_first_device(parts)) for parts in zip(*batch.kept, strict=True))
        rows, batch_sizes = to_numpy(padded, "uint8"), to_numpy(code_sizes, "int64")  # layer by layer, set by set
        batch_codes = rows[np.arange(rows.shape[1]) < batch_sizes[:, np.newaxis]]
        begins = start + batch_sizes.cumsum() - batch_sizes
        by_layer = zip(np.split(begins, len(layers)), np.split(batch_sizes, len(layers)), strict=True)
        for layer, (layer_begins, layer_sizes) in enumerate(by_layer):
            batch_lengths = [lengths[layer][index] for index in batch.order]
            layer_counts = np.concatenate(batch_lengths)
            for values, target in ((layer_begins, offsets), (layer_sizes, sizes), (layer_counts, counts)):
                _assign_to_heads(values, batch_lengths, batch.order, target[:, layer])
        codes.append(batch_codes)
        start += len(batch_codes)
    return {
        "kept_offset": offsets, "kept_length": sizes, "kept_code": np.concatenate(codes), "kept_count": counts,
        "stage1_count": _stage1_counts(layers, shape),
    }  # fmt: skip


def _stage1_counts(layers: Sequence[LayerResult], shape: tuple[int, int, int]) -> NDArray[np.int64]:
    """Return the numbers of entries kept in stage 1, of the given `shape` (config, layer, head)."""
    counts = np.zeros(shape, dtype=np.int64)
    for groups in zip(*(layer.groups for layer in layers), strict=True):  # one group of every layer
        per_set = torch.stack(move_to_first_device(group.budgets.stage1_entries for group in groups), dim=1)
        per_head = to_numpy(per_set, "int64").repeat(shape[-1] // groups[0].kept_heads, axis=-1)
        counts[list(groups[0].config_indices)] = per_head
    return counts


def _assign_to_heads(values: NDArray[Any], lengths: Lengths, order: Sequence[int], heads: NDArray[Any]) -> None:
    """Write values per kept set into `heads` (config, head), repeated for all heads that share the set.

    `values` are those of the configurations in `order`, one after the other; `lengths` has their numbers of kept sets.
    """
    ends = np.cumsum([len(sets) for sets in lengths])[:-1]
    for index, per_set in zip(order, np.split(values, ends), strict=True):
        heads[index] = per_set.repeat(heads.shape[1] // len(per_set))


def prefill_arrays(batches: Sequence[BatchResult], cached: NDArray[np.float64], seconds: float) -> Arrays:
    """Return the prefill durations and `held_share`, the share of entries that the own prefills attend to.

    `cached` are the shares of the cache, which stay for other configurations, and `seconds` is the full prefill's
    duration. Configurations without a prefill of their own have the duration NaN.
    """
    shares, durations = cached.copy(), np.full(len(cached), np.nan)
    for batch in batches:
        for index, prefill in batch.prefills.items():
            shares[index] = prefill.share
            durations[index] = seconds if prefill.seconds is None else prefill.seconds
    return {"held_share": shares, "prefill_seconds": durations, "prefill_seconds_full": np.array(seconds)}


def cached_sizes(batches: Sequence[BatchResult], shape: Shape, prompt_tokens: int) -> Arrays:
    """Return the caches as shares of the full one, all layers counted (METHOD: a budget is not a share), and bytes.

    Bytes are per configuration, corrections included, and of the full cache.
    Numbers count 16 bits unless they are quantised, and of a cache of latents are the latents'; windows and recurrent
    states of unmeasured layers are in all.
    """
    unmeasured = FULL_BITS * shape.unmeasured_numbers(prompt_tokens)
    full = FULL_BITS * math.prod(shape.stored_entries) * prompt_tokens + unmeasured
    sizes = {index: size for batch in batches for index, size in batch.sizes.items()}
    held, resident = (
        np.array([getattr(sizes[index], name) + unmeasured for index in range(len(sizes))], dtype=np.float64) / 8
        for name in ("bits", "resident_bits")
    )
    shares = [shape.cache_share(sizes[index].entries, prompt_tokens) for index in range(len(sizes))]
    return {
        "held_share": np.array(shares, dtype=np.float64),
        "held_bytes": held,
        "resident_bytes": resident,
        "full_bytes": np.array(full / 8),
        "unmeasured_bytes": np.array(unmeasured / 8),
    }


def answer_arrays(sample: SampleRun, batches: Sequence[BatchResult]) -> Arrays:
    """Return the variables of the answers' tokens and scores, with separate variables for the full cache's answer."""
    prompt, most = sample.prompt, sample.run.generate
    answers = {index: tokens for batch in batches for index, tokens in batch.generated.items()}
    rows = [answers[None], *(answers[index] for index in range(len(answers) - 1))]  # None: the full cache's
    full, *evicted = [[*tokens, *[-1] * (most - len(tokens))] for tokens in rows]
    texts = [decode_answer(tokens, sample.adapter.tokenizer.decode) for tokens in rows]
    values: dict[str, object] = {"generated_full": full, "generated": evicted}
    graded = metrics_of([prompt])
    values["score_full"], *values["score"] = (grade(text, prompt, graded) for text in texts)
    values["digits_full"], *values["digits"] = (leading_digits(text, prompt.answers) for text in texts)
    return _as_arrays(values)


def attention_array(layers: Sequence[LayerResult]) -> Arrays:
    """Return the reference attention (step, layer, head, key), NaN for entries later than the step."""
    longest = layers[0].attention[-1].shape[-1]
    padded = [
        [torch.nn.functional.pad(a, (0, longest - a.shape[-1]), value=torch.nan).cpu() for a in layer.attention]
        for layer in layers
    ]
    stacked = torch.stack([torch.stack(layer) for layer in padded], dim=1)
    return {"attention_full": to_numpy(stacked, VARIABLES["attention_full"].dtype)}


def pad_steps(arrays: Arrays, steps: int) -> Arrays:
    """Return the arrays padded to length `steps` along `step`: floats by NaN, tokens by −1, other integers by 0."""
    return {name: _pad_variable(name, array, steps) for name, array in arrays.items()}


def _pad_variable(name: str, array: NDArray[Any], steps: int) -> NDArray[Any]:
    """Return the array of the variable `name`, padded as `pad_steps` does."""
    dims = VARIABLES[name].dims
    if "step" not in dims:
        return array
    missing = steps - array.shape[dims.index("step")]
    blank = np.nan if array.dtype.kind == "f" else -1 if name in ("token_id", "next_token_id") else 0
    return np.pad(array, [(0, missing if axis == "step" else 0) for axis in dims], constant_values=blank)


def _as_arrays(values: dict[str, object]) -> Arrays:
    """Return name -> array, with the dtype of the trace variable of that name."""
    return {name: np.asarray(value).astype(VARIABLES[name].dtype) for name, value in values.items()}


def _inverse_order(indices: Sequence[int]) -> list[int]:
    """Return the inverse permutation of `indices`."""
    return sorted(range(len(indices)), key=lambda row: indices[row])
