"""The connector under examples/ in a paged engine of a tiny model: `exact`, and a planted fault is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from examples.dump_connector import DumpConnector
from perturbkv import audit_dump
from perturbkv.analyses.audit.dump_verdict import DumpAudit
from tests.support.models import tiny_adapter, token_ids

BLOCK, BLOCKS, LAYERS, HEADS = 4, 20, 3, 2
PROMPTS = {"a": token_ids(21, seed=1), "b": token_ids(10, seed=2)}
TABLES = {"a": [7, 2, 11, 0, 5, 19, 3], "b": [4, 18, 9, 12]}
Fault = Callable[[int, torch.Tensor], object]
"""`(layer, blocks)`: changes a layer's blocks before the connector takes them."""
LAYOUTS = {
    "kv block token head dim": (2, BLOCKS, BLOCK, HEADS, 8),
    "block kv token head dim": (BLOCKS, 2, BLOCK, HEADS, 8),
}


class PagedEngine:
    """Two requests, decoded greedily in one pass each per step, whose entries lie in blocks of every layer."""

    def __init__(self, connector: DumpConnector, layout: str, fault: Fault) -> None:
        self.model = tiny_adapter("llama", 4, HEADS, layers=LAYERS)
        self.connector, self.layout, self.fault = connector, layout, fault
        self.blocks = [torch.full(LAYOUTS[layout], float("nan")) for _ in range(LAYERS)]
        self.tokens = {name: list(ids) for name, ids in PROMPTS.items()}
        self.read = dict.fromkeys(PROMPTS, 0)
        self.caches = {name: DynamicCache() for name in PROMPTS}

    @torch.inference_mode()
    def step(self) -> None:
        """A forward pass over what is new; the decoded tokens have no entries yet."""
        tables = {name: (ids, TABLES[name][: -(-len(ids) // BLOCK)]) for name, ids in self.tokens.items()}
        self.connector.start_step(tables)
        decoded = {
            name: int(self.model.model(torch.tensor([ids[self.read[name] :]]), past_key_values=self.caches[name])
                      .logits[0, -1].argmax())
            for name, ids in self.tokens.items()
        }  # fmt: skip
        for layer, blocks in enumerate(self.blocks):
            for name, ids in self.tokens.items():
                for token in range(self.read[name], len(ids)):
                    self.store(layer, blocks, name, token)
            self.fault(layer, blocks)
            self.connector.save_kv_layer(f"layers.{layer}", blocks, None)
        self.read = {name: len(ids) for name, ids in self.tokens.items()}
        self.tokens = {name: [*ids, decoded[name]] for name, ids in self.tokens.items()}

    def store(self, layer: int, blocks: torch.Tensor, name: str, token: int) -> None:
        """Write a token's key and value into its place."""
        kept = self.caches[name].layers[layer]
        first = self.layout.startswith("kv")
        for kind, entries in enumerate((kept.keys, kept.values)):
            (blocks if first else blocks.transpose(0, 1))[kind, TABLES[name][token // BLOCK], token % BLOCK] = entries[
                0, :, token
            ]


def audited(folder: Path, layout: str = "kv block token head dim", fault: Fault = lambda *_: None) -> DumpAudit:
    """The audit of what the connector writes after the fifth step, while the engine goes on."""
    axis = layout.split().index("block")
    connector = DumpConnector(folder / "dump", layout, axis, kv_heads=HEADS, head_size=8, block_size=BLOCK)
    engine = PagedEngine(connector, layout, fault)
    for _ in range(5):
        engine.step()
    for blocks in engine.blocks:  # the next pass overwrites them
        blocks.zero_()
    return audit_dump(engine.model, connector.wait_for_save(), progress=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_engine_is_exact(layout: str, tmp_path: Path) -> None:
    result = audited(tmp_path, layout)
    assert result.verdict == "exact", result.summary
    assert {one.request: one.tokens for one in result.requests} == {"a": 25, "b": 14}
    assert all(one.compared == one.tokens * LAYERS * HEADS for one in result.requests)


def test_a_planted_fault_is_named_with_its_place(tmp_path: Path) -> None:
    """In layer 1 a block of request a is overwritten by one of request b."""

    def copied(layer: int, blocks: torch.Tensor) -> None:
        if layer == 1:
            blocks[:, 11] = blocks[:, 18]

    result = audited(tmp_path, fault=copied)
    assert result.verdict == "differs"
    fault = result.faults[0]
    assert (fault.kind, fault.request, fault.first, fault.last, list(fault.blocks)) == ("request", "a", 8, 11, [11])
    assert fault.layers == (1,) and "tokens 4 to 7 of request b" in result.summary
