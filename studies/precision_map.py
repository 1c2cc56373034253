"""Which layers' keys and values need their bits: what each loses alone, and which to keep in 16 bits.

A *part* is the keys or the values of one layer. On the first half of the prompts every part alone is stored in few bits
(all entries but the last, under the tokens of the full run's text), beside all keys, all values and everything. The
parts are ranked by the mean KL of the next token that each costs alone. On the other half the parts at the top of that
list stay in 16 bits and everything else goes into few bits, beside as many parts of the outermost layers, as many drawn
at random, and none: the same number of bytes each. Two more rows tell keys with and without the bias of their
projection apart: it is taken off each key, at its position, before it is rounded (3 bits by token), and put back.

What is decided, before any number was seen (KL: mean over a sample's steps; 95 % intervals over n samples):

1. *Parts add up* where the ratio of the sum of all parts' KL to that of everything has its interval within 0.8 and
   1.25; they *do not* where it lies outside of that; else undecided. Likewise of the last layer's drift (L1).
2. *The list is better than the outermost layers*, or worse, where the interval of the ratio of both KL (sums over the
   judged samples) lies below 1, or above; likewise than parts drawn at random.
3. *Outer keys carry the loss* (ggml-org/llama.cpp#21385 says it of Qwen2.5) where the keys of the first and the last
   layer hold more than half of what all layers' keys cost alone: the interval of that share lies above ½; below ½ it is
   contradicted.
4. *The bias is why* where taking it off before rounding at least halves the KL: the interval of the ratio lies below ½;
   above ½ it is contradicted. Said of models whose key projections have a bias.

    python studies/precision_map.py --model qwen2.5-coder-0.5b-q4_k_m --dataset multi_news --data-dir … --samples 24
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import common
import numpy as np
import torch
from common import estimate, interval_text, side_of
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from torch import Tensor
from transformers import DynamicCache

import perturbkv as pk

KINDS = ("keys", "values")
FORMATS = ("rotated-3", "q4_0")
SHARES = (4, 8, 12)
"""Numbers of parts that stay in 16 bits: keys and values of the first and last one, two, three layers."""
ADD_UP = (0.8, 1.25)
WORDS = {1: "worse", -1: "better", 0: "undecided"}
Part = tuple[int, str]
"""A layer, and keys or values."""


def stored(precision: str) -> pk.EvictionConfig:
    """Return the configuration that keeps every entry, all but the last one in this precision."""
    chosen: dict[str, Any] = {"selection": "attention", "granularity": "kv", "window": 1}
    return pk.grid(1.0, precision=precision, **chosen)[0]


def except_for(parts: Sequence[Part], code: str) -> str:
    """Return the precision with these parts in 16 bits and everything else as the code says."""
    kinds = {layer: [kind for kind in KINDS if (layer, kind) in parts] for layer in sorted({own for own, _ in parts})}
    rules = [f"layers {layer}: {', '.join(f'{kind}=16' for kind in own)}" for layer, own in kinds.items()]
    return "; ".join([f"keys={code}, values={code}", *rules])


def map_configs(layers: Sequence[int], code: str) -> dict[Any, pk.EvictionConfig]:
    """Return what is stored in few bits, a part or a text -> the configuration."""
    parts = {(layer, kind): stored(f"layers {layer}: {kind}={code}") for layer in layers for kind in KINDS}
    whole = {kind: stored(f"quantise({kind}={code}, {other}=16)") for kind, other in (KINDS, KINDS[::-1])}
    return {**parts, **whole, "everything": stored(f"quantise(bits={code})")}


def rounded_keys(model: Any, input_ids: Tensor, attention_mask: Tensor, without_bias: bool = False) -> DynamicCache:
    """Return the cache with keys in 3 bits by token, with or without their projection's bias in what is rounded."""
    cache = DynamicCache()
    model(input_ids, None, None, cache)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
    for layer, stored_layer in zip(model.model.layers, cache.layers, strict=True):
        keys, taken = stored_layer.keys, torch.zeros_like(stored_layer.keys)
        bias = layer.self_attn.k_proj.bias
        if without_bias and bias is not None:
            cosine, sine = model.model.rotary_emb(keys, positions)
            own = bias.view(keys.shape[1], 1, -1).expand(keys.shape[1:])
            first, second = own.chunk(2, dim=-1)
            taken = (own * cosine[0] + torch.cat([-second, first], dim=-1) * sine[0]).unsqueeze(0)
        rest = keys - taken
        low, high = rest.amin(dim=-1, keepdim=True), rest.amax(dim=-1, keepdim=True)
        scale = ((high - low) / 7).clamp(min=1e-8)
        stored_layer.keys = ((rest - low) / scale).round() * scale + low + taken
    return cache


