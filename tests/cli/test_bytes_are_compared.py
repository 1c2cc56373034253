"""Few bits as an option of every command that makes a trace, and budgets of bytes that they fill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import study

Run = Callable[..., Any]


@pytest.fixture
def asked(model: Path, tmp_path: Path) -> list[object]:
    """A run without budget: prompts of 182 tokens with accepted answers, window 8."""
    text, rows = "The quick brown fox jumps over the lazy dog. " * 4, tmp_path / "prompts.jsonl"
    rows.write_text("\n".join(json.dumps({"id": f"p{i}", "prompt": f"{i} {text}", "answers": ["17"]}) for i in (1, 2)))
    return ["--model", model, "--dataset", rows, "--samples", 2, "--window", 8]


@pytest.fixture
def equal_bytes(asked: list[object], tmp_path: Path) -> dict[str, Any]:
    """The document of the study of equal bytes, which measures this run in `out`."""
    study("equal_bytes", *asked, "--answers", "--max-new-tokens", 3, "-o", tmp_path / "out")
    return dict(json.loads((tmp_path / "out" / "equal_bytes.json").read_text()))


@pytest.mark.slow
def test_a_budget_of_bytes_is_filled_with_entries(equal_bytes: dict[str, Any], tmp_path: Path) -> None:
    """One prefill a sample: every number of bits at every budget, everything in few bits, and answers of all."""
    for base, *others in equal_bytes["settings"]:
        assert [row["bits"] for row in (base, *others)] == [16, 8, 4, 2]
        assert "precision" not in base["config"] and base["config"]["granularity"] == "kv"
        assert base["held"] == pytest.approx(base["bytes"])
        held = [row["held"] for row in (base, *others)]
        assert held == sorted(held)
        for row in others:
            assert row["bytes"] <= base["bytes"]
            assert row["held"] == 1 or row["bytes"] > 0.9 * base["bytes"]
            assert 0 <= row["score"] <= 1
    assert [row["bits"] for row in equal_bytes["everything"]] == [8, 4, 2]
    assert all(row["held"] == 1 and row["kind"] == "quantised" for row in equal_bytes["everything"])
    assert len(equal_bytes["settings"]) == 2 * 3
    assert (tmp_path / "out" / "equal_bytes.png").exists()


def test_precisions_sweep_like_other_choices(perturbkv: Run, asked: list[object]) -> None:
    Path("sweep.yaml").write_text("selection: attention\nbudget: 64\nprecision: [full, quantise]\nbits: [8, 2]\n")
    told = perturbkv("trace", *asked, "--config", "sweep.yaml", "--dry-run", "--json").json()
    labels = [one["config"]["label"].partition("query")[2] for one in told["kept"]]
    assert labels == ["", " quantise(bits=8)", " quantise(bits=2)"]
    both = ["--precision", "full", "--precision", "quantise(bits=2)", "--budget", 64]
    told = perturbkv("heads", *asked, *both, "--dry-run", "--json").json()
    assert len(told["kept"]) == 4


def test_generate_says_what_its_caches_take(perturbkv: Run, tiny: list[object]) -> None:
    ran = perturbkv("generate", *tiny, "--precision", "quantise(bits=2)", "--max-new-tokens", 3, "-o", "out")
    assert ran.code == 0 and "of bytes" in ran.out


def test_what_looks_at_answers_tells_bytes_too(perturbkv: Run, tiny: list[object]) -> None:
    few = ["--precision", "full", "--precision", "quantise(bits=2)", "--selection", "attention", "--divergence"]
    perturbkv("generate", *tiny, *few, "--max-new-tokens", 3, "-o", "out")
    ran = perturbkv("quality", "--divergence", "out/generation.jsonl", "--format", "png", "--explain")
    assert "what is stored" in ran.out, ran.err
    rows = [json.loads(line) for line in Path("out/generation.jsonl").read_text().splitlines()[1:]]
    for row in rows:
        whole, two = (made for label, made in sorted(row["evicted"].items(), key=lambda one: len(one[0])))
        assert whole["bytes_share"] == pytest.approx(whole["held_share"])
        assert two["bytes_share"] < two["held_share"] == whole["held_share"]
