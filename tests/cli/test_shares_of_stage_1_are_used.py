"""Shares of stage 1 from a file, in the commands that measure and answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perturbkv as pk

Run = Callable[..., Any]


@pytest.fixture
def six(tiny: list[object]) -> list[object]:
    return [*tiny[:4], "--samples", 6, *tiny[6:], "--format", "png"]


@pytest.mark.slow
def test_workers_and_resumed_runs_need_no_file(perturbkv: Run, six: list[object]) -> None:
    Path("a.json").write_text(json.dumps({"by": "head", "alpha": [[0, 0.5, 1, 0.25]] * 2, "layers": [0, 1]}))
    asked = ["--selection", "two-stage(alpha=a.json)", "--selection", "attention"]
    first = perturbkv("trace", *six[:-2], *asked, "-o", "one.h5")
    ran = perturbkv("trace", *six[:-2], *asked, "--engine", "workers", "--workers", 2, "-o", "two.h5")
    assert (first.code, ran.code) == (0, 0), ran.err
    one, two = (pk.read_trace(path) for path in ("one.h5", "two.h5"))
    np.testing.assert_array_equal(one.arrays["kept_code"], two.arrays["kept_code"])
    np.testing.assert_array_equal(one.arrays["stage1_count"], two.arrays["stage1_count"])
    assert len(np.unique(one.arrays["stage1_count"][:, 0])) == 4


@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_answers_whose_cache_is_compressed_again_take_a_table(
    perturbkv: Run, tiny: list[object], granularity: str
) -> None:
    """Of equal shares what the number gives, of others something else."""
    equal, other = [[0.75] * 4] * 2, [[0, 0.5, 1, 0.25], [1, 1, 0, 0.9]]
    for name, rows in (("equal", equal), ("other", other)):
        Path(f"{name}.json").write_text(json.dumps({"by": "head", "alpha": rows, "layers": [0, 1]}))
    names = ["0.75", "equal.json", "other.json"]
    asked = ["--max-new-tokens", 12, "--compress-every", 28, "--granularity", granularity, "-o", "out"]
    chosen = [part for name in names for part in ("--selection", f"two-stage(alpha={name})")]
    ran = perturbkv("generate", *tiny, *chosen, *asked)
    assert ran.code == 0, ran.err
    rows = [json.loads(line) for line in Path("out/generation.jsonl").read_text().splitlines()]
    answers = [[one["tokens"] for one in row["evicted"].values()] for row in rows if "evicted" in row]
    assert len(answers) == 2 and all(number == table for number, table, _ in answers)
    assert any(number != table for number, _, table in answers)
