"""What llama.cpp's server saves of a slot is, but for its types' rounding, what transformers computes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import xllamacpp
from transformers import DynamicCache

from perturbkv.auditing.dumps.llamacpp import read_slot
from perturbkv.models.adapter import Adapter
from tests.llamacpp.conftest import NEW, PROMPT, Audited, Save, complete, save, start
from tests.support.screens import run

MADE = [
    ("q4_1", "f16", "f16", True), ("q4_1", "f32", "f32", False), ("q4_1", "q8_0", "q8_0", True),
    ("q4_1", "q4_0", "q4_0", True), ("q4_1", "q8_0", "q4_0", True), ("float32", "f16", "f16", True),
    ("float32", "bf16", "bf16", True), ("float32", "q8_0", "q8_0", True), ("float32", "q4_0", "q4_0", True),
    ("float32", "q5_1", "f16", False),
]  # fmt: skip
FARTHEST = {
    ("q4_1", "f16"): 0.06, ("q4_1", "f32"): 0.06, ("q4_1", "q8_0"): 0.06, ("q4_1", "q4_0"): 0.25,
    ("float32", "f16"): 0.002, ("float32", "bf16"): 0.01, ("float32", "q8_0"): 0.02, ("float32", "q4_0"): 0.25,
    ("float32", "q5_1"): 0.12,
}  # fmt: skip
"""Weights and type -> above every layer's typical distance."""


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "keys", "values", "flash"), MADE)
def test_every_type_is_exact(slot: Save, audited: Audited, weights: str, keys: str, values: str, flash: bool) -> None:
    audit = audited(slot(weights, keys, values, flash), weights)
    assert audit.verdict == "exact", audit.summary
    (request,) = audit.requests
    assert request.tokens == PROMPT + NEW - 1  # the last token's entries are not computed
    assert (request.compared, request.differing) == (request.tokens * 30 * 3, 0)
    assert set(audit.stored.split(", ")) == {f"{keys} keys", f"{values} values"}
    assert audit.typical.max() < max(FARTHEST[weights, keys], FARTHEST[weights, values])
    assert 0 < request.perturbation < request.worst_perturbation


def test_in_float32_the_cache_is_the_plain_models(slot: Save, audited: Audited) -> None:
    audit = audited(slot("float32", "f32", "f32", False), "float32")
    assert audit.verdict == "exact", audit.summary
    (request,) = audit.requests
    assert max(request.key_distance, request.value_distance) < 3e-5
    assert request.worst_perturbation < 1e-4


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_the_first_layer_is_the_plain_models_rounded_to_its_type(
    slot: Save, adapters: dict[str, Adapter], kind: str
) -> None:
    """Nothing before it was rounded, so that it is the same numbers, but for those on the edge of a step."""
    adapter = adapters["float32"]
    found = read_slot(slot("float32", kind, kind), adapter.config)
    cache = DynamicCache()
    with torch.inference_mode():
        adapter.model(torch.tensor([found.requests[0].token_ids]), past_key_values=cache)
    keys, values, _ = found.layer(0).rows["slot"]
    for stored, read, plain in zip(
        found.parts[0], (keys, values), (cache.layers[0].keys, cache.layers[0].values), strict=True
    ):
        lost = torch.linalg.vector_norm(read - stored.stored.round(plain[0]), dim=-1)
        assert float((lost / torch.linalg.vector_norm(plain[0], dim=-1)).median()) < 1e-6


def test_tokens_and_decoded_ones_stand_in_the_slot(
    slot: Save, adapters: dict[str, Adapter], text: tuple[int, ...]
) -> None:
    (request,) = read_slot(slot("q4_1", "f16", "f16"), adapters["q4_1"].config).requests
    assert request.token_ids[:PROMPT] == text[:PROMPT]
    assert len(request.token_ids) == PROMPT + NEW - 1


@pytest.mark.slow
def test_a_slot_that_goes_on_from_a_prefix_is_exact(
    embedded: Path, audited: Audited, text: tuple[int, ...], tmp_path: Path
) -> None:
    """Of the second prompt the server takes the first 80 tokens from the slot, and overwrites the others."""
    server = start(embedded, "q8_0", "q8_0", True, tmp_path)
    complete(server, text[:PROMPT], NEW)
    complete(server, [*text[:80], *text[200:260]], NEW)
    save(server, "again.bin")
    audit = audited(tmp_path / "again.bin", "q4_1")
    assert audit.verdict == "exact", audit.summary
    assert audit.requests[0].tokens == 140 + NEW - 1


def test_the_command_prints_the_verdict(slot: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = slot("q4_1", "q8_0", "q4_0")
    ran = run("audit", str(path), "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["conclusion"].split(":")[0]) == (0, "exact")
    assert (found["stored"], found["engine"]) == ("q4_0 values, q8_0 keys", "llama.cpp")
    costs = np.array(found["requests"][0]["perturbations"])
    assert costs.shape == (30, 9)
    assert 0.01 < np.median(costs) < 0.2


def test_the_version_is_the_one_whose_file_is_read() -> None:
    assert xllamacpp.__version__ == "2026.10.11549"
