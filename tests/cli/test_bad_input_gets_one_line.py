"""Each mistake: exit code 2, its line in refusals.txt, no weights loaded and nothing written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from perturbkv.storage.trace.trace_file import read_trace
from tests.support import screens
from tests.support.asked import instead, refused
from tests.support.folders import model_folder
from tests.support.screens import Refusal, refusals

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    screens.prepare(folder)
    return folder


def commands() -> list[Refusal]:
    return [one for one in refusals() if isinstance(one, Refusal)]


def state(folder: Path) -> dict[Path, bytes | None]:
    """Return what lies in a folder but the sweep file, which the test itself writes, and what Python compiles."""
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path != folder / "sweep.yaml" and "__pycache__" not in path.parts
    }


@pytest.mark.parametrize(
    "refusal", [one for one in refusals() if isinstance(one, Refusal)], ids=lambda one: one.command
)
def test_a_mistake_is_its_line(prepared: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perturbkv.pipeline.run.plan.load_weights", None)
    before = state(prepared)
    ran = screens.refused(prepared, refusal)
    assert (ran.code, ran.err.strip()) == (2, refusal.line), "make snapshots writes what is said now"
    assert refusal.line.splitlines()[-1].startswith("error: ")
    assert ran.out == "" or "--json" in refusal.command
    assert state(prepared) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("budget: 64\n\twindow: 3", "expected YAML, got text that cannot be read as YAML: "),
        ("samples: 1\nmodel: \x01", "expected YAML, got text that cannot be read as YAML: "),
        ("[" * 3000, "expected YAML"),
        ("{}", "expected a mapping of options, such as 'budget: [128, 256]', got an empty mapping"),
        ("grids: [{}]", "grids: expected a mapping of options"),
        ("!!python/object:os.x {}", "expected a mapping of options"),
        ("budget: !!python/object:os.x [x]", "budget: a budget is tokens"),
    ],
    ids=[
        "a tab",
        "a control character",
        "a bottomless list",
        "an empty mapping",
        "an empty grid",
        "an object",
        "a tag",
    ],  # fmt: skip
)
def test_a_sweep_file_that_is_no_text_to_print(perturbkv: Run, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    refused(perturbkv("trace", "--config", "sweep.yaml", "-o", "out"), f"error: sweep.yaml: {said}")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "of_selfcheck"), [("cuda:7", "needs a CUDA device"), ("tpu9", "tpu9")])
def test_a_device_that_is_not_there_is_named(
    perturbkv: Run, tiny: list[object], tmp_path: Path, device: str, of_selfcheck: str
) -> None:
    refused(perturbkv("heads", *tiny, "--device", device, "-o", "out"), device)
    refused(perturbkv("doctor", "selfcheck", "--device", device, "-o", "out"), of_selfcheck)
    assert list(tmp_path.iterdir()) == []


def test_help_is_no_error(perturbkv: Run) -> None:
    for command in (["--help"], ["heads", "--help"], ["list"]):
        ran = perturbkv(*command)
        assert (ran.code, ran.err) == (0, "")
        assert "Usage: " in ran.out


def test_a_hub_that_is_not_there(perturbkv: Run, data: Path) -> None:
    ran = perturbkv("heads", "--model", "mistral-7b", "--dataset", data)
    refused(ran, "mistralai/Mistral-7B-Instruct-v0.3", "safetensors", "--model PATH", "HF_HOME")
    refused(perturbkv("heads", "--model", "nobody/nothing", "--dataset", data), "nobody/nothing", "--model PATH")


@pytest.mark.slow
def test_another_run_replaces_a_trace_only_when_asked(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    perturbkv("trace", *tiny, "-o", "t.h5")
    assert perturbkv("trace", *tiny, "--max-tokens", 99, "-o", "t.h5").code == 2
    assert perturbkv("trace", *tiny, "--max-tokens", 99, "-o", "t.h5", "--overwrite").code == 0
    assert read_trace(tmp_path / "t.h5").run.max_tokens == 99


@pytest.mark.parametrize("switch", [2, 500])
def test_a_text_on_one_side_of_a_change_of_rotations_is_measured(
    perturbkv: Run, tiny: list[object], tmp_path: Path, switch: int
) -> None:
    """LongRoPE; read below the switch and decoded above it, it is refused."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    more = {"original_max_position_embeddings": switch}
    asked = {"rope_type": "longrope", "rope_theta": 1e4, **more, **factors}
    model = model_folder(tmp_path / "changing", "phi3", rope_parameters=asked, eos_token_id=None, **more)
    ran = perturbkv("trace", *instead(tiny, "--model", model), "--max-tokens", 64, "-o", "out", "--dry-run")
    assert ran.code == 0, ran.err


