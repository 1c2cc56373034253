"""A plan tells what fits, and too little memory is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv import memory
from perturbkv.api.inputs import make_plan
from perturbkv.configs.resources import Resources, parse_size
from perturbkv.configs.run import Settings
from perturbkv.errors import NoMemoryError
from perturbkv.models import loading
from perturbkv.models.loading import load_model, load_weights, open_model
from perturbkv.pipeline.run import footprint
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.sample import one_sample
from perturbkv.selection.grid import grid
from perturbkv.storage.run.journal import Journal
from tests.support.folders import model_folder
from tests.support.models import tiny_adapter, token_ids

CONFIGS = grid((10, 0.5), window=4, policy=["snapkv", "adakv"], selection=["attention", "two-stage"])
PROMPTS = [pk.Prompt(f"p{seed}", token_ids(300 + 40 * seed, seed=seed), 0) for seed in range(4)]


@pytest.fixture(scope="module")
def whole() -> Plan:
    settings = Settings(save=("outputs",))
    return make_plan(tiny_adapter(layers=4), PROMPTS, CONFIGS, settings, Resources(2**20, 2**30), resumable=True)


@pytest.mark.slow
def test_a_trace_and_its_journal_are_as_large_as_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Plan
) -> None:
    """Within a fifth: of random weights with outputs saved, which deflate as those of trained ones."""
    journals: list[int] = []
    discard = Journal.discard

    def watched(journal: Journal) -> None:
        journals.append(sum(file.stat().st_size for file in journal.folder.glob("*.npz")))
        discard(journal)

    monkeypatch.setattr(Journal, "discard", watched)
    path = tmp_path / "t.h5"
    pk.measure(
        tiny_adapter(layers=4), PROMPTS, CONFIGS, path=path, settings=pk.Settings(save=("outputs",)), progress=False
    )
    told = footprint.estimate_footprint(whole)
    assert told.trace == pytest.approx(path.stat().st_size, rel=0.2)
    assert sum(told.journal) == pytest.approx(journals[-1], rel=0.2)


@pytest.mark.parametrize("share", [0.6, 0.8, 0.95])
def test_what_is_advised_for_the_disk_makes_it_fit(whole: Plan, share: float) -> None:
    found = footprint.estimate_footprint(whole)
    free = int(found.disk * share)
    said = footprint.suggest_options(whole, free, found.memory.total)
    others = {
        "--no-kept": replace(whole, kept=False),
        "--no-prompts": replace(whole, with_text=False),
        "no --save outputs": replace(whole, run=replace(whole.run, save=())),
    }
    for name, other in others.items():
        assert (name in said) == (footprint.estimate_footprint(other).disk <= free)
    (samples,) = [int(one.split()[1].rstrip(",")) for one in said if one.startswith("--samples")]
    for count, fits in ((samples, True), (samples + 1, False)):
        part = replace(whole, prompts=whole.prompts[:count])
        assert (footprint.estimate_footprint(part).disk <= free) == fits
    assert footprint.suggest_options(whole, found.disk, found.memory.total) == []


def test_what_is_advised_for_memory_makes_it_fit() -> None:
    settings = Settings(generate=2, scored=False)
    whole = make_plan(tiny_adapter(layers=4), PROMPTS, CONFIGS, settings, Resources(2**20, 2**30), resumable=True)
    needed = footprint.estimate_memory(whole).total
    assert len(whole.batches.indices) == 1, "all at once, unless a bound is given"
    (size, dtype) = footprint.suggest_options(whole, 2**60, needed - 1)
    assert dtype == "--dtype bfloat16"
    bound = parse_size("--max-memory", size.split()[1])
    less = make_plan(tiny_adapter(layers=4), PROMPTS, CONFIGS, settings, Resources(2**20, bound), resumable=True)
    assert footprint.estimate_memory(less).total < needed
    assert footprint.suggest_options(whole, 2**60, 0) == [], "nothing makes it fit into nothing"


CPU = torch.device("cpu")


def raised_by(work: Any) -> str:
    with pytest.raises(NoMemoryError) as raised, memory.translate_allocation_errors("take less"):
        work()
    return str(raised.value)


def test_what_torch_numpy_and_python_say_is_told_with_the_size() -> None:
    assert raised_by(lambda: torch.empty(2**58, dtype=torch.uint8)) == (
        "there is not enough memory: 256.0 PiB wanted; take less"
    )
    assert "1.00 EiB wanted" in raised_by(lambda: np.empty(2**60, np.uint8))
    assert raised_by(lambda: torch.empty(2**62)) == "there is not enough memory; take less"
    assert raised_by(lambda: bytearray(2**60)) == "there is not enough memory; take less"


def test_what_a_gpu_says_is_told_with_the_size() -> None:
    def full() -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which …"
        )

    assert raised_by(full) == "there is not enough memory on the GPU: 20.00 GiB wanted; take less"


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("x"), OSError(2, "No such file")])
def test_every_other_error_passes(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error.args[-1])), memory.translate_allocation_errors():
        raise error


def test_free_memory_is_that_of_the_machine_at_most() -> None:
    import psutil

    assert 0 < memory.free_bytes(CPU) <= psutil.virtual_memory().total + psutil.swap_memory().total


def test_what_a_system_does_not_show_is_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden() -> Any:
        raise FileNotFoundError(2, "No such file", "/proc/vmstat")

    monkeypatch.setattr("psutil.swap_memory", hidden)
    monkeypatch.setattr(memory, "_LIMITS", (tmp_path / "none", tmp_path))
    assert memory.free_bytes(CPU) > 0


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = open_model(str(model_folder(tmp_path / "model")))
    needed = files.parameters() * 4
    monkeypatch.setattr(loading, "_read_weights", lambda *asked: pytest.fail("read"))
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed - 1)
    with pytest.raises(NoMemoryError, match="the weights of model .* are free on cpu; a smaller model or --dtype"):
        load_weights(files, torch.float32, CPU)


def test_weights_that_just_fit_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = str(model_folder(tmp_path / "model"))
    needed = open_model(name).parameters() * 4
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed)
    load_model(name, "float32", "cpu")


def test_samples_that_are_finished_survive_and_the_rest_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tiny_adapter()
    prompts = [pk.Prompt.from_text(f"{place} " + "text " * 10, adapter, id=str(place)) for place in range(3)]
    configs = pk.grid(16, window=4)
    whole = pk.measure(adapter, prompts, configs, progress=False)
    measure, calls = one_sample.trace_sample, []

    def short(adapter: Any, prompt: Any, *more: Any) -> Any:
        calls.append(prompt.sample_id)
        return measure(adapter, prompt, *more) if len(calls) < 3 else torch.empty(2**58)

    monkeypatch.setattr(one_sample, "trace_sample", short)
    with pytest.raises(NoMemoryError, match="EiB wanted; shorter prompts"):
        pk.measure(adapter, prompts, configs, path=tmp_path / "t.h5", progress=False)
    monkeypatch.setattr(one_sample, "trace_sample", lambda *asked: calls.append("again") or measure(*asked))
    found = pk.measure(adapter, prompts, configs, path=tmp_path / "t.h5", progress=False)
    assert calls[3:] == ["again"]
    assert found.sample_ids == whole.sample_ids
    np.testing.assert_array_equal(found.arrays["perturbation_isolated"], whole.arrays["perturbation_isolated"])
