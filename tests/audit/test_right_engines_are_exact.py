"""Right engines whose kernels round otherwise are `exact`: of short requests, and of tokens that rounding moves far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from perturbkv.analyses.audit.dump_verdict import DumpAudit
from perturbkv.auditing.dumps import plain_entries
from perturbkv.auditing.dumps.dump_audit import audit_dump
from perturbkv.auditing.dumps.dump_file import read_dump, write_dump
from perturbkv.models.adapter import Adapter
from tests.audit.dumped import TOKENS, model
from tests.audit.test_an_engine_attends_to_its_own_cache import halved


def read(adapter: Adapter, ids: list[int]) -> DynamicCache:
    cache = DynamicCache()
    with torch.inference_mode():
        adapter.model(torch.tensor([ids]), past_key_values=cache)
    return cache


def audited(folder: Path, adapter: Adapter, ids: list[int], cache: DynamicCache, **request: Any) -> DumpAudit:
    layers = (
        {"keys.a": layer.keys[0], "values.a": layer.values[0], "positions.a": torch.arange(len(ids))}
        for layer in cache.layers
    )
    told = {"id": "a", "token_ids": ids, **request}
    return audit_dump(adapter, read_dump(write_dump(folder, [told], layers, kv_heads=2, head_size=8)))


@pytest.mark.parametrize("tokens", [1, 2, 20])
def test_a_request_is_held_against_products_of_many_rows_too(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of few rows are summed otherwise than those of many, as on processors; the engine's have many."""
    ids, linear = TOKENS["a"][:tokens], nn.functional.linear
    cache = read(model(), ids)

    def summed(given: Tensor, *others: Any) -> Tensor:
        product = linear(given, *others)
        return product * (1 + 3e-5) if given.shape[-2] < 32 else product

    monkeypatch.setattr(nn.functional, "linear", summed)
    result = audited(tmp_path / "dump", model(), ids, cache)
    assert result.verdict == "exact", result.summary


def test_a_token_that_other_roundings_move_far_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits; of a token that they do not move, the same distance is a fault."""
    adapter, ids = halved(), TOKENS["a"]
    cache = read(adapter, ids)
    longer = torch.ones(len(ids), 1).index_fill_(0, torch.tensor([1]), 1.3)
    cache.layers[2].keys = cache.layers[2].keys * longer.bfloat16()

    def moved(*arguments: Any) -> list[Tensor]:
        return [torch.zeros(2, len(ids)).index_fill_(1, torch.tensor([1]), 0.3 * (layer == 2)) for layer in range(3)]

    faulty = audited(tmp_path / "faulty", adapter, ids, cache)
    assert [(fault.first, fault.last, list(fault.layers)) for fault in faulty.faults] == [(1, 1, [2])]
    monkeypatch.setattr(plain_entries, "_moved_by_rounding", moved)
    assert audited(tmp_path / "right", adapter, ids, cache).verdict == "exact"


def test_other_roundings_move_entries_by_about_their_type() -> None:
    adapter, ids = halved(), torch.tensor(TOKENS["a"])
    full = [(layer.keys, layer.values) for layer in read(adapter, TOKENS["a"]).layers]
    with torch.inference_mode():
        moved = torch.stack(plain_entries._moved_by_rounding(adapter, ids, full))
    assert moved.shape == (3, 2, len(ids))
    assert 0.2 < float(moved.median()) / torch.finfo(torch.bfloat16).eps < 4


def test_log_probabilities_may_differ_by_the_rounding_of_a_logit(tmp_path: Path) -> None:
    """In 16 bits a request of few tokens may be read alike in all parts."""
    adapter, ids = halved(), TOKENS["a"][:3]
    cache = DynamicCache()
    with torch.inference_mode():
        logits = adapter.model(torch.tensor([ids]), past_key_values=cache).logits[0].double()
    known = logits.log_softmax(-1)
    step = float(logits.abs().max()) * torch.finfo(torch.bfloat16).eps / 2
    for folder, times, verdict in (("near", 2, "exact"), ("far", 60, "differs")):
        told = [None, float(known[0, ids[1]]) + times * step, float(known[1, ids[2]])]
        result = audited(tmp_path / folder, adapter, ids, cache, logprobs=told)
        assert result.verdict == verdict, result.summary


def test_one_tensor_may_be_both_scales(tmp_path: Path) -> None:
    ids, one = TOKENS["a"][:8], torch.ones(())
    cache, adapter = read(model(), ids), model()
    layers = (
        {
            "cache": torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2).unsqueeze(1),
            "key_scale": one, "value_scale": one,
        }
        for layer in cache.layers
    )  # fmt: skip
    path = write_dump(
        tmp_path / "dump", [{"id": "a", "token_ids": ids, "blocks": [0]}], layers, kv_heads=2, head_size=8,
        block_size=8, layout="kv block token head dim",
    )  # fmt: skip
    assert audit_dump(adapter, read_dump(path)).verdict == "exact"
