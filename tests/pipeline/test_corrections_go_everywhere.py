"""What stands in for entries that went: exact where its query is the one at hand, nothing where nothing went."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from perturbkv import theory
from perturbkv.cache import makers as correcting
from perturbkv.cache.compact import CompactLayer
from perturbkv.cache.entries import KeptEntries
from perturbkv.cache.stand_in import StandIn, make_stand_in
from perturbkv.configs.choice import parse
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.option import complete_choice
from perturbkv.configs.precision import CORRECTION_OPTIONS, correction_bits
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError
from perturbkv.selection import compatibility
from perturbkv.selection.grid import configuration
from tests.oracle import theory as oracle
from tests.oracle.sample import Reference
from tests.support.models import HEADS, exact_adapter, token_ids
from tests.support.resolved import answer, trace_sample

PROMPT = Prompt("s", token_ids(40, seed=4), 0, question_tokens=9)
WINDOW = 5
CORRECTIONS = ("corrected", "corrected(mass=linear)", "corrected-oracle")
EVERY = pytest.mark.parametrize("correction", CORRECTIONS)
HEAD, KV, D, N = 4, 2, 8, 30
SCALE = 0.4
PLAIN = theory.Softmax(SCALE)


def config(correction: str = "none", budget: float = 16, policy: str = "adakv", **more: object) -> EvictionConfig:
    return configuration(budget, policy=policy, **{"window": WINDOW, "kernel": 3, "correction": correction, **more})


class World:
    """Random keys, values and queries of one layer, and what of it goes; of the last head nothing."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)
        self.keys, self.values = (torch.randn(KV, N, D, generator=made, dtype=torch.float64) for _ in range(2))
        self.query, self.other = (torch.randn(HEAD, D, generator=made, dtype=torch.float64) for _ in range(2))
        self.gone = torch.rand(HEAD, N, generator=made) < 0.6
        self.gone[-1] = False

    def stand_in(self, correction: str) -> StandIn:
        choice = parse(correction)
        whole = complete_choice(choice, "correction", CORRECTION_OPTIONS[choice.name])
        return make_stand_in(whole, self.query, self.keys, self.values, self.gone, PLAIN)

    def full(self, query: Tensor) -> Tensor:
        return theory.attention_output(query, self.keys, self.values, PLAIN)

    def layer(self, stand_ins: Mapping[int, StandIn]) -> CompactLayer:
        """Three rows of the same kept entries, and the last entry decoded in each."""
        lying = [(keys, values) for keys, values in zip(self.keys, self.values, strict=True) for _ in range(HEAD // KV)]
        stays = [~gone[:-1] for gone in self.gone]
        kept = [[kind[:-1][mask] for kind in pair] for pair, mask in zip(lying, stays, strict=True)]
        row = KeptEntries.of([keys for keys, _ in kept], [values for _, values in kept])
        layer = CompactLayer([row] * 3, HEAD, N - 1, stand_ins=stand_ins)
        layer.attached = True
        layer.append(*(kind[:, -1:].expand(3, -1, -1, -1) for kind in (self.keys, self.values)))
        return layer

    def decoded(self, layer: CompactLayer, query: Tensor) -> Tensor:
        """(row, head, d_head)."""
        return layer.attend(query.view(1, HEAD, 1, D).expand(layer.batch, -1, -1, -1), PLAIN)[:, 0]


@pytest.fixture
def world() -> World:
    made = World()
    made.gone[:, -1] = False  # decoded, and so kept
    return made


@EVERY
def test_the_window_s_own_query_gets_its_full_output_back(world: World, correction: str) -> None:
    """The mean and the log-mass are then true ones: 0 is what is left of the loss, and the oracle of the others'."""
    rows = world.decoded(world.layer({1: world.stand_in(correction)}), world.query)
    full = world.full(world.query)
    torch.testing.assert_close(rows[1], full, rtol=1e-12, atol=1e-13)
    assert (rows[0] - full)[:-1].abs().amax(dim=-1).min() > 1e-2, "uncorrected, these heads lose something"
    assert torch.equal(rows[0], rows[2])


@EVERY
def test_another_query_does_not(world: World, correction: str) -> None:
    rows = world.decoded(world.layer({1: world.stand_in(correction)}), world.other)
    assert (rows[1] - world.full(world.other))[:-1].abs().amax(dim=-1).min() > 1e-3
    assert (rows[1] - rows[0])[:-1].abs().amax(dim=-1).min() > 1e-3


@EVERY
def test_a_head_that_loses_nothing_keeps_every_bit(world: World, correction: str) -> None:
    rows = world.decoded(world.layer({1: world.stand_in(correction)}), world.other)
    assert torch.equal(rows[1, -1], rows[0, -1])
    assert not torch.equal(rows[1, 0], rows[0, 0])


def test_linear_is_the_tangent_of_the_true_mass_at_the_mean_query(world: World) -> None:
    """Second order in the step: a tenth of it leaves a hundredth; stored is off to first order."""
    known, linear, stored = (world.stand_in(one) for one in ("corrected-oracle", "corrected(mass=linear)", "corrected"))

    def off(made: StandIn, step: float) -> float:
        asked = (world.query + step * world.other).unsqueeze(1)
        return float((made.logits(asked, PLAIN) - known.logits(asked, PLAIN))[:-1].abs().max())

    assert off(linear, 0.0) < 1e-12 and off(stored, 0.0) < 1e-12
    assert off(linear, 1e-2) / off(linear, 1e-3) == pytest.approx(100, rel=0.1)
    assert off(stored, 1e-2) / off(stored, 1e-3) == pytest.approx(10, rel=0.1)


def test_rows_take_along_what_stands_in_for_them(world: World) -> None:
    layer = world.layer({0: world.stand_in("corrected"), 2: world.stand_in("corrected-oracle")})
    before = world.decoded(layer, world.other)
    layer.keep_rows([2, 1])
    assert torch.equal(world.decoded(layer, world.other), before[[2, 1]])


def off() -> float:
    """How far a run's isolated L lies from the naive decoder's, over all heads of the linear correction: relative."""
    adapter, ids, n = exact_adapter("llama", *HEADS["GQA"]), PROMPT.token_ids, len(PROMPT.token_ids)
    run = RunConfig("m", "d", (config("corrected(mass=linear)", policy="snapkv"),))
    found, reference = (
        trace_sample(adapter, PROMPT, run).arrays["perturbation_isolated"],
        Reference(adapter.model, ids, run),
    )
    worst = 0.0
    for layer, head in np.ndindex(found.shape[2:]):
        held, (kept, _) = reference.layer(layer, 0), reference.kept(layer, run.configs[0])[head]
        own, stays = head // (HEAD // KV), [*kept, n]
        extra = reference.extras(layer, run.configs[0])[head]
        assert extra is not None
        logits = held["key"][own] @ held["query"][head] * reference.decoder.scale
        weights = oracle.softmax([*logits[stays], extra.logit(held["query"][head])])
        changed = np.array(weights) @ np.stack([*held["value"][own][stays], extra.value])
        full = np.array(oracle.softmax(list(logits))) @ held["value"][own]
        expected = oracle.l1((full - changed) @ oracle.head_slice(held["w_o"], head, reference.decoder.d_head))
        worst = max(worst, abs(float(found[0, 0, layer, head]) / expected - 1))
    return worst


PLANTED = {
    "what stays for what went": lambda asked, query, keys, values, gone, softmax: (query, keys, values, ~gone, softmax),
    "no scale": lambda asked, query, keys, values, gone, softmax: (query, keys, values, gone, theory.Softmax(1.0)),
    "no query": lambda asked, query, keys, values, gone, softmax: (0 * query, keys, values, gone, softmax),
}


def test_a_run_s_corrections_are_those_of_the_naive_decoder() -> None:
    assert off() < 1e-9


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = PLANTED[mistake]
    monkeypatch.setattr(correcting, "make_stand_in", lambda asked, *given: make_stand_in(asked, *wrong(asked, *given)))
    assert off() > 1e-3


@pytest.fixture(scope="module")
def corrected() -> dict[str, np.ndarray]:
    """None and each correction, of everything and of 16 entries."""
    configs = tuple(config(one, budget) for budget in (1.0, 16) for one in ("none", *CORRECTIONS))
    return dict(trace_sample(exact_adapter("llama", *HEADS["GQA"]), PROMPT, RunConfig("m", "d", configs)).arrays)


MEASURED = ("perturbation_isolated", "perturbation_isolated_cosine", "perturbation_propagated", "logit_kl")


@pytest.mark.parametrize("name", MEASURED)
def test_where_everything_stays_a_correction_changes_no_bit(corrected: dict[str, np.ndarray], name: str) -> None:
    for place in (1, 2, 3):
        assert np.array_equal(corrected[name][place], corrected[name][0])
    assert corrected["evicted"].tolist() == [0] * 4 + [1] * 4


def test_what_is_kept_and_its_bounds_are_those_of_the_uncorrected(corrected: dict[str, np.ndarray]) -> None:
    for name in ("kept_count", "theta", "theta_hat", "retained_mass", "sigma_stage1", "held_share"):
        assert (corrected[name][4:] == corrected[name][4]).all(), name
    found = corrected["perturbation_isolated"]
    assert not np.isclose(found[5:], found[4], rtol=1e-3).all(axis=(1, 2, 3)).any()


def test_bytes_are_counted_for_each_head_that_loses_any() -> None:
    linear, oracle = (complete_choice(parse(one), "correction", CORRECTION_OPTIONS[parse(one).name])
                      for one in CORRECTIONS[1:])  # fmt: skip
    assert correction_bits(linear, 10, 3, 64, 64) == 3 * (16 * 2 * 64 + 32)
    assert correction_bits(oracle, 10, 3, 64, 64) == 16 * 64 * (3 + 10)
    assert correction_bits(oracle, 0, 3, 64, 64) == 0


def test_uncorrected_rows_are_those_of_a_run_without_others() -> None:
    adapter, plain = exact_adapter("llama", *HEADS["GQA"]), (config(), config(policy="snapkv"))
    alone = trace_sample(adapter, PROMPT, RunConfig("m", "d", plain)).arrays
    among = trace_sample(adapter, PROMPT, RunConfig("m", "d", (plain[0], *map(config, CORRECTIONS), plain[1]))).arrays
    for name in MEASURED:
        np.testing.assert_allclose(alone[name], among[name][[0, 4]], rtol=1e-9, atol=1e-13)
    assert np.array_equal(alone["held_bytes"], among["held_bytes"][[0, 4]])


def test_a_rectangular_cache_decodes_alike() -> None:
    adapter = exact_adapter("llama", *HEADS["GQA"])
    configs = tuple(config(one, policy="snapkv") for one in CORRECTIONS)
    ragged, rectangular = (
        trace_sample(adapter, PROMPT, RunConfig("m", "d", configs, cache=cache, steps=3)).arrays
        for cache in ("ragged", "rectangular")
    )
    for name in MEASURED:
        np.testing.assert_allclose(ragged[name], rectangular[name], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("scenario", ["regular", "context-only"])
def test_answers_come_from_what_is_measured(scenario: str) -> None:
    """Evicting while reading stores what evicting afterwards stores, and so says the same."""
    adapter = exact_adapter("llama", *HEADS["GQA"])
    configs = tuple(config(one, budget) for one in ("none", *CORRECTIONS) for budget in (12, 1.0))
    traced = trace_sample(adapter, PROMPT, RunConfig("m", "d", configs, scenario=scenario, generate=12)).arrays
    made = answer(adapter, PROMPT, configs, 12, scenario=scenario, divergence=True)
    assert [[token for token in row if token >= 0] for row in traced["generated"].tolist()] == made.evicted
    assert made.stored == pytest.approx((traced["held_bytes"] / traced["full_bytes"]).tolist())


@pytest.mark.parametrize(("asked", "said"), [
    ({"precision": "quantise"}, "stands in for entries of full precision; leave precision 'quantise"),
    ({"policy": "streaming-llm(positions=in-cache)", "selection": "position"}, "positions=in-cache moves them"),
])  # fmt: skip
def test_what_cannot_be_corrected_is_refused(asked: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compatibility.check(configuration(16, **{"window": WINDOW, "correction": "corrected", **asked}))


def test_a_cache_that_is_compressed_again_is_not_corrected() -> None:
    with pytest.raises(
        ConfigError, match="is stored once, for the prompt; caches are compressed again with correction none"
    ):
        compatibility.check_compressible(config("corrected"))


def test_kept_sets_from_outside_are_not_corrected() -> None:
    with pytest.raises(ConfigError, match="expected correction none, got corrected"):
        configuration(16, policy="given:theirs", correction="corrected")
