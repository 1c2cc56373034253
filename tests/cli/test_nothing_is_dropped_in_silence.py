"""What is typed counts or is refused: an option given twice, one without effect, results that would be replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.cli import option_refusals
from perturbkv.cli.command_line import option_fields
from perturbkv.cli.options import RunOptions
from perturbkv.selection.policies import registry
from perturbkv.storage.trace.trace_file import read_run
from tests.support.asked import instead, refused
from tests.support.measured import MEASURED

Run = Callable[..., Any]


@pytest.mark.slow
def test_what_is_repeatable_makes_every_combination(perturbkv: Run, tiny: list[object]) -> None:
    several = ["--policy", "snapkv", "--policy", "adakv", "--granularity", "query", "--granularity", "kv"]
    ran = perturbkv("heads", *tiny, *several, "--preset", "paper", "--preset", "paper-v2", "-o", "out", "--json")
    assert ran.code == 0, ran.err
    configs = read_run(Path("out/trace.h5")).configs
    assert len(configs) == len({(one.policy, one.granularity, one.selection) for one in configs}) == 16
    pairs = [(one["baseline"]["policy"], one["treatment"]["policy"]) for one in ran.json()["comparisons"]]
    assert sorted(pairs) == [("adakv", "adakv")] * 4 + [("snapkv", "snapkv")] * 4


def test_help_is_given_whatever_stands_beside_it(perturbkv: Run) -> None:
    assert perturbkv("heads", "--seed", 1, "--seed", 2, "--help").code == 0


@pytest.mark.parametrize(
    "more",
    [
        ["--policy", "adakv(floor=0.3)", "--protect-first", 4],
        ["--protect-recent", 9],
        ["--protect-recent", 0],
        ["--protect-recent", 0.25],
        ["--compare", "attention,adakv(floor=0.3)"],
        ["--seed", 1, "--compare", "attention,random"],
        ["--alpha", 0.5, "--compare", "attention,value"],
        ["--compare", "attention(alpha=0.5, split=total),two-stage(alpha=0.5, split=total)"],
        ["--granularity", "kv(reduce=max)"],
        ["--policy", "adakv(kernel=3)", "--compare", "value,random"],
        ["--overwrite", "--columns", 1, "--format", "png"],
        ["--dataset", "ruler:niah_single_1", "--length", 512, "--seed", 3],
        ["--compare", "snapkv:value,streaming-llm(positions=in-cache)"],
    ],
    ids=lambda more: " ".join(map(str, more)),
)
def test_an_option_with_effect_is_none(perturbkv: Run, tiny: list[object], more: list[object]) -> None:
    ran = perturbkv("heads", *instead(tiny, *more), "--dry-run")
    assert ran.code == 0, ran.err


def test_the_environment_is_not_typed(perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERTURBKV_DATA_DIR", "somewhere")
    assert perturbkv("heads", *tiny, "--dry-run").code == 0


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    return Path(shutil.copy(MEASURED, tmp_path / "measured.h5"))


def test_a_key_that_one_grid_uses_is_right(perturbkv: Run, tmp_path: Path, model: Path, data: Path) -> None:
    text = f"model: {model}\ndataset: {data}\nsamples: 1\nwindow: 8\nbudget: 24\nfloor: 0.3\n"
    (tmp_path / "sweep.yaml").write_text(text + "grids:\n- {policy: adakv}\n- {selection: value}\n")
    ran = perturbkv("trace", "--config", "sweep.yaml", "--dry-run")
    assert ran.code == 0, ran.err
    typed = perturbkv("trace", "--config", "sweep.yaml", "--policy", "snapkv", "--dry-run")
    refused(typed, "sweep.yaml: floor: has no effect")


def test_results_of_another_question_are_not_replaced(perturbkv: Run, measured: Path) -> None:
    ask = ["heads", measured, "-o", "out", "--format", "png", "--compare"]
    assert perturbkv(*ask, "attention,value").code == 1  # a sample of it failed
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    again = perturbkv(*ask, "attention,random")
    refused(again, "out/summary.json holds heads with --compare attention,value", "--overwrite")
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before
    assert perturbkv(*ask, "attention,value").code == 1
    assert perturbkv(*ask, "attention,random", "--overwrite").code == 1
    told = json.loads(Path("out/summary.json").read_text())["analyses"]["heads"]
    assert told["asked"]["compare"] == "attention,random"


@pytest.mark.parametrize(
    "question",
    [
        ["heads", "--compare", "attention,nonsense"],
        ["heads", "--compare", "value,nonsense:value"],
        ["layers", "--compare", "attention,nonsense"],
        ["tokens", "--compare", "attention,nonsense"],
        ["horizon", "--compare", "attention,nonsense"],
        ["budget", "--max-kl", 1, "--compare", "nonsense"],
        ["budget", "--cliff", "--compare", "nonsense"],
        ["ablation", "--methods", "nonsense"],
    ],
    ids=lambda question: " ".join(map(str, question)),
)
def test_what_a_trace_lacks_is_told_before_results_that_are_not_replaced(
    perturbkv: Run, measured: Path, question: list[object]
) -> None:
    Path("out").mkdir()
    Path("out/summary.json").write_text("mine")
    refused(perturbkv(*question, measured, "-o", "out"), "nonsense")


def test_a_question_that_only_adds_is_answered(perturbkv: Run, measured: Path) -> None:
    assert perturbkv("layers", measured, "-o", "out", "--format", "png").code == 1
    assert perturbkv("layers", measured, "-o", "out", "--format", "png", "--per-sample").code == 1
    refused(perturbkv("layers", measured, "-o", "out"), "with --per-sample; this one is without --per-sample")


def test_every_name_of_the_table_is_an_option() -> None:
    assert set(option_refusals.NEEDS) <= set(option_fields(RunOptions))


def test_an_option_whose_help_names_what_it_is_for_needs_that() -> None:
    known = {name: f"--policy {name}" for name in registry.names()} | {"needle": "--dataset needle"}
    for name, annotated in option_fields(RunOptions).items():
        said = next(option.help for option in annotated.__metadata__).partition(":")[0]
        if said in known:
            assert option_refusals.NEEDS[name].text == known[said]
