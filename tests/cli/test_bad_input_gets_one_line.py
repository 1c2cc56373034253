"""Each mistake: exit code 2, its line in refusals.txt, no weights loaded and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
        ("budget: 64\n\twindow: 3", "sweep.yaml:2: expected YAML"),
        ("samples: 1\nmodel: \x01", "sweep.yaml:2: expected "),
        ("[" * 3000, "sweep.yaml:1: expected YAML"),
        ("{}", "sweep.yaml:1: expected a mapping of options, such as 'budget: [128, 256]', got an empty mapping"),
        ("grids: [{}]", "sweep.yaml:1: grids: expected a mapping of options"),
        ("!!python/object:os.x {}", "sweep.yaml:1: expected a mapping of options"),
        ("!!python/object:os.x {budget: 64}", "sweep.yaml:1: expected a mapping of options"),
        ("budget: !!python/object:os.x [64]", "sweep.yaml:1: budget: expected tokens (128) or a fraction"),
        ("grids: !!python/tuple [{policy: adakv}]", "sweep.yaml:1: grids: expected a list of mappings"),
        ("!!python/name:os.x budget: 64", "sweep.yaml:1: expected the name of an option as key"),
    ],
    ids=[
        "a tab",
        "a control character",
        "a bottomless list",
        "an empty mapping",
        "an empty grid",
        "an empty object",
        "an object",
        "a list with a tag",
        "a tuple",
        "a key with a tag",
    ],  # fmt: skip
)
def test_a_sweep_file_that_is_no_text_to_print(perturbkv: Run, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    refused(perturbkv("trace", "--config", "sweep.yaml", "-o", "out"), f"error: {said}")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]


@pytest.mark.parametrize("device", ["cuda:7", "tpu9"])
def test_a_device_that_is_not_there_is_named(perturbkv: Run, tiny: list[object], tmp_path: Path, device: str) -> None:
    for asked in (["heads", *tiny], ["doctor", "bench"]):
        refused(perturbkv(*asked, "--device", device, "-o", "out"), device)
    assert list(tmp_path.iterdir()) == []


def test_help_is_no_error(perturbkv: Run) -> None:
    for command in (["--help"], ["heads", "--help"], ["question"], ["list"]):
        ran = perturbkv(*command)
        assert (ran.code, ran.err) == (0, "")
        assert "Usage: " in ran.out


def test_a_hub_that_is_not_there(perturbkv: Run, data: Path) -> None:
    ran = perturbkv("heads", "--model", "mistral-7b", "--dataset", data)
    refused(ran, "mistralai/Mistral-7B-Instruct-v0.3", "safetensors", "--model PATH", "HF_HOME")
    refused(perturbkv("heads", "--model", "nobody/nothing", "--dataset", data), "nobody/nothing", "--model PATH")


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
