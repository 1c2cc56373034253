"""studies/precision_map.py: which parts are listed and kept, sums by hand, and a run on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import perturbkv as pk
from tests.support import somebodys
from tests.support.folders import model_folder
from tests.support.models import tiny_model, token_ids
from tests.support.scripts import STUDIES, functions, study

MAP = functions("precision_map", STUDIES)
LAYERS = (0, 1, 2, 3)


def losses(kl: dict[Any, list[float]]) -> Any:
    made = object.__new__(MAP["Losses"])
    made.kl = made.drift = {name: np.array(values) for name, values in kl.items()}
    made.samples = 5
    return made


def test_a_list_is_ranked_by_what_a_part_costs_alone() -> None:
    kl = {(layer, kind): [float(layer * 2 + (kind == "keys"))] * 5 for layer in LAYERS for kind in MAP["KINDS"]}
    order = MAP["ranked"](losses(kl), LAYERS)
    assert order[:3] == [(3, "keys"), (3, "values"), (2, "keys")] and len(order) == 8
    lists = MAP["judged_lists"](order, LAYERS, 4, seed=0)
    assert lists["list"] == order[:4]
    assert lists["outermost"] == [(0, "keys"), (0, "values"), (3, "keys"), (3, "values")]
    assert len(set(lists["random"])) == 4 and set(lists["random"]) <= set(order)
    precision = MAP["except_for"](lists["list"], "q4_0")
    assert precision == "keys=q4_0, values=q4_0; layers 2: keys=16, values=16; layers 3: keys=16, values=16"
    assert pk.grid(1.0, precision=precision, window=1)[0].precision.name == "quantise"
    assert MAP["layer_words"](lists["list"]) == "2 3"


def test_rules_decide_by_intervals_alone() -> None:
    def interval(low: float, high: float) -> tuple[float, Any]:
        return (low + high) / 2, SimpleNamespace(low=low, high=high, is_range=False)

    assert MAP["add_up"](interval(0.9, 1.2)) == "add up"
    assert MAP["add_up"](interval(1.26, 2)) == MAP["add_up"](interval(0.2, 0.79)) == "do not add up"
    assert MAP["add_up"](interval(0.7, 1.1)) == MAP["add_up"]((1.0, None)) == "undecided"


def test_sums_of_parts_are_over_what_both_cost() -> None:
    own = losses({"a": [1, 2, 3, 4, 5], "b": [1, 1, 1, 1, 1], "whole": [4, 4, 4, 4, 4]})
    ratio, ends = own.ratio(own.kl, ["a", "b"], ["whole"])
    assert ratio == pytest.approx(20 / 20) and ends.low < 1 < ends.high


def test_the_bias_is_taken_off_where_the_key_stands() -> None:
    """Keys that are their bias alone are exact without it, whatever their position; with it they are rounded."""
    model = tiny_model("qwen2", 4, 2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.zero_()
    ids = torch.tensor([token_ids(20)])
    inputs = (model, ids, torch.ones_like(ids))
    with torch.no_grad():
        exact, without = somebodys.plain(*inputs), MAP["rounded_keys"](*inputs, without_bias=True)
        rounded = MAP["rounded_keys"](*inputs)
    for full, taken, other in zip(exact.layers, without.layers, rounded.layers, strict=True):
        torch.testing.assert_close(taken.keys, full.keys)
        assert (other.keys - full.keys).abs().max() > 0.01
        assert torch.equal(taken.values, full.values)


@pytest.mark.slow
def test_a_map_is_measured_and_judged_on_other_samples(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "tiny", layers=3, positions=2048)
    said = study("precision_map", "--model", model, "--short", "--format", "rotated-3", "-o", tmp_path / "out")
    document = json.loads((tmp_path / "out" / "precision_map.json").read_text())
    assert (tmp_path / "out" / "precision_map.png").stat().st_size > 10_000
    first, other = (pk.read_trace(tmp_path / "out" / f"{name}.h5") for name in ("map", "judged"))
    assert not set(first.sample_ids) & set(other.sample_ids)
    (row,) = document["shares"]
    kl = dict(zip(first.run.labels(), first.arrays["logit_kl"].mean(axis=(0, 2)), strict=True))
    whole = next(value for label, value in kl.items() if label.endswith("quantise(bits=rotated-3)"))
    assert row["KL"] == pytest.approx(whole, rel=1e-6)
    assert {row["kept in 16 bits"] for row in document["judged"]} == {"none", "list", "outermost", "random"}
    held = [row["bytes"] for row in document["judged"] if row["parts"] == 4]
    assert held == pytest.approx([held[0]] * 3), "equal bytes"
    assert "bias" not in document and "vLLM, --kv-cache-dtype-skip-layers: 4 parts: " in said
