"""A name, file or option that is wrong is refused before torch and transformers are imported, which takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.traces import sample_trace, write

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import contextlib, io, json, sys
from perturbkv.cli.main import main

def refused(words):
    sys.argv, out, err, code = ["perturbkv", *words], io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    return code, out.getvalue(), err.getvalue(), heavy

sys.stdout.write(json.dumps([refused(words) for words in json.load(sys.stdin)]))
"""
REFUSALS = {
    "heads --model nope": "unknown model 'nope'",
    "heads --model qwen3-8b": "needs Qwen/Qwen3-8B and the hub did not give it: HF_HUB_OFFLINE is set; bring it with",
    "heads --model ./nope": "expected a folder of safetensors or a .gguf file, got './nope'",
    "heads --model nope.gguf": "expected a folder of safetensors or a .gguf file, got 'nope.gguf'",
    "heads --model random:nope": "unknown model 'random:nope'",
    "trace --model nope -o out": "unknown model 'nope'",
    "trace --head-scores scores.json --model nope": "unknown model 'nope'",
    "generate --model nope": "unknown model 'nope'",
    "audit plain.py:f --model nope": "unknown model 'nope'",
    "budget --max-kl 0.1 --model nope": "unknown model 'nope'",
    "patching --model nope": "unknown model 'nope'",
    "heads --dataset nope": "unknown dataset 'nope'",
    "quality --dataset needle,nope": "unknown dataset 'nope'",
    "heads --dataset nope.jsonl": "expected a jsonl file (UTF-8) at nope.jsonl, got nothing",
    "generate --dataset nope.jsonl": "expected a jsonl file (UTF-8) at nope.jsonl",
    "heads --samples 0": "a run needs at least 1 sample",
    "heads --policy nope": "unknown policy 'nope'",
    "heads --policy snapkv --policy nope": "unknown policy 'nope'",
    "heads --policy nope.py:Mine": "expected a Python file at nope.py, got nothing",
    "heads --policy adakv(by=nope)": "unknown score 'nope'",
    "heads --policy adakv(nope)": "unknown score 'nope'",
    "heads --compare attention,nope": "unknown selection 'nope'",
    "heads --compare nope:attention,attention": "unknown policy 'nope'",
    "heads --compare adakv:nope,attention": "unknown selection 'nope'",
    "generate --selection nope": "unknown selection 'nope'",
    "heads --budget 0": "a budget must be positive, got 0",
    "heads --samples many": "Invalid value for '--samples'",
    "heads --ploicy snapkv": "No such option: --ploicy",
    "heads --budget 64,256": "expected one budget, got '64,256'",
    "heads -o taken": "taken/summary.json",
    "heads --format nope": "unknown format 'nope'",
    "heads other/trace.h5 --style nope": "unknown style 'nope'",
    "heads --model ./taken": "model './taken' cannot be loaded: expected config.json in its folder, got none",
    "audit nope.npz": "expected a file of kept positions at nope.npz, got nothing",
    "audit nope.json": "expected a file of kept positions at nope.json, got nothing",
    "audit nope.py:f": "expected a Python file at nope.py, got nothing",
    "audit nope.py:f(a=1)": "expected a Python file at nope.py, got nothing",
    "heads nope.h5": "expected a trace file at nope.h5, got nothing",
    "report nope.h5": "expected a trace file at nope.h5, got nothing",
    "trace --config nope.yaml": "expected a sweep file (YAML) at nope.yaml, got nothing",
    "quality nope.jsonl --divergence": "nope.jsonl",
}
"""Command line -> a part of its one line."""


def answers(
    folder: Path, lines: list[list[str]], code: str = CODE, **variables: str
) -> list[tuple[int, str, str, list[str]]]:
    """Exit code, stdout, stderr and imported heavy packages after each command line, all in one process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    command, given = [sys.executable, "-c", code], json.dumps(lines)
    done = subprocess.run(command, input=given, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    return [(code, out, err, heavy) for code, out, err, heavy in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Command line -> what it answers, in a folder with files of each kind."""
    folder = tmp_path_factory.mktemp("door")
    texts = {
        "plain.py": b"def f(model, input_ids, attention_mask): ...\n",
        "taken/summary.json": b"{}",
    }
    (folder / "taken").mkdir()
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    (folder / "other").mkdir()
    write(folder / "other" / "trace.h5", sample_trace("s0"))
    before = sorted(folder.rglob("*"))
    lines = [line.split() for line in REFUSALS]
    got = dict(zip(REFUSALS, answers(folder, lines, HF_HUB_OFFLINE="1", HF_HOME=str(folder / "hf")), strict=True))
    assert sorted(folder.rglob("*")) == before
    return got


@pytest.mark.parametrize("line", REFUSALS)
def test_a_refusal_is_one_line_without_torch(refused: dict[str, Any], line: str) -> None:
    code, out, err, heavy = refused[line]
    assert (code, out, err.count("\n"), heavy) == (2, "", 1, []), err
    assert err.startswith("error: ") and REFUSALS[line] in err


@pytest.mark.slow
def test_too_little_address_space_is_refused_before_torch_fails_in_it(tmp_path: Path) -> None:
    """Before, torch's import was a traceback, and SciPy's never ended."""
    limits = [(300, "300.0 MiB"), (900, "900.0 MiB"), (1400, "1.4 GiB")]
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_AS, ({} * 2**20,) * 2)\n"
    for size, text in limits:
        ((code, out, err, heavy),) = answers(tmp_path, [["heads", "-o", "out"]], limit.format(size) + CODE)
        assert (code, out, err.count("\n"), heavy) == (2, "", 1, []), err
        assert f"measuring takes 1.5 GiB of address space at least, and this process may have {text}" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_backend_that_matplotlib_lacks_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    ((code, out, err, heavy),) = answers(tmp_path, [["heads"]], MPLBACKEND="nope")
    assert (code, out, err.count("\n"), heavy) == (2, "", 1, []), err
    assert err.startswith("error: expected MPLBACKEND to name a backend of matplotlib, such as agg, got 'nope'")


@pytest.mark.slow
def test_the_check_of_imports_can_fail(tmp_path: Path) -> None:
    (tmp_path / "heavy.py").write_text("import torch\n")
    ((code, _, err, heavy),) = answers(tmp_path, [["heads", "--policy", "heavy.py:Mine"]])
    assert (code, "heavy.py has no class 'Mine'" in err) == (2, True)
    assert "torch" in heavy
