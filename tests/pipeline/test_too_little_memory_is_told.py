"""Memory that is not there is a line that says how much was wanted and what to lower; what is finished stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv import memory
from perturbkv.errors import NoMemoryError
from perturbkv.models import loading
from perturbkv.models.loading import load_model, load_weights, open_model
from perturbkv.pipeline.sample import one_sample
from tests.support.folders import model_folder
from tests.support.models import tiny_adapter

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
