"""Large dumps are read layer by layer, decoded tokens are no fault, moved keys are held."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_entries import Entries, EntryDistances, Limits
from perturbkv.auditing.dumps.dump_file import read_dump, write_dump
from perturbkv.datasets.needle import sentences
from tests.audit.dumped import TOKENS, entries, model

LAYERS, BLOCKS, BLOCK, MIB = 16, 131_072, 4, 2**20
LAYER_MIB = 2 * BLOCKS * BLOCK * 2 * 8 * 4 // MIB
AUDIT = """
import sys
from pathlib import Path
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump
from tests.support.models import tiny_adapter

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

adapter = tiny_adapter("llama", 4, 2, layers=16)
audit_dump(adapter, read_dump(Path(sys.argv[1])))
before = peak()
result = audit_dump(adapter, read_dump(Path(sys.argv[2])))
print(result.verdict, (peak() - before) // 1024)
"""


def write(folder: Path, blocks: int) -> Path:
    from transformers import DynamicCache

    from tests.support.models import tiny_adapter, token_ids

    adapter, ids, cache = tiny_adapter("llama", 4, 2, layers=LAYERS), token_ids(30), DynamicCache()
    with torch.inference_mode():
        adapter.model(torch.tensor([ids]), past_key_values=cache)
    table = [blocks - 1 - index for index in range(-(-len(ids) // BLOCK))]

    def layers() -> Iterator[dict[str, Tensor]]:
        for layer in cache.layers:
            both = torch.zeros(2, blocks, BLOCK, 2, 8)
            for kind, part in enumerate((layer.keys[0], layer.values[0])):
                for place in range(len(ids)):
                    both[kind, table[place // BLOCK], place % BLOCK] = part[:, place]
            yield {"cache": both}

    request = {"id": "a", "token_ids": ids, "blocks": table}
    return write_dump(
        folder, [request], layers(), kv_heads=2, head_size=8, block_size=BLOCK, layout="kv block token head dim"
    )


@pytest.mark.slow
def test_memory_grows_with_a_layer(tmp_path: Path) -> None:
    small, large = write(tmp_path / "small", 8), write(tmp_path / "large", BLOCKS)
    assert sum(file.stat().st_size for file in large.iterdir()) >= LAYERS * LAYER_MIB * MIB == 1024 * MIB
    done = subprocess.run(
        [sys.executable, "-c", AUDIT, small, large], capture_output=True, text=True, check=True
    ).stdout.split()
    assert done[0] == "exact"
    assert LAYER_MIB <= int(done[1]) < 6 * LAYER_MIB


@pytest.mark.parametrize(("floors", "differ"), [(0.8, 0), (2.5, 16)])
def test_a_block_may_be_two_floors_away_where_all_others_are_equal(floors: float, differ: int) -> None:
    limits = Limits.of_layer((1.0, 1.0), (0.0, 0.0), 17)
    zeros, positions = torch.zeros(1, 48, 4), torch.arange(48)[None]
    distance = torch.zeros(1, 48)
    distance[:, 32:] = floors
    entries = Entries(zeros, zeros, positions, torch.full((48,), -1))
    both = torch.stack([distance, zeros[..., 0]])
    measured = EntryDistances(both, torch.ones(1, 48, dtype=torch.bool), torch.ones_like(both))
    assert int(limits.differing_entries(entries, measured).any(dim=0).sum()) == differ


@pytest.mark.slow
@pytest.mark.real_model
def test_a_cache_that_transformers_decoded_is_exact(tmp_path: Path) -> None:
    model = pk.load_model("smollm2-135m-q4_1")
    ids = list(pk.Prompt.from_text(" ".join(sentences()[20:24]), model).token_ids)[:80]
    cache = DynamicCache()
    with torch.inference_mode():
        logits = model.model(torch.tensor([ids]), past_key_values=cache).logits
        for _ in range(48):
            ids.append(int(logits[0, -1].argmax()))
            logits = model.model(torch.tensor([ids[-1:]]), past_key_values=cache).logits
    layers = [{"keys.a": layer.keys[0].clone(), "values.a": layer.values[0].clone()} for layer in cache.layers]
    path = pk.write_dump(tmp_path / "dump", [{"id": "a", "token_ids": ids}], layers, kv_heads=3, head_size=64)
    result = pk.audit_dump(model, path, progress=False)
    assert result.verdict == "exact", result.summary


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
