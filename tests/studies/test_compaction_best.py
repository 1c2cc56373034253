"""`studies/compaction_best.py`: its exchanges against every set and the package's, its losses against a trace."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv.optimum.exact import HeadEntries
from perturbkv.optimum.search import improve_by_swaps
from perturbkv.selection.policies import caches
from tests.support.folders import model_folder
from tests.support.models import tiny_adapter, token_ids
from tests.support.scripts import STUDIES, functions, study

own = functions("compaction_best", STUDIES)
study_of_caches = functions("compaction", STUDIES)
TOKENS = 60


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    before = dict(caches._REGISTERED)
    yield
    caches._REGISTERED.clear()
    caches._REGISTERED.update(before)


def readers(heads: int, entries: int, seed: int) -> Any:
    random = np.random.default_rng(seed)
    weights = np.exp(2 * random.normal(size=(heads, entries)))
    return own["Readers"](weights / weights.sum(axis=1, keepdims=True), random.normal(size=(heads, entries, 5)))


def moved(given: Any, kept: np.ndarray) -> float:
    """Sum over heads of the L1 distance between the outputs of all entries and of kept ones, renormalised."""
    total = 0.0
    for weights, projected in zip(given.weights, given.projected, strict=True):
        some = np.where(kept, weights, 0)
        total += np.abs(weights @ projected - some / some.sum() @ projected).sum()
    return total


@pytest.mark.parametrize("seed", range(5))
def test_no_exchange_lowers_what_exchanges_end_with(seed: int) -> None:
    given = readers(3, 11, seed)
    start, free = np.arange(11) >= 6, np.arange(11) < 9
    assert given.loss(start) == pytest.approx(moved(given, start), rel=1e-12)
    end = own["exchanged"](given, start, free)
    every = {
        chosen: moved(given, np.isin(np.arange(11), [*chosen, 9, 10]))
        for chosen in itertools.combinations(range(9), 3)
    }  # fmt: skip
    assert min(every.values()) <= end * (1 + 1e-12) and end <= moved(given, start)
    (found,) = [chosen for chosen, loss in every.items() if loss == pytest.approx(end, rel=1e-12)]
    others = [loss for chosen, loss in every.items() if len(set(chosen) & set(found)) == 2]
    assert len(others) == 18 and min(others) >= end * (1 - 1e-12)


def test_of_one_head_the_exchanges_are_the_packages() -> None:
    given, start = readers(1, 40, 7), np.arange(40) >= 28
    free = np.arange(40) < 36
    found = improve_by_swaps(HeadEntries(given.weights[0], given.projected[0], ~free), start, 60)
    assert own["exchanged"](given, start, free) == pytest.approx(found.perturbation, rel=1e-12)
    assert found.perturbation < given.loss(start)


@torch.no_grad()
def test_its_losses_are_those_of_a_trace() -> None:
    """Every head of every cache at the first step."""
    adapter, ids = tiny_adapter("llama", 4, 2), torch.tensor([token_ids(TOKENS, seed=5)])
    names, budget = own["CACHES"], 30
    configs: list[pk.EvictionConfig] = []
    for name in names:
        make = functools.partial(study_of_caches["make"], **study_of_caches["METHODS"][name])
        configs += pk.grid(budget, policy=pk.external(make, name))
    prompt = pk.Prompt("p", ids[0].tolist(), 0)
    trace = pk.measure(adapter, [prompt], configs, settings=pk.Settings(steps=1), progress=False)
    measured = np.asarray(trace.get("perturbation_isolated", "a test"))[0, :, 0]
    reading, step = own["read"](adapter.model, ids, False), own["FirstStep"].read(adapter.model, ids)
    for layer, kv_head in itertools.product(range(2), range(2)):
        given = step.readers(layer, kv_head)
        full = [one[0, :, :TOKENS].double() for one in (step.layers[layer].keys, step.layers[layer].values)]
        for index, name in enumerate(names):
            fits = study_of_caches["METHODS"][name]["fits"]
            cache = own["compacted"](*full, reading.queries[layer], reading, budget, fits)
            found = step.losses_of(cache, layer, kv_head, given.outputs)
            expected = measured[index, layer, 2 * kv_head : 2 * kv_head + 2]
            np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=name)


def planted(ratio: float) -> list[dict[str, Any]]:
    """Searches of six prompts of two heads each, in which `matching` moves `ratio` times as far as the best set."""
    every = []
    for sample in range(6):
        heads = [
            {"budget": share, "layer": 0, "kv_head": head, "starts": dict.fromkeys(own["STARTS"], 3.0),
             "ends": {"hindsight": 2.0, "attention-unpooled": 2.1}, "own": {"0": 0.5}, "settled": True,
             "caches": {name: [ratio * (1 + 0.01 * sample), ratio * (1 - 0.01 * sample)] for name in own["CACHES"]}}
            for share in own["SHARES"] for head in range(2)
        ]  # fmt: skip
        every.append({"sample": str(sample), "heads": heads})
    return every


@pytest.mark.parametrize(("ratio", "told"), [(1.3, "reversed"), (0.7, "holds")])
def test_words_follow_from_planted_ratios(ratio: float, told: str, tmp_path: Path) -> None:
    path = tmp_path / "best.jsonl"
    path.write_text("\n".join(map(json.dumps, planted(ratio))))
    said = study("compaction_best", path, "-o", tmp_path / "out")
    document = json.loads((tmp_path / "out" / "compaction_best.json").read_text())
    assert document["verdict"] == told and f"matching < best kept set: {told}" in said
    matching = document["parts"][0]["caches"][0]
    assert matching["shared"] == pytest.approx(ratio, rel=1e-9), "two readers of 1 ± x, over 2"
    assert matching["own"] == pytest.approx(2 * ratio * np.exp(np.mean(np.log(1 + 0.01 * np.arange(6)))))
    assert document["parts"][0]["caches"][-1]["shared"] == pytest.approx(1.5)


def test_a_claim_needs_both_shares() -> None:
    assert [own["verdict"](words) for words in (["better"] * 2, ["worse"] * 2, ["better", "undecided"])] == [
        "holds", "reversed", "depends",
    ]  # fmt: skip


def test_another_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "best.jsonl").write_text('{"sample": "a"}\n')
    said = study("compaction_best", tmp_path / "best.jsonl", "-o", tmp_path / "out", code=2)
    assert said.startswith("error: expected a best.jsonl of finished searches")


@pytest.mark.slow
def test_it_searches_a_tiny_model_and_goes_on(tmp_path: Path) -> None:
    rows = [{"id": f"p{i}", "prompt": f"{i} " + "The quick brown fox jumps over the lazy dog. " * 4} for i in range(2)]
    data, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    data.write_text("\n".join(map(json.dumps, rows)))
    asked = ("--model", model_folder(tmp_path / "tiny", positions=512), "--dataset", data, "--samples", 2)
    study("compaction_best", *asked, "--budget", 0.3, "-o", out)
    lines = (out / "best.jsonl").read_text().splitlines(keepends=True)
    for head in (head for line in lines for head in json.loads(line)["heads"]):
        assert max(head["ends"].values()) <= max(head["starts"].values()) * (1 + 1e-12)
        assert all(0 < loss for losses in head["caches"].values() for loss in losses)
    document = (out / "compaction_best.json").read_text()
    (out / "best.jsonl").write_text(lines[0])
    study("compaction_best", *asked, "--budget", 0.3, "-o", out)
    assert (out / "compaction_best.json").read_text() == document
