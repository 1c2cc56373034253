"""A finished trace is read, analysed, drawn and put on a page where torch and what measuring needs is not installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import perturbkv as pk
from perturbkv.errors import MEASURING, MissingPackageError
from tests.house.test_no_label_is_parsed import COMMANDS, asked_of
from tests.support.answers import CONFIGS, row
from tests.support.answers import written as written_answers
from tests.support.commands import every_command
from tests.support.traces import sample_trace, write

ROOT = Path(__file__).resolve().parents[2]
ABSENT = ("accelerate", "gguf", "huggingface_hub", "jaxtyping", "safetensors", "tokenizers", "torch",
          "transformers", "yaml")  # fmt: skip
BEGIN = f"""
import contextlib, importlib, io, json, sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
"""
COMMAND_LINES = """
from perturbkv.cli.main import main

def run(words):
    sys.argv, out, err, code = ["perturbkv", *words], io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as left:
            code = left.code
    return code, out.getvalue(), err.getvalue()

sys.stdout.write(json.dumps([run(words) for words in json.load(sys.stdin)]))
"""
PUBLIC = """
import perturbkv as pk

def missing(name):
    try:
        getattr(pk, name)
    except pk.PerturbkvError as error:
        return str(error)

sys.stdout.write(json.dumps({name: missing(name) for name in pk.__all__}))
"""
PICTURES = """
import perturbkv as pk

trace = pk.read_trace(sys.argv[1])
results = [analyse(trace) for analyse in (pk.compare_heads, pk.assumption, pk.ablation)]
for result in results:
    result.plot().savefig(sys.argv[2])
    result.to_frame(), result.to_dict(), repr(result), result._repr_html_()
assert trace.to_xarray().sizes["sample"] == len(trace.to_frame()["sample"].unique())
assert pk.report(trace).html.startswith("<!")
"""
NEEDS_TORCH = {
    "list policies": [], "doctor": [], "doctor selfcheck": [],
    "trace": [], "generate": [], "audit": [f"{__file__}:evict"], "patching": [],
}  # fmt: skip
"""Commands that measure, or that look at what measures."""
WITHOUT_A_TRACE: dict[str, list[str]] = {"list": [], "list models": [], "list datasets": []}
READ = ("tokens", "export", "report", "merge", "list trace.h5")
"""Commands on a finished trace beside the analyses."""
DRAWN = ("--format", "png", "--overwrite", "-o")


def without_torch(code: str, *arguments: object, given: str = "") -> str:
    """What a Python prints that has none of the absent modules."""
    command = [sys.executable, "-c", BEGIN + code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=given, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ran(lines: Iterable[Iterable[object]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command line, all run in one process without the absent modules."""
    given = json.dumps([[*map(str, line)] for line in lines])
    return [(code, out, err) for code, out, err in json.loads(without_torch(COMMAND_LINES, given=given))]


@pytest.fixture
def read(tmp_path: Path) -> Path:
    """A small trace with its prompts' text."""
    return write(
        tmp_path / "trace.h5", *(sample_trace(f"s{seed}", optional=True, seed=seed, keys=70) for seed in (0, 1))
    )


def test_the_absent_modules_are_those_of_the_rule() -> None:
    assert set(ABSENT) == {*MEASURING, "safetensors", "tokenizers"}
    with pytest.raises(AssertionError, match="No module named 'torch'"):
        without_torch("import perturbkv.theory")


def test_every_command_is_listed_here() -> None:
    analyses = {command.partition(" --")[0] for command in COMMANDS}
    listed = [*analyses, *READ, *NEEDS_TORCH, *WITHOUT_A_TRACE]
    assert sorted(listed) == sorted(map(" ".join, every_command()))


@pytest.mark.slow
def test_what_needs_torch_says_so_in_one_line_with_what_to_type() -> None:
    lines = [*([*command.split(), *more] for command, more in NEEDS_TORCH.items()), ["heads"], ["heads", "--dry-run"]]
    *plain, (code, document, _) = ran([*lines, ["trace", "--json"]])
    assert (code, json.loads(document)["error"]["type"]) == (2, "MissingPackageError")
    for line, (code, out, err) in zip(lines, plain, strict=True):
        assert (code, out, err.count("\n")) == (2, "", 1), (line, err)
        assert re.match(r"error: expected the package \w+ to measure with .* type: pip install 'torch>=", err), line


@pytest.mark.slow
def test_public_names_are_there_or_say_what_is_missing() -> None:
    missing = {name: error for name, error in json.loads(without_torch(PUBLIC)).items() if error}
    measuring = {
        "audit",
        "audit_dump",
        "external",
        "generate",
        "load_model",
        "load_prompts",
        "measure",
        "patching",
        "search_kept_sets",
    }
    assert set(missing) == measuring | {"CompactCache", "Policy", "Score", "write_dump"}
    assert all("pip install 'torch>=" in error for error in missing.values())


def test_a_module_of_ours_that_is_missing_stays_an_error_of_ours() -> None:
    with pytest.raises(ModuleNotFoundError, match="gone"):
        MissingPackageError.from_error(ModuleNotFoundError("gone", name="perturbkv.gone"))
    assert str(MissingPackageError("psutil")).endswith("type: pip install psutil")


@pytest.mark.slow
def test_a_trace_is_opened_listed_and_kept_without_torch(read: Path, tmp_path: Path) -> None:
    lines = [
        ["list", read], ["tokens", read], ["merge", read], ["report", read, "-o", tmp_path / "page"],
        ["export", read, "-o", tmp_path / "x.csv", "-o", tmp_path / "x.parquet"],
        *(command.split() for command in WITHOUT_A_TRACE),
    ]  # fmt: skip
    assert {line[0] for line in lines[:5]} == {command.split()[0] for command in READ}
    assert [(line, err) for line, (code, _, err) in zip(lines, ran(lines), strict=True) if code] == []


@pytest.mark.slow
def test_python_reads_analyses_and_draws_without_torch(tmp_path: Path) -> None:
    without_torch(PICTURES, asked_of("heads").save(tmp_path / "trace.h5"), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.slow
def test_every_analysis_of_a_finished_trace_runs_without_torch(tmp_path: Path) -> None:
    lines: list[list[Any]] = []
    for number, (command, options) in enumerate(COMMANDS.items()):
        path = asked_of(command).save(tmp_path / f"{number}.h5")
        lines.append([*command.split(), *options, path, *DRAWN, tmp_path / f"out-{number}"])
    answers = tmp_path / "generation.jsonl"
    rows = [row("a", [1, 2], [[1, 2], [1, 3]], [[0, 0], [0, 1]]), row("b", [4, 5], [[4, 5], [6, 7]], [[0, 0], [2, 1]])]
    header = {"run": json.loads(written_answers(*rows, configs=CONFIGS).run.to_json())}
    answers.write_text("".join(json.dumps(line) + "\n" for line in (header, *rows)))
    assert len(pk.read_answers(answers).rows) == 2
    lines.append(["quality", answers, "--divergence", *DRAWN, tmp_path / "divergence"])
    assert [(line[:2], err) for line, (code, _, err) in zip(lines, ran(lines), strict=True) if code] == []


def test_the_page_lists_what_pyproject_asks_for_but_for_measuring() -> None:
    page = (ROOT / "docs" / "how-to" / "light_reading.md").read_text()
    (listed,) = re.findall(r"^pip install ((?:'[^']+' *)+)$", page.replace("\\\n", ""), re.MULTILINE)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert sorted(re.findall("'([^']+)'", listed)) == sorted(set(declared) - set(MEASURING.values()))
    assert set(MEASURING.values()) <= set(declared)
