"""Prompts of one's own: the page's blocks, its table of fields and its refusals are what the commands do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perturbkv.datasets.jsonl import FIELDS
from tests.support.asked import refused
from tests.support.pages import shell

Run = Callable[..., Any]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "own_prompts.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
REFUSED = re.findall(r"^\| `(\{.*\})` \| (line 1: .*) \|$", PAGE, re.MULTILINE)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_every_block_of_the_page_runs(perturbkv: Run, model: Path, tmp_path: Path) -> None:
    tiny = f"--dataset prompts.jsonl --model {model}"
    script = "".join(BLOCKS).replace("--dataset prompts.jsonl", tiny).replace("--show", f"--show --model {model}")
    listed, shown, measured = shell(script, tmp_path, {"perturbkv": perturbkv})
    assert [ran.code for ran in (listed, shown, measured)] == [0, 0, 0], (listed.err, shown.err, measured.err)
    assert "2, of which a run would refuse none" in listed.out
    assert "The ferry leaves at nine" in listed.out
    assert "sample asked" in shown.out
    assert "12:00" in shown.out
    assert (tmp_path / "own" / "trace.h5").exists()


def test_the_page_has_every_field_once_and_no_other() -> None:
    table = PAGE.partition("## Fields")[2].partition("##")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(FIELDS)


@pytest.mark.parametrize(("row", "error"), REFUSED)
def test_every_refusal_of_the_page_is_word_for_word_what_a_run_says(
    perturbkv: Run, model: Path, row: str, error: str
) -> None:
    write(Path("bad.jsonl"), row)
    ran = perturbkv("trace", "--model", model, "--dataset", "bad.jsonl", "--samples", 1, "-o", "t.h5")
    refused(ran, f"bad.jsonl, {error}")
    assert ran.err.endswith(f"{error}\n")
    assert perturbkv("list", "bad.jsonl", "--json").json()["refused"] == [f"bad.jsonl, {error}"]


def test_the_page_shows_refusals() -> None:
    assert len(REFUSED) == PAGE.partition("## What is refused")[2].count("\n| `{")
    assert len(REFUSED) > 5


def test_a_list_shows_long_prompts_by_their_ends_and_counts_what_it_leaves_out(perturbkv: Run) -> None:
    path = write(Path("p.jsonl"), {"prompt": f"First {'x' * 3000} last"}, *[{"answr": str(row)} for row in range(9)])
    ran = perturbkv("list", path)
    assert ran.code == 0
    text = " ".join(ran.out.split())
    assert "10, of which a run would refuse 9" in text
    assert "fields prompt (1), answr (9)" in text
    assert "begins First xxx" in text
    assert text.count("did you mean `answers`?") == 5
    assert "4 more rows; --json lists all" in text
    found = perturbkv("list", "datasets", path, "--json").json()
    assert found["first_prompt"]["ends"].endswith("xx last")
    assert found["first_prompt"]["characters"] == found["characters"]["most"] == 3011
    assert len(found["refused"]) == 9


def test_a_list_escapes_what_would_steer_a_terminal(perturbkv: Run) -> None:
    ran = perturbkv("list", write(Path("p.jsonl"), {"prompt": "a\x1b[2Jb", "\x1b[31m": 1}, {"prompt": "a\x1b[2Jb"}))
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert r"a\x1b[2Jb" in ran.out


def test_answers_are_described_and_refused_as_prompts(perturbkv: Run, tiny: list[object]) -> None:
    assert perturbkv("generate", *tiny, "--max-new-tokens", 2, "-o", "out").code == 0
    path = Path("out/generation.jsonl")
    ran = perturbkv("list", path)
    assert (ran.code, ran.err) == (0, "")
    assert "answers that perturbkv generate wrote" in ran.out
    told = perturbkv("list", path, "--json").json()
    assert (told["kind"], told["sample_ids"], told["compress_every"]) == ("answers", ["p0", "p1"], None)
    refused(
        perturbkv("trace", *tiny[:2], "--dataset", path), "line 1: expected a prompt, got the run with which a file"
    )


@pytest.mark.parametrize("key", ["searches", "swap"])
def test_other_files_of_results_are_named(perturbkv: Run, key: str) -> None:
    refused(
        perturbkv("list", write(Path("r.jsonl"), {key: {}})), "expected a trace, prompts or answers at r.jsonl, got"
    )
