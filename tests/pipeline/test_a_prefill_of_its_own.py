"""A prefill along lines is whole where its budget is, costs others nothing, and what it cannot do is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from perturbkv.cache.entries import KeptEntries
from perturbkv.cache.makers import OwnPrefill
from perturbkv.configs import cache_contents as asked_of
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.patching import check_sides
from perturbkv.configs.resources import Resources, Shape
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import BudgetError, ConfigError
from perturbkv.pipeline.run import searching
from perturbkv.pipeline.sample.capture import FiniteCheck
from perturbkv.pipeline.variants import readers as owned
from perturbkv.pipeline.variants.readers import run_sparse_prefill
from perturbkv.selection import compatibility, grid
from perturbkv.selection import sparse_lines as chosen_lines
from perturbkv.selection.grid import configuration
from perturbkv.selection.resolved_config import ResolvedConfig, resolve
from perturbkv.selection.sparse_lines import Lines
from tests.oracle.sample import QUESTION, Reference
from tests.support.models import HEADS, exact_adapter, token_ids
from tests.support.resolved import prefill, trace_sample

WINDOW = 5
IDS = token_ids(44, seed=4)
PROMPT = Prompt("s", IDS, 0, question_tokens=QUESTION)


def lined(selection: str = "attention", budget: float = 17, **more: Any) -> ResolvedConfig:
    policy = "vertical-slash(first=2)" if selection.startswith("random") else "vertical-slash(last=9, first=2)"
    return resolve(configuration(budget, policy=policy, selection=selection, **{"window": WINDOW, **more}))


def traced(*configs: EvictionConfig, **more: Any) -> Any:
    return trace_sample(exact_adapter("llama", *HEADS["GQA"]), PROMPT, RunConfig("m", "d", configs, **more)).arrays


def test_a_covering_budget_is_the_full_run_bit_for_bit() -> None:
    """Its row is that of the run which keeps everything: no prefill, no copy."""
    found = traced(lined(budget=1.0), lined("random", 1.0), lined(budget=44), lined(), save=("outputs",))
    assert all(np.array_equal(found["hidden"][0], found["hidden"][place]) for place in (1, 2))
    assert not np.array_equal(found["hidden"][0], found["hidden"][3])
    assert found["evicted"].tolist() == [0, 0, 0, 1] and found["held_share"].tolist()[:3] == [1.0] * 3
    assert (found["perturbation_isolated"][:3] <= found["noise_floor_isolated"]).all()
    assert (found["perturbation_propagated"][:3] <= found["noise_floor"] * (1 + 1e-9)).all()
    assert (found["prefill_seconds"][:3] == found["prefill_seconds_full"]).all()
    assert found["prefill_seconds"][3] > 0 and (found["held_bytes"] == found["full_bytes"]).all()


def read(config: ResolvedConfig, **more: Any) -> tuple[list[KeptEntries], OwnPrefill]:
    adapter = exact_adapter("llama", *HEADS["GQA"])
    return run_sparse_prefill(adapter, IDS, config, "s", Resources(**more), FiniteCheck())


def cached(rows: list[KeptEntries]) -> list[torch.Tensor]:
    return [torch.cat(row.rectangle) for row in rows if row.rectangle is not None]


def test_masks_that_hide_nothing_leave_the_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = exact_adapter("llama", *HEADS["GQA"])
    monkeypatch.setattr(owned, "lines_for_budget", lambda config, given, n: chosen_lines.all_lines(config, given))
    (rows, own_prefill), full = read(lined()), prefill(adapter, IDS, [lined()], Resources(), "s")
    assert own_prefill.share == 1.0 and len(rows) == 2
    for layer, own in enumerate(cached(rows)):
        held = adapter.cache_layer(full.cache, layer)
        torch.testing.assert_close(own, torch.cat([held.keys[0], held.values[0]]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("granularity", ["query", "kv"])
def test_chunks_of_queries_are_the_whole(granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = lined("two-stage", granularity=granularity)
    (whole, of_whole), sizes = read(config), []
    seen = Lines.attention_mask
    monkeypatch.setattr(
        Lines, "attention_mask", lambda own, positions: (sizes.append(len(positions)), seen(own, positions))[1]
    )
    parts, of_parts = read(config, chunk_bytes=16 * 4 * 44 * 7)
    assert sizes == [7, 7, 7, 7, 7, 7, 2] * 2 and of_parts.share == pytest.approx(of_whole.share)
    for one, other in zip(cached(whole), cached(parts), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)


def test_drawn_lines_are_those_of_the_full_prefill() -> None:
    """They depend on no query: the first layer's cache differs in nothing, and later ones by what went before."""
    (first, _), (second, _), (other, _) = (read(lined(name)) for name in ("random", "random", "random(seed=1)"))
    assert all(torch.equal(*both) for both in zip(cached(first), cached(second), strict=True))
    assert not torch.equal(cached(first)[1], cached(other)[1])


