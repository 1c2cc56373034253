"""What the audit says of rounded caches, right ones and ones with planted faults.

`PYTHONPATH=. python docs/audit-threshold/rounding.py` audits them, of two models with random weights, and `… report`
counts the verdicts in docs/results/audit.md.

Codes are integers of 8, 4, 3 and 2 bits with a scale per entry (from the largest magnitude, or from the range) or per
channel, the same after a random rotation, the best levels of a normal distribution after one, and e4m3.

The rule, written before the rows: no right cache is `differs`, and a fault is never `exact` nor `lossy`.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

import perturbkv as pk
from perturbkv.models.forward import run_with_cache
from tests.audit import planted
from tests.audit.test_every_fault_has_its_kind_and_place import FAULTS
from tests.audit.test_faults_under_rounding_are_found import FOUND
from tests.audit.test_planted_faults_are_told_apart import model
from tests.support.models import token_ids

ROWS = Path(__file__).parent / "rounding.csv"
MODELS = ("llama", "qwen3", "phi3")
RIGHT = ("right", "whole", "without_sinks", "on write")
Codec = Callable[[Tensor], Tensor]


def by_magnitude(vectors: Tensor, bits: int) -> Tensor:
    """Round vectors to integers with a scale each, from the largest magnitude."""
    scale = vectors.abs().amax(dim=-1, keepdim=True).clamp(min=1e-9) / (2 ** (bits - 1) - 1)
    return (vectors / scale).round() * scale


def by_range(vectors: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Round vectors to integers with a scale per vector, or with `dim` −2 per channel, from the range."""
    low, high = vectors.amin(dim=dim, keepdim=True), vectors.amax(dim=dim, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).clamp(min=1e-9)
    return ((vectors - low) / scale).round() * scale + low


@cache
def rotation(width: int) -> Tensor:
    """Return a random rotation."""
    return torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)))[0]


def rotated(vectors: Tensor, bits: int) -> Tensor:
    """Round vectors by magnitude after a rotation."""
    turn = rotation(vectors.shape[-1]).to(vectors.dtype)
    return by_magnitude(vectors @ turn, bits) @ turn.T


@cache
def levels(bits: int) -> Tensor:
    """Return the levels of least squared error for a normal distribution, by Lloyd's iterations."""
    numbers = torch.randn(400_000, generator=torch.Generator().manual_seed(3)).sort().values
    found = torch.erfinv((torch.arange(2**bits) + 0.5) / 2 ** (bits - 1) - 1) * 2**0.5
    for _ in range(200):
        cell = torch.bucketize(numbers, (found[1:] + found[:-1]) / 2)
        count = torch.bincount(cell, minlength=2**bits)
        sums = torch.zeros(2**bits).index_add_(0, cell, numbers)
        found = torch.where(count > 0, sums / count.clamp(min=1), found)
    return found


def by_levels(vectors: Tensor, bits: int) -> Tensor:
    """Round vectors to the best levels after a rotation; their norms stay."""
    width = vectors.shape[-1]
    turn, norm = rotation(width).to(vectors.dtype), torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    numbers, best = (vectors / norm) @ turn * width**0.5, levels(bits).to(vectors.dtype)
    nearest = best[(numbers.unsqueeze(-1) - best).abs().argmin(dim=-1)]
    return nearest @ turn.T / width**0.5 * norm


def e4m3(vectors: Tensor, bits: int) -> Tensor:
    """Round vectors to a floating-point type of 8 bits."""
    scale = vectors.abs().amax() / 448
    return (vectors / scale).to(torch.float8_e4m3fn).to(vectors.dtype) * scale


KINDS = {"magnitude": by_magnitude, "range": by_range, "channel": partial(by_range, dim=-2), "rotated": rotated,
         "levels": by_levels}  # fmt: skip
CODECS: dict[str, Codec] = {
    f"{name} {bits}": partial(kind, bits=bits)
    for (name, kind), bits in product(KINDS.items(), (8, 4, 3, 2))
    if bits > 2 or name not in ("magnitude", "rotated")  # of 2 bits the sign alone would be left
} | {"e4m3 8": partial(e4m3, bits=8)}


def afterwards(eviction: Any, codec: Codec) -> Any:
    """Return an eviction whose cache is then rounded."""

    def evict(loaded: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        held = eviction(loaded, input_ids, attention_mask)
        for layer in held.layers:
            layer.keys, layer.values = codec(layer.keys), codec(layer.values)
        return held

    if hasattr(eviction, "decode"):
        evict.decode = eviction.decode  # type: ignore[attr-defined]
    return evict


def on_write(codec: Codec) -> Any:
    """Return a cache that rounds whatever is written."""

    class Layer(DynamicLayer):
        def update(self, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
            return super().update(codec(keys), codec(values), *more, **named)

    def evict(loaded: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        held = Cache(layer_class_to_replicate=Layer)
        run_with_cache(loaded, input_ids, held)
        return held

    return evict


def audited(name: str, eviction: Any, tokens: tuple[int, ...], situation: str) -> Any:
    """Return the audit of an eviction of a tiny model."""
    asked = {"steps": 3, "losses": False, "plain_use": False, "progress": False}
    return pk.audit(model(name), pk.Prompt("p", tokens, 0), eviction, situations=[situation], **asked)


def measured() -> Iterator[tuple[str, ...]]:
    """Yield model, codec, what is audited, verdict and first line."""
    for name, (label, codec) in product(MODELS, CODECS.items()):
        for right, (count, vocabulary, situation) in product(RIGHT, ((60, 256, "block"), (90, 40, "single"))):
            eviction = planted.full if right == "whole" else getattr(planted, right, None)
            made = on_write(codec) if right == "on write" else afterwards(eviction, codec)
            result = audited(name, made, token_ids(count, vocab=vocabulary), situation)
            yield name, label, f"{right}, {count} tokens", result.verdict, "", result.summary
        for fault in FOUND:
            kind, where, layer, *_ = FAULTS[fault]
            made, situation = afterwards(getattr(planted, fault), codec), max(where)
            result = audited(name, made, token_ids(60), situation)
            found = any((one.kind, one.layer) == (kind, layer) for one in result.faults)
            yield name, label, fault, result.verdict, str(found), result.summary


def report() -> None:
    """Print, per number of bits, the verdicts of right caches and of faults, and how many have their kind and layer."""
    right, faults, named = Counter(), Counter(), Counter()
    for _, codec, _, verdict, found, _ in csv.reader(ROWS.open()):
        bits = codec.rpartition(" ")[2]
        (faults if found else right)[bits, verdict] += 1
        named[bits] += found == "True"
    for bits in "8432":
        counts = [{verdict: count for (of, verdict), count in each.items() if of == bits} for each in (right, faults)]
        print(f"{bits} bits: right {counts[0]}; faults {counts[1]}, {named[bits]} with kind and layer")  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1:] == ["report"]:
        report()
    else:
        with ROWS.open("w", newline="") as stream:
            csv.writer(stream).writerows(measured())
