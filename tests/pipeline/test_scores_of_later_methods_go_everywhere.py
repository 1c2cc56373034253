"""Every score of a later method with every budget rule, granularity, type and scenario that takes scores."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import perturbkv as pk
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError
from perturbkv.selection.compatibility import check_compressible
from perturbkv.selection.grid import configuration
from tests.oracle import scores as naive
from tests.oracle.decoder import Decoder
from tests.support.models import FAMILIES, exact_adapter, tiny_adapter, token_ids
from tests.support.resolved import answer, asked, prefill, trace_sample
from tests.support.traces import kept_of

SCORES = ("caote", "dropkv", "obcache-value", "obcache-key", "obcache-joint", "knorm", "value-norm",
          "expected-attention", "r-kv", "randkv", "triattention")  # fmt: skip
SIGNED = ("knorm", "r-kv", "triattention")
PROMPT = Prompt("s", token_ids(60), 0)
ROTATING = ("expected-attention", "triattention")
SINKS = {"value-norm": 3, "expected-attention": 2, "randkv": 3}


def named(score: str) -> str:
    option = "prompt" if score == "randkv" else "sinks"
    return f"{score}({option}={SINKS[score]})" if score in SINKS else score


def configs(score: str) -> tuple[EvictionConfig, ...]:
    """By itself and under two budget rules, per query head and per key/value head."""
    made = []
    for granularity in ("query", "kv"):
        made += [
            configuration(budget, policy=policy, selection="attention", granularity=granularity, window=6)
            for policy in (named(score), f"adakv(by={named(score)})", f"pyramidkv(by={named(score)})")
            for budget in (16, 0.4)
            if score not in SIGNED or "adakv" not in policy
        ]
    return tuple(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", SCORES)
def test_a_score_goes_through_a_whole_run(score: str, dtype: torch.dtype) -> None:
    chosen = configs(score)
    run = RunConfig("m", "d", chosen, steps=2)
    found = trace_sample(tiny_adapter(dtype=dtype), PROMPT, run).arrays
    for name in ("perturbation_isolated", "perturbation_propagated", "retained_mass", "theta"):
        assert np.isfinite(found[name]).all(), name
    assert (found["perturbation_isolated"] >= 0).all()
    for place, (config, counts) in enumerate(zip(chosen, found["kept_count"], strict=True)):
        starts = {position for where in np.ndindex(counts.shape) for position in kept_of(found, place, *where)[:3]}
        assert set(range(SINKS.get(score, 0))) <= starts, "the sinks stay"
        assert counts.mean() == config.kept_entries(60)


@pytest.mark.parametrize("score", SCORES)
def test_a_score_is_a_policy_of_a_grid(score: str) -> None:
    (chosen,) = pk.grid(128, policy=score, selection="attention")
    assert str(chosen.policy) == score
    for preset in ("paper-v2", "released-v2", "kvpress"):
        (same,) = pk.grid(128, policy=score, selection="attention", preset=preset)
        assert same.policy == chosen.policy, "a preset is SnapKV's; other scores keep their own options"


def test_scores_below_zero_are_not_multiplied_or_mixed() -> None:
    for score in SIGNED:
        for choice in ({"policy": score, "selection": "two-stage"}, {"policy": f"adakv(by={score})"}):
            with pytest.raises(ConfigError, match="gives some below 0"):
                pk.grid(128, **choice)


@pytest.mark.parametrize("score", SCORES)
def test_a_prompt_inside_the_window_is_kept_whole(score: str) -> None:
    prompt = Prompt("s", token_ids(5), 0)
    found = trace_sample(tiny_adapter(), prompt, RunConfig("m", "d", configs(score)[:1])).arrays
    assert (found["kept_count"] == 5).all()


@pytest.mark.parametrize("score", [score for score in SCORES if score not in ROTATING])
def test_a_growing_cache_is_compressed_again_by_a_score(score: str) -> None:
    chosen = [
        configuration(12, policy=named(score), selection="attention", granularity=granularity, window=4)
        for granularity in ("query", "kv")
    ]
    found = answer(tiny_adapter(), Prompt("s", token_ids(20), 0), chosen, 30, compress_over=18)
    assert {one.config for one in found.compressions} == {0, 1}
    for one in found.compressions:
        assert one.before > 18
        assert one.after == 12
        assert one.perturbation.isfinite().all()


@pytest.mark.parametrize("score", ROTATING)
def test_scores_of_rotations_cannot_compress_what_was_generated(score: str) -> None:
    chosen = configuration(12, policy=score, selection="attention", window=4)
    with pytest.raises(ConfigError, match="looks at what decoding forgets"):
        check_compressible(chosen)


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_attention_of_a_model_is_the_oracles(family: str) -> None:
    """From the naive decoder's own projections, turned by its own rotation."""
    adapter, n = exact_adapter(family, 4, 2), 24
    chosen = configuration(12, policy="expected-attention(n_future=40)", selection="attention", window=5)
    found = prefill(adapter, token_ids(n), [chosen], Resources(), "s").statistics.scored[asked(chosen)]
    decoder = Decoder(adapter.model)
    records = [decoder.step(token) for token in token_ids(n)]

    def turned(vector: np.ndarray, position: int) -> np.ndarray:
        return decoder._rotate(vector[None], position, decoder.places[0])[0]

    for layer, scores in enumerate(found):
        back = np.array(
            [[turned(record.query[layer][head], -place) for place, record in enumerate(records)] for head in range(4)]
        )
        keys, values = (np.array(held[layer]) for held in (decoder.keys, decoder.values))
        sinks = decoder.sinks(layer)
        wanted = naive.expected_attention(back, keys, values, adapter.scale(layer), turned, 40, logits=sinks)
        np.testing.assert_allclose(scores.numpy(), wanted[:, : n - 5], rtol=1e-8)
