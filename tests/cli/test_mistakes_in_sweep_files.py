"""`trace --config`: every mistake in a file is one line that names file, line and key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


BAD = {
    "no YAML": ("budget: 64\nmodel: [a\nsteps: 2", 3, "", ["expected YAML", "expected ',' or ']'"]),
    "a tab": ("budget: 64\n\twindow: 3", 2, "", ["expected YAML", "'\\t'"]),
    "a control character": ("samples: 1\nmodel: \x01", 2, "", ["special characters are not allowed"]),
    "two documents": ("samples: 1\n---\nsamples: 2", 2, "", ["single document"]),
    "an anchor that is not there": ("samples: 1\nbudget: *sizes", 2, "", ["undefined alias"]),
    "a bottomless list": ("[" * 3000, 1, "", ["expected YAML", "too deep"]),
    "a list": ("- budget: 64", 1, "", ["expected a mapping", "got a list"]),
    "text": ("\n\nbudget", 3, "", ["expected a mapping", "got 'budget'"]),
    "a key twice": ("budget: 64\nsteps: 1\nbudget: 128", 3, "budget", ["every key once", "line 1"]),
    "a key twice, spelled otherwise": ("max-tokens: 64\nmax_tokens: 65", 2, "max_tokens", ["line 1"]),
    "an option twice": ("length: 200\nlengths: 300", 2, "lengths", ["line 1"]),
    "a key twice in a grid": ("grids:\n- alpha: 0\n  alpha: 1", 3, "alpha", ["line 2"]),
    "grids twice": ("grids:\n- alpha: 0\ngrids: []", 3, "grids", ["line 1"]),
    "an unknown key": ("samples: 1\n\nbugdet: 64", 3, "bugdet", ["unknown key 'bugdet'; known: budget, "]),
    "an option that is typed": ("dry-run: true", 1, "dry-run", ["unknown key 'dry-run'"]),
    "an option of no owner": ("pyramid-beta: 5", 1, "pyramid-beta", ["'pyramid-beta'; known: beta, "]),
    "a merge key": ("<<: {budget: 64}", 1, "<<", ["unknown key"]),
    "a list as key": ("? [a]\n: 1", 1, "", ["the name of an option", "got a list"]),
    "an unknown key in a grid": ("grids:\n- policy: adakv\n  alfa: 1", 3, "alfa", ["known: alpha"]),
    "an option of the run in a grid": ("grids:\n- steps: 2", 2, "steps", ["stand outside the grids"]),
    "grids in a grid": ("grids:\n- grids: []", 2, "grids", ["unknown key 'grids'"]),
    "grids that are none": ("grids: {alpha: 1}", 1, "grids", ["a list of mappings", "got a mapping"]),
    "no grid": ("samples: 1\ngrids: []", 2, "grids", ["got an empty list"]),
    "a grid that is text": ("grids:\n- alpha: 1\n- beta", 3, "grids", ["expected a mapping", "got 'beta'"]),
    "a list where one is taken": ("samples: 1\nsteps: [1, 2]", 2, "steps", ["a whole number, got a list", "evict"]),
    "a list of seeds": ("seed: [1, 2]", 1, "seed", ["got a list", "under 'grids'"]),
    "a list of one where one is taken": ("model: [tiny]", 1, "model", ["got a list"]),
    "an empty list": ("samples: 1\nbudget: []", 2, "budget", ["tokens (128) or a fraction (0.05)", "an empty list"]),
    "an empty list of lengths": ("length: []", 1, "length", ["an empty list"]),
    "nothing": ("samples: 1\nwindow:\nsteps: 1", 2, "window", ["a whole number, got nothing", "leave the key out"]),
    "null": ("pool: ~", 1, "pool", ["expected text, got nothing (null)"]),
    "null in a list": ("alpha:\n- 0.5\n- null", 3, "alpha", ["expected a number, got nothing"]),
    "a mapping": ("budget: {a: 1}", 1, "budget", ["got a mapping"]),
    "a list in a list": ("budget:\n- 64\n- [128]", 3, "budget", ["got a list"]),
    "a list of itself": ("budget: &b\n- 64\n- *b", 1, "budget", ["got a list"]),
    "an object": ("model: !!python/name:os.system x", 1, "model", ["got 'x' with the tag", "python"]),
    "a budget in words": ("samples: 1\nbudget: many", 2, "budget", ["tokens (128) or a fraction (0.05), got 'many'"]),
    "a budget of nothing": ("budget:\n- 64\n- 0\n- 128", 3, "budget", ["must be positive, got 0"]),
    "a budget of all and a half": ("budget: [64,\n1.5]", 2, "budget", ["at most 1, got 1.5"]),
    "a fraction of a query": ("window: 3.5", 1, "window", ["expected a whole number, got '3.5'"]),
    "samples in words": ('samples: "x"', 1, "samples", ["expected a whole number, got 'x'"]),
    "truth for a number": ("steps: yes", 1, "steps", ["expected a whole number, got 'yes'"]),
    "sixty as YAML counts": ("window: 1:30", 1, "window", ["expected a whole number, got '1:30'"]),
    "a share in words": ("alpha: half", 1, "alpha", ["expected a number, got 'half'"]),
    "perhaps": ("chat-template: perhaps", 1, "chat-template", ["expected true or false, got 'perhaps'"]),
    "alpha out of range": ("alpha:\n- 0.5\n- 1.5\n", 3, "alpha", ["must lie in [0, 1], got 1.5"]),
    "alpha out of range in a grid": ("grids:\n- policy: adakv\n- alpha: 2", 3, "alpha", ["[0, 1], got 2"]),
    "alpha that is none": ("alpha: .nan", 1, "alpha", ["expected a number, got '.nan'"]),
    "an even kernel": ("kernel: 6", 1, "kernel", ["kernel must be odd, got 6; try 7"]),
    "an unknown pool": ("pool: [max, None]", 1, "pool", ["unknown pool 'None'; known: none"]),
    "an unknown policy": ("policy:\n- snapkv\n- snapvk", 3, "policy", ["unknown policy 'snapvk'; known: snapkv"]),
    "an unknown selection": ("selection: twostage", 1, "selection", ["unknown selection 'twostage'"]),
    "an unknown policy of a selection": ("selection: ada:value", 1, "selection", ["unknown policy 'ada'"]),
    "an unknown preset": ("preset: papr", 1, "preset", ["unknown preset 'papr'; known: paper"]),
    "an unknown cache": ("cache: padded", 1, "cache", ["unknown cache 'padded'"]),
    "an unknown scenario": ("scenario: context", 1, "scenario", ["known: context-only"]),
    "an unknown haystack": ("haystack: hay", 1, "haystack", ["unknown haystack"]),
    "something else to save": ("save:\n- outputs\n- all", 3, "save", ["unknown save 'all'"]),
    "no sample": ("steps: 1\nsamples: 0", 2, "samples", ["at least 1 sample, got 0"]),
    "no step": ("steps: 0", 1, "steps", ["at least 1 decode step, got 0"]),
    "too few tokens": ("max-tokens: 1", 1, "max-tokens", ["at least 2, got 1"]),
    "too little memory": ("chunk-mib: 0", 1, "chunk-mib", ["at least 1, got 0"]),
    "a short prompt": ("length:\n- 500\n- 5", 3, "length", ["at least 128 tokens"]),
    "half a token": ("length: 200.5", 1, "length", ["whole numbers"]),
    "a depth below": ("depth: [0.5, 2]", 1, "depth", ["a depth must lie in [0, 1], got 2"]),
    "no such device": ("device: tpu9", 1, "device", ["got 'tpu9'"]),
    "no such dtype": ("samples: 1\ndtype: int8", 2, "dtype", ["unknown dtype 'int8'"]),
    "no such model": ("samples: 1\nmodel: smolm2", 2, "model", ["unknown model 'smolm2'; known: smollm2-135m"]),
    "no such folder": ("samples: 1\nmodel: ./nowhere", 2, "model", ["got './nowhere'"]),
    "no such dataset": ("samples: 1\ndataset: nedle", 2, "dataset", ["unknown dataset 'nedle'; known: needle"]),
    "a budget within the window": ("budget:\n- 64\n- 16", 3, "budget", ["window of 32", "under 'grids'"]),
    "a window above the budget": ("window: [8, 128]", 1, "window", ["window of 128", "under 'grids'"]),
    "a preset's window above the budget": ("preset:\n- kvpress\nbudget: [64]", 3, "budget", ["window of 64"]),
    "what a policy refuses": (
        "policy: [snapkv, streaming-llm]\nselection:\n- attention\n- two-stage", 3, "selection",
        ["'streaming-llm' does not combine with selection 'attention'", "under 'grids'"],
    ),
    "what a policy refuses of the defaults": (
        "budget: 64\npolicy:\n- snapkv\n- streaming-llm", 4, "policy",
        ["'streaming-llm' does not combine with selection 'attention'", "under 'grids'"],
    ),
    "what a policy refuses in a grid": (
        "selection: value\ngrids:\n- selection: random\n- policy: streaming-llm", 1, "selection",
        ["'streaming-llm' does not combine with selection 'value'"],
    ),
    "positions that are none": ("positions: [kept, inside]", 1, "positions", ["unknown positions 'inside'"]),
    "what a cache refuses": (
        "cache: rectangular\nselection: value\npolicy:\n- snapkv\n- adakv", 5, "policy", ["rectangular cache cannot"],
    ),
    "what a cache refuses of a selection's policy": (
        "cache: rectangular\npolicy: snapkv\nselection:\n- value\n- adakv:value", 5, "selection", ["rectangular"],
    ),
}  # fmt: skip


def refused(ran: Any, start: str, *words: str) -> None:
    assert ran.code == 2, (ran.out, ran.err)
    (line,) = ran.err.splitlines()
    assert line.startswith(f"error: {start}"), line
    for word in words:
        assert word in line


@pytest.mark.parametrize(("text", "line", "key", "words"), BAD.values(), ids=BAD)
def test_a_mistake_is_told_with_file_line_and_key(
    perturbkv: Run, tmp_path: Path, text: str, line: int, key: str, words: list[str]
) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    ran = perturbkv("trace", "--config", "sweep.yaml", "-o", "out")
    refused(ran, f"sweep.yaml:{line}: {key}: " if key else f"sweep.yaml:{line}: expected ", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


def test_a_file_that_cannot_be_read(perturbkv: Run, tmp_path: Path) -> None:
    refused(perturbkv("trace", "--config", "none.yaml"), "expected a sweep file (YAML) at none.yaml", "got nothing")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    refused(perturbkv("trace", "--config", "empty.yaml"), "empty.yaml: expected a mapping", "an empty file")
    (tmp_path / "latin.yaml").write_bytes(b"model: \xe9")
    refused(perturbkv("trace", "--config", "latin.yaml"), "expected a sweep file", "latin.yaml", "no UTF-8")
    refused(perturbkv("trace", "--config", "."), "expected a sweep file (YAML) at .", "a folder")


def test_what_is_typed_wrongly_is_not_blamed_on_the_file(perturbkv: Run, tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("budget: 64\nwindow: 16\nselection: value")

    def trace(*typed: str) -> Any:
        return perturbkv("trace", "--config", "sweep.yaml", *typed)

    refused(trace("--budget", "many"), "a budget is tokens")
    refused(trace("--policy", "snapkv(kernel=6)"), "kernel of policy 'snapkv' must be odd")
    refused(trace("--policy", "snapvk"), "unknown policy 'snapvk'")
    refused(trace("--window", "8", "--budget", "4", "--selection", "random"), "budget 4 keeps 4 entries")
    refused(trace("--budget", "12"), "sweep.yaml:2: window: budget 12 keeps 12 entries")
    refused(trace("--policy", "streaming-llm"), "sweep.yaml:3: selection: policy 'streaming-llm' does not")


def test_what_the_prompts_refuse_is_told_with_its_line(perturbkv: Run, tmp_path: Path, model: Path, data: Path) -> None:
    def trace(more: str) -> Any:
        (tmp_path / "sweep.yaml").write_text(f"model: {model}\nwindow: 8\ndataset: {data}\n{more}")
        return perturbkv("trace", "--config", "sweep.yaml")

    refused(trace("budget:\n- 0.5\n- 0.01"), "sweep.yaml:6: budget: budget 0.01 of 182 tokens", "window of 8")
    refused(trace("samples: 99"), "sweep.yaml:3: dataset: dataset", "has 6 samples, fewer than --samples 99")
    missing = "policy: headkv\nhead-scores: none.json"
    refused(trace(missing), "sweep.yaml:5: head-scores: expected head scores as JSON at none.json")
    refused(trace("policy: headkv"), "sweep.yaml:4: policy: policy 'headkv' needs scores")
