from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
FEW = ("--heads", 3, "--proven", 1, "--seconds", 20, "--format", "png")


@pytest.mark.slow
def test_a_search_leaves_its_lines_a_figure_and_its_numbers(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("question", "regret", *tiny, *FEW, "-o", "out")
    assert ran.code == 0, ran.err
    assert json.loads(Path("out/regret.json").read_text())["parts"][0]["heads"] == 6
    header, *lines = [json.loads(line) for line in Path("out/regret.jsonl").read_text().splitlines()]
    assert (len(lines), header["searches"]["heads"]) == (2, 3)
    told = json.loads(Path("out/regret.json").read_text())
    assert [part["part"] for part in told["parts"]] == ["prompt", "prefix"]
    assert Path("out/regret.png").exists()


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_and_says_the_same(perturbkv: Run, tiny: list[object]) -> None:
    whole = perturbkv("question", "regret", *tiny, *FEW, "-o", "out", "--json").json()
    path = Path("out/regret.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:20])
    again = perturbkv("question", "regret", *tiny, *FEW, "-o", "out", "--json").json()
    assert again == whole
    assert path.read_text().splitlines() == "".join(lines).splitlines()


@pytest.mark.slow
def test_another_question_is_refused_until_it_may_replace(perturbkv: Run, tiny: list[object]) -> None:
    assert perturbkv("question", "regret", *tiny, *FEW, "-o", "out").code == 0
    other = ["question", "regret", *tiny, "--heads", 2, "--proven", 0, "--format", "png", "-o", "out"]
    ran = perturbkv(*other)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "--overwrite" in ran.err
    assert perturbkv(*other, "--overwrite").code == 0
    Path("out/regret.json").write_text("mine")
    ran = perturbkv(*other)
    assert (ran.code, "out/regret.json" in ran.err) == (2, True)


def test_a_dry_run_searches_nothing(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("question", "regret", *tiny, "--dry-run", "-o", "out")
    assert ran.code == 0 and not Path("out").exists()
    assert "hindsight-attention" in ran.out
