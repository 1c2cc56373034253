"""The checks that wait for a GPU, on the CPU: what is right is equal, and what is planted wrong is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from perturbkv.cache import ragged
from perturbkv.errors import ConfigError
from perturbkv.models import aliases
from perturbkv.selection.policies import registry
from perturbkv.selfcheck import checks as kernel
from perturbkv.selfcheck import checks as placement
from perturbkv.selfcheck import equality
from perturbkv.selfcheck import whole_samples as samples
from perturbkv.selfcheck.checks import Check, run_check
from tests.support.varlen import varlen

CPU = torch.device("cpu")
SIZES = equality.Sizes(48, 3)


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: half precision is packed, float32 padded."""
    monkeypatch.setattr(ragged, "kernel_for", lambda keys, values: None if keys.dtype == torch.float32 else varlen)


@pytest.mark.slow
@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize("layout", equality.LAYOUTS)
def test_every_layout_equals_the_masked_reference(layout: str) -> None:
    checks = equality.check_layout(CPU, SIZES, layout)
    assert len(checks) == 2 * 3 * (2 if layout == "packed" else 3)
    assert [check for check in checks if not check.equal] == []
    assert all(check.rule for check in checks)


@pytest.mark.slow
@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize("layout", equality.LAYOUTS)
def test_keys_that_lie_one_place_off_are_found_in_every_dtype(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = equality._kept_entries

    def shifted(keys: Tensor, values: Tensor, sets: Sequence[Tensor]) -> Any:
        return entries(keys.roll(1, dims=1), values, sets)

    monkeypatch.setattr(equality, "_kept_entries", shifted)
    checks = equality.check_layout(CPU, SIZES, layout)
    everything = [check for check in checks if check.name.endswith("attention")]
    assert len(everything) >= 4
    # Row 0 is off too and lifts the floor, but never by the whole size of an output.
    assert all(check.distance is not None and check.distance > 0.1 for check in everything)


@pytest.mark.slow
def test_one_entry_too_few_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = equality._kept_entries

    def short(keys: Tensor, values: Tensor, sets: Sequence[Tensor]) -> Any:
        everything = all(len(one) == SIZES.entries for one in sets)
        return entries(keys, values, sets if everything else [one[1:] if len(one) > 1 else one for one in sets])

    monkeypatch.setattr(equality, "_kept_entries", short)
    checks = equality.check_layout(CPU, SIZES, "padded")
    assert [check.name for check in checks if check.equal and check.name.endswith("attention")] == []


def test_where_nothing_can_be_packed_that_is_said_and_is_no_failure() -> None:
    (check,) = equality.check_layout(CPU, SIZES, "packed")
    assert (check.equal, check.needed) == (False, False)
    assert "variable-length" in check.reason


def test_the_kernel_is_checked_at_every_head_size_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "SHAPES", {"grouped by 2": (2, 1, 5, 33)})
    checks = kernel.check_kernel(CPU)
    assert len(checks) == 5 * 3
    assert all(check.equal for check in checks)
    monkeypatch.setattr(kernel, "projected_value_norms", lambda value, w_o, kernel: 1.01 * kernel_loop(value, w_o))
    assert not any(check.equal for check in kernel.check_kernel(CPU))


def kernel_loop(value: Tensor, w_o: Tensor) -> Tensor:
    return kernel.loop_norms(value.double(), w_o.double()).float()


def test_a_device_that_cannot_run_the_kernel_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    (check,) = run_check("Triton norms", "rule", lambda: kernel.check_kernel(CPU))
    assert not check.equal
    assert "TRITON_INTERPRET=1" in check.reason


def test_layers_that_accelerate_lays_out_measure_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {**aliases.ALIASES["smollm2-135m"].shapes, "num_hidden_layers": 2, "vocab_size": 300}
    monkeypatch.setitem(aliases.ALIASES, "small", aliases.Alias("owner/small", "llama", shapes))
    checks = placement.check_placement("random:small", CPU, 160)
    assert len(checks) == 5
    assert all(check.equal for check in checks)


def test_a_check_that_fails_lets_the_others_go_on() -> None:
    def fail() -> list[Check]:
        raise ConfigError("expected a GPU,\n got none")

    (check,) = run_check("it", "rule", fail)
    assert (check.name, check.equal, check.reason) == ("it", False, "expected a GPU, got none")


def test_nan_is_not_equal_and_is_json() -> None:
    check = Check("it", math.nan, 1.0, "rule")
    assert not check.equal
    assert check.to_dict()["distance"] == "nan"


@pytest.mark.slow
def test_samples_of_every_policy_equal_the_cpus() -> None:
    checks = samples.check_samples(CPU)
    assert {check.name for check in checks} >= {f"policy {name}" for name in registry.names()} | set(samples.KINDS)
    assert [check for check in checks if not check.equal] == []


@pytest.mark.parametrize("share", [1.01, float("nan")])
def test_a_sample_that_differs_or_is_no_number_is_found(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain = [], samples.trace_sample

    def other(*asked: Any) -> Any:
        made.append(plain(*asked))
        if len(made) % 2 == 0:
            made[-1].arrays["theta"] *= share
        return made[-1]

    monkeypatch.setattr(samples, "trace_sample", other)
    (check,) = samples._check_sums("snapkv", CPU, samples._configs())
    assert not check.equal


def test_answers_of_other_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made, plain = [], samples.answer

    def other(*asked: Any) -> Any:
        made.append(plain(*asked))
        return made[-1] if len(made) % 2 else replace(made[-1], full=[7] * 24)

    monkeypatch.setattr(samples, "answer", other)
    (check,) = samples._check_answers("answers", CPU, 0)
    assert check.distance is not None
    assert 0.2 < check.distance <= 0.25
    assert not check.equal


def test_whatever_a_check_raises_costs_it_alone() -> None:
    def fails() -> list[Check]:
        raise OSError("illegal memory\naccess")

    (check,) = run_check("packed", "rule", fails)
    assert (check.name, check.reason, check.equal, check.needed) == ("packed", "illegal memory access", False, True)
