"""What an audit says of evictions that are right, only lossy, wrong in one planted way each, or unreadable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

import perturbkv as pk
from tests.pins.running import below, leaves, left, plain, prompts, run, tiny_model

NAMES = (
    "right", "off_by_one", "rotated_again", "swapped_values", "values_of_others", "with_padding", "quantised",
    "repeated", "moved", "twice", "without_sinks", "without_window", "shuffled", "in_parts", "Streaming", "nothing",
    "breaks", "alone_only",
)  # fmt: skip
"""Of `PLANTED`: ten faults, what is only lossy, and what cannot be read."""
PLANTED = """
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

KEPT, SINKS, RECENT = 20, 4, 8


def positions(tokens, head):
    between = torch.arange(SINKS, tokens - RECENT)
    chosen = between[torch.linspace(head, len(between) - 1, KEPT - SINKS - RECENT).round().long()]
    return torch.cat([torch.arange(SINKS), chosen, torch.arange(tokens - RECENT, tokens)])


def places(mask):
    return (mask.cumsum(dim=-1) - 1).clamp(min=0)


def full(model, ids, mask):
    cache = DynamicCache()
    model(input_ids=ids, attention_mask=mask, position_ids=places(mask), past_key_values=cache)
    return cache


def gathered(cache, masks, padding=False):
    for layer in cache.layers:
        rows = []
        for mask in masks:
            start = 0 if padding else int((mask == 0).sum())
            heads = range(layer.keys.shape[1])
            rows.append(torch.stack([start + positions(len(mask) - start, head) for head in heads]))
        place = torch.stack(rows).unsqueeze(-1).expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, place), layer.values.gather(2, place)
    return cache


def right(model, input_ids, attention_mask):
    return gathered(full(model, input_ids, attention_mask), attention_mask)


def off_by_one(model, input_ids, attention_mask):
    cache = right(model, input_ids, attention_mask)
    cache.tokens = attention_mask.sum(dim=-1)
    return cache


def early(model, cache, token, step):
    where = cache.tokens.unsqueeze(-1) + step - 1 + torch.arange(token.shape[1])
    return model(input_ids=token, position_ids=where, past_key_values=cache).logits


off_by_one.decode = early


def turned(keys, cosine, sine):
    first, second = keys.chunk(2, dim=-1)
    return keys * cosine + torch.cat([-second, first], dim=-1) * sine


def rotated_again(model, input_ids, attention_mask, layer=1):
    cache = full(model, input_ids, attention_mask)
    held = cache.layers[layer]
    cosine, sine = model.model.rotary_emb(held.values, places(attention_mask))
    held.keys = turned(held.keys, cosine.unsqueeze(1), sine.unsqueeze(1))
    return gathered(cache, attention_mask)


def swapped_values(model, input_ids, attention_mask, layer=1):
    cache = full(model, input_ids, attention_mask)
    values = cache.layers[layer].values.clone()
    values[:, 0] = values[:, 1]
    cache.layers[layer].values = values
    return gathered(cache, attention_mask)


def values_of_others(model, input_ids, attention_mask, layer=1):
    cache = right(model, input_ids, attention_mask)
    cache.layers[layer].values = cache.layers[layer].values.roll(1, dims=2)
    return cache


def with_padding(model, input_ids, attention_mask):
    return gathered(full(model, input_ids, attention_mask), attention_mask, padding=True)


def quantised(model, input_ids, attention_mask):
    cache = right(model, input_ids, attention_mask)
    for layer in cache.layers[1:]:
        step = layer.keys.abs().amax(dim=-1, keepdim=True) / 127
        layer.keys = (layer.keys / step).round() * step
    return cache


class RepeatedLayer(DynamicLayer):
    def update(self, keys, values, *args, **kwargs):
        return super().update(keys.repeat_interleave(2, dim=1), values.repeat_interleave(2, dim=1), *args, **kwargs)


def repeated(model, input_ids, attention_mask):
    cache = right(model, input_ids, attention_mask)
    for place, layer in enumerate(cache.layers):
        other = RepeatedLayer()
        other.update(layer.keys, layer.values)
        cache.layers[place] = other
    return cache


def moved(model, input_ids, attention_mask):
    cache, tokens = right(model, input_ids, attention_mask), input_ids.shape[1]
    for layer in cache.layers:
        for head in range(layer.keys.shape[1]):
            back = torch.arange(KEPT) - positions(tokens, head)
            cosine, sine = model.model.rotary_emb(layer.values, back.unsqueeze(0))
            layer.keys[:, head] = turned(layer.keys[:, head], cosine, sine)
    return cache


