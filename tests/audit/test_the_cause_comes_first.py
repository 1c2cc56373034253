"""The first line of an audit of a dump is the cause: the fault in the lowest layer, with its kind, not what follows.

Faults are planted in what was stored, or in what a made-up engine computes: a plain model whose attention reads the
cache that the fault is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump, write_dump
from perturbkv.cache.entries import rotate_keys
from perturbkv.models.adapter import Adapter
from tests.support.models import tiny_adapter, token_ids

LAYERS, BLOCK, IDS = 4, 8, token_ids(50, seed=5)
Pair = tuple[Tensor, Tensor]
"""Keys and values (kv_head, token, width)."""
Change = Callable[[int, list[Pair]], Pair]
"""`(layer, right)`: what is in a layer instead, given the right entries of all layers."""
NAMES = ("keys", "values", "entries")


def only(parts: str, change: Change) -> Change:
    """The change of keys alone, of values alone, or of both (`entries`)."""

    def chosen(layer: int, right: list[Pair]) -> Pair:
        keys, values = change(layer, right)
        return keys if parts != "values" else right[layer][0], values if parts != "keys" else right[layer][1]

    return chosen


def heads(layer: int, right: list[Pair]) -> Pair:
    return right[layer][0].roll(1, dims=0), right[layer][1].roll(1, dims=0)


def exchanged(layer: int, right: list[Pair]) -> Pair:
    return right[layer][1], right[layer][0]


def next_layer(layer: int, right: list[Pair]) -> Pair:
    return right[(layer + 1) % LAYERS]


def late(layer: int, right: list[Pair]) -> Pair:
    keys, values = right[layer]
    return torch.cat([keys[:, :1], keys[:, :-1]], dim=1), torch.cat([values[:, :1], values[:, :-1]], dim=1)


def scaled(layer: int, right: list[Pair]) -> Pair:
    return right[layer][0] * 1.3, right[layer][1] * 1.3


def turned(layer: int, right: list[Pair]) -> Pair:
    keys, values = right[layer]
    return rotate_keys(keys, torch.full((len(IDS), 1), 5.0) * engine().frequencies), values


def other_base(layer: int, right: list[Pair]) -> Pair:
    keys, values = right[layer]
    pairs = len(engine().frequencies)
    more = 5e5 ** (-torch.arange(pairs) / pairs) - engine().frequencies
    return rotate_keys(keys, torch.arange(len(IDS)).unsqueeze(-1) * more), values


WORDS: dict[str, tuple[Change, str, dict[str, str]]] = {
    "heads": (heads, "head", {name: f"{name} of head 1 in head 0, of head 0 in head 1" for name in NAMES}),
    "exchanged": (exchanged, "swapped", {
        "keys": "values where keys belong", "values": "keys where values belong",
        "entries": "keys where values belong, and values where keys do",
    }),
    "next layer": (next_layer, "layer", {name: f"{name} of layer n + 1 in layer n" for name in NAMES}),
    "late": (late, "shifted", {name: f"{name} of the token 1 position earlier" for name in NAMES}),
    "scaled": (scaled, "scale", {name: f"all {name} multiplied by 1.3" for name in ("keys", "values")}),
    "turned": (turned, "rotation", {"keys": "keys rotated by 5 more positions"}),
    "another base": (other_base, "rotation", {"keys": "keys rotated with base 500,000, the model's is 10,000"}),
}  # fmt: skip
"""Fault -> the change, its kind, and per part what is said first."""
CASES = [(fault, parts) for fault, (_, _, words) in WORDS.items() for parts in words]


def engine() -> Adapter:
    return tiny_adapter("llama", 4, 2, layers=LAYERS)


def right_entries() -> list[Pair]:
    cache = DynamicCache()
    with torch.inference_mode():
        engine().model(torch.tensor([IDS]), past_key_values=cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


class Faulty(DynamicCache):  # type: ignore[misc]
    """A cache that changes what it is given in some layers, and stores it in a type; attention reads what it stores."""

    def __init__(self, change: Change, layers: set[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.change, self.changed, self.dtype, self.known = change, layers, dtype, right_entries()

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.known[layer_idx] = key_states[0], value_states[0]
        new = self.change(layer_idx, self.known) if layer_idx in self.changed else self.known[layer_idx]
        keys, values = (part.to(self.dtype).to(part.dtype).unsqueeze(0) for part in new)
        return super().update(keys, values, layer_idx, *args, **kwargs)


def dumped(entries: list[Pair], folder: Path, dtype: torch.dtype) -> DumpAudit:
    """The audit of a dump of blocks, in reverse order."""
    count = -(-len(IDS) // BLOCK)
    table = list(range(count))[::-1]

    def layers() -> Iterator[dict[str, Tensor]]:
        for pair in entries:
            blocks = torch.zeros(2, count, BLOCK, *pair[0].shape[::2])
            for kind, part in enumerate(pair):
                for token in range(len(IDS)):
                    blocks[kind, table[token // BLOCK], token % BLOCK] = part[:, token]
            yield {"cache": blocks.to(dtype)}

    path = write_dump(
        folder, [{"id": "a", "token_ids": IDS, "blocks": table}], layers(), kv_heads=2, head_size=8, block_size=BLOCK,
        layout="kv block token head dim",
    )  # fmt: skip
    return audit_dump(engine(), read_dump(path), losses=False)


def served(change: Change, layers: set[int], dtype: torch.dtype) -> list[Pair]:
    cache = Faulty(change, layers, dtype)
    with torch.inference_mode():
        engine().model(torch.tensor([IDS]), past_key_values=cache)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


def where(everywhere: bool) -> set[int]:
    return set(range(LAYERS)) if everywhere else {1}


@pytest.mark.parametrize(
    ("fault", "parts", "computed", "everywhere", "dtype"),
    [
        pytest.param(*case, *more, marks=[] if (index + place) % 4 == 0 else [pytest.mark.slow])
        for index, case in enumerate(CASES)
        for place, more in enumerate(product((False, True), (False, True), (torch.float32, torch.bfloat16)))
    ],
)
def test_the_first_line_is_the_cause_in_its_place(
    fault: str, parts: str, computed: bool, everywhere: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    change, kind, words = WORDS[fault]
    faulty, layers = only(parts, change), where(everywhere)
    right = right_entries()
    stored = [faulty(layer, right) if layer in layers else right[layer] for layer in range(LAYERS)]
    found = dumped(served(faulty, layers, dtype) if computed else stored, tmp_path / "dump", dtype)
    first = found.faults[0]
    assert (first.kind, first.what, first.layers[0]) == (kind, words[parts], min(layers)), found.summary
    assert {layer for one in found.faults for layer in one.layers} <= layers, found.summary
    # keys and queries that are all turned alike attend as right ones do: stored or computed is one
    assert bool(found.following) <= (computed or kind == "rotation"), found.summary
