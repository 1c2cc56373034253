"""Dumps of made-up engines, right ones and damaged ones: blocks of two requests and of one that has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump, write_dump
from perturbkv.models.adapter import Adapter
from tests.support.models import tiny_adapter, token_ids

BLOCK, BLOCKS = 8, 24
PREFIX = token_ids(16, seed=1)
TOKENS = {"a": PREFIX + token_ids(37, seed=2), "b": PREFIX + token_ids(25, seed=3), "old": token_ids(30, seed=4)}
Layer = tuple[Tensor, Tensor]
"""Keys and values (block, token, head, dim)."""
Damage = Callable[[int, Tensor, Tensor, dict[str, list[int]]], None]
"""`(layer, keys, values, tables)`: changes blocks in place."""


@cache
def model(kv_heads: int = 2) -> Adapter:
    return tiny_adapter("llama", 4, kv_heads, layers=3)


@cache
def entries(kv_heads: int = 2) -> dict[str, list[Layer]]:
    """The plain model's keys and values (kv_head, entry, d_head) of every request, in each layer."""
    adapter, found = model(kv_heads), {}
    with torch.inference_mode():
        for name, ids in TOKENS.items():
            kept = DynamicCache()
            adapter.model(torch.tensor([ids]), past_key_values=kept)
            found[name] = [(layer.keys[0], layer.values[0]) for layer in kept.layers]
    return found


def tables(seed: int = 0) -> dict[str, list[int]]:
    """A block table per request; `b` shares the blocks of the prefix with `a`."""
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    found, first = {}, 0
    for name, ids in TOKENS.items():
        shared = len(PREFIX) // BLOCK if name == "b" else 0
        count = -(-len(ids) // BLOCK) - shared
        found[name] = found["a"][:shared] + order[first : first + count] if shared else order[first : first + count]
        first += count
    return found


def together(keys: Tensor, values: Tensor) -> dict[str, Tensor]:
    """Keys and values in one tensor, `kv block token head dim`."""
    return {"cache": torch.stack([keys, values])}


@dataclass
class Made:
    """A dump of blocks, before it is written."""

    damage: Damage | None = None
    store: Callable[[Tensor, Tensor], dict[str, Tensor]] = together
    layout: str = "kv block token head dim"
    kv_heads: int = 2
    seed: int = 0
    block: int = BLOCK
    told: Callable[[dict[str, list[int]]], dict[str, list[int]]] = dict
    header: dict[str, Any] = field(default_factory=dict)

    def layers(self, blocks: dict[str, list[int]]) -> Iterator[dict[str, Tensor]]:
        known = entries(self.kv_heads)
        for layer, (some, _) in enumerate(known["a"]):
            heads, size = some.shape[0], some.shape[2]
            noise = torch.Generator().manual_seed(layer)
            keys, values = (torch.randn(BLOCKS, BLOCK, heads, size, generator=noise) for _ in range(2))
            for name, table in blocks.items():
                for place in range(len(TOKENS[name])):
                    block, slot = table[place // BLOCK], place % BLOCK
                    keys[block, slot], values[block, slot] = (part[:, place] for part in known[name][layer])
            if self.damage is not None:
                self.damage(layer, keys, values, blocks)
            yield self.store(keys, values)

    def write(self, folder: Path) -> Path:
        blocks = tables(self.seed)
        told = self.told(blocks)
        requests = [
            {"id": name, "token_ids": list(ids), "blocks": told[name], **({"finished": True} if name == "old" else {})}
            for name, ids in TOKENS.items()
        ]
        adapter = model(self.kv_heads)
        return write_dump(
            folder, requests, self.layers(blocks), kv_heads=self.kv_heads, head_size=adapter.d_key,
            block_size=self.block, layout=self.layout, engine="made-up 1.0", **self.header,
        )  # fmt: skip

    def audited(self, folder: Path) -> DumpAudit:
        return audit_dump(model(self.kv_heads), read_dump(self.write(folder)))