def with_bias_configs() -> dict[str, pk.EvictionConfig]:
    """Return the configurations of keys that are rounded with and without their bias."""
    makers = {"with the bias": False, "without the bias": True}
    names = {text: pk.external(partial(rounded_keys, without_bias=without), f"keys-{text.split()[0]}-bias")
             for text, without in makers.items()}  # fmt: skip
    return {text: pk.grid(1.0, policy=name)[0] for text, name in names.items()}


class Losses:
    """KL and last layer's drift over its norm of each configuration, (sample,) each: means over measured steps."""

    def __init__(self, trace: pk.Trace, configs: Mapping[Any, pk.EvictionConfig]) -> None:
        self.samples = int(trace.ok.sum())
        kl = np.nanmean(trace.get("logit_kl", "precision_map").astype(float), axis=-1)
        drift = trace.get("hidden_drift_l1", "precision_map")[..., -1].astype(float)
        norm = trace.get("hidden_norm", "precision_map")[..., -1].astype(float)
        relative = np.nanmean(drift / norm[:, None], axis=-1)
        held, full = (trace.get(f"{name}_bytes", "precision_map").astype(float) for name in ("held", "full"))
        index = {name: trace.config_index(config.label()) for name, config in configs.items()}
        self.kl = {name: kl[:, place] for name, place in index.items()}
        self.drift = {name: relative[:, place] for name, place in index.items()}
        self.bytes = {name: float((held[:, place] / full).mean()) for name, place in index.items()}

    def ratio(self, values: Mapping[Any, Any], first: Sequence[Any], second: Sequence[Any]) -> tuple[float, Any]:
        """Return Σ over the names `first` / Σ over `second`, summed over samples, with its interval."""
        above, below = (np.sum([values[name] for name in names], axis=0) for names in (first, second))
        return float(above.sum() / below.sum()), pk.stats.intervals.of_ratio(above, below)


def ranked(losses: Losses, layers: Sequence[int]) -> list[Part]:
    """Return all parts, that with the largest mean KL alone first."""
    parts = [(layer, kind) for layer in layers for kind in KINDS]
    return sorted(parts, key=lambda part: -losses.kl[part].mean())


