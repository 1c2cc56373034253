"""A wrong scale of 8 bits is found: with its factor where the dump tells it, as unknown where attention read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump, write_dump
from perturbkv.models.adapter import Adapter
from tests.audit.dumped import TOKENS
from tests.support.models import tiny_adapter

IDS, EIGHT, LAYERS, BLOCK = TOKENS["a"], torch.float8_e4m3fn, 5, 8
SCALES = [(0.044, 0.0124), (0.068, 0.0292), (0.027, 0.0196), (0.104, 0.0388), (0.05, 0.0148)]
"""Of keys and of values, by layer."""
Read = Callable[[int], tuple[float, float]]


def model() -> Adapter:
    return tiny_adapter("llama", 4, 2, layers=LAYERS)


class Scaled(DynamicCache):  # type: ignore[misc]
    """A cache in 8 bits, which attention reads with scales that may be others than those it was written with."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.scales, self.kept = read, [[torch.empty(0)] * 2 for _ in range(LAYERS)]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        both = []
        for kind, new in enumerate((key_states, value_states)):
            stored = (new / SCALES[layer_idx][kind]).to(EIGHT)
            self.kept[layer_idx][kind] = stored[0]
            both.append(stored.float() * self.scales(layer_idx)[kind])
        return super().update(both[0], both[1], layer_idx, *args, **kwargs)


def audited(folder: Path, read: Read = SCALES.__getitem__, told: Read = SCALES.__getitem__) -> DumpAudit:
    """Of an engine that reads with some scales, and tells others."""
    adapter, cache, table = model(), Scaled(read), list(range(-(-len(IDS) // BLOCK)))
    with torch.inference_mode():
        adapter.model(torch.tensor([IDS]), past_key_values=cache)

    def layers() -> Iterator[dict[str, Tensor]]:
        for index, kept in enumerate(cache.kept):
            blocks = torch.zeros(2, len(table) * BLOCK, 2, adapter.d_key)
            for kind, part in enumerate(kept):
                blocks[kind, : len(IDS)] = part.float().transpose(0, 1)
            scales = dict(zip(("key_scale", "value_scale"), map(torch.tensor, told(index)), strict=True))
            yield {"cache": blocks.unflatten(1, (-1, BLOCK)).to(EIGHT), **scales}

    requests = [{"id": "a", "token_ids": IDS, "blocks": table}]
    about = {"kv_heads": 2, "head_size": adapter.d_key, "block_size": BLOCK, "layout": "kv block token head dim"}
    return audit_dump(adapter, read_dump(write_dump(folder, requests, layers(), **about)))


def test_right_scales_are_exact(tmp_path: Path) -> None:
    assert audited(tmp_path / "dump").verdict == "exact"


@pytest.mark.parametrize(
    ("read", "lowest"),
    [
        (lambda layer: SCALES[3 if layer == 1 else layer], 2),
        (lambda layer: (SCALES[layer][0], SCALES[0 if layer == 2 else layer][1]), 3),
        (lambda layer: SCALES[min(layer + 1, LAYERS - 1)], 1),
        (lambda layer: (0.12, 0.0441) if layer == 1 else SCALES[layer], 2),
    ],
)
def test_attention_with_another_scale_shows_in_the_layer_above(read: Read, lowest: int, tmp_path: Path) -> None:
    audit = audited(tmp_path / "dump", read)
    assert {fault.kind for fault in audit.faults} <= {"unknown", "changed", "coarse"}
    assert audit.faults[0].layers[0] == lowest, audit.summary


@pytest.mark.parametrize(
    "told",
    [
        lambda layer: SCALES[(layer + 1) % LAYERS],
        lambda layer: SCALES[layer][::-1],
        lambda layer: tuple((1.31, 0.8, 1.17, 0.9, 1.43)[layer] * scale for scale in SCALES[layer]),
    ],
)
def test_scales_that_are_wrong_in_all_layers_have_their_factors(told: Read, tmp_path: Path) -> None:
    audit = audited(tmp_path / "dump", told=told)
    assert {fault.kind for fault in audit.faults} == {"scale"}
    found = {}
    for fault in audit.faults:
        words, factor = fault.what.rsplit(" ", 1)
        found[words, fault.layers] = float(factor)
    assert found == {
        (f"all {name} multiplied by", (layer,)): pytest.approx(told(layer)[kind] / SCALES[layer][kind], rel=0.06)
        for layer in range(LAYERS) for kind, name in enumerate(("keys", "values"))
    }  # fmt: skip
