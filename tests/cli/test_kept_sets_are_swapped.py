"""`perturbkv patching`: what it leaves, what it tells beforehand, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.configs.layer_types import format_layers
from perturbkv.configs.patching import PatchingConfig, parse_layers
from perturbkv.errors import ConfigError
from tests.support.folders import model_folder

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of ten layers: too many for all subsets unasked."""
    return model_folder(tmp_path_factory.mktemp("models") / "deep", positions=512, layers=10)


@pytest.mark.slow
def test_it_leaves_numbers_a_figure_and_what_was_measured(perturbkv: Run, tiny: list[object], data: Path) -> None:
    ran = perturbkv("patching", *tiny, "--treatment-in", 0, "--json", "-o", "out", "--format", "pdf")
    assert ran.code == 0, ran.err
    document = ran.json()
    assert {path.name for path in Path("out").iterdir()} == {"swap.jsonl", "patching.json", "patching.pdf"}
    assert json.loads(Path("out/patching.json").read_text()) == document
    assert [one["mixture"] for one in document["named"]] == ["tt", "tb"]
    assert document["shapley"]["coalitions"] == 4 and document["shapley"]["permutations"] == 0
    assert document["shapley"]["sum"] == pytest.approx(document["shapley"]["everybody"])
    whole = perturbkv("heads", *tiny, "--steps", 1, "--json", "-o", "trace").json()["comparisons"][0]
    assert whole["propagated"]["sum_ratio"] == pytest.approx(document["named"][0]["propagated"]["sum_ratio"], rel=1e-6)
    assert whole["propagated"]["better_share"] == document["named"][0]["propagated"]["better_share"]
    before = Path("out/swap.jsonl").read_bytes()
    again = perturbkv("patching", *tiny, "--outcome", "kl", "-o", "out")
    assert again.code == 0 and "KL" in again.out
    assert Path("out/swap.jsonl").read_bytes() == before  # another question to the same measurements


def test_a_notebook_gets_what_the_command_says(perturbkv: Run, model: Path, tiny: list[object], data: Path) -> None:
    told = perturbkv("patching", *tiny, "--json", "-o", "out", "--format", "png").json()
    loaded = pk.load_model(str(model))
    prompts = pk.load_prompts(str(data), loaded, samples=2)
    found = pk.patching(loaded, prompts, *pk.grid(24, selection=("attention", "two-stage"), window=8), progress=False)
    assert found.to_dict()["shapley"] == told["shapley"]
    assert found.to_dict()["greedy"] == told["greedy"]
    assert len(found.to_frame()) == 4  # two layers of two samples
    assert set(found.to_frame()["sample"]) == {"p0", "p1"}


@pytest.mark.slow
def test_what_it_would_measure_is_told_and_is_what_it_measures(perturbkv: Run, deep: Path, data: Path) -> None:
    asked = ["patching", "--model", deep, "--dataset", data, "--samples", 2, "--budget", 24, "--window", 8]
    more = ["--permutations", 8, "--greedy", 2, "--baseline-in", "0,2-4"]
    told = perturbkv(*asked, *more, "--dry-run", "--json").json()["mixtures"]
    assert "3 by name" in perturbkv(*asked, *more, "--dry-run").out
    assert not Path("runs").exists()
    ran = perturbkv(*asked, *more, "-o", "out", "--format", "png", "--json")
    assert ran.code == 0, ran.err
    assert ran.json()["shapley"]["coalitions"] == told["shapley"]
    rows = [json.loads(line)["rows"] for line in Path("out/swap.jsonl").read_text().splitlines()[1:]]
    measured = [row["mixture"] for batch in rows for row in batch]
    assert len(measured) <= 2 * told["mixtures"]
    assert len(measured) - len(set(measured)) <= len(set(measured))  # at most once of each sample
    named = next(one for one in ran.json()["named"] if one["name"] == "baseline in 0, 2-4")
    assert named["mixture"] == "btbbbttttt"


def test_a_notebook_s_corrected_sides_are_refused_before_anything_is_read() -> None:
    names = ("attention", "two-stage")
    sides = [pk.grid(24, selection=name, window=8, correction="corrected-oracle")[0] for name in names]
    with pytest.raises(ConfigError, match="with no correction, got corrected-oracle; leave it out"):
        pk.patching(None, [], *sides)  # type: ignore[arg-type]
    alone = pk.grid(24, selection="attention", window=8)[0]
    with pytest.raises(ConfigError, match="with no correction"):
        pk.patching(None, [], alone, sides[1])  # type: ignore[arg-type]


@pytest.mark.slow
def test_heads_of_a_layer_are_switched(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("patching", *tiny, "--by", "heads", "--layers", 1, "--json", "-o", "out", "--format", "png")
    assert ran.code == 0, ran.err
    assert [one["player"] for one in ran.json()["shapley"]["players"]] == ["1-0", "1-1", "1-2", "1-3"]


@pytest.mark.slow
def test_measurements_of_another_run_stay(perturbkv: Run, tiny: list[object]) -> None:
    assert perturbkv("patching", *tiny, "-o", "out", "--format", "png").code == 0
    before = Path("out/swap.jsonl").read_bytes()
    ask = ["patching", *tiny, "--alpha", 0.5, "-o", "out", "--format", "png"]
    other = perturbkv(*ask)
    assert other.code == 2 and "--overwrite" in other.err
    assert Path("out/swap.jsonl").read_bytes() == before
    assert perturbkv(*ask, "--overwrite").code == 0


def test_layers_are_read_and_told_as_ranges() -> None:
    assert parse_layers("--layers", "18-20, 0,19") == (0, 18, 19, 20)
    assert format_layers((0, 2, 3, 4, 9)) == "0, 2-4, 9"
    with pytest.raises(ConfigError, match="greedy"):
        PatchingConfig(greedy=-2)
