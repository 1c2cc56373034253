"""The recipes of docs/how-to/extending.md, applied as they stand to a copy of the source, add what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import pytest

from tests.support.folders import model_folder
from tests.support.traces import decoded

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "extending.md").read_text()
STEP = re.compile(
    r"^In (?P<new>a new file )?`(?P<path>[^`]+)`"
    r"(?:, (?P<how>as its last line|after|before|replace)(?: `(?P<line>[^`]+)`)?)?:\n\n"
    r"```python\n(?P<block>.*?)```$",
    re.MULTILINE | re.DOTALL,
)
OUTSIDE = ("analyses", "figures", "cli")
"""Folders that are installed inside the package, as whose links they stand there."""


def edited(text: str, how: str, line: str | None, block: str) -> str:
    """The file with the block put where the page says; a line that is named has to stand there exactly once."""
    if line is None:
        return text + block
    marked = f"{line}\n"
    assert text.count(f"\n{marked}") == 1, f"'{line}' stands {text.count(line)} times"
    put = textwrap.indent(block, line[: len(line) - len(line.lstrip())])
    return text.replace(f"\n{marked}", "\n" + {"after": marked + put, "before": put + marked, "replace": put}[how])


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as it is installed, every step of the page taken."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "perturbkv", folder / "perturbkv")
    for step in STEP.finditer(PAGE):
        path = folder / ("perturbkv" if step["path"].startswith(OUTSIDE) else "") / step["path"]
        if step["new"]:
            assert not path.exists()
            path.parent.mkdir(exist_ok=True)
            path.write_text(step["block"])
        else:
            path.write_text(edited(path.read_text(), step["how"], step["line"], step["block"]))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = [{"id": f"p{place}", "prompt": f"{place} " + "The quick brown fox. " * 5} for place in range(2)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


SERVER = """
import contextlib, io, json, sys
from perturbkv.cli.main import main

for line in sys.stdin:
    sys.argv[1:], out, code = json.loads(line), io.StringIO(), 0
    with contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, out.getvalue()]), flush=True)
"""
Perturbkv = Callable[..., str]


@pytest.fixture(scope="module")
def perturbkv(copy: Path) -> Iterator[Perturbkv]:
    """The copy's command, in one process of its own for all calls; returns what it says."""
    env = {**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200"}
    with (copy / "stderr").open("w") as errors, subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=copy, env=env, text=True, stdin=-1, stdout=-1, stderr=errors
    ) as server:  # fmt: skip
        sent, received = server.stdin, server.stdout
        assert sent is not None and received is not None

        def call(*arguments: object) -> str:
            sent.write(json.dumps([*map(str, arguments)]) + "\n")
            sent.flush()
            code, said = json.loads(received.readline() or '["it ended", ""]')
            assert code == 0, (copy / "stderr").read_text()
            return str(said)

        yield call
        sent.close()


def test_every_python_block_is_a_step() -> None:
    assert PAGE.count("```python") == len(STEP.findall(PAGE)) > 0


def test_the_page_names_lines_that_stand_there_once() -> None:
    with pytest.raises(AssertionError, match="stands 0 times"):
        edited("a\nb\n", "after", "c", "d\n")
    assert edited("a\nb\n", "before", "b", "d\n") == "a\nd\nb\n"
    assert edited("a\n  b\n", "replace", "  b", "d\n") == "a\n  d\n"
    assert edited("a\nb\n", "as its last line", None, "d\n") == "a\nb\nd\n"


@pytest.mark.slow
def test_policy_and_selection_are_measured(perturbkv: Perturbkv, copy: Path, data: Path, tmp_path: Path) -> None:
    shared = ["--model", model_folder(tmp_path / "tiny"), "--dataset", data, "--window", 4, "--budget", 24]
    wanted = ["--compare", "attention,recent-half(share=0.5):attention,snapkv:attention-by-age", "--json"]
    said = json.loads(perturbkv("heads", *shared, *wanted, "--output", tmp_path, "--format", "png"))
    asked = [config["policy"] + ":" + config["selection"] for config in said["run"]["configs"]]
    assert asked == ["snapkv:attention", "recent-half:attention", "snapkv:attention-by-age"]
    assert all(one["isolated"]["tied"] < one["heads"] for one in said["comparisons"])
    with h5py.File(tmp_path / "trace.h5") as file:  # of a selection that this process does not know
        tokens, where = int(file["prompt_tokens"][0]), (0, 1, 0, 0)
        offset, length = int(file["kept_offset"][where]), int(file["kept_length"][where])
        kept = decoded(file["kept_code"][offset : offset + length].tolist(), tokens)
    assert kept[12:] == list(range(tokens - 12, tokens))
    assert kept[0] < tokens - 24


@pytest.mark.slow
def test_a_score_of_ones_own_is_measured_under_any_budget_rule(
    perturbkv: Perturbkv, copy: Path, data: Path, tmp_path: Path
) -> None:
    shared = ["--model", model_folder(tmp_path / "tiny"), "--dataset", data, "--window", 4, "--budget", 24]
    peak = "my_score.py:Peak(tau=2)"
    wanted = ["--compare", f"snapkv(pool=none):attention,{peak}:attention,adakv({peak}):two-stage", "--json"]
    said = json.loads(perturbkv("heads", *shared, *wanted, "--output", tmp_path, "--format", "png"))
    asked = [config["policy"] for config in said["run"]["configs"]]
    assert asked == ["snapkv(pool=none)", peak.replace("tau=2", "tau=2.0"), f"adakv(by={peak.replace('2', '2.0')})"]
    assert said["comparisons"][0]["isolated"]["tied"] < said["comparisons"][0]["heads"]
    lines = (copy / "my_score.py").read_text().splitlines()
    assert len(lines) <= 15
    assert "tau" in perturbkv("list", "policies", "my_score.py:Peak")


@pytest.mark.slow
def test_a_family_and_a_command_run(perturbkv: Perturbkv, copy: Path, data: Path, tmp_path: Path) -> None:
    shared = ["--model", model_folder(tmp_path / "tiny", "seed_oss"), "--dataset", data, "--window", 4, "--budget", 24]
    perturbkv("kept-attention", *shared, "--output", tmp_path / "run", "--format", "png")
    told = json.loads((tmp_path / "run" / "summary.json").read_text())["analyses"]["kept-attention"]
    assert len(told["configs"]) == 2
    assert all(0 < mass <= 1 for config in told["configs"] for mass in [*config["by_layer"], config["mean"]])
    assert (tmp_path / "run" / "kept-attention.png").exists()
