"""`studies/compaction.py`: its fits against SciPy, its merging against a loop, its words from planted numbers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import lsq_linear
from transformers import DynamicCache

import perturbkv as pk
from perturbkv.selection.policies import caches
from tests.support.folders import model_folder
from tests.support.measured import hand_made
from tests.support.models import exact_adapter, token_ids
from tests.support.scripts import STUDIES, functions, study

own = functions("compaction", STUDIES)
RANDOM = np.random.default_rng(0)
SAMPLES, SHARES = 6, ["0.2", "0.4"]


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(caches._REGISTERED)
    yield
    caches._REGISTERED.clear()
    caches._REGISTERED.update(before)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("kept", [7, 60])
def test_biases_are_scipys_least_squares(kept: int) -> None:
    """Fewer weights than queries, and more, which have many best ones."""
    weights = softmax(2 * RANDOM.normal(size=(40, 300)))[:, :kept]
    bias = own["fitted_bias"](torch.tensor(weights)[None])[0].numpy()
    best = lsq_linear(weights, np.ones(40), bounds=(np.exp(-3), np.exp(3)))
    assert np.square(weights @ np.exp(bias) - 1).sum() == pytest.approx(2 * best.cost, rel=1e-3, abs=1e-3)
    assert np.abs(bias).max() <= 3 + 1e-12


def test_values_are_the_least_squares_of_outputs_and_of_what_they_were() -> None:
    weights, values, outputs = softmax(RANDOM.normal(size=(10, 20))), RANDOM.normal(size=(20, 4)), np.ones((10, 4))
    found = own["fitted_values"](*(torch.tensor(one)[None] for one in (weights, values, outputs)))[0].numpy()
    rows = np.concatenate([weights, np.sqrt(own["RIDGE"]) * np.eye(20)])
    expected = np.linalg.lstsq(rows, np.concatenate([outputs, np.sqrt(own["RIDGE"]) * values]), rcond=None)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-8)


def test_evicted_entries_are_averaged_into_the_most_similar_kept_one() -> None:
    keys, values, places = RANDOM.normal(size=(12, 4)), RANDOM.normal(size=(12, 3)), [1, 4, 9]
    groups: dict[int, list[int]] = {place: [place] for place in places}
    for entry in set(range(12)) - set(places):
        alike = [keys[entry] @ keys[p] / np.linalg.norm(keys[p]) for p in places]
        groups[places[int(np.argmax(alike))]].append(entry)
    given = (torch.tensor(keys)[None], torch.tensor(values)[None], torch.tensor([places]))
    means = own["merged"](*given, True)
    for place, members in enumerate(groups.values()):
        np.testing.assert_allclose(means[0][0, place], keys[members].mean(axis=0))
        np.testing.assert_allclose(means[1][0, place], values[members].mean(axis=0))
        assert float(means[2][0, place]) == pytest.approx(np.log(len(members)))
    assert not own["merged"](*given, False)[2].any()


@pytest.fixture
def model() -> Any:
    return exact_adapter("llama", 4, 2).model


IDS = torch.tensor([token_ids(60, seed=5)])
MASK = torch.ones_like(IDS)


@torch.no_grad()
def test_its_queries_give_the_models_own_outputs(model: Any) -> None:
    seen: list[torch.Tensor] = []
    hooks = [layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0][0, -1]))
             for layer in model.model.layers]  # fmt: skip
    cache = DynamicCache()
    with own["queries_of"](model) as queries:
        model(input_ids=IDS, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    for layer, query, mixed in zip(cache.layers, queries, seen, strict=True):
        for head in range(4):
            keys, values = layer.keys[0, head // 2].numpy(), layer.values[0, head // 2].numpy()
            weights = softmax(keys @ query[head, -1].numpy() / np.sqrt(8))
            np.testing.assert_allclose(weights @ values, mixed.view(4, -1)[head].numpy(), rtol=1e-9)


@pytest.mark.parametrize("name", own["METHODS"])
@torch.no_grad()
def test_a_cache_takes_no_more_bytes_than_the_entries_and_the_window_stays(model: Any, name: str) -> None:
    plain, cache = DynamicCache(), own["make"](model, IDS, MASK, 30, **own["METHODS"][name])
    model(input_ids=IDS, past_key_values=plain)
    for layer, full in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, -16:], full.keys[:, :, -16:], rtol=1e-9, atol=1e-9)
        has_bias = hasattr(layer, "bias")
        assert layer.keys.shape[2] == (29 if has_bias else 30)  # 14 of 16 numbers, or 13 of 17
        assert not has_bias or (not layer.bias[..., -16:].any() and layer.bias.shape == (1, 2, 29))
    assert cache.nbytes <= 2 * 2 * 2 * 30 * 16  # bytes, layers, key/value heads, entries, numbers
    assert cache.nbytes > 0.98 * 2 * 2 * 2 * 30 * 16


@torch.no_grad()
def test_with_every_entry_a_fit_changes_nothing(model: Any) -> None:
    plain, cache = DynamicCache(), own["make"](model, IDS, MASK, 60, fits="values")
    model(input_ids=IDS, past_key_values=plain)
    for layer, full in zip(cache.layers, plain.layers, strict=True):
        torch.testing.assert_close(layer.keys, full.keys, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(layer.values, full.values, rtol=1e-7, atol=1e-9)


MOVED = {"attention": 4.0, "attention-unpooled": 5.0, "random": 9.0, "hindsight": 3.0, "matching": 2.0,
         "matching-values": 4.5, "matching-repeat": 2.2, "merge": 6.0, "merge-count": 6.0}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Matching is better than all, more queries worse; merging is worse, and with a bias of mixed effect."""
    configs = own["configurations"](argparse.Namespace(budget=SHARES, short=False, seed=0))
    base = np.array([MOVED[own["name_of"](config)] for config in configs])
    each = base * np.exp(np.linspace(-0.02, 0.02, SAMPLES)[:, None] * np.arange(len(base)) / len(base))
    counted = [own["name_of"](config) == "merge-count" for config in configs]
    each = np.where(counted, each * np.exp(np.linspace(-0.5, 0.5, SAMPLES))[:, None], each)
    arrays = {
        "perturbation_propagated": each[:, :, None, None] * np.full((2, 2), 0.25),
        "perturbation_isolated": each[:, :, None, None] * np.full((2, 2), 0.5),
        "logit_kl": each / 100,
        "held_bytes": np.full(each.shape, 200.0),
        "full_bytes": np.full(SAMPLES, 1000.0),
    }
    return hand_made(list(configs), arrays, layers=2, heads=2).save(tmp_path / "trace.h5")


