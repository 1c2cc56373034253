"""No number of a prompt depends on which prompts stand beside it, in which order, or how its caches are batched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.selection.grid import configuration
from perturbkv.trace import FailedSample, SampleTrace
from tests.support.models import tiny_adapter, token_ids
from tests.support.resolved import trace

CONFIGS = tuple(
    configuration(budget, selection=selection, window=6)
    for budget in (16, 0.5) for selection in ("attention", "two-stage", "random")
)  # fmt: skip
LENGTHS = {"a": 50, "b": 81, "c": 64, "d": 50}
PROMPTS = {name: Prompt(name, token_ids(length, seed), 0) for seed, (name, length) in enumerate(LENGTHS.items())}


def measured(order: Sequence[str], max_bytes: int | None = None) -> dict[str, SampleTrace]:
    """Prompts in this order, their caches decoded together in so many bytes."""
    found: list[SampleTrace | FailedSample] = []
    run = RunConfig("m", "d", CONFIGS, steps=3)
    trace(tiny_adapter(), [PROMPTS[name] for name in order], run, Resources(max_bytes=max_bytes), found.append)
    return {one.sample_id: one for one in found if isinstance(one, SampleTrace)}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["dcba", "cadb", "b", "ca"])
def test_order_and_company_of_prompts_change_no_bit(order: str) -> None:
    alone, beside = measured("abcd"), measured(order)
    assert list(beside) == list(order)
    for name, one in beside.items():
        assert one.arrays.keys() == alone[name].arrays.keys()
        for variable, array in one.arrays.items():
            np.testing.assert_array_equal(array, alone[name].arrays[variable], err_msg=f"{variable} of {name}")


@pytest.mark.slow
def test_batches_of_caches_change_nothing_beyond_the_noise_floor() -> None:
    whole, single = measured("ab"), measured("ab", max_bytes=64 * 1024)
    for name, one in single.items():
        for variable in ("perturbation_isolated", "perturbation_propagated"):
            floor = 4 * one.arrays["noise_floor"].max() + 1e-6
            np.testing.assert_allclose(one.arrays[variable], whole[name].arrays[variable], atol=floor)
        np.testing.assert_array_equal(one.arrays["kept_code"], whole[name].arrays["kept_code"])


@pytest.mark.slow
def test_other_prompts_have_other_numbers() -> None:
    found = measured("abcd")
    assert not np.array_equal(found["a"].arrays["output_norm"], found["d"].arrays["output_norm"])  # of one length