def judged_lists(order: Sequence[Part], layers: Sequence[int], count: int, seed: int) -> dict[str, list[Part]]:
    """Return name -> `count` parts that stay in 16 bits."""
    outer = [layer for pair in zip(layers, reversed(layers), strict=True) for layer in pair][: count // 2]
    drawn = random.Random(seed).sample(sorted(order), count)
    return {"list": list(order[:count]), "outermost": [(layer, kind) for layer in outer for kind in KINDS],
            "random": drawn}  # fmt: skip


def add_up(ratio: tuple[float, Any]) -> str:
    """Return whether parts add up, by rule 1."""
    low, high = (ratio[1].low, ratio[1].high) if ratio[1] is not None else (0.0, np.inf)
    if low >= ADD_UP[0] and high <= ADD_UP[1]:
        return "add up"
    return "do not add up" if high < ADD_UP[0] or low > ADD_UP[1] else "undecided"


def half(estimated: tuple[float, Any], below: bool) -> str:
    """Return whether a share lies above ½ (rule 3), or a ratio below it (rule 4)."""
    side = side_of(estimated[1], 0.5)
    return "undecided" if not side else "supported" if (side < 0) == below else "contradicted"


def layer_words(parts: Sequence[Part]) -> str:
    """Return the layers of a list as an engine is told them that skips whole layers, first come first."""
    wanted = list(dict.fromkeys(layer for layer, _ in parts))[: max(1, len(parts) // 2)]
    return " ".join(str(layer) for layer in sorted(wanted))


def draw(maps: Mapping[str, Losses], layers: Sequence[int], judged: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw each format's map, KL of a part alone over layers, and what the lists cost on the judged samples."""
    figure = common.page_figure(50 * len(maps) + 10)
    panels = figure.subplots(len(maps), 2, squeeze=False, width_ratios=(2, 1))
    for (left, right), (code, losses) in zip(panels, maps.items(), strict=True):
        values = np.array([[losses.kl[layer, kind].mean() for layer in layers] for kind in KINDS])
        image = left.imshow(values, aspect="auto", cmap="cividis", norm=LogNorm(max(values.min(), 1e-9), values.max()))
        left.set(yticks=range(2), yticklabels=KINDS, title=f"{code}: KL of the part alone, nat", xlabel="layer")
        left.set(xticks=range(0, len(layers), 4), xticklabels=[str(layer) for layer in layers[::4]])
        figure.colorbar(image, ax=left, format=lambda value, _: common.tick_text(value))
        for name in ("list", "outermost", "random"):
            rows = [row for row in judged if row["format"] == code and row["kept in 16 bits"] == name]
            right.plot(
                [row["parts"] for row in rows], [row["kl"] for row in rows], marker="o", markersize=3, label=name
            )
        none = next((row["kl"] for row in judged if row["format"] == code and row["kept in 16 bits"] == "none"), None)
        if none is not None:
            right.axhline(none, color="0.35", linestyle="--", linewidth=0.9, label="none")
        common.plain_log(right, "y")
        right.set(xlabel="parts in 16 bits", xticks=SHARES, title="on other samples, nat")
    figure.legend(*panels[0, 1].get_legend_handles_labels(), loc="outside upper right", ncols=4)
    return figure


def study(asked: argparse.Namespace) -> None:
    """Measure both halves of the prompts; print the tables, write document and picture."""
    model = common.load_model(asked)
    layers, every, codes = list(model.layer_indices), common.prompts(asked, model), asked.format or FORMATS
    first, other = every[::2], every[1::2]
    settings = pk.Settings(steps=asked.steps, kept=False)
    maps: dict[str, Losses] = {}
    configs = {code: map_configs(layers, code) for code in codes}
    biases = with_bias_configs() if model.model.model.layers[0].self_attn.k_proj.bias is not None else {}
    chosen = [config for own in configs.values() for config in own.values()] + list(biases.values())
    trace = common.measure(asked, "map.h5", model, first, chosen, settings)
    for code, own in configs.items():
        maps[code] = Losses(trace, own)
    orders = {code: ranked(losses, layers) for code, losses in maps.items()}
    counts = [count for count in SHARES if count < 2 * len(layers)]
    lists = {(code, count, name): parts for code in codes for count in counts
             for name, parts in judged_lists(orders[code], layers, count, asked.seed).items()}  # fmt: skip
    kept = {key: stored(except_for(parts, key[0])) for key, parts in lists.items()}
    kept |= {(code, 0, "none"): configs[code]["everything"] for code in codes}
    judged = Losses(common.measure(asked, "judged.h5", model, other, kept.values(), settings), kept)
    document = {**common.trace_summary(trace), **report(maps, orders, lists, judged, layers)}
    if biases:
        document["bias"] = report_bias(Losses(trace, biases), model)
    common.save(asked, document, draw(maps, layers, document["judged"]))


def report(
    maps: Mapping[str, Losses],
    orders: Mapping[str, Sequence[Part]],
    lists: Mapping[tuple[str, int, str], Sequence[Part]],
    judged: Losses,
    layers: Sequence[int],
) -> dict[str, Any]:
    """Print rules 1 to 3 and the lists; return them as a document."""
    rows, shares = [], []
    for code, losses in maps.items():
        parts = [(layer, kind) for layer in layers for kind in KINDS]
        outer = [(layer, "keys") for layer in (layers[0], layers[-1])]
        keys = [part for part in parts if part[1] == "keys"]
        summed = {name: losses.ratio(values, parts, ["everything"]) for name, values in
                  (("KL", losses.kl), ("drift", losses.drift))}  # fmt: skip
        share, against = losses.ratio(losses.kl, outer, keys), losses.ratio(losses.kl, ["keys"], ["values"])
        shares.append({
            "format": code, "KL": float(losses.kl["everything"].mean()), "bytes": losses.bytes["everything"],
            "parts / everything, KL": f"{interval_text(*summed['KL'])} {add_up(summed['KL'])}",
            "drift": f"{interval_text(*summed['drift'])} {add_up(summed['drift'])}",
            "keys / values": interval_text(*against),
            "outer keys / all keys": f"{interval_text(*share)} {half(share, below=False)}",
        })  # fmt: skip
    for (code, count, name), kept in lists.items():
        own = judged.ratio(judged.kl, [(code, count, name)], [(code, 0, "none")])
        beside = judged.ratio(judged.kl, [(code, count, "list")], [(code, count, name)])
        row = {"format": code, "parts": count, "kept in 16 bits": name, "bytes": judged.bytes[code, count, name],
               "kl": float(judged.kl[code, count, name].mean()), "of none": interval_text(*own)}  # fmt: skip
        row |= estimate("list_over", beside)
        row["list / this"] = "" if name == "list" else f"{interval_text(*beside)} {WORDS[side_of(beside[1], 1)]}"
        rows.append({**row, "skip_layers": layer_words(kept)})
    none = [{"format": code, "parts": 0, "kept in 16 bits": "none", "bytes": judged.bytes[code, 0, "none"],
             "kl": float(judged.kl[code, 0, "none"].mean()), "of none": "1", "list / this": "", "skip_layers": ""}
            for code in maps]  # fmt: skip
    n = next(iter(maps.values())).samples
    common.show(f"what few bits cost, n = {n}", shares)
    shown = ("format", "parts", "kept in 16 bits", "bytes", "kl", "of none", "list / this")
    common.show(f"on other samples, n = {judged.samples}", [{name: row[name] for name in shown} for row in none + rows])
    for code, order in orders.items():
        top = ", ".join(f"{kind} of {layer}" for layer, kind in order[:8])
        skipped = [f"{row['parts']} parts: {row['skip_layers']}" for row in rows
                   if row["format"] == code and row["kept in 16 bits"] == "list"]  # fmt: skip
        print(f"{code}, the first of the list: {top}.\n  vLLM, --kv-cache-dtype-skip-layers: {'; '.join(skipped)}.")
        print(f"  llama.cpp: {cache_types(maps[code])}.")
    named = {code: [f"{layer} {kind}" for layer, kind in order] for code, order in orders.items()}
    return {"shares": shares, "judged": none + rows, "order": named}


def cache_types(losses: Losses) -> str:
    """Return which of keys and values llama.cpp should keep in 16 bits, where it stores one of them in few."""
    ratio, ends = losses.ratio(losses.kl, ["keys"], ["values"])
    side = side_of(ends, 1)
    told = interval_text(ratio, ends)
    if not side:
        return f"neither --cache-type-k f16 nor --cache-type-v f16 is decided for (keys / values {told})"
    return f"--cache-type-{'k' if side > 0 else 'v'} f16 first (keys / values {told})"


def report_bias(losses: Losses, model: Any) -> dict[str, Any]:
    """Print rule 4, and how large the biases are; return them as a document."""
    ratio = losses.ratio(losses.kl, ["without the bias"], ["with the bias"])
    norms = [float(layer.self_attn.k_proj.bias.detach().float().norm()) for layer in model.model.model.layers]
    first, last, median = norms[0], norms[-1], float(np.median(norms))
    print(f"keys in 3 bits by token, KL without the bias / with it: {interval_text(*ratio)}: {half(ratio, below=True)}")
    print(f"norm of the bias: {first:.3g} in the first layer, {last:.3g} in the last, {median:.3g} in the median")
    return {**estimate("ratio", ratio), "norms": norms, **{name: float(values.mean()) for name, values in
                                                            losses.kl.items()}}  # fmt: skip


if __name__ == "__main__":
    parser = common.options(__doc__ or "", samples=24)
    parser.add_argument("--format", action="append", help=f"codes of a precision [{', '.join(FORMATS)}]")
    parser.add_argument("--steps", type=int, default=8, help="decode steps along the full run's text [%(default)s]")
    common.main(study, parser)
