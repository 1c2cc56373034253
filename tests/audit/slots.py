"""Slot files of a made-up llama.cpp: written here, from the tiny model's entries, apart from the reader under test."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import hadamard
from transformers import DynamicCache

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.llamacpp import read_slot
from perturbkv.models.adapter import Adapter
from tests.support.models import tiny_adapter, token_ids

LAYERS, SIZE = 3, 64
IDS = token_ids(45, seed=5)
Rows = NDArray[np.float32]
"""Keys or values (token, head, component)."""
Damage = Callable[[int, Rows, Rows], None]
"""`(layer, keys, values)`: changes the model's entries in place."""


@cache
def model(family: str = "llama", kv_heads: int = 2) -> Adapter:
    return tiny_adapter(family, 4, kv_heads, layers=LAYERS, d_head=SIZE)


@cache
def entries(family: str = "llama", kv_heads: int = 2) -> list[tuple[Rows, Rows]]:
    """The plain model's keys and values of every layer."""
    kept = DynamicCache()
    with torch.inference_mode():
        model(family, kv_heads).model(torch.tensor([IDS]), past_key_values=kept)
    return [tuple(part[0].transpose(0, 1).numpy() for part in (one.keys, one.values)) for one in kept.layers]


def paired(keys: Rows) -> Rows:
    """The first and second half of each head's components in turns."""
    found = np.empty_like(keys)
    found[..., 0::2], found[..., 1::2] = keys[..., : SIZE // 2], keys[..., SIZE // 2 :]
    return found


def content(rows: Rows, kind: str) -> NDArray[np.uint8]:
    """The bytes (token, byte) of rows (token, number)."""
    return gguf.quantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[kind.upper()]).view(np.uint8)


@dataclass
class Made:
    """A slot file, before it is written."""

    keys: str = "f16"
    values: str = "f16"
    damage: Damage | None = None
    transposed: bool = False
    family: str = "llama"
    kv_heads: int = 2
    version: int = 4
    layers: int = LAYERS
    streams: int = 1
    coded: bool = True
    ids: list[int] = field(default_factory=lambda: list(IDS))
    order: list[int] = field(default_factory=lambda: list(range(len(IDS))))
    after: bytes = b""
    kinds: dict[str, int] = field(default_factory=dict)
    """Name of a type -> the code that is written for it, where it is not ggml's."""

    def write(self, path: Path) -> Path:
        words = [-1, 1, len(self.ids), *self.ids, 0] if self.coded else self.ids
        parts = [b"qsgg", struct.pack("<II", self.version, len(words)), struct.pack(f"<{len(words)}i", *words)]
        parts += [struct.pack("<I", self.streams), *[struct.pack("<I", 0)] * (self.streams - 1)]
        parts += [struct.pack("<I", len(self.order)), *[struct.pack("<iIi", place, 1, 0) for place in self.order]]
        turned = [0 if kind in ("f32", "f16", "bf16") else SIZE for kind in (self.keys, self.values)]
        parts.append(struct.pack("<IIII", self.transposed, self.layers, *turned))
        known = [[part.copy() for part in both] for both in entries(self.family, self.kv_heads)]
        for layer, (keys, values) in enumerate(known):
            if self.damage is not None:
                self.damage(layer, keys, values)
        for kind, name in enumerate((self.keys, self.values)):
            for both in (known * self.layers)[: self.layers]:
                rows = both[kind]
                if kind == 0 and self.family == "llama":
                    rows = paired(rows)
                if turned[kind]:
                    rows = rows @ (hadamard(SIZE) / np.sqrt(SIZE)).astype(np.float32)
                parts.append(self._part(rows[self.order].reshape(len(self.order), rows[0].size), name, kind == 1))
        path.write_bytes(b"".join([*parts, self.after]))
        return path

    def _part(self, rows: Rows, name: str, values: bool) -> bytes:
        written, code = content(rows, name), self.kinds.get(name, int(gguf.GGMLQuantizationType[name.upper()]))
        if not (values and self.transposed):
            return struct.pack("<iQ", code, written.shape[1]) + written.tobytes()
        each = written.shape[1] // rows.shape[1]
        turned = written.reshape(len(rows), rows.shape[1], each).swapaxes(0, 1)
        return struct.pack("<iII", code, each, rows.shape[1]) + turned.tobytes()

    def audited(self, path: Path) -> DumpAudit:
        adapter = model(self.family, self.kv_heads)
        return audit_dump(adapter, read_slot(self.write(path), adapter.config), losses=False)


def config(**changes: Any) -> Any:
    """The tiny model's configuration, changed."""
    made = model().config.__class__(**{**model().config.to_dict(), **changes})
    return made
