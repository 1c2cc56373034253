"""Each command on shards in docs/cluster.md runs as it is written, with a stand-in for `sbatch`, on a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import run_script
from tests.support.sharded import assert_same_trace

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^In a file `([^`]+)`:\n\n```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SBATCH = """
import os, re, subprocess, sys
*options, file = sys.argv[1:]
asked = " ".join([open(file).read(), *options])
for index in eval_indices(re.findall(r"--array=([0-9,-]+)", asked)[-1]):
    subprocess.run(["bash", file], env={**os.environ, "SLURM_ARRAY_TASK_ID": str(index)}, check=True)
"""
INDICES = """
def eval_indices(text):
    parts = [part.partition("-") for part in text.split(",")]
    return [index for first, _, last in parts for index in range(int(first), int(last or first) + 1)]
"""


@pytest.mark.slow
def test_every_command_runs_as_it_is_written(
    perturbkv: Callable[..., Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGE.read_text().partition("\n## Worker processes")[0]
    ((name, batch),) = FILE.findall(page)
    assert len(batch.splitlines()) <= 10
    rows = [{"id": f"p{place}", "prompt": f"{place} The quick brown fox jumps. " * 8} for place in range(8)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tiny = f"--dataset prompts.jsonl --model {model} --window 8"
    (tmp_path / name).write_text(batch.replace("--dataset prompts.jsonl", tiny))
    blocks = BLOCK.findall(page)
    sbatch = {"sbatch": INDICES + SBATCH}
    left = [run_script(block.replace("--dataset prompts.jsonl", tiny), tmp_path, perturbkv, sbatch) for block in blocks]
    halves, heads, array, again, wide = left
    assert page.count(" ".join(halves[0].out.split()).partition(";")[0]) == 1
    assert [ran.code for ran in (*halves, *heads, *array, *again, *wide)] == [0] * (2 + 1 + 5 + 2 + 2)
    assert "halves.h5: 8 samples" in halves[1].out
    assert "3 of 4 shards are there" in " ".join(array[2].out.split())
    assert "joined into study.h5" in array[3].err
    assert_same_trace(tmp_path / "study.h5", tmp_path / "halves.h5")
    assert "wide.h5: 2 samples, 4 configurations" in wide[1].out
