from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.folders import model_folder
from tests.support.mischief import Mischief

LENGTHS = (90, 120, 150, 180, 210, 240)
"""Tokens of the prompts, one per character."""


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Here as in a worker: sums of other numbers of threads are rounded otherwise."""
    threads, told = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    torch.set_num_threads(threads)
    os.environ.pop("OMP_NUM_THREADS")
    if told is not None:
        os.environ["OMP_NUM_THREADS"] = told


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("cluster") / "tiny", positions=1024)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    text = "The quick brown fox jumps over the lazy dog. " * 6
    rows = [{"id": f"p{n}", "prompt": f"{n} {text}"[: n - 1] + ".", "answers": ["a fox"]} for n in LENGTHS]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def mischief(tmp_path: Path) -> Mischief:
    (tmp_path / "mischief").mkdir()
    return Mischief(tmp_path / "mischief")
