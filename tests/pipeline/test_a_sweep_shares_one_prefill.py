from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from perturbkv.cache import entries
from perturbkv.configs.choice import parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources, Shape, parse_size, plan_batches
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError
from perturbkv.pipeline.progress import time_phases
from perturbkv.pipeline.sample import layer, one_sample, sample_run
from perturbkv.schema import VARIABLES
from perturbkv.selection.grid import configuration
from tests.support.models import exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import trace_sample
from tests.support.traces import kept_of

PROMPT = Prompt("s", token_ids(60), 0)
POLICIES = ("snapkv", "pyramidkv", "adakv", "headkv", "h2o", "scissorhands", "tova", "random")
HEAD_SCORES = ((1.0, 2.0, 5.0, 1.0), (3.0, 1.0, 1.0, 0.5))


def sweep() -> tuple[EvictionConfig, ...]:
    """Every policy with several selections, granularities, alphas and budgets; windows and pools of several widths."""
    made = [
        configuration(budget, policy=policy, selection=selection, granularity=granularity, window=6,
                            alpha=alpha)
        for policy, selection, (granularity, alpha), budget in itertools.product(
            POLICIES, ("attention", "two-stage"), (("query", 0.25), ("kv", 0.6)), (12, 30)
        )
    ]  # fmt: skip
    made += [
        configuration(20, policy="snapkv", selection=name, window=6)
        for name in ("attention-unpooled", "two-stage-uniform", "value", "random", "hindsight")
    ]
    made += [configuration(0.5, preset="kvpress", policy="adakv", window=9, product="mean-of-products")]
    made += [configuration(70, policy="snapkv", window=6)]
    made += [configuration(18, policy="streaming-llm", selection="position", window=6)]
    inside = replace(made[-1], policy=parse("streaming-llm(positions=in-cache)"))
    made += [inside, replace(inside, budget=Budget(0.4))]
    return tuple(made)


def run(configs: tuple[EvictionConfig, ...], **fields: Any) -> RunConfig:
    return RunConfig("m", "d", configs, head_scores=HEAD_SCORES, **fields)


def kept(arrays: Any, config: int) -> list[list[list[int]]]:
    _, layers, heads = arrays["kept_count"].shape
    return [[kept_of(arrays, config, layer, head) for head in range(heads)] for layer in range(layers)]


def assert_same(found: Any, place: int, alone: Any, atol: float) -> None:
    """One configuration of a sweep against the run of that configuration alone."""
    assert kept(found, place) == kept(alone, 0)
    for name, variable in VARIABLES.items():
        if "config" in variable.dims and name in alone and name != "kept_offset":
            np.testing.assert_allclose(
                found[name][place].astype(float), alone[name][0].astype(float), rtol=1e-5, atol=atol, err_msg=name
            )


@pytest.mark.parametrize("scenario", ["regular", pytest.param("context-only", marks=pytest.mark.slow)])
def test_a_sweep_equals_one_run_per_configuration(scenario: str) -> None:
    adapter, configs = exact_adapter("llama", 4, 2), sweep()
    prompt = Prompt("s", token_ids(60), 0, question_tokens=7)
    options = {"scenario": scenario, "steps": 2, "save": ("outputs",), "generate": 2}
    together = trace_sample(adapter, prompt, run(configs, **options)).arrays
    assert len({str(kept(together, place)) for place in range(len(configs))}) > len(configs) // 2
    for place, config in enumerate(configs):
        alone = trace_sample(adapter, prompt, run((config,), **options)).arrays
        assert_same(together, place, alone, atol=1e-9)


@pytest.mark.slow
def test_in_single_precision_they_differ_by_rounding_alone() -> None:
    adapter, configs = tiny_adapter(), sweep()[:12]
    together = trace_sample(adapter, PROMPT, run(configs)).arrays
    for place, config in enumerate(configs):
        alone = trace_sample(adapter, PROMPT, run((config,))).arrays
        assert kept(together, place) == kept(alone, 0)
        for name in ("perturbation_isolated", "theta", "theta_hat", "retained_mass", "sigma_topk"):
            np.testing.assert_allclose(together[name][place], alone[name][0], rtol=1e-5, err_msg=name)
        floor = 4 * alone["noise_floor"].max()
        propagated = (arrays["perturbation_propagated"] for arrays in (together, alone))
        np.testing.assert_allclose(*(next(propagated)[row] for row in (place, 0)), rtol=1e-5, atol=floor)


