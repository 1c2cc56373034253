"""From what was measured on the device to the arrays of a trace: one place where axes are put into their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from perturbkv import kept_codec
from perturbkv.cache.entries import Lengths
from perturbkv.cache.quantisation import held_bits
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import FULL, stored_bits
from perturbkv.configs.resources import Shape
from perturbkv.datasets.metrics import leading_digits
from perturbkv.devices import stack_on_device
from perturbkv.pipeline.answers import grading
from perturbkv.pipeline.sample.layer import LayerResult, order
from perturbkv.pipeline.sample.measure import Arrays, to_numpy
from perturbkv.pipeline.sample.sample_run import SampleRun
from perturbkv.pipeline.variants import quantised
from perturbkv.pipeline.variants.sparse_prefill import OwnPrefill
from perturbkv.schema import VARIABLES


@dataclass(frozen=True)
class BatchResult:
    """What one batch of configurations gave.

    Attributes:
        places: which of the run's configurations.
        steps: per decode step, name -> tensor, configurations first where the variable has them.
        order: the configurations as `kept` lists them.
        kept: of every layer the kept sets as bits.
        cache_bytes, padding_bytes: of the evicted caches.
        generated: tokens of each configuration's answer by its place, and in one of the batches the full cache's under
            None; empty where nothing is generated.
        isolated: of configurations in few bits, or corrected, by their place (step, name, layer, head), names as
            `quantised.NAMES`; NaN where that changes nothing.
        own: of configurations that have one, by their place, the prefill along lines.
    """

    places: tuple[int, ...]
    steps: list[dict[str, Tensor]]
    order: tuple[int, ...]
    kept: list[UInt8[Tensor, "kept_set byte"]]
    cache_bytes: int
    padding_bytes: int
    generated: dict[int | None, list[int]]
    isolated: dict[int, Tensor]
    own: Mapping[int, OwnPrefill] = field(default_factory=dict)


def sample_arrays(sample: SampleRun, batches: Sequence[BatchResult], lengths: Sequence[Lengths]) -> Arrays:
    """Return what is one number or one row per sample."""
    n, prompt, tokens = sample.tokens, sample.prompt, sample.full.tokens
    values: dict[str, object] = {
        "prompt_tokens": n,
        "question_tokens": len(prompt.token_ids) - n,
        "cut_tokens": prompt.cut_tokens,
        "token_id": tokens.tolist(),
        "steps_measured": len(tokens),
        "evicted": [any(min(layer[place]) < n for layer in lengths) for place in range(len(sample.run.configs))],
        "cache_bytes": sum(batch.cache_bytes for batch in batches),
        "cache_padding_bytes": sum(batch.padding_bytes for batch in batches),
    }
    return _as_arrays(values)


def isolated_arrays(layers: Sequence[LayerResult], device: torch.device) -> Arrays:
    """(config, step, layer, head) from per layer, per step (config, head); noise floors without config."""
    back = _inverse(order(layers[0].groups))
    arrays = {}
    for name in layers[0].isolated[0]:
        stacked = stack_on_device(
            device, [torch.stack([step[name] for step in layer.isolated]) for layer in layers], dim=1
        )
        array = to_numpy(stacked, VARIABLES[name].dtype)
        arrays[name] = array if array.ndim == 3 else array.transpose(2, 0, 1, 3)[back]
    return arrays


def changed_arrays(batches: Sequence[BatchResult], arrays: Arrays) -> Arrays:
    """The isolated perturbations of `arrays`, of configurations in few bits or corrected as these really perturb."""
    found = {name: arrays[name].copy() for name in quantised.NAMES}
    for batch in batches:
        for place, moved in batch.isolated.items():
            for name, array in zip(quantised.NAMES, moved.unbind(dim=1), strict=True):
                own = to_numpy(array, VARIABLES[name].dtype)
                found[name][place] = np.where(np.isnan(own), found[name][place], own)
    return found


def lost_arrays(layers: Sequence[LayerResult], device: torch.device) -> Arrays:
    """(config, layer, head, lost_entry) from per layer (config, head, lost_entry); C of every head without config."""
    back = _inverse(order(layers[0].groups))
    arrays = {}
    for name in layers[0].lost:
        dims = VARIABLES[name].dims
        stacked = stack_on_device(device, [layer.lost[name] for layer in layers], dim=dims.index("layer"))
        array = to_numpy(stacked, VARIABLES[name].dtype)
        arrays[name] = array[back] if "config" in dims else array
    return arrays


def step_arrays(batches: Sequence[BatchResult]) -> Arrays:
    """Variables of the decode steps, in the run's order of configurations; what all batches measured from the first."""
    back = _inverse([place for batch in batches for place in batch.places])
    arrays = {}
    for name in batches[0].steps[0]:
        dims = VARIABLES[name].dims
        parts = [
            to_numpy(torch.stack([step[name] for step in batch.steps], dim=dims.index("step")), VARIABLES[name].dtype)
            for batch in (batches if "config" in dims else batches[:1])
        ]
        arrays[name] = np.concatenate(parts)[back] if "config" in dims else parts[0]
    return arrays


