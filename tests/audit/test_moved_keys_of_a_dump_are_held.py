"""Entries are dropped and the keys of the others rotated to gap-free positions: right ways are exact, wrong ones named.

A cache server drops tokens, one set for all layers and heads, and rotates the keys that stay from their tokens'
positions to 0, 1, …, so that decoding goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump, write_dump
from tests.audit.dumped import TOKENS, entries, model

IDS = TOKENS["a"]
KEPT = torch.tensor([0, 1, 2, 3, *range(10, len(IDS), 2)])
Move = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""`(layer, keys, values)` -> keys and values (kv_head, entry, d_head) as the server keeps them."""


def turned(vectors: Tensor, positions: Tensor, pairs_apart: int) -> Tensor:
    """Vectors (kv_head, entry, dim) rotated by positions, pair by pair; by complex numbers, in float64."""
    size = vectors.shape[-1]
    first = [i for i in range(size) if not i // pairs_apart % 2]
    second = [i + pairs_apart for i in first]
    rates = 10000.0 ** (-2 * torch.arange(len(first), dtype=torch.float64) / size)
    turns = torch.polar(torch.ones(()).double(), positions.double().unsqueeze(-1) * rates)
    both = torch.complex(vectors[..., first].double(), vectors[..., second].double()) * turns
    found = torch.empty_like(vectors)
    found[..., first], found[..., second] = both.real.float(), both.imag.float()
    return found


TO_CACHE = torch.arange(len(KEPT)) - KEPT


def mended(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return turned(keys, TO_CACHE, keys.shape[-1] // 2), values


def left(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys, values


def wrong_way(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return turned(keys, -TO_CACHE, keys.shape[-1] // 2), values


def neighbours(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return turned(keys, TO_CACHE, 1), values


def forgotten(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return (keys, values) if layer == 1 else mended(layer, keys, values)


def fused(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Key and value beside each other, rotated as if they were one key of twice the size."""
    both = turned(torch.cat([keys, values], dim=-1), TO_CACHE, keys.shape[-1])
    return tuple(both.split(keys.shape[-1], dim=-1))  # type: ignore[return-value]


def audited(folder: Path, move: Move) -> DumpAudit:
    def layers() -> Iterator[dict[str, Tensor]]:
        for layer, (keys, values) in enumerate(entries()["a"]):
            own = move(layer, keys[:, KEPT], values[:, KEPT])
            yield {"keys.a": own[0].contiguous(), "values.a": own[1].contiguous(), "positions.a": KEPT}

    path = write_dump(folder, [{"id": "a", "token_ids": IDS}], layers(), kv_heads=2, head_size=8)
    return audit_dump(model(), read_dump(path))


@pytest.mark.parametrize(("move", "positions"), [(mended, "in-cache"), (left, "original")])
def test_keys_at_their_places_or_at_their_tokens_are_exact(move: Move, positions: str, tmp_path: Path) -> None:
    result = audited(tmp_path / "dump", move)
    assert result.verdict == "exact", result.summary
    assert [request.positions for request in result.requests] == [positions]
    assert ("keys stand at their places in the cache" in result.summary) == (positions == "in-cache")
    assert [loss.name for loss in result.losses][0] == "its kept sets"


@pytest.mark.parametrize(
    ("move", "kind", "words", "layers"),
    [
        (wrong_way, "rotation", "keys rotated, each by a number of positions of its own", [0, 1, 2]),
        (neighbours, "rotation", "keys rotated with neighbouring components as pairs", [0, 1, 2]),
        (forgotten, "rotation", "keys rotated, each by a number of positions of its own", [1]),
        (fused, "unknown", "entries of no token of the dump", [0, 1, 2]),
    ],
)
def test_a_wrong_rotation_is_named(move: Move, kind: str, words: str, layers: list[int], tmp_path: Path) -> None:
    result = audited(tmp_path / "dump", move)
    assert result.verdict == "differs"
    assert {(fault.kind, fault.what) for fault in result.faults} == {(kind, words)}, result.faults
    assert sorted({layer for fault in result.faults for layer in fault.layers}) == layers
