"""`perturbkv export`: what lies beside a trace is replaced only when asked, and texts of an earlier one go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.schema import TEXT
from tests.support.asked import refused
from tests.support.payloads import small_trace

Run = Callable[..., Any]


def complete(path: str) -> Path:
    """A finished trace at this path, none of whose samples failed."""
    return small_trace().sel(sample=["s0", "s1"]).save(path)


def without_text(trace: pk.Trace) -> pk.Trace:
    """The trace as `--no-text` leaves it."""
    lean = {name: array for name, array in trace.arrays.items() if name not in TEXT}
    return dataclasses.replace(trace, arrays=lean)


@pytest.mark.slow
def test_texts_of_an_earlier_trace_are_not_published(perturbkv: Run) -> None:
    made = complete("a/t.h5")
    assert perturbkv("export", "a").code == 0
    made.unlink()
    without_text(small_trace().sel(sample=["s0", "s1"])).save(made)
    Path("a/other.tokens.csv").write_text("not,ours")
    for path in ("a/t.csv", "a/t.parquet"):
        Path(path).unlink()
    for words in ((), ("-o", "a/t.csv")):
        refused(perturbkv("export", "a", *words), "expected no a/t.tokens.csv beside a trace without text, got prompts")
        assert {path.name for path in Path("a").iterdir()} == {
            "t.h5", "t.tokens.csv", "t.tokens.parquet", "other.tokens.csv"
        }  # fmt: skip
    ran = perturbkv("export", "a", "--overwrite")
    assert ran.code == 0, ran.err
    assert "a/t.tokens.parquet: removed, as the trace holds no text" in ran.out + ran.err
    assert {path.name for path in Path("a").iterdir()} == {"t.csv", "t.h5", "t.parquet", "other.tokens.csv"}


def test_a_file_that_is_no_table_of_tokens_is_left_alone(perturbkv: Run) -> None:
    without_text(small_trace().sel(sample=["s0", "s1"])).save("a/t.h5")
    for suffix in ("csv", "parquet"):
        Path(f"a/t.tokens.{suffix}").write_text("mine")
    assert perturbkv("export", "a", "--overwrite").code == 0
    assert {Path(f"a/t.tokens.{suffix}").read_text() for suffix in ("csv", "parquet")} == {"mine"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["t.h5", "u.h5", "-o", "t.csv"], "--output names the tables of one trace, got 2 traces"),
        (["t.h5", "t.hdf5"], "expected a table per trace, got t.csv for two of them"),
        (["empty"], "in the folder empty, got none; name the traces themselves"),
    ],
)
def test_what_cannot_be_published_is_one_line(perturbkv: Run, words: list[str], error: str) -> None:
    Path("empty").mkdir()
    for name in ("t.h5", "u.h5", "t.hdf5"):
        Path(name).touch()  # refused before a trace is read
    before = sorted(Path().iterdir())
    refused(perturbkv("export", *words), error)
    assert sorted(Path().iterdir()) == before
