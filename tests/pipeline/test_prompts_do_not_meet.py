"""Prompts of a run do not meet, positions are asked for, and the text alone votes where it is asked to."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

import perturbkv as pk
from perturbkv.cache import entries
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError, ModelError, UnknownNameError
from perturbkv.selection.grid import configuration, grid
from perturbkv.selection.policies import registry
from perturbkv.trace import FailedSample, SampleTrace
from tests.pipeline.test_positions_inside_the_cache import INSIDE, KEPT, PROMPT, SINKS, SNAPKV
from tests.support.models import tiny_adapter, token_ids
from tests.support.resolved import answer, every, trace, trace_sample

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


CHANGING = {
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
    "longrope": ("phi3", {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 256,
    }),
}  # fmt: skip


@pytest.mark.parametrize("rope", CHANGING)
def test_rotations_that_do_not_compose_are_refused_before_anything_runs(
    rope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, asked = CHANGING[rope]
    more = {"original_max_position_embeddings": 256} if rope == "longrope" else {}
    adapter = tiny_adapter(family, rope_parameters=asked, **more)
    trace_sample(adapter, PROMPT, RunConfig("m", "d", (KEPT,)))
    monkeypatch.setattr(adapter.model, "forward", lambda *given, **more: pytest.fail("the model ran"))
    for ask in (
        lambda: trace_sample(adapter, PROMPT, RunConfig("m", "d", (KEPT, INSIDE))),
        lambda: answer(adapter, PROMPT, (INSIDE,), 3),
    ):
        with pytest.raises(ModelError, match=rf"got '{rope}' of model 'tiny-{family}'.*use positions=kept$"):
            ask()


def test_every_known_type_of_frequencies_is_taken_or_refused() -> None:
    config = AutoConfig.for_model("llama")
    for kind in ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional"):
        config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4}
        entries.check_positions(every((KEPT, SNAPKV)), config, "m")
        if kind in entries.COMPOSING_ROPE_TYPES:
            entries.check_positions(every((INSIDE,)), config, "m")
        else:
            with pytest.raises(ModelError, match=kind):
                entries.check_positions(every((INSIDE,)), config, "m")


@pytest.mark.parametrize("name", [info.name for info in registry.all_policies() if not info.needs_scores])
def test_every_policy_that_evicts_places_keys_inside_the_cache_and_others_say_why_not(name: str) -> None:
    info = registry.policy_class(name)
    asked = {"policy": [f"{name}(positions={where})" for where in ("kept", "in-cache")], "window": 5}
    if name in {"quest", "vertical-slash"}:
        with pytest.raises(ConfigError, match=rf"policy '{name}' has no option 'positions'; its options: "):
            grid(64, **asked)
        return
    kept, inside = grid(20, selection=info.selections[0], **asked)
    assert (kept.positions, inside.positions) == ("kept", "in-cache")
    assert "positions" not in kept.policy.options, "a choice at the default is the choice without it"


def test_a_label_names_the_positions() -> None:
    assert INSIDE.label() == KEPT.label().replace(f"sinks={SINKS}", f"sinks={SINKS}, positions=in-cache")
    run = RunConfig("m", "d", (KEPT, INSIDE))
    assert RunConfig.from_json(run.to_json()) == run
    with pytest.raises(UnknownNameError, match="unknown positions 'inside'; known: "):
        grid(12, policy="streaming-llm(positions=inside)", selection="position", window=5)


VOTING = [pk.Prompt(f"p{seed}", token_ids(60, seed=seed), 0, 20, template_tail=range(53, 58)) for seed in range(2)]
GRID = {"window": 8, "selection": ("attention", "two-stage")}


@pytest.mark.slow
def test_a_trace_of_all_queries_is_given_the_texts_and_goes_on(tmp_path: Path) -> None:
    model, path = tiny_adapter(), tmp_path / "t.h5"
    usual, both = pk.grid(20, **GRID), pk.grid(20, window_queries=("all", "text"), **GRID)
    first = pk.measure(model, VOTING, usual, path=path, progress=False)
    grown = pk.measure(model, VOTING, both, path=path, progress=False)
    assert grown.run.configs == pk.read_trace(path).run.configs == both
    assert "window_queries" not in str([config.to_document() for config in first.run.configs])
    apart = pk.measure(model, VOTING, both[2:], progress=False)
    for name in ("kept_count", "perturbation_isolated", "perturbation_propagated"):
        np.testing.assert_array_equal(grown.arrays[name][:, :2], first.arrays[name])
        np.testing.assert_allclose(grown.arrays[name][:, 2:], apart.arrays[name], rtol=1e-5)
    assert not grown.same_kept(0, 2).all()
    for sample, config in np.ndindex(2, 4):
        assert grown.kept_masks(sample, config)[..., -8:].all(), "the window stays, the template's tokens with it"
        assert (grown.kept_masks(sample, config).sum(axis=-1) == 20).all()


@pytest.mark.parametrize(
    ("window", "tail", "scenario", "said"),
    [
        (8, range(0), "regular", "the last 8 compressed tokens of sample 'p1' hold none"),
        (8, range(20, 52), "regular", "the last 8 compressed tokens of sample 'p1' hold none"),
        (8, range(50, 60), "regular", "leaves no query: the last 8 .* of sample 'p1' .*; use --window 11 or more"),
        (2, range(53, 60), "regular", "leaves no query: the last 2 .* of sample 'p0' .*; use --window 8 or more"),
        (8, range(53, 58), "context-only", "the last 8 compressed tokens of sample 'p0' hold none"),
    ],
)
def test_a_window_without_the_templates_tokens_or_of_nothing_else_is_one_line(
    window: int, tail: range, scenario: str, said: str
) -> None:
    first = dataclasses.replace(VOTING[0], template_tail=tail if window == 2 else VOTING[0].template_tail)
    prompts = [first, dataclasses.replace(VOTING[1], template_tail=tail)]
    configs, settings = pk.grid(20, window=window, window_queries="text"), pk.Settings(scenario=scenario)
    with pytest.raises(ConfigError, match=said) as refused:
        pk.measure(tiny_adapter(), prompts, configs, settings=settings, progress=False)
    assert "\n" not in str(refused.value)
