"""A model that mixes full and sliding layers: every place that names a layer names it by its index in the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet
import pytest

import perturbkv as pk
from perturbkv.analyses.layers.layers import LayerDrifts
from perturbkv.storage.trace.trace_file import read_trace
from tests.support.artists import words
from tests.support.folders import model_folder

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, of which 2 and 5 see everything."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    folder = tmp_path_factory.mktemp("models") / "mixed"
    return model_folder(folder, "gemma3_text", num_hidden_layers=6, layer_types=kinds)


@pytest.fixture
def options(mixed: Path, data: Path) -> list[object]:
    return ["--model", mixed, "--dataset", data, "--samples", 2, "--budget", 24, "--window", 8]


@pytest.mark.slow
def test_a_trace_names_the_layers_that_were_measured(perturbkv: Run, options: list[object]) -> None:
    planned = json.loads(perturbkv("trace", *options, "--dry-run", "--json").out)
    assert planned["measured_layers"] == "2 5 of 6"
    assert "2 5 of 6" in perturbkv("trace", *options, "--dry-run").out
    ran = perturbkv("trace", *options, "-o", "t.h5")
    assert ran.code == 0
    assert "2 5 of 6" in ran.err
    with h5py.File("t.h5") as file:
        assert file.attrs["measured_layers"] == "2 5 of 6"
        assert file["layer"][:].tolist() == [2, 5]
        assert file["theta"].shape[3] == 2
    assert "2 5 of 6" in perturbkv("heads", "t.h5").out
    trace = read_trace("t.h5")
    assert trace.layers == (2, 5)
    assert trace.to_xarray()["theta"].sel(layer=5).shape == trace.arrays["theta"][..., 1, :].shape
    rows = trace.to_frame()
    assert sorted(set(rows["layer"])) == [2, 5]
    for layer in (2, 5):
        drift = rows[(rows["layer"] == layer) & (rows["sample"] == trace.sample_ids[0])]["hidden_drift_l1"]
        assert set(drift) == set(trace.arrays["hidden_drift_l1"][0, ..., layer].flat)
    assert "2 5 of 6" in perturbkv("list", "t.h5").out
    perturbkv("export", "t.h5", "-o", "t.parquet")
    assert sorted(set(pyarrow.parquet.read_table("t.parquet")["layer"].to_pylist())) == [2, 5]
    trace.sel(sample=trace.sample_ids[:1]).save("part.h5")
    assert read_trace("part.h5").attrs["measured_layers"] == "2 5 of 6"


@pytest.mark.slow
def test_analyses_name_layers_by_their_indices(perturbkv: Run, options: list[object]) -> None:
    perturbkv("trace", *options, "-o", "t.h5")
    trace = read_trace("t.h5")
    for found in (pk.compare_heads(trace), pk.layer_drift(trace), pk.assumption(trace), pk.bound_tightness(trace)):
        expected = set(range(6)) if isinstance(found, LayerDrifts) else {2, 5}
        assert {row["layer"] for row in found.records()} == expected
        assert "2 5 of 6" in " ".join(repr(found).split())
    flagged = pk.compare_heads(trace)[0].to_dict()["flagged_heads"]
    assert {name.split("-")[0] for name in flagged} <= {"2", "5"}
    drift = pk.layer_drift(trace).plot()
    assert all(line.get_xdata().tolist() == [*range(6)] for line in drift.axes[0].lines)
    maps = pk.assumption(trace).plot()
    assert [tick.get_text() for tick in maps.axes[0].get_yticklabels()] == ["2", "5"]
    assert "2 5 of 6" in words(maps)
    bar = pk.compare_heads(trace).plot().axes[-1]
    assert [tick.get_text() for tick in bar.get_yticklabels()] == ["2", "5"]


@pytest.mark.slow
def test_a_layer_is_asked_for_by_its_index(perturbkv: Run, options: list[object]) -> None:
    perturbkv("trace", *options, "-o", "t.h5")
    trace = read_trace("t.h5")
    assert pk.tokens(trace, layer=5, head=1).shown.layer == 5
    shown = pk.tokens(trace, layer=5, head=1)
    kept = {place for place, fate in enumerate(shown.fates) if fate in ("both", "baseline")}
    first = trace.run.configs.index(shown.baseline)
    assert kept == set(trace.kept(shown.prompt.index, first, 1, 1).tolist())
    assert pk.tokens(trace, layer=2).shown.layer == 2
    ran = perturbkv("tokens", "t.h5", "--layer", 1, "--head", 0)
    assert (ran.code, "2, 5, got 1" in ran.err) == (2, True)


@pytest.mark.slow
def test_head_scores_are_of_measured_layers(perturbkv: Run, options: list[object]) -> None:
    names = [f"{layer}-{head}" for layer in (2, 5) for head in range(4)]
    Path("scores.json").write_text(json.dumps({name: place + 1.0 for place, name in enumerate(names)}))
    asked = ["--policy", "headkv", "--head-scores", "scores.json", "-o", "t.h5"]
    assert perturbkv("trace", *options, *asked).code == 0
    counts = read_trace("t.h5").arrays["kept_count"][0, 0].sum(axis=-1)
    assert counts[1] > counts[0]


@pytest.mark.slow
def test_prompts_longer_than_the_window_are_taken(perturbkv: Run, options: list[object]) -> None:
    """182 tokens, and a window of 12."""
    assert perturbkv("trace", *options, "-o", "t.h5").code == 0
    assert np.all(read_trace("t.h5").arrays["prompt_tokens"] > 12)