def twice(model, input_ids, attention_mask):
    cache = right(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = (torch.cat([one, one[:, :, :1]], dim=2) for one in (layer.keys, layer.values))
    return cache


def without_sinks(model, input_ids, attention_mask):
    cache = right(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, SINKS:], layer.values[:, :, SINKS:]
    return cache


def without_window(model, input_ids, attention_mask):
    cache = right(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :-RECENT], layer.values[:, :, :-RECENT]
    return cache


def shuffled(model, input_ids, attention_mask):
    cache = right(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.flip(2), layer.values.flip(2)
    return cache


def in_parts(model, input_ids, attention_mask):
    cache = DynamicCache()
    for start in range(0, input_ids.shape[1], 16):
        part = slice(start, start + 16)
        model(input_ids=input_ids[:, part], attention_mask=attention_mask[:, : start + 16],
              position_ids=places(attention_mask)[:, part], past_key_values=cache)
    return gathered(cache, attention_mask)


class StreamingLayer(DynamicLayer):
    def update(self, keys, values, *args, **kwargs):
        keys, values = super().update(keys, values, *args, **kwargs)
        if keys.shape[2] > SINKS + RECENT:
            self.keys, self.values = (torch.cat([one[:, :, :SINKS], one[:, :, -RECENT:]], dim=2)
                                      for one in (keys, values))
        return keys, values


class Streaming(Cache):
    def __init__(self):
        super().__init__(layers=[StreamingLayer() for _ in range(3)])


def nothing(model, input_ids, attention_mask):
    pass


def breaks(model, input_ids, attention_mask):
    raise ValueError("no such thing\\nand more lines")


def alone_only(model, input_ids, attention_mask):
    if len(input_ids) > 1:
        raise NotImplementedError("one prompt at a time")
    return right(model, input_ids, attention_mask)
"""
KEPT, SINKS, RECENT = 20, 4, 8


def record(folder: Path) -> dict[str, Any]:
    """Audit each by the command, some with losses, and positions that another program kept."""
    (folder / "planted.py").write_text(PLANTED)
    model = tiny_model(folder / "model")
    data = prompts(folder / "prompts.jsonl", 2, sentences=1)
    asked: list[Any] = ["--model", model, "--dataset", data, "--steps", 3, "--format", "svg", "--json"]
    found: dict[str, Any] = {}

    def audit(name: str, eviction: Any, *more: Any) -> None:
        ran = run("audit", eviction, *asked, *more, "-o", folder / name)
        found[f"{name}/code"] = ran.code
        found.update(leaves(ran.document(), name, folder))
        found.update(below(f"{name}/figure", ran.figures))
        if (folder / name).exists():
            found.update(below(f"{name}/files", left(folder, folder / name, (".svg",))))

    for name in NAMES:
        audit(name, f"{folder / 'planted.py'}:{name}", "--no-loss")
    for name in ("right", "swapped_values", "Streaming"):
        audit(f"{name} with losses", f"{folder / 'planted.py'}:{name}", "--samples", 2)
    audit("option", f"{folder / 'planted.py'}:swapped_values(layer=0)", "--no-loss", "--situation", "single")
    loaded = pk.load_model(str(model))
    prompt = next(iter(pk.load_prompts(str(data), loaded, samples=1)))
    kept = [[_positions(len(prompt.token_ids), head) for head in range(2)] for _ in range(3)]
    positions = folder / "kept.json"
    positions.write_text(json.dumps({"token_ids": list(map(int, prompt.token_ids)), "kept": kept}))
    audit("positions", positions, "--no-loss")
    arrays = {f"layer_{layer}_head_{head}": one for layer, sets in enumerate(kept) for head, one in enumerate(sets)}
    np.savez(folder / "kept.npz", token_ids=prompt.token_ids, **arrays)
    audit("positions of numpy", folder / "kept.npz")
    result = pk.audit(loaded, prompt, folder / "kept.npz", steps=2, losses=False, progress=False)
    found["from a script"] = [result.verdict, result.exit_code, plain(folder)(result.conclusion())]
    return found


def _positions(tokens: int, head: int) -> list[int]:
    between = torch.arange(SINKS, tokens - RECENT)
    chosen = between[torch.linspace(head, len(between) - 1, KEPT - SINKS - RECENT).round().long()]
    return [*range(SINKS), *chosen.tolist(), *range(tokens - RECENT, tokens)]