def test_words_follow_from_planted_ratios(trace: Path, tmp_path: Path) -> None:
    caches._REGISTERED.clear()  # as for a reader without the code
    said = study("compaction", trace, "-o", tmp_path / "out")
    document = json.loads((tmp_path / "out" / "compaction.json").read_text())
    verdicts = {claim: words["L"] for claim, words in document["verdicts"].items()}
    assert verdicts == {
        "matching < attention": "holds", "matching < attention-unpooled": "holds",
        "matching-values < attention-unpooled": "holds", "matching < matching-values": "holds",
        "matching-repeat < matching": "reversed", "merge < attention-unpooled": "reversed",
        "merge-count < merge": "depends", "matching < hindsight": "holds",
    }  # fmt: skip
    first = document["claims"][0]
    assert (first["propagated"], first["kl"]) == (pytest.approx(0.5, rel=0.01), pytest.approx(-0.02, rel=0.02))
    assert first["propagated_interval"]["high"] < 0.52
    assert "n = 6" in said and (tmp_path / "out" / "compaction.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["better"] * 4, "holds"),
        (["better", "better", "undecided", "better"], "holds"),
        (["better", "better", "undecided", "undecided"], "depends"),
        (["better", "better", "better", "worse"], "depends"),
        (["worse", "worse", "worse", "undecided"], "reversed"),
        (["undecided"] * 4, "depends"),
    ],
)
def test_a_claim_needs_three_of_four_shares_and_none_against_it(words: list[str], told: str) -> None:
    assert own["verdict"](words) == told


def test_another_trace_is_one_line(tmp_path: Path) -> None:
    (config,) = pk.grid(0.2, selection="attention", granularity="kv")
    other = hand_made([config], {"logit_kl": np.ones((5, 1)), "held_bytes": np.ones((5, 1)), "full_bytes": np.ones(5)})
    said = study("compaction", other.save(tmp_path / "t.h5"), "-o", tmp_path / "out", code=2)
    assert said.startswith("error: expected a trace of this study, got one without attention-unpooled")


@pytest.mark.slow
def test_it_measures_a_tiny_model(tmp_path: Path) -> None:
    """Two prompts of letters, at one share."""
    rows = [{"id": f"p{i}", "prompt": f"{i} " + "The quick brown fox jumps over the lazy dog. " * 4} for i in range(2)]
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    model = model_folder(tmp_path / "tiny", positions=512)
    study("compaction", "--model", model, "--dataset", data, "--samples", 2, "--budget", 0.3, "-o", tmp_path / "out")
    levels = {row["method"]: row for row in json.loads((tmp_path / "out" / "compaction.json").read_text())["levels"]}
    assert levels.keys() == MOVED.keys()
    for name, row in levels.items():
        assert 0.28 < row["bytes"] <= 0.3 + 1e-9, name
        assert row["isolated"] > 0, "it was read as the plain model reads it"
