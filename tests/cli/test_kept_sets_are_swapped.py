"""`perturbkv question patching`: what it leaves, what it tells beforehand, and what it refuses."""

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


def test_it_leaves_numbers_a_figure_and_what_was_measured(perturbkv: Run, tiny: list[object], data: Path) -> None:
    ran = perturbkv("question", "patching", *tiny, "--treatment-in", 0, "--json", "-o", "out", "--format", "pdf")
    assert ran.code == 0, ran.err
    document = ran.json()
    assert {path.name for path in Path("out").iterdir()} == {"swap.jsonl", "patching.json", "patching.pdf"}
    assert json.loads(Path("out/patching.json").read_text()) == document
    assert [one["mixture"] for one in document["named"]] == ["tt", "tb"]
    assert document["shapley"]["coalitions"] == 4 and document["shapley"]["permutations"] == 0
    assert document["shapley"]["sum"] == pytest.approx(document["shapley"]["everybody"])
    whole = perturbkv("heads", *tiny, "--json", "-o", "trace").json()["comparisons"][0]
    assert whole["propagated"]["sum_ratio"] == pytest.approx(document["named"][0]["propagated"]["sum_ratio"], rel=1e-6)
    assert whole["propagated"]["better_share"] == document["named"][0]["propagated"]["better_share"]
    before = Path("out/swap.jsonl").read_bytes()
    again = perturbkv("question", "patching", *tiny, "--outcome", "kl", "-o", "out")
    assert again.code == 0 and "the next token's KL" in again.out
    assert Path("out/swap.jsonl").read_bytes() == before  # another question to the same measurements
    assert max(map(len, again.out.splitlines())) <= 80


def test_a_notebook_gets_what_the_command_says(perturbkv: Run, model: Path, tiny: list[object], data: Path) -> None:
    told = perturbkv("question", "patching", *tiny, "--json", "-o", "out", "--format", "png").json()
    loaded = pk.load_model(str(model))
    prompts = pk.load_prompts(str(data), loaded, samples=2)
    found = pk.patching(loaded, prompts, *pk.grid(24, selection=("attention", "two-stage"), window=8), progress=False)
    assert found.to_dict()["shapley"] == told["shapley"]
    assert found.to_dict()["greedy"] == told["greedy"]
    assert len(found.to_frame()) == 4  # two layers of two samples
    assert set(found.to_frame()["sample"]) == {"p0", "p1"}


def test_what_it_would_measure_is_told_and_is_what_it_measures(perturbkv: Run, deep: Path, data: Path) -> None:
    asked = ["question", "patching", "--model", deep, "--dataset", data, "--samples", 2, "--budget", 24, "--window", 8]
    more = ["--permutations", 8, "--greedy", 2, "--baseline-in", "0,2-4"]
    told = perturbkv(*asked, *more, "--dry-run", "--json").json()["mixtures"]
    assert "mixtures of each prompt: 3 by name" in perturbkv(*asked, *more, "--dry-run").out
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


def test_heads_of_a_layer_are_switched(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv(
        "question", "patching", *tiny, "--by", "heads", "--layers", 1, "--json", "-o", "out", "--format", "png"
    )
    assert ran.code == 0, ran.err
    assert [one["player"] for one in ran.json()["shapley"]["players"]] == ["1-0", "1-1", "1-2", "1-3"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layers", "x"], "--layers takes layers, such as 0 or 0,18-23; got 'x'"),
        (["--layers", "3-1"], "--layers takes layers, such as 0 or 0,18-23; got '3-1'"),
        (["--baseline-in", "7"], "expected layers of 0-1, which are measured, got 7"),
        (["--layers", "0"], "expected at least 2 layers to tell apart, got 1; give more, or --by heads"),
        (["--by", "thirds"], "unknown player 'thirds'; known: heads, layers"),
        (["--outcome", "score"], "ask for them with --answers"),
        (["--max-new-tokens", 4], "--max-new-tokens has no effect here: it needs --answers; leave it out"),
        (["--permutations", 0, "--greedy", 0, "--outcome", "kl"], "--outcome has no effect here: it needs"),
        (["--permutations", 7], "an even number from 8 on, or 0 for none; got 7"),
        (["--permutations", 4], "an even number from 8 on, or 0 for none; got 4"),
        (["--permutations", 8, "--exact"], "give one of them"),
        (["--samples", 1, "--greedy", 1], "expects at least 2 samples, one to choose and one to judge, got 1"),
        (["--compare", "attention,two-stage,random"], "expected one baseline and one treatment at one budget, got 3"),
        (["--budget", 999], "expected a budget below the 182 tokens of the longest prompt, got 999"),
        (["--step", 2], "expected a step from 0 to 0, got 2; --steps 3 records it"),
        (["--engine", "workers"], "has no effect on question patching: each choice waits for all samples"),
        (["--save", "outputs"], "has no effect on question patching: it measures no outputs"),
        (["--correction", "corrected"], "with no correction, got corrected(mass=stored); leave it out"),
        (["--answers"], "expected accepted answers in every sample"),
    ],
)
def test_what_cannot_be_asked_gets_one_line(perturbkv: Run, tiny: list[object], words: list[object], said: str) -> None:
    options = [one for one in tiny]
    for name in ("--samples", "--budget"):
        if name in words:
            place = options.index(name)
            del options[place : place + 2]
    ran = perturbkv("question", "patching", *options, *words, "-o", "out")
    assert ran.code == 2
    assert said in " ".join(ran.err.split())
    assert len(ran.err.splitlines()) == 1 and not Path("out/swap.jsonl").exists()


def test_the_help_says_which_numbers_of_orders_are_taken(perturbkv: Run) -> None:
    assert "even, from 8 on, or 0 [16]" in " ".join(perturbkv("question", "patching", "-h").out.split())
    assert PatchingConfig(permutations=8).permutations == 8


def test_measurements_of_another_run_stay(perturbkv: Run, tiny: list[object]) -> None:
    assert perturbkv("question", "patching", *tiny, "-o", "out", "--format", "png").code == 0
    before = Path("out/swap.jsonl").read_bytes()
    other = perturbkv("question", "patching", *tiny, "--alpha", 0.5, "-o", "out", "--format", "png")
    assert other.code == 2 and "got one of another run; give --overwrite or another --output" in other.err
    assert Path("out/swap.jsonl").read_bytes() == before
    assert (
        perturbkv("question", "patching", *tiny, "--alpha", 0.5, "-o", "out", "--format", "png", "--overwrite").code
        == 0
    )


def test_layers_are_read_and_told_as_ranges() -> None:
    assert parse_layers("--layers", "18-20, 0,19") == (0, 18, 19, 20)
    assert format_layers((0, 2, 3, 4, 9)) == "0, 2-4, 9"
    with pytest.raises(ConfigError, match="greedy"):
        PatchingConfig(greedy=-2)