def kept_arrays(
    batches: Sequence[BatchResult], lengths: Sequence[Lengths], layers: Sequence[LayerResult], heads: int
) -> Arrays:
    """Kept positions of all configurations and layers as codes; heads of a shared kept set share theirs."""
    shape = (len(lengths[0]), len(layers), heads)
    offsets, sizes, counts, stage1 = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    rows, start = [], 0
    for batch in batches:
        for layer, masks in enumerate(batch.kept):
            own = [lengths[layer][place] for place in batch.order]
            code, taken = kept_codec.encode_masks(to_numpy(masks, "uint8"), np.concatenate(own))
            begins = start + taken.cumsum() - taken
            for values, held in ((begins, offsets), (taken, sizes), (np.concatenate(own), counts)):
                _spread(values, own, batch.order, held[:, layer])
            rows.append(code)
            start += len(code)
    for layer, found in enumerate(layers):
        for group in found.groups:
            first = group.budgets.stage1_entries.repeat_interleave(heads // group.kept_heads, dim=1)
            stage1[list(group.config_indices), layer] = to_numpy(first, "int64")
    return {
        "kept_offset": offsets, "kept_length": sizes, "kept_code": np.concatenate(rows), "kept_count": counts,
        "stage1_count": stage1,
    }  # fmt: skip


def _spread(values: NDArray[Any], own: Lengths, order: Sequence[int], heads: NDArray[Any]) -> None:
    """Numbers of each kept set of the configurations in `order`, to every head that shares it: (config, head)."""
    ends = np.cumsum([len(sets) for sets in own])[:-1]
    for place, found in zip(order, np.split(values, ends), strict=True):
        heads[place] = found.repeat(heads.shape[1] // len(found))


def held_share(lengths: Sequence[Lengths], kv_heads: int, prompt_tokens: int) -> NDArray[np.float64]:
    """(config,) entries of all layers and kept sets over those of the full cache (METHOD: a budget is not a share)."""
    held = [sum(sum(layer[place]) for layer in lengths) for place in range(len(lengths[0]))]
    return np.array(held, dtype=np.float64) / (len(lengths) * kv_heads * prompt_tokens)


def prefill_arrays(
    batches: Sequence[BatchResult], configs: Sequence[EvictionConfig], held: NDArray[np.float64], seconds: float
) -> Arrays:
    """Of configurations with a prefill along lines what it took, and `held_share` as what its queries look at.

    That of a budget which covers the prompt is the full one, which took `seconds`; the others have none: NaN.
    """
    shares, took = held.copy(), np.full(len(configs), np.nan)
    for place in (place for place, config in enumerate(configs) if config.has_sparse_prefill):
        shares[place], took[place] = 1.0, seconds
    for batch in batches:
        for place, own in batch.own.items():
            shares[place], took[place] = own.share, own.seconds
    return {"held_share": shares, "prefill_seconds": took, "prefill_seconds_full": np.array(seconds)}


def held_bytes(
    lengths: Sequence[Lengths], configs: Sequence[EvictionConfig], shape: Shape, prompt_tokens: int
) -> Arrays:
    """(config,) bytes of the evicted caches' entries and of what stands in for others, and of the full cache's.

    As stored; in 16 bits where nobody says otherwise.
    """
    full = stored_bits(Choice(FULL), prompt_tokens, 0, shape.d_head) * shape.kv_heads * len(lengths)
    held = [
        sum(
            held_bits(config, layer[place], prompt_tokens, shape.heads, shape.kv_heads, shape.d_head)
            for layer in lengths
        )
        for place, config in enumerate(configs)
    ]
    return {"held_bytes": np.array(held, dtype=np.float64) / 8, "full_bytes": np.array(full / 8)}


def answer_arrays(sample: SampleRun, batches: Sequence[BatchResult]) -> Arrays:
    """Return what each row generated, the full cache's first, and how good it is."""
    prompt, most = sample.prompt, sample.run.generate
    made = {place: tokens for batch in batches for place, tokens in batch.generated.items()}
    rows = [made[None], *(made[place] for place in range(len(made) - 1))]
    full, *evicted = [[*tokens, *[-1] * (most - len(tokens))] for tokens in rows]
    texts = [grading.text_of(tokens, sample.adapter.tokenizer.decode) for tokens in rows]
    values: dict[str, object] = {"generated_full": full, "generated": evicted}
    graded = grading.metrics_of([prompt])
    values["score_full"], *values["score"] = (grading.grade(text, prompt, graded) for text in texts)
    values["digits_full"], *values["digits"] = (leading_digits(text, prompt.answers) for text in texts)
    return _as_arrays(values)


def attention_array(layers: Sequence[LayerResult]) -> Arrays:
    """Reference attention (step, layer, head, key), NaN past the entries a step sees."""
    longest = layers[0].attention[-1].shape[-1]
    padded = [
        [torch.nn.functional.pad(a, (0, longest - a.shape[-1]), value=torch.nan).cpu() for a in layer.attention]
        for layer in layers
    ]
    stacked = torch.stack([torch.stack(layer) for layer in padded], dim=1)
    return {"attention_full": to_numpy(stacked, VARIABLES["attention_full"].dtype)}


def with_all_steps(arrays: Arrays, steps: int) -> Arrays:
    """The arrays with `steps` places along `step`; past the end of the text NaN, token -1, other integers 0."""
    return {name: _padded(name, array, steps) for name, array in arrays.items()}


def _padded(name: str, array: NDArray[Any], steps: int) -> NDArray[Any]:
    dims = VARIABLES[name].dims
    if "step" not in dims:
        return array
    missing = steps - array.shape[dims.index("step")]
    blank = np.nan if array.dtype.kind == "f" else -1 if name == "token_id" else 0
    return np.pad(array, [(0, missing if axis == "step" else 0) for axis in dims], constant_values=blank)


def _as_arrays(values: dict[str, object]) -> Arrays:
    return {name: np.asarray(value).astype(VARIABLES[name].dtype) for name, value in values.items()}


def _inverse(places: Sequence[int]) -> list[int]:
    """Where each configuration of the run stands in another order."""
    return sorted(range(len(places)), key=lambda row: places[row])