def off(config: EvictionConfig) -> float:
    """The largest difference of a run's drift and isolated L from the naive decoder's."""
    adapter = exact_adapter("llama", *HEADS["GQA"])
    run = RunConfig("m", "d", (config,))
    arrays, reference = trace_sample(adapter, PROMPT, run).arrays, Reference(adapter.model, IDS, run)
    (own,) = reference.evicted(config)
    return float(
        np.abs(arrays["hidden_drift_l1"][0, 0, -1] - np.abs(reference.full[0].hidden[-1] - own.hidden[-1]).sum())
    )


def test_what_is_left_is_what_the_naive_decoder_leaves() -> None:
    assert off(lined("two-stage(alpha=0)")) < 1e-9


_seen, _choose, _diagonals = Lines.attention_mask, chosen_lines.choose_lines, chosen_lines.diagonal_sums


def later_too(own: Lines, positions: torch.Tensor) -> torch.Tensor:
    return _seen(Lines(own.vertical, own.slash.roll(1, dims=-1)), positions)


def full_queries(config: EvictionConfig, given: chosen_lines.LastQueries) -> chosen_lines.ChosenLines:
    return _choose(config, replace(given, norms=torch.ones_like(given.norms)))


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (Lines, "attention_mask", later_too),
        (chosen_lines, "diagonal_sums", lambda weights: _diagonals(weights).roll(1, dims=-1)),
        (chosen_lines, "_column_sums", lambda weights: weights[:, -1]),
    ],
)
def test_a_wrong_line_is_found(where: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, wrong)
    assert off(lined("two-stage(alpha=0)")) > 1e-3


def test_norms_that_are_left_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perturbkv.selection.sparse_lines.choose_lines", full_queries)
    assert off(lined("two-stage(alpha=0)")) > 1e-3


def test_others_cost_nothing_and_are_what_they_were() -> None:
    adapter, other = exact_adapter("llama", *HEADS["GQA"]), configuration(17, window=WINDOW)
    assert prefill(adapter, IDS, [other], Resources(), "s").statistics.queries == {}
    alone, beside = traced(other), traced(other, lined())
    assert "prefill_seconds" not in alone and np.isnan(beside["prefill_seconds"][0])
    assert alone["held_share"][0] == beside["held_share"][0]
    for name in ("perturbation_isolated", "perturbation_propagated", "theta_hat", "logit_kl", "lost_output"):
        np.testing.assert_allclose(alone[name][0], beside[name][0], rtol=1e-9, atol=1e-13)
    assert (beside["lost_position"][1] == -1).all() and np.isnan(beside["lost_output"][1]).all()


def test_only_the_queries_that_are_looked_at_are_remembered() -> None:
    adapter = exact_adapter("llama", *HEADS["GQA"])
    found = prefill(adapter, IDS, [lined(), lined("two-stage(alpha=0)"), lined(budget=20)], Resources(), "s").statistics
    assert sorted(tensor.shape[1] for each in found.queries.values() for tensor in each) == [9, 9, 32, 32]
    assert not found.scored, "no score of entries is asked for"


