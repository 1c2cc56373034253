"""Checks of decoding from a compact cache, against the full cache with evicted entries masked.

The model is small, with random weights whose heads attend sharply, so that kept entries make a difference. The
reference keeps all entries, masks those that a head does not keep, and computes the weights in float32. It decodes
random tokens; at every step and in every layer the compact cache gets the same queries, and is compared head by head.
Rounding is not a difference: row 0 keeps everything, in the same layout and through the same kernel, and its distance
from its reference is the noise floor.

Then the model decodes from the compact cache alone. In float32 this has to agree with the reference; half precision may
be at most twice as far from the float32 reference as the reference in half precision is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from perturbkv.cache import ragged
from perturbkv.cache.compact import CompactCache, CompactLayer
from perturbkv.cache.entries import KeptEntries
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.models.loading import ByteTokenizer
from perturbkv.pipeline.sample.capture import Observer, capture, decode_from, intercept_attention
from perturbkv.selfcheck.checks import Check
from perturbkv.theory import Softmax

HEADS, KV_HEADS, D_HEAD, LAYERS, VOCAB = 8, 2, 64, 3, 260


def small_model(dtype: torch.dtype, device: torch.device) -> Adapter:
    """Return a Llama of three layers with random weights, the same on every device, rounded to `dtype`."""
    config = AutoConfig.for_model(
        "llama", num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=D_HEAD,
        hidden_size=HEADS * D_HEAD, intermediate_size=2 * HEADS * D_HEAD, vocab_size=VOCAB,
        max_position_embeddings=4096, initializer_range=0.1, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        exact = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.load_state_dict(exact.state_dict())  # rounds weights alone: rotations stay in float32
    return Adapter(model.eval().to(device), ByteTokenizer(), "small", "seed 0", True)


def random_tokens(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return `count` random token ids, the same on every device."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).to(device)


def full_cache(adapter: Adapter, count: int) -> DynamicCache:
    """Return the full cache of a random prompt of `count` tokens."""
    cache = DynamicCache()
    with torch.inference_mode():
        run_with_cache(adapter.model, random_tokens(count, 0, adapter.device)[None], cache, logits_to_keep=1)
    return cache


FLOORS = 4
"""Most noise floors that are no difference (METHOD: Audit)."""
LAYOUTS = ("padded", "packed", "rectangular")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 4
"""Rows of a batch: row 0 keeps everything, the others evict."""
_WORSE = 2
"""How many times as far half precision may be from float32 as the reference in half precision is."""
_SAME_QUERIES = f"{FLOORS} noise floors, or the dtype's epsilon where that is more; same queries"
_DECODING = f"{FLOORS} noise floors, or the dtype's epsilon where that is more; the whole decoding"
_AGAINST_FLOAT32 = (
    f"{_WORSE} times the distance of the reference in this dtype from the one in float32; the whole decoding"
)

Sets = list[list[list[Tensor]]]
"""Kept positions by layer, row and kept set."""


@dataclass(frozen=True)
class Sizes:
    """The size of the checks: entries of the prompt, and steps decoded after it."""

    entries: int = 1024
    steps: int = 8


def check_layout(device: torch.device, sizes: Sizes, layout: str) -> list[Check]:
    """Return the checks of one cache layout at every dtype that the device supports, per query head and kv head."""
    models = {dtype: small_model(dtype, device) for dtype in DTYPES if supports(layout, dtype, device)}
    if not models:
        return [
            Check(
                layout, None, 0.0, _SAME_QUERIES, "no variable-length attention here: caches are padded",
                needed=device.type == "cuda",
            )
        ]  # fmt: skip
    exact, checks = models.get(torch.float32) or small_model(torch.float32, device), []
    for sets in (HEADS, KV_HEADS):
        kept = kept_sets(sets, sizes.entries, even=layout == "rectangular")
        reference, _ = decode_masked(exact, kept, sizes)
        for adapter in models.values():
            checks += compare(adapter, kept, sizes, layout, reference)
    return checks


def supports(layout: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device supports this layout for a dtype."""
    like = torch.empty(0, D_HEAD, dtype=dtype, device=device)
    return layout != "packed" or ragged.kernel_for(like, like) is not None