@pytest.mark.slow
@pytest.mark.parametrize(("kibibytes", "scenario"), [(100, "regular"), (300, "context-only")])
def test_a_bound_on_memory_makes_batches_and_changes_no_number(
    kibibytes: int, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, configs = exact_adapter("llama", 4, 2), sweep()
    prompt = replace(PROMPT, answers=("a b",), question_tokens=7)
    whole = trace_sample(adapter, prompt, run(configs, steps=2, generate=8, scenario=scenario)).arrays
    held: list[int] = []
    original = one_sample.decode_evicted

    def watched(adapter: Any, cache: Any, *more: Any) -> Any:
        borrowed = sum(layer.borrowed_nbytes for layer in cache.layers)
        held.append(cache.nbytes - borrowed)
        assert len({layer.batch for layer in cache.layers}) == 1
        rows.add(cache.layers[0].batch)
        return original(adapter, cache, *more)

    rows: set[int] = set()
    monkeypatch.setattr(one_sample, "decode_evicted", watched)
    resources = Resources(max_bytes=kibibytes * 2**10)
    split = trace_sample(adapter, prompt, run(configs, steps=2, generate=8, scenario=scenario), resources).arrays
    assert len(held) > 2
    assert len(rows) == 1
    assert max(held) <= kibibytes * 2**10
    for name, array in whole.items():
        if name not in ("kept_offset", "kept_code", "cache_bytes", "cache_padding_bytes"):
            np.testing.assert_allclose(split[name].astype(float), array.astype(float), rtol=1e-5, atol=1e-9)
    assert [kept(split, place) for place in range(len(configs))] == [
        kept(whole, place) for place in range(len(configs))
    ]


@pytest.mark.slow
def test_working_memory_of_a_byte_takes_configurations_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, configs = exact_adapter("llama", 4, 2), sweep()
    calls: list[int] = []
    original = layer.measure.isolated_quantities

    def counted(*given: Any) -> Any:
        calls.append(len(given[1].kept))
        return original(*given)

    monkeypatch.setattr(layer.measure, "isolated_quantities", counted)
    whole = trace_sample(adapter, PROMPT, run(configs)).arrays
    assert max(calls) > 4
    calls.clear()
    narrow = trace_sample(adapter, PROMPT, run(configs), Resources(chunk_bytes=1)).arrays
    assert set(calls) == {1}
    for name in ("perturbation_isolated", "theta_hat", "sigma_stage1", "noise_floor_isolated"):
        np.testing.assert_allclose(narrow[name], whole[name], rtol=1e-9, atol=1e-12)


def test_the_prompt_is_read_once_and_every_layer_is_sorted_once_per_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 configurations of three policies and two selections at four budgets make two rankings."""
    adapter = tiny_adapter()
    configs = tuple(
        configuration(budget, policy=policy, selection=selection, window=6)
        for policy, selection, budget in itertools.product(
            ("snapkv", "pyramidkv", "adakv"), ("attention", "two-stage"), (10, 14, 20, 30)
        )
    )
    read: list[int] = []
    adapter.model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    sorts = counted_sorts(monkeypatch)
    with time_phases() as seconds:
        trace_sample(adapter, PROMPT, run(configs), Resources(max_bytes=2**30))
    assert sorted(read) == [1, 1, len(PROMPT.token_ids)]
    assert len(sorts) == 2 * len(adapter.layers)
    assert set(seconds) == {
        "prefill", "scores", "norms", "reference", "layers", "select", "evict", "decode", "measure", "assembly"
    }  # fmt: skip


def counted_sorts(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    from perturbkv.selection import ranking

    calls: list[None] = []
    original: Callable[..., Any] = ranking.rank

    def rank(score: torch.Tensor) -> Any:
        calls.append(None)
        return original(score)

    monkeypatch.setattr(ranking, "rank", rank)
    return calls


class Waiting(TorchDispatchMode):
    """Names of operations that make a GPU's host wait: their result is a number, or its shape has to be found out."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "bincount", "item")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.overloadpacket.__name__
        if name in self.WAITS or (name == "index" and any(is_mask(index) for index in args[1])):
            self.seen.append(name)
        return operation(*args, **kwargs or {})


def is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def under(mode: Waiting, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return wrapped


@pytest.mark.slow
def test_nothing_in_the_layer_loops_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Head scores and PyramidKV's line are worked out on the host, where there is nothing to wait for."""
    configs = tuple(config for config in sweep() if config.policy.name not in ("headkv", "pyramidkv", "random"))
    modes = {name: Waiting() for name in ("measure_layer", "evict", "decode", "measure")}
    monkeypatch.setattr(one_sample, "measure_layer", under(modes["measure_layer"], one_sample.measure_layer))
    monkeypatch.setattr(one_sample._BatchDecoder, "_evict", under(modes["evict"], one_sample._BatchDecoder._evict))
    monkeypatch.setattr(one_sample, "decode_evicted", under(modes["decode"], one_sample.decode_evicted))
    monkeypatch.setattr(sample_run, "decode_full", under(modes["decode"], sample_run.decode_full))
    monkeypatch.setattr(
        one_sample._BatchDecoder, "_measure", under(modes["measure"], one_sample._BatchDecoder._measure)
    )
    columns = entries._nonzero

    def of_known_length(mask: torch.Tensor, count: int) -> Any:
        """As on CUDA, where the length is handed in."""
        row, column = torch.nonzero_static(mask, size=count).unbind(dim=-1)
        assert all(torch.equal(one, other) for one, other in zip(columns(mask, count), (row, column), strict=True))
        modes["evict"].seen = [name for name in modes["evict"].seen if name not in ("nonzero", "equal")]
        return row, column

    monkeypatch.setattr(entries, "_nonzero", of_known_length)
    trace_sample(tiny_adapter(), PROMPT, run(configs, steps=2))
    assert {name: mode.seen for name, mode in modes.items()} == {name: [] for name in modes}


def test_waiting_would_be_seen() -> None:
    with Waiting() as mode:
        int(torch.ones(3).sum())
        torch.ones(3).nonzero()
        torch.ones(3)[torch.ones(3, dtype=torch.bool)]
    assert mode.seen == ["_local_scalar_dense", "nonzero", "index"]


SHAPE = Shape(3, 4, 2, d_key=8, d_value=8, d_model=32, vocab=100, itemsize=4, weights_bytes=40_000)


@settings(deadline=None)
@given(st.lists(st.integers(10, 400), min_size=1, max_size=60, unique=True), st.floats(1, 20))
def test_batches_hold_every_configuration_once_inside_the_bound(budgets: list[int], room: float) -> None:
    configs = [EvictionConfig(Budget(budget), window=6) for budget in budgets]
    sizes = [SHAPE.row_bytes(config, 500, 2, 2) for config in configs]
    bound = int(max(sizes) * room)
    planned = plan_batches(configs, SHAPE, 500, 2, 2, bound)
    assert sorted(place for batch in planned.indices for place in batch) == list(range(len(configs)))
    held = [sum(sizes[place] for place in batch) for batch in planned.indices]
    assert max(held) == planned.largest_bytes <= bound
    assert planned.rows == 1 + max(map(len, planned.indices))
    assert max(map(len, planned.indices)) - min(map(len, planned.indices)) <= 1


def test_a_bound_that_one_configuration_exceeds_is_refused_with_what_it_takes() -> None:
    configs = [EvictionConfig(Budget(100), window=6)]
    with pytest.raises(
        ConfigError, match=r"max_bytes \(--max-memory\) allows 1 KiB, less than the 89 KiB that 'snapkv:two-stage b=100"
    ):
        plan_batches(configs, SHAPE, 500, 1, 1, max_bytes=1000)
    assert plan_batches(configs, SHAPE, 500, 1, 1, None).rows == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512", 512 * 2**20), ("2GiB", 2 * 2**30), ("1.5 gib", 3 * 2**29), ("800MB", 800_000_000), ("64kib", 2**16)],
)
def test_sizes_are_read_with_their_units(text: str, expected: int) -> None:
    assert parse_size("--max-memory", text) == expected


@pytest.mark.parametrize("text", ["", "much", "-3MiB", "0", "3TiB", "1e3"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-memory takes a size such as"):
        parse_size("--max-memory", text)