def test_a_whole_cache_of_its_own_is_planned_for() -> None:
    shape = Shape(2, 4, 2, 8, 8, 32, 260, 4, 10**6)
    assert shape.kept_bytes(lined(), 44) == shape.full_cache_bytes(44)
    assert shape.row_bytes(lined(), 44, 1, 1, passing=True) > shape.full_cache_bytes(44)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"granularity": "layer"},
            "chooses lines by head; granularity 'layer' has one set for several heads: choose query or kv",
        ),
        ({"granularity": "query(block=8)"}, "block of granularity 'query' has no effect here: it needs a policy"),
        ({"precision": "quantise"}, "reads the prompt in a prefill of its own: expected precision full, got quantise"),
        ({"correction": "corrected"}, "expected correction none, got corrected"),
        ({"protect_first": 4}, "expected protect_first 0, got 4; leave it out"),
        ({"protect_recent": 0.5}, "expected protect_recent 0, got 0.5; leave it out"),
        ({"selection": "attention-unpooled"}, "does not combine with selection 'attention-unpooled'"),
        ({"selection": "two-stage-uniform"}, "does not combine with selection 'two-stage-uniform'"),
        ({"selection": "value"}, "does not combine with selection 'value'"),
        ({"selection": "hindsight"}, "does not combine with selection 'hindsight'"),
        ({"selection": "position"}, "does not combine with selection 'position'"),
        ({"selection": "two-stage(epsilon=0.1)"}, "epsilon of selection 'two-stage' has no effect here"),
        ({"selection": "two-stage(score=pooled)"}, "score of selection 'two-stage' has no effect here"),
        ({"selection": "two-stage(split=total)"}, "split of selection 'two-stage' has no effect here"),
        ({"selection": "random", "granularity": "kv(reduce=max)"}, "reduce of granularity 'kv' has no effect here"),
        (
            {"selection": "random", "policy": "vertical-slash(sums=free)"},
            "sums of policy 'vertical-slash' has no effect",
        ),
        ({"selection": "random", "policy": "vertical-slash(last=9)"}, "last of policy 'vertical-slash' has no effect"),
        ({"policy": "vertical-slash(vertical=1.5)"}, "vertical of policy 'vertical-slash' must lie in [0, 1], got 1.5"),
        ({"policy": "vertical-slash(last=0)"}, "last of policy 'vertical-slash' must be at least 1, got 0"),
        ({"policy": "vertical-slash(first=-1)"}, "first of policy 'vertical-slash' must be at least 0, got -1"),
        ({"policy": "vertical-slash(kernel=3)"}, "has no option 'kernel'"),
    ],
)
def test_what_has_no_lines_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        grid.grid(128, **{"policy": "vertical-slash", "selection": "attention", **asked})
    assert said in str(refused.value) and "\n" not in str(refused.value)


class Model:
    """What a plan knows of a model."""

    model_type = "llama"
    num_hidden_layers = 4


class Mixed(Model):
    layer_types = ("sliding_attention", "full_attention") * 2
    sliding_window = 12


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((2, 0, Model), "expects no 2 decode steps; the prompt's queries have no steps: use --steps 1"),
        ((1, 30, Model), "expects no answers of 30 tokens; it is measured and does not answer"),
        ((1, 0, Mixed), "expects no model 'm', some of whose layers slide or are recurrent; windows and states"),
    ],
)
def test_a_run_that_asks_for_more_is_refused(asked: tuple[int, int, type], said: str) -> None:
    steps, generate, model = asked
    with pytest.raises(ConfigError) as refused:
        asked_of.check_sparse_prefill([lined().policy], steps, generate, (), model(), "m")
    assert said in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="expects no --save effect; it evicts nothing whose loss could cost a text"):
        asked_of.check_sparse_prefill([lined().policy], 1, 0, ("effect",), model(), "m")
    asked_of.check_sparse_prefill([configuration(17, window=WINDOW).policy], steps, generate, (), model(), "m")


def test_what_forgets_searches_or_swaps_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="policy 'vertical-slash' evicts nothing, so that nothing is compressed again"
    ):
        compatibility.check_compressible(lined())
    with pytest.raises(ConfigError, match="got policy vertical-slash, which evicts nothing"):
        searching.check_search([lined()], searching.SearchSettings())
    with pytest.raises(ConfigError, match="so that there are kept sets to swap; policy 'vertical-slash' does not"):
        check_sides(lined(), lined("two-stage"))


def test_a_budget_that_buys_no_line_is_refused() -> None:
    with pytest.raises(
        BudgetError, match="no more than policy 'vertical-slash' always keeps: the first 2 and the last 5"
    ):
        compatibility.check_ends(lined(budget=7), 44)
    with pytest.raises(BudgetError, match="no more than the window of 5"):
        lined(budget=5)
