"""A wrong scale of 8 bits is traced to its layer, by what the dump tells or by what attention read, or not at all."""

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


def whats(audit: DumpAudit) -> dict[str, list[int]]:
    return {f"{fault.kind}: {fault.what}": list(fault.layers) for fault in audit.faults}


def test_right_scales_are_exact(tmp_path: Path) -> None:
    assert audited(tmp_path / "dump").verdict == "exact"


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda layer: SCALES[3 if layer == 1 else layer], "layer 1 read its keys and values with layer 3's scale"),
        (lambda layer: (SCALES[layer][0], SCALES[0 if layer == 2 else layer][1]),
         "layer 2 read its values with layer 0's scale"),
        (lambda layer: SCALES[min(layer + 1, LAYERS - 1)], "layer 0 read its keys and values with layer 1's scale"),
        (lambda layer: SCALES[0], "layer 1 read its keys and values with layer 0's scale"),
    ],
)  # fmt: skip
def test_attention_with_another_layers_scale_is_named(read: Read, words: str, tmp_path: Path) -> None:
    """In one layer, or in several: what follows above is no fault of its own."""
    audit = audited(tmp_path / "dump", read)
    index = int(words.split()[1])
    assert whats(audit) == {f"scale: {words}": [index + 1]}, audit.summary


def test_a_scale_of_no_layer_is_not_named(tmp_path: Path) -> None:
    audit = audited(tmp_path / "dump", lambda layer: (0.12, 0.0441) if layer == 1 else SCALES[layer])
    assert {fault.kind for fault in audit.faults} <= {"unknown", "changed", "coarse"}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (lambda layer: SCALES[(layer + 1) % LAYERS], "read with the scale of layer n + 1 in layer n"),
        (lambda layer: SCALES[(layer - 1) % LAYERS], "read with the scale of layer n - 1 in layer n"),
        (lambda layer: SCALES[layer][::-1], "read with the other's scale: those of keys and of values are swapped"),
    ],
)  # fmt: skip
def test_scales_that_are_wrong_in_all_layers_are_named(told: Read, words: str, tmp_path: Path) -> None:
    found = whats(audited(tmp_path / "dump", told=told))
    assert found == {f"scale: all {name} {words}": list(range(LAYERS)) for name in ("keys", "values")}


def test_scales_of_no_pattern_have_their_factors(tmp_path: Path) -> None:
    factors = (1.31, 0.8, 1.17, 0.9, 1.43)
    audit = audited(tmp_path / "dump", told=lambda layer: tuple(factors[layer] * scale for scale in SCALES[layer]))
    assert len(audit.faults) == 2 * LAYERS
    assert all(fault.what.startswith(("all keys multiplied by", "all values multiplied by")) for fault in audit.faults)
    assert not any("their scale" in fault.what for fault in audit.faults)


def test_the_one_layer_whose_scale_it_is_is_named_where_scales_differ(tmp_path: Path) -> None:
    wrong = audited(tmp_path / "wrong", told=lambda layer: SCALES[3 if layer == 1 else layer])
    assert all(fault.what.endswith(", their scale is layer 3's") for fault in wrong.faults), wrong.summary


@pytest.mark.parametrize("wrong", [{1, 3}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}])
def test_where_all_scales_are_one_no_owner_is_invented(wrong: set[int], tmp_path: Path) -> None:
    """Neither the one right layer, nor keys, whose scale the values have by chance."""
    adapter = model()
    with torch.inference_mode():
        adapter.model(torch.tensor([IDS]), past_key_values=(plain := DynamicCache()))

    def layers() -> Iterator[dict[str, Tensor]]:
        for index, layer in enumerate(plain.layers):
            factor = 1.25 if index in wrong else 1.0
            yield {"keys.a": layer.keys[0].clone(), "values.a": factor * layer.values[0]}

    about = {"kv_heads": 2, "head_size": adapter.d_key}
    path = write_dump(tmp_path / "dump", [{"id": "a", "token_ids": IDS}], layers(), **about)
    audit = audit_dump(adapter, read_dump(path))
    assert {fault.what for fault in audit.faults} == {"all values multiplied by 1.25"}, audit.summary
