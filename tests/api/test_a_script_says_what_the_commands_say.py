"""A script that imports nothing but `perturbkv as pk` gets the numbers that the commands print with --json."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from perturbkv.cli.main import app
from tests.support.folders import model_folder

SCRIPT = """
import perturbkv as pk

model = pk.load_model(FOLDER)
prompts = pk.load_prompts("needle", model, samples=5, lengths=[200], haystack="noise")
pair = ["attention", "two-stage"]
ranked = ["attention", "attention-unpooled", "two-stage-uniform", "two-stage", "value", "random", "hindsight"]


def traced(budget, selection):
    return pk.measure(model, prompts, pk.grid(budget, selection=selection, window=8), progress=False)


budgets = traced([0.1, 0.2, 24], pair)
found = {
    "heads": pk.compare_heads(traced(24, pair), "attention", "two-stage").to_dict(),
    "layers": {
        **pk.layer_drift(budgets).to_dict(),
        **pk.last_layer(budgets).to_dict(),
        "budgets": pk.budget_curves(budgets).to_dict(),
    },
    "bound-tightness": pk.bound_tightness(traced([24, 32], ranked), "two-stage").to_dict(),
    "generate": pk.generate(
        model, prompts, pk.grid(24, policy=["snapkv", "adakv(floor=0.1)"], selection=pair, window=8),
        max_new_tokens=6, progress=False,
    ).to_dict(),
}
"""
COMMANDS = {
    "heads": ["--budget", "24"],
    "layers": ["--budget", "0.1", "--budget", "0.2", "--budget", "24", "--per-sample", "--budgets"],
    "bound-tightness": ["--budget", "24", "--budget", "32"],
    "generate": ["--budget", "24", "--policy", "snapkv", "--policy", "adakv(floor=0.1)", "--max-new-tokens", "6"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("api") / "tiny", positions=512)


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """What the script finds, as JSON holds it."""
    names: dict[str, Any] = {"FOLDER": str(folder)}
    exec(compile(SCRIPT, "script", "exec"), names)
    return {command: json.loads(json.dumps(numbers)) for command, numbers in names["found"].items()}


def test_the_script_imports_nothing_else() -> None:
    imported = [ast.unparse(one) for one in ast.walk(ast.parse(SCRIPT)) if isinstance(one, ast.Import | ast.ImportFrom)]
    assert imported == ["import perturbkv as pk"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_numbers_are_equal_bit_for_bit(command: str, found: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    data = ["--model", str(folder), "--dataset", "needle", "--length", "200", "--haystack", "noise", "--samples", "5"]
    ran = CliRunner().invoke(
        app, [command, *data, "--window", "8", *COMMANDS[command], "-o", str(tmp_path / "out"), "--json"]
    )
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    numbers = found[command]
    assert numbers
    assert {name: told[name] for name in numbers} == numbers
    beside = {"asked", "figures", "analysis", "trace", "trace_digest", "run", "failed", "bytes_over_full", "schema",
              "file", "divergence"}  # fmt: skip
    assert set(told) - beside == set(numbers), "nothing that the command tells is missing"
