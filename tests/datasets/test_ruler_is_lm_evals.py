"""The oracle: lm-eval itself, imported whole in another process, with a network that is not there."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perturbkv.datasets import metrics
from perturbkv.datasets.dataset_registry import DatasetOptions, LoadedDataset, load
from tests.support import lm_eval_ruler, ruler_data

OFFLINE = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
WITH_DATA = (*lm_eval_ruler.ESSAYS, "qa_squad", "qa_hotpot")
ASKED = [
    *((task, 1000, 0) for task in OFFLINE + WITH_DATA),
    *((task, 2000, 7) for task in ("niah_multikey_2", "vt", "fwe")),
    ("cwe", 4200, 0),
]
"""Task, length, seed."""


def recorded(draw: random.Random) -> list[tuple[str, list[str]]]:
    """200 answers of models, right, wrong and in between."""
    numbers = [str(draw.randrange(10**6)) for _ in range(40)]
    said = (" {}.", "{}", "The number is {}\x07 and {}", "{} {} {}", "", "\n\n", "none of it", "{}".upper() + "\t{}")
    return [
        (draw.choice(said).format(*draw.choices(numbers, k=3)), draw.sample(numbers, draw.randrange(1, 11)))
        if i % 2
        else (f"Foo{draw.choice(said)} BAR", draw.sample(["foo", "Bar", "foo}{", "x"], 2))
        for i in range(200)
    ]


@pytest.fixture
def official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, Any]]:
    """The folder of the data, and what lm-eval makes and says."""
    ruler_data.write(tmp_path)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk_data"))
    texts = {"process_results": recorded(random.Random(1)), "process_results_part": recorded(random.Random(2))}
    (tmp_path / "asked.json").write_text(json.dumps({"tasks": ASKED, "texts": texts}))
    ran = subprocess.run(
        [sys.executable, lm_eval_ruler.__file__, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return tmp_path, {**json.loads((tmp_path / "made.json").read_text()), "texts": texts}


def made(folder: Path, task: str, lengths: tuple[int, ...], seed: int, samples: int) -> LoadedDataset:
    return load(
        f"ruler:{task}", DatasetOptions(samples, seed=seed, data_dir=folder, lengths=lengths), ruler_data.Words()
    )


@pytest.mark.slow
def test_every_sample_and_score_is_lm_evals(official: tuple[Path, dict[str, Any]]) -> None:
    import nltk

    folder, told = official
    nltk.data.path.insert(0, os.environ["NLTK_DATA"])
    try:
        for asked, rows in zip(ASKED, told["rows"], strict=True):
            check(folder, *asked, rows)
    finally:
        nltk.data.path.remove(os.environ["NLTK_DATA"])
    for (name, texts), scores in zip(told["texts"].items(), told["scores"], strict=True):
        graded = metrics.metric("ruler:vt" if name == "process_results" else "ruler:qa_squad")
        assert graded is not None
        assert [graded.grade(text, answers, ()) for text, answers in texts] == scores
        assert 0.1 < sum(score == 0 for score in scores) / len(scores) < 0.9


def check(folder: Path, task: str, length: int, seed: int, rows: list[dict[str, Any]]) -> None:
    """Some are made between samples of another length, which do not move their random numbers."""
    lengths = (length, 1500) if seed else (length,)
    found = made(folder, task, lengths, seed, len(lengths) * len(rows)).samples[:: len(lengths)]
    assert len(rows) == lm_eval_ruler.ROWS
    assert [one.prompt for one in found] == [row["input"] for row in rows], task
    assert [list(one.answers) for one in found] == [row["outputs"] for row in rows], task
    assert [one.answer_prefix for one in found] == [row["gen_prefix"] for row in rows], task
