"""An id or a text that no trace could hold is refused where it comes in, with its line, before anything is measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.datasets import jsonl, longbench
from perturbkv.datasets.dataset_registry import DatasetOptions
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.sample import Sample
from perturbkv.errors import DatasetError
from perturbkv.models.loading import ByteTokenizer
from tests.support.models import tiny_adapter


def loaded(path: Path) -> Any:
    return jsonl.load(str(path), DatasetOptions(9, at_most=True), ByteTokenizer()).samples


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "a", "id": "a\\u0000b"}', "an id without NUL characters"),
        ('{"context": "a", "_id": "\\u0000"}', "an id without NUL characters"),
        ('{"prompt": "a", "id": "\\udfff"}', "half of a surrogate pair"),
        (json.dumps({"prompt": "a", "id": "x" * 1001}), "at most 1,000 characters, got 1,001"),
        ('{"prompt": "a", "id": ' + "9" * 5_000 + "}", "a whole number of 5,000 digits"),
        ('{"prompt": "a", "id": NaN}', "expected `id` to be text or a whole number"),
        ('{"context": "a", "_id": {}}', "expected `_id` to be text or a whole number"),
        ('{"prompt": "a", "more": ' + "[" * 10_000, "too deep"),
    ],
)
def test_a_row_that_cannot_be_stored_is_told_with_its_line(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n' + row)
    with pytest.raises(DatasetError, match=f"^{path}, line 2: ") as raised:
        loaded(path)
    assert said in str(raised.value)


def test_numbers_that_nobody_reads_may_be_what_python_writes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "length": NaN, "language": [-Infinity, 1e400]}')
    assert [sample.prompt for sample in loaded(path)] == ["a"]


@pytest.mark.parametrize("name", ["a\tb", "\x1b[2J", "\u202eb", "7" * 900, "=1+1", "🙂"])
def test_an_id_that_only_looks_odd_is_kept(tmp_path: Path, name: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "id": name}))
    assert loaded(path)[0].id == name


def test_a_mark_before_the_first_row_and_old_line_ends_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r{"prompt": "b"}\r\n\n{"prompt": "c"}')
    assert [sample.prompt for sample in loaded(path)] == ["a", "b", "c"]


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path: Path) -> None:
    for name in ("rows.jsonl", "trec.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(DatasetError, match="got a named pipe, not a regular file"):
        loaded(tmp_path / "rows.jsonl")
    with pytest.raises(DatasetError, match="got a named pipe, not a regular file"):
        longbench.load("trec", DatasetOptions(1, data_dir=tmp_path), ByteTokenizer())


def test_a_script_is_told_as_well() -> None:
    model = tiny_adapter()
    for made in (
        lambda: pk.Prompt.from_text("a", model, id="a\0b"),
        lambda: Prompt("\0", (1, 2), 0),
        lambda: pk.Prompt.from_text("\ud83d", model),
        lambda: Sample("a", "b", answers=("\udc00",)),
    ):
        with pytest.raises(DatasetError, match="NUL characters|half of a surrogate pair"):
            made()