@pytest.mark.slow
def test_nan_fails_the_sample_and_the_run_exits_1(
    perturbkv: Run, tiny: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    from perturbkv.pipeline.sample import one_sample

    measure = one_sample.trace_sample

    def poisoned(adapter, prompt, *more):  # type: ignore[no-untyped-def]
        norm = adapter.model.model.layers[1].input_layernorm.weight
        kept = norm.detach().clone()
        if prompt.sample_id == "p0":
            norm.data.fill_(float("nan"))
        try:
            return measure(adapter, prompt, *more)
        finally:
            norm.data.copy_(kept)

    monkeypatch.setattr(one_sample, "trace_sample", poisoned)
    ran = perturbkv("heads", *tiny, "-o", "out")
    assert ran.code == 1
    assert "1 sample\n" in ran.out
    ((sample, reason),) = read_trace(Path("out/trace.h5")).failures.items()
    assert sample == "p0" and "layer 1" in reason and f"failed: {reason}" in ran.err


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [(float("nan"), 2, "'lm_head.weight' holds"), (3e38, 1, "the logits hold NaN or Inf in sample 'p0'")],
)
def test_a_model_whose_logits_are_no_numbers_leaves_no_file_of_answers(
    perturbkv: Run, tiny: list[object], model: Path, tmp_path: Path, value: float, code: int, words: str
) -> None:
    shutil.copytree(model, tmp_path / "odd")
    weights = load_file(tmp_path / "odd" / "model.safetensors")
    weights["lm_head.weight"].fill_(value)
    save_file(weights, tmp_path / "odd" / "model.safetensors", metadata={"format": "pt"})
    ran = perturbkv("generate", *instead(tiny, "--model", tmp_path / "odd"), "--max-new-tokens", 2, "-o", "out")
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert words in ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["odd"]


MOVING = """
import os
from dataclasses import dataclass
import perturbkv as pk

def leave():
    os.makedirs({elsewhere!r}, exist_ok=True)
    os.chdir({elsewhere!r})

leave()

@dataclass(frozen=True)
class Moving(pk.Score):
    def __post_init__(self):
        leave()

    def score(self, layer):
        leave()
        return layer.attention[..., : layer.prefix].amax(dim=1)

@dataclass(frozen=True)
class MovingBudgets(pk.Policy):
    name = "moving"

    def __post_init__(self):
        leave()

    def first_entries(self, config, kept):
        leave()
        return super().first_entries(config, kept)

    def allocate(self, config, available):
        leave()
        return super().allocate(config, available)
"""


@pytest.mark.parametrize("policy", ["moving.py:Moving", "adakv(by=moving.py:Moving)", "moving.py:MovingBudgets"])
@pytest.mark.parametrize("command", [["trace"], ["generate", "--max-new-tokens", 2]], ids=lambda words: words[0])
def test_a_file_that_changes_the_working_directory_does_not_move_the_results(
    perturbkv: Run, tiny: list[object], tmp_path: Path, policy: str, command: list[object]
) -> None:
    (tmp_path / "moving.py").write_text(MOVING.format(elsewhere=str(tmp_path / "elsewhere")))
    ran = perturbkv(*command, *tiny, "--policy", policy, "-o", "out")
    assert ran.code == 0, ran.err
    assert Path.cwd() == tmp_path
    (result,) = (tmp_path / "out").iterdir()
    assert result.name in ("trace.h5", "generation.jsonl")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_policy_without_a_name_is_one_line(perturbkv: Run, tiny: list[object], tmp_path: Path) -> None:
    text = MOVING.format(elsewhere=str(tmp_path)).replace('name = "moving"', "...")
    (tmp_path / "moving.py").write_text(text)
    ran = perturbkv("heads", *tiny, "--policy", "moving.py:MovingBudgets", "-o", "out")
    refused(ran, "policy 'moving.py:MovingBudgets': expected a name in its class, name = ", ", got none")