def compare(adapter: Adapter, kept: Sets, sizes: Sizes, layout: str, reference: Tensor) -> list[Check]:
    """Return the checks of one layout at one dtype: attention for the same queries, decoding by step and at once.

    `reference`: head outputs (row, layer, head, step, d_value) of the masked full cache in float32.
    """
    name = f"{layout}, {str(adapter.dtype).removeprefix('torch.')}, per {'query' if len(kept[0][0]) == HEADS else 'kv'}"
    masked, compact = decode_masked(adapter, kept, sizes, compact_cache(adapter, kept, sizes, layout))
    cache = compact_cache(adapter, kept, sizes, layout)
    decoded = _decode(adapter, cache, sizes, lambda: decode_from(adapter, cache))
    at_once = _decode_at_once(adapter, compact_cache(adapter, kept, sizes, layout), sizes)
    ways = {"decoding": decoded, "a block of tokens": at_once}
    checks = [_compare_to_floor(f"{name}: attention", compact, masked, adapter.dtype, _SAME_QUERIES)]
    if adapter.dtype == torch.float32:
        return checks + [
            _compare_to_floor(f"{name}: {way}", outputs, masked, adapter.dtype, _DECODING)
            for way, outputs in ways.items()
        ]
    bound = _WORSE * worst_head_distance(masked[1:], reference[1:])
    return checks + [
        Check(f"{name}: {way}", worst_head_distance(outputs[1:], reference[1:]), bound, _AGAINST_FLOAT32)
        for way, outputs in ways.items()
    ]


def _compare_to_floor(name: str, outputs: Tensor, expected: Tensor, dtype: torch.dtype, rule: str) -> Check:
    """Return the check of all rows but row 0, with a bound from row 0's distance, the noise floor."""
    bound = max(FLOORS * worst_head_distance(outputs[:1], expected[:1]), float(torch.finfo(dtype).eps))
    return Check(name, worst_head_distance(outputs[1:], expected[1:]), bound, rule)


