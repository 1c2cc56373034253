"""Tokens that were decoded one at a time lie up to a noise floor away, beside a prompt whose entries are equal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.auditing.dumps.dump_entries import Entries, EntryDistances, Limits
from perturbkv.datasets.needle import sentences


@pytest.mark.parametrize(("floors", "differ"), [(0.8, 0), (2.5, 16)])
def test_a_block_may_be_two_floors_away_where_all_others_are_equal(floors: float, differ: int) -> None:
    limits = Limits.of_layer((1.0, 1.0), (0.0, 0.0), 17)
    zeros, positions = torch.zeros(1, 48, 4), torch.arange(48)[None]
    distance = torch.zeros(1, 48)
    distance[:, 32:] = floors
    entries = Entries(zeros, zeros, positions, torch.full((48,), -1))
    measured = EntryDistances(torch.stack([distance, zeros[..., 0]]), torch.ones(1, 48, dtype=torch.bool))
    assert int(limits.differing(entries, measured).any(dim=0).sum()) == differ


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
