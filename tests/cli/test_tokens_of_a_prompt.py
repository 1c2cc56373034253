"""`perturbkv tokens` on a finished trace, `--no-prompts` on what makes one; what `info` and `export` say of text."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import perturbkv as pk
from perturbkv.display import Table
from tests.support.asked import refused

Run = Callable[..., Any]
SENTENCE = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture
def traced(perturbkv: Run, tiny: list[object]) -> Path:
    assert perturbkv("trace", *tiny, "-o", "t.h5").code == 0
    return Path("t.h5")


def test_the_prompt_is_shown_with_its_fates(perturbkv: Run, traced: Path) -> None:
    ran = perturbkv("tokens", traced, "--sample", "p1", "--layer", 1, "--head", 3, "--all")
    assert ran.code == 0
    assert "(head 1-3 of 'p1'; isolated, b = " in " ".join(ran.out.split())
    shown = re.sub(r"\[[-=]|[-=]\]|\{\+|\+\}", "", ran.out.partition("both evict")[2])
    assert "".join(SENTENCE.split()) in "".join(shown.replace("␣", " ").split())
    assert "\x1b" not in ran.out
    assert not list(Path().glob("*.json"))


def test_a_trace_without_two_stage_shows_its_own_sides_and_why(perturbkv: Run, tiny: list[object]) -> None:
    sides = ["--policy", "snapkv", "--policy", "adakv", "--selection", "attention", "--budget", 40]
    assert perturbkv("trace", *tiny, *sides, "-o", "t.h5").code == 0
    ran = perturbkv("tokens", "t.h5", "--budget", 40, "-o", "out")
    assert ran.code == 0
    assert re.search(r"Why: snapkv evicts \d+ % of head \d-\d's attention, adakv \d+ %\.", " ".join(ran.out.split()))
    assert sorted(path.name for path in Path("out").iterdir()) == ["summary.json", "tokens.png", "tokens.svg"]
    assert json.loads(Path("out/summary.json").read_text())["analyses"]["tokens"]["baseline"]["budget"] == 40
    heads = perturbkv("heads", "t.h5", "--budget", 40, "--json").json()
    assert [(pair["treatment"]["policy"], pair["treatment"]["budget"]) for pair in heads["comparisons"]] == [
        ("adakv", 40)
    ]
    assert len(heads["run"]["configs"]) == 4
    refused(perturbkv("heads", "t.h5", "--budget", 600), "expected a --budget of t.h5 (24, 40), got 600")
    refused(perturbkv("tokens", "t.h5", "--budget", 600), "expected a --budget of t.h5 (24, 40), got 600")


def test_the_ten_largest_losses_of_each_side_are_details(traced: Path) -> None:
    tables = [part for part in pk.tokens(pk.read_trace(traced), "p1", 1, 3).details() if isinstance(part, Table)]
    assert [len(table.rows) for table in tables] == [10, 10]


@pytest.mark.slow
def test_colours_stand_in_place_of_marks_in_a_terminal(
    perturbkv: Run, traced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = perturbkv("tokens", traced, "--layer", 0, "--head", 0).out
    assert "\x1b[30;43m" in coloured
    assert "[-" not in re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = perturbkv("tokens", traced, "--layer", 0, "--head", 0).out
    assert "[-" in plain
    assert "\x1b[30;43m" not in plain


@pytest.mark.slow
def test_json_holds_what_a_notebook_holds(perturbkv: Run, traced: Path) -> None:
    told = perturbkv("tokens", traced, "--layer", 1, "--compare", "two-stage,attention", "--json").json()
    found = pk.tokens(pk.read_trace(traced), layer=1, baseline="two-stage", treatment="attention")
    expected = json.loads(json.dumps(found.to_dict()))
    assert {name: told[name] for name in expected} == expected
    assert "".join(one["text"] for one in told["tokens"]).endswith(SENTENCE)


@pytest.mark.slow
def test_a_run_without_text_leaves_none_and_tokens_says_how_to_get_it(perturbkv: Run, tiny: list[object]) -> None:
    assert perturbkv("heads", *tiny, "-o", "out", "--no-prompts", "--format", "png").code == 0
    assert b"brown" not in Path("out/trace.h5").read_bytes()
    assert re.search(r"^text +not stored", perturbkv("list", "out/trace.h5").out, re.MULTILINE)
    refused(perturbkv("tokens", "out/trace.h5"), f"--model {tiny[1]} --dataset {tiny[3]} …)", "--no-prompts")
    assert perturbkv("heads", *tiny, "-o", "again", "--format", "png").code == 0
    assert re.search(r"^text +stored", perturbkv("list", "again/trace.h5").out, re.MULTILINE)
    assert perturbkv("tokens", "again/trace.h5").code == 0


def test_a_sweep_file_leaves_text_out(perturbkv: Run, model: Path, data: Path) -> None:
    lines = [f"model: {model}", f"dataset: {data}", "samples: 1", "budget: 24", "window: 8", "prompts: false"]
    Path("s.yaml").write_text("\n".join(lines))
    assert perturbkv("trace", "--config", "s.yaml", "-o", "s.h5").code == 0
    assert perturbkv("list", "s.h5", "--json").json()["with_text"] == []


@pytest.mark.slow
def test_export_writes_tokens_into_a_table_of_their_own(perturbkv: Run, traced: Path) -> None:
    ran = perturbkv("export", traced, "--json").json()
    tokens = {path: rows for path, rows in ran["files"].items() if ".tokens" in path}
    assert set(tokens) == {"t.tokens.csv", "t.tokens.parquet"}
    with Path("t.tokens.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == tokens["t.tokens.csv"] == pq.read_table("t.tokens.parquet").num_rows
    assert "".join(row["text"] for row in rows if row["sample"] == "p1") == "1 " + SENTENCE * 4
    assert [int(row["position"]) for row in rows if row["sample"] == "p0"] == list(range(182))
    assert "brown" not in Path("t.csv").read_text()
    assert perturbkv("export", traced).code == 2
