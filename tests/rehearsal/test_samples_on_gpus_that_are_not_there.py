"""Whole samples on one and on two GPUs that are not there give the CPU's numbers, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv.cache.blocks import PackedBlock
from perturbkv.models.adapter import Adapter
from perturbkv.selection.policies import registry
from tests.rehearsal.models import OFFLOADED, ONE, TWO_GPUS, WITH_COMPILER, rehearsal, tiny
from tests.support.models import FAMILIES, token_ids
from tests.support.resolved import answer, resolved_run, trace_sample

pytestmark = WITH_COMPILER
PROMPT = pk.Prompt("p", token_ids(90), 0, question_tokens=12, answers=("3",))
TWO = [
    *pk.grid(24, policy="snapkv", selection="two-stage", window=8),
    *pk.grid(24, policy="adakv", selection="attention", window=8),
]
CLOCKED = ("prefill_seconds", "prefill_seconds_full")
LAST_OF_MANY = ("first_logp", "first_logp_full")
"""After a question the last row of many is projected: torch multiplies such a slice otherwise on another device."""
Measure = Callable[[Adapter], dict[str, Any]]


def traced(configs: Sequence[pk.EvictionConfig], **settings: Any) -> Measure:
    """All variables of a sample, but those that a clock made."""

    def measure(model: Adapter) -> dict[str, Any]:
        arrays = trace_sample(model, PROMPT, resolved_run(configs, **settings)).arrays
        return {name: array for name, array in arrays.items() if name not in CLOCKED}

    return measure


def answered(configs: Sequence[pk.EvictionConfig], most: int = 12, **options: Any) -> Measure:
    """The answers of a sample, and what was measured on the way."""

    def measure(model: Adapter) -> dict[str, Any]:
        found = answer(model, PROMPT, configs, most, **options)
        compressions = [
            (one.config, one.generated, one.before, one.after, one.perturbation.tolist(), one.retained_mass.tolist())
            for one in found.compressions
        ]
        return {"full": found.full, "evicted": found.evicted, "held": list(found.held), "compressions": compressions}

    return measure


def check(measure: Measure, devices: Sequence[str], family: str = "llama", **model: Any) -> None:
    """Compare what a measurement gives on pretended GPUs with what it gives on the CPU."""
    expected = measure(tiny(family, **model))
    with rehearsal(2):
        found = measure(tiny(family, devices, **model))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name in LAST_OF_MANY:
            np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        else:
            assert found[name] == value, name


def of_policy(name: str) -> list[pk.EvictionConfig]:
    """A policy with every selection that it takes."""
    info = registry.policy_class(name)
    signed = dict.fromkeys(("knorm", "r-kv", "triattention"), ("attention", "random"))
    budget = 48 if name == "quest" else 24
    return [
        config
        for selection in signed.get(name, info.selections)
        for config in pk.grid(budget, policy=name, selection=selection, window=8)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "granularity", ["kv(reduce=union)", "layer(reduce=union)", "head", "model", "model(reduce=union)"]
)
def test_sets_that_heads_and_layers_share_on_two_gpus(granularity: str) -> None:
    selections = ("attention", "two-stage") if "union" in granularity else ("two-stage", "hindsight", "value", "random")
    configs = pk.grid(24, policy="snapkv", window=8, selection=selections, granularity=granularity)
    check(traced(configs, steps=2), TWO_GPUS)


@pytest.mark.slow
def test_the_main_path_on_one_gpu() -> None:
    check(traced(TWO, generate=3), ONE)


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.names())
def test_every_policy_and_selection_on_two_gpus(name: str) -> None:
    scores = ((1.0, 2.0, 3.0, 4.0),) * 2 if registry.policy_class(name).needs_scores else ()
    check(traced(of_policy(name), steps=2, generate=3, head_scores=scores), TWO_GPUS)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_two_gpus(family: str) -> None:
    check(traced(TWO, steps=2), TWO_GPUS, family)
    check(answered(TWO, 6), TWO_GPUS, family)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "grid"),
    [
        ({"scenario": "context-only", "generate": 3}, {}),
        ({"cache": "rectangular"}, {"policy": "pyramidkv"}),
        ({"save": ("outputs",)}, {}),
        ({"generate": 2}, {"precision": "quantise(bits=4)"}),
        ({"generate": 2}, {"policy": "adakv(positions=in-cache)"}),
        ({"scenario": "context-only"}, {"correction": "corrected"}),
        ({}, {"correction": "corrected(mass=stored)"}),
        ({}, {"granularity": "query"}),
        ({}, {"granularity": "layer"}),
        ({"generate": 2}, {"granularity": ("head", "head(reduce=union)", "model(block=4)", "model(reduce=union)")}),
    ],
    ids=str,
)
def test_every_kind_of_cache_on_two_gpus(settings: dict[str, Any], grid: dict[str, Any]) -> None:
    configs = pk.grid(24, window=8, selection="attention", **grid)
    check(traced(configs, steps=2, **settings), TWO_GPUS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "configs",
    [
        TWO,
        [*pk.grid(24, policy=("h2o", "tova", "random"), selection="attention", window=8),
         *pk.grid(24, policy="streaming-llm", selection="position", window=8)],
        pk.grid(24, policy="snapkv(positions=in-cache)", selection="attention", window=8),
        pk.grid(24, selection="attention", window=8, precision="quantise(bits=4)"),
        pk.grid(24, selection="two-stage", window=8, granularity=("head", "model(reduce=union)")),
    ],
    ids=["by score", "by time", "in-cache", "quantised", "shared by layers"],
)  # fmt: skip
def test_caches_that_are_compressed_while_decoding_on_two_gpus(configs: list[pk.EvictionConfig]) -> None:
    check(answered(configs, compress_over=4), TWO_GPUS)


@pytest.mark.parametrize("devices", [OFFLOADED, OFFLOADED[::-1]], ids=str)
@pytest.mark.parametrize("policy", ["adakv", "lava", "kvzip"])
def test_layers_left_on_the_cpu_are_measured_rightly(policy: str, devices: tuple[str, ...]) -> None:
    check(traced(of_policy(policy)[:1], generate=2), devices)


@pytest.mark.slow
def test_packed_caches_in_sixteen_bits_on_two_gpus() -> None:
    """They go through the kernel of a GPU, here its stand-in; a CPU's are padded, and round otherwise."""
    run = resolved_run(TWO, steps=2, generate=3)
    expected = trace_sample(tiny(dtype=torch.bfloat16), PROMPT, run).arrays["perturbation_propagated"]
    with (
        rehearsal(2),
        mock.patch.object(PackedBlock, "attend", autospec=True, side_effect=PackedBlock.attend) as packed,
    ):
        model = tiny(devices=TWO_GPUS, dtype=torch.bfloat16)
        found = trace_sample(model, PROMPT, run).arrays["perturbation_propagated"]
    assert packed.call_count > 0
    assert found.sum() == pytest.approx(expected.sum(), rel=0.05)
