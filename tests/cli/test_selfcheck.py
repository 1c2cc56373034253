"""`perturbkv doctor selfcheck`: one JSON and an exit code that says whether everything is equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from perturbkv.models import aliases
from perturbkv.selfcheck import checks, equality
from tests.support.asked import refused

Run = Callable[..., Any]


@pytest.fixture
def small(model: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Everything as small as it can be."""
    shapes = {**aliases.ALIASES["smollm2-135m"].shapes, "num_hidden_layers": 1, "vocab_size": 300}
    monkeypatch.setitem(aliases.ALIASES, "small", aliases.Alias("owner/small", "llama", shapes))
    monkeypatch.setattr(checks, "SHAPES", {"grouped by 2": (2, 1, 5, 33)})
    return ["--model", model, "--samples", 1, "--length", 300, "--entries", 24, "--placed", "random:small"]


def test_without_a_gpu_it_says_so_and_writes_nothing(
    perturbkv: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(perturbkv("doctor", "selfcheck"), "--device cpu")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_one_file_holds_checks_ties_and_rows(perturbkv: Run, small: list[object]) -> None:
    ran = perturbkv("doctor", "selfcheck", "--device", "cpu", *small, "-o", "gpu.json")
    assert ran.code == 0, ran.out + ran.err
    told = json.loads(Path("gpu.json").read_text())
    assert told["equal"] is True
    assert {check["name"].split(",")[0] for check in told["checks"]} >= {"padded", "packed", "rectangular"}
    assert {one["dtype"] for one in told["ties"]} == {"bfloat16", "float16"}
    assert {(row["name"], row["verdict"]) for row in told["bench"]["rows"]} == {
        (name, "not measured") for name in ("triton-time", "triton-rate", "cuda-24", "cuda-decode")
    }
    again = perturbkv("doctor", "selfcheck", "--device", "cpu", *small, "-o", "gpu.json")
    refused(again, "--overwrite")


@pytest.mark.slow
def test_what_is_not_equal_gives_exit_code_1_and_stands_in_the_file(
    perturbkv: Run, small: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equality, "FLOORS", 0)
    monkeypatch.setattr(equality, "_WORSE", 0)
    ran = perturbkv("doctor", "selfcheck", "--device", "cpu", *small, "--json")
    assert ran.code == 1
    assert ran.json()["equal"] is False
    assert ran.json()["checks"] == json.loads(Path("runs/gpu.json").read_text())["checks"]


def test_random_weights_have_no_ties_and_no_model_is_said(
    perturbkv: Run, small: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "run_check", lambda *asked: [])
    monkeypatch.setattr("perturbkv.models.sources.embedded_gguf", lambda: None)
    ran = perturbkv("doctor", "selfcheck", "--device", "cpu", "--model", "random:small", "-o", "gpu.json")
    refused(ran, "random:small")
    assert not Path("gpu.json").exists()
    ran = perturbkv("doctor", "selfcheck", "--device", "cpu", "-o", "gpu.json")
    assert ran.code == 0, ran.err
    assert "trained model" in ran.err
    assert json.loads(Path("gpu.json").read_text())["ties"] == []


@pytest.mark.slow
def test_the_file_is_written_after_every_check_and_a_missing_kernel_of_a_gpu_is_not_equal(
    perturbkv: Run, small: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is cut off in its ties keeps its checks."""
    left = []

    def checked(name: str, rule: str, work: object) -> list[checks.Check]:
        if Path("gpu.json").exists():
            left.append(len(json.loads(Path("gpu.json").read_text())["checks"]))
        return [checks.Check(name, None, 0.0, rule, "no such kernel")]

    def cut_off(*asked: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "run_check", checked)
    monkeypatch.setattr("perturbkv.analyses.heads.half_precision.compare", cut_off)
    ran = perturbkv("doctor", "selfcheck", "--device", "cpu", *small, "-o", "gpu.json")
    assert ran.code == 130
    told = json.loads(Path("gpu.json").read_text())
    assert (told["finished"], told["equal"], len(told["checks"])) == (False, False, 6)
    assert left == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_failure_of_the_ties_leaves_the_rows_of_the_benchmark(
    perturbkv: Run, small: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*asked: object) -> None:
        raise ImportError("no gguf")

    monkeypatch.setattr(checks, "run_check", lambda *asked: [])
    monkeypatch.setattr("perturbkv.analyses.heads.half_precision.compare", fails)
    ran = perturbkv("doctor", "selfcheck", "--device", "cpu", *small, "-o", "gpu.json")
    told = json.loads(Path("gpu.json").read_text())
    assert (ran.code, told["finished"], told["equal"], told["ties_failed"]) == (1, True, False, "no gguf")
    assert len(told["bench"]["rows"]) == 4
    assert "ties: NOT CHECKED: no gguf" in ran.out