def kept_sets(sets: int, entries: int, even: bool) -> Sets:
    """Return random kept sets: row 0 keeps everything; `even` gives all heads of a row equally many entries."""
    generator = torch.Generator().manual_seed(sets)
    layers = []
    for _ in range(LAYERS):
        rows = [[torch.arange(entries)] * sets]
        for row in range(1, _ROWS):
            counts = torch.randint(1, entries + 1, (sets,), generator=generator).tolist()
            counts = [entries // (2 * row)] * sets if even else [1, *counts[1:]]
            rows.append([torch.randperm(entries, generator=generator)[:count].sort().values for count in counts])
        layers.append(rows)
    return layers


def compact_cache(adapter: Adapter, kept: Sets, sizes: Sizes, layout: str) -> CompactCache:
    """Return a compact cache, in one of `LAYOUTS`, of the kept entries of the random prompt."""
    full, kind = full_cache(adapter, sizes.entries), "rectangular" if layout == "rectangular" else "ragged"
    layers = []
    # a `padded` cache is one that finds no variable-length kernel
    with patch.object(ragged, "kernel_for", lambda keys, values: None) if layout == "padded" else nullcontext():
        for layer, rows in zip(full.layers, kept, strict=True):
            entries = [_kept_entries(layer.keys[0], layer.values[0], row) for row in rows]
            layers.append(CompactLayer(entries, adapter.heads, sizes.entries, kind))
    return CompactCache(layers)


def _kept_entries(keys: Tensor, values: Tensor, sets: Sequence[Tensor]) -> KeptEntries:
    """Return the kept keys and values of one row; several kept sets can share a key/value head."""
    sharing = len(sets) // len(keys)
    kept = [(head // sharing, positions.to(keys.device)) for head, positions in enumerate(sets)]
    return KeptEntries.of(
        [keys[head, positions] for head, positions in kept], [values[head, positions] for head, positions in kept]
    )


def decode_masked(
    adapter: Adapter, kept: Sets, sizes: Sizes, compact: CompactCache | None = None
) -> tuple[Tensor, Tensor]:
    """Return head outputs (row, layer, head, step, d_value) of decoding from the masked full cache, and a second.

    The second tensor has the outputs of the `compact` cache for the same queries instead, where it is given.
    """
    cache: DynamicCache = full_cache(adapter, sizes.entries)
    cache.batch_repeat_interleave(_ROWS)
    masks = [_kept_mask(rows, adapter.heads, sizes.entries).to(adapter.device) for rows in kept]
    compact_outputs: list[Tensor] = []

    def attend(stock: Any, module: Any, args: Any, kwargs: Any) -> tuple[Tensor, None]:
        query, key, value = args[:3]
        output = masked_attention(query, key, value, masks[module.layer_idx], kwargs["scaling"])
        if compact is not None:
            layer = compact.layers[module.layer_idx]
            layer.append(key[:, :, -1:], value[:, :, -1:])
            compact_outputs.append(layer.attend(query, Softmax(kwargs["scaling"]))[:, -1].float())
        return output, None

    if compact is not None:
        compact.attach(True)
    outputs = _decode(adapter, cache, sizes, lambda: intercept_attention(adapter, attend))
    return outputs, _stack_outputs(compact_outputs, sizes) if compact_outputs else outputs


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return softmax attention over the entries that each row's head keeps and over all later entries.

    Args:
        query: (row, head, query, d_key).
        key: keys (row, kv_head, entry, d_key): those of the prompt, then the decoded ones.
        value: values of the same shape.
        mask: (row, head, entry) of the prompt, True for kept entries.
        scale: factor of the logits.

    Returns:
        Head outputs (row, query, head, d_value), computed in float32, in the query's dtype.
    """
    group = query.shape[1] // key.shape[1]
    keys, values = (part.float().repeat_interleave(group, dim=1) for part in (key, value))
    later = mask.new_ones(*mask.shape[:2], key.shape[2] - mask.shape[2])
    hidden = ~torch.cat([mask, later], dim=2).unsqueeze(2)
    weights = (query.float() @ keys.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf).softmax(dim=-1)
    return (weights @ values).transpose(1, 2).to(query.dtype)


def _kept_mask(rows: list[list[Tensor]], heads: int, entries: int) -> Tensor:
    """Return (row, head, key): True for kept entries."""
    mask = torch.zeros(len(rows), heads, entries, dtype=torch.bool)
    for row, sets in enumerate(rows):
        for head in range(heads):
            mask[row, head, sets[head * len(sets) // heads]] = True
    return mask


def _decode(
    adapter: Adapter, cache: Any, sizes: Sizes, attention: Callable[[], AbstractContextManager[None]]
) -> Tensor:
    """Return the head outputs of decoding the same random tokens in every row, step by step, within `attention`."""
    outputs: list[Tensor] = []

    def record(layer: int, mixed: Tensor) -> None:
        outputs.append(mixed[:, -1].float().view(_ROWS, adapter.heads, adapter.d_value))

    with torch.inference_mode(), attention(), capture(adapter, Observer(head_output=record)):
        for token in random_tokens(sizes.steps, 1, adapter.device):
            run_with_cache(adapter.model, token.expand(_ROWS, 1), cache, logits_to_keep=1)
    return _stack_outputs(outputs, sizes)


def _decode_at_once(adapter: Adapter, cache: CompactCache, sizes: Sizes) -> Tensor:
    """Return the head outputs (row, layer, head, step, d_value) of decoding all random tokens in one forward pass."""
    outputs: list[Tensor] = []

    def record(layer: int, mixed: Tensor) -> None:
        outputs.append(mixed.float().view(_ROWS, sizes.steps, adapter.heads, adapter.d_value))

    tokens = random_tokens(sizes.steps, 1, adapter.device).expand(_ROWS, -1)
    with torch.inference_mode(), decode_from(adapter, cache), capture(adapter, Observer(head_output=record)):
        run_with_cache(adapter.model, tokens, cache, logits_to_keep=1)
    return torch.stack(outputs).permute(1, 0, 3, 2, 4)


def _stack_outputs(outputs: list[Tensor], sizes: Sizes) -> Tensor:
    """Return the outputs (row, head, d_value) of every step and layer as a tensor (row, layer, head, step, d_value)."""
    return torch.stack(outputs).view(sizes.steps, LAYERS, _ROWS, HEADS, D_HEAD).permute(2, 1, 3, 0, 4)


def worst_head_distance(outputs: Tensor, expected: Tensor) -> float:
    """Return the maximum over heads of root mean square difference / root mean square expected output.

    Both are (row, layer, head, step, d_value); the means are over steps and components of one head of a row and layer.
    """
    error, size = (part.square().mean(dim=(-2, -1)).sqrt() for part in (outputs - expected, expected))
    return float((error / size).max())
