"""Texts of an exported CSV that a spreadsheet would compute stand behind an apostrophe; numbers stay numbers."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from perturbkv.storage.trace.export import tokens_path, write, write_tokens
from tests.support import prompts

WORDS = ["=cmd|' /C calc'!A0", "+1+cmd", "-2+3", "@SUM(1)", "\tx", "\rx", "-1\n=2"]


def cells(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("word", WORDS)
def test_a_formula_in_an_id_or_a_prompt_is_text(tmp_path: Path, word: str) -> None:
    trace = prompts.made(prompts.sample(word, ("The", word, "", "é", "-", "12", " sat", ".", " Who?")))
    table, tokens = tmp_path / "t.csv", tokens_path(tmp_path / "t.csv")
    write(trace, table)
    write_tokens(trace, tokens)
    assert {row["sample"] for row in cells(table) + cells(tokens)} == {f"'{word}"}
    assert [row["text"] for row in cells(tokens)][:6] == ["The", f"'{word}", "", "é", "-", "12"]


@pytest.mark.parametrize("word", ["-1.5", "+3e5", "plain", "'quoted", "a=b", "−1"])
def test_numbers_and_plain_names_stay_as_they_are(tmp_path: Path, word: str) -> None:
    trace = prompts.made(prompts.sample(word))
    write(trace, tmp_path / "t.csv")
    rows = cells(tmp_path / "t.csv")
    assert {row["sample"] for row in rows} == {word}
    assert all(float(row["perturbation_isolated"]) > 0 for row in rows)


def test_parquet_holds_the_text_itself(tmp_path: Path) -> None:
    write(prompts.made(prompts.sample(WORDS[0])), tmp_path / "t.parquet")
    assert set(pq.read_table(tmp_path / "t.parquet")["sample"].to_pylist()) == {WORDS[0]}
