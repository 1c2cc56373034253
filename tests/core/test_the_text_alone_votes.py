"""`window_queries=text`: the chat template's queries in the window have no row, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import perturbkv as pk
from perturbkv.analyses import sides
from perturbkv.analyses.sides import group_by_selection, pairs
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ConfigError, TraceError
from perturbkv.scoring import score_registry
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import OF_WINDOW, LayerView
from perturbkv.selection import compatibility
from perturbkv.selection.policies import registry
from perturbkv.selection.resolved_config import resolve
from tests.oracle import later_scores, policies
from tests.oracle import scores as naive
from tests.support.layers import SCALE, layer_view
from tests.support.models import HEADS

N, WINDOW = 24, 5
TAILS = {"last": range(21, 24), "before an answer's beginning": range(20, 23), "longer than the window": range(15, 23)}
SINKS = torch.linspace(-1, 1, 6, dtype=torch.float64)


def view(heads: tuple[int, int], template: range, n: int = N, window: int = WINDOW, **more: Any) -> LayerView:
    return layer_view(*heads, n=n, seed=8, window=window, template=template, **more)


def computed(name: str, seen: LayerView, chunk_bytes: int = CHUNK_BYTES) -> np.ndarray:
    """Per query head, of one score and beside the one that asks all of the window."""
    score, whole = (score_registry.build(text).unpooled() for text in (f"{name}(window_queries=text)", name))
    found = layer_scores(seen, [whole, score], chunk_bytes)
    assert torch.equal(found[whole], layer_scores(seen, [whole], chunk_bytes)[whole])
    return found[score].repeat_interleave(seen.heads // len(found[score]), dim=0).numpy()


def rows(seen: LayerView) -> np.ndarray:
    """(head, voting query, n)."""
    first = seen.entries - seen.window
    every = policies.rows(seen.queries.numpy(), seen.keys.numpy(), SCALE, first)
    return every[:, [place not in seen.template for place in range(first, seen.entries)]]


def expected(name: str, seen: LayerView) -> np.ndarray:
    arrays, kv_heads = (seen.queries.numpy(), seen.keys.numpy(), seen.values.numpy()), len(seen.keys)
    if name == "tova":
        return np.tile(rows(seen)[:, -1, : seen.prefix].mean(axis=0), (seen.heads, 1))
    if name == "lava":
        return np.array(later_scores.lava(rows(seen), arrays[2], "none", 1, seen.prefix))
    if name == "defensive":
        found = later_scores.defensive(rows(seen), seen.norms.numpy(), kv_heads, "average", 5, seen.prefix)
        return np.repeat(np.array(found), seen.heads // kv_heads, axis=0)
    if name == "r-kv":
        found = later_scores.r_kv(*arrays[:2], SCALE, seen.window, silent=seen.template)
        return np.repeat(np.array(found), seen.heads // kv_heads, axis=0)
    sinks = None if seen.softmax.sinks is None else seen.softmax.sinks.numpy()
    return naive.of_layer(name, *arrays, SCALE, seen.window, sinks, seen.template)


NEEDS = {name: score_registry.SCORES.load(name).needs for name in score_registry.SCORES.names()}
BY_WINDOW = [name for name, needs in NEEDS.items() if not OF_WINDOW.isdisjoint(needs)]
OTHERS = [name for name in NEEDS if name not in BY_WINDOW]


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("name", BY_WINDOW)
def test_every_score_of_the_window_is_its_formula_over_the_rows_that_vote(
    name: str, heads: tuple[int, int], tail: range
) -> None:
    seen = view(heads, tail)
    np.testing.assert_allclose(computed(name, seen), expected(name, seen), rtol=1e-10)
    np.testing.assert_allclose(computed(name, seen, chunk_bytes=1), expected(name, seen), rtol=1e-10)


@pytest.mark.parametrize("name", [name for name in BY_WINDOW if name in naive.OF_ENTRY])
def test_a_sinks_weight_is_left_out_of_the_rows_that_vote(name: str) -> None:
    seen = view((6, 3), TAILS["last"], sinks=SINKS)
    np.testing.assert_allclose(computed(name, seen), expected(name, seen), rtol=1e-10)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(0, 11), st.integers(0, 5), st.integers(0, 500))
def test_the_mean_runs_over_the_rows_that_vote(window: int, tail: int, answer: int, seed: int) -> None:
    """Over w − t rows, and with no row of the template in the window it is the window's own mean."""
    n = 20
    template = range(max(0, n - answer - tail), n - answer)
    seen = layer_view(4, 2, n=n, seed=seed, window=window, template=template)
    voting = [place for place in range(n - window, n) if place not in template]
    if not voting:
        return
    score = score_registry.build("snapkv(window_queries=text)").unpooled()
    found = layer_scores(seen, [score], CHUNK_BYTES)[score].numpy()
    every = policies.rows(seen.queries.numpy(), seen.keys.numpy(), SCALE, 0)
    wanted = sum(every[:, place, : n - window] for place in voting) / len(voting)
    np.testing.assert_allclose(found, wanted, rtol=1e-10)
    if len(voting) == window:
        whole = score_registry.build("snapkv").unpooled()
        assert np.array_equal(found, layer_scores(seen, [whole], CHUNK_BYTES)[whole].numpy())


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(0, 20), st.integers(0, 5))
def test_a_window_of_the_template_alone_or_without_it_is_refused(window: int, tail: int, answer: int) -> None:
    n, config = 40, resolve(pk.grid(20, window=window, window_queries="text")[0])
    template = range(n - answer - tail, n - answer)
    inside = len({*range(n - window, n)} & {*template})
    if 0 < inside < window:
        compatibility.check_window_queries(config, "p", n, template)
        return
    said = "leaves no query" if inside else "hold none; leave it out"
    with pytest.raises(ConfigError, match=said) as refused:
        compatibility.check_window_queries(config, "p", n, template)
    if inside:
        least = int(str(refused.value).rpartition("--window ")[2].split()[0])
        (wider,) = pk.grid(40, window=least, window_queries="text")
        compatibility.check_window_queries(resolve(wider), "p", n, template)


def test_without_the_option_nothing_is_asked_of_the_template() -> None:
    (config,) = pk.grid(20, window=8)
    compatibility.check_window_queries(resolve(config), "p", 40, range(0))


def test_all_is_what_a_configuration_was_before_there_was_the_option() -> None:
    """Labels, documents and the flat choices of exports do not change, so that older traces go on."""
    usual, (said,) = EvictionConfig(128, "snapkv"), pk.grid(128, policy="snapkv(window_queries=all)")
    assert said == pk.grid(128)[0]
    for text in (said.label(), str(said.to_document()), str(said.flat())):
        assert "window_queries" not in text
    assert resolve(usual).system.score == resolve(said).system.score
    assert EvictionConfig.from_document(said.to_document()) == said


def test_text_is_told_and_stored() -> None:
    whole, text = pk.grid(128, selection="attention", window=8, window_queries=("all", "text"))
    assert text.label() == "snapkv(window_queries=text):attention b=128 w=8 query"
    assert (text.flat()["policy_window_queries"], text.window, text.budget) == ("text", whole.window, whole.budget)
    run = RunConfig("m", "d", (whole, text))
    assert RunConfig.from_json(run.to_json()) == run
    (by,) = pk.grid(128, policy="adakv(by=caote(window_queries=text))", selection="attention")
    assert compatibility.only_text_votes(EvictionConfig.from_document(by.to_document()))
    assert not compatibility.only_text_votes(whole)


def test_a_grid_measures_both_and_makes_no_second_of_what_asks_no_query() -> None:
    found = pk.grid(128, policy=("snapkv", "h2o"), selection=("attention", "random"), window_queries=("all", "text"))
    assert [f"{one.policy}:{one.selection}" for one in found] == [
        "snapkv:attention", "snapkv:random", "h2o:attention", "h2o:random", "snapkv(window_queries=text):attention",
    ]  # fmt: skip


@pytest.mark.parametrize("name", BY_WINDOW)
def test_every_policy_of_a_score_of_the_window_has_the_option(name: str) -> None:
    config = resolve(pk.grid(128, policy=f"{name}(window_queries=text)", selection="attention", window=32)[0])
    assert config.system.score.window_queries == "text"
    first = config.system.first_stage
    assert first is None or first.window_queries == "text"


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        *(({"policy": name, "window_queries": "text"}, "window_queries has no effect here: it needs policy snapkv or")
          for name in OTHERS if name not in ("knorm", "kvzip", "kvzip-plus", "triattention")),
        ({"policy": "knorm", "window_queries": "text", "selection": "attention"}, "no effect here: it needs policy"),
        ({"policy": "h2o(window_queries=text)"}, "policy 'h2o' has no option 'window_queries'"),
        ({"selection": "random", "window_queries": "text"}, "a selection or policy that looks at attention"),
        ({"policy": "snapkv(window_queries=text)", "selection": "value"}, "that looks at attention; leave it out"),
        ({"policy": "adakv(caote, window_queries=text)"}, "it needs the policy's own score, without by"),
        ({"policy": "adakv(by=h2o(window_queries=text))"}, "score 'h2o' has no option 'window_queries'"),
        ({"policy": "streaming-llm", "window_queries": "text", "selection": "position"}, "no effect here"),
        ({"window_queries": "question"}, "unknown window_queries 'question'; known: all, text"),
    ],
    ids=str,
)  # fmt: skip
def test_the_option_is_refused_where_it_asks_nobody(choices: dict[str, Any], said: str) -> None:
    with pytest.raises(pk.PerturbkvError, match=said.replace("(", r"\(")):
        pk.grid(128, **choices)


def test_a_cache_that_decoding_fills_has_no_template_at_its_end() -> None:
    (config,) = pk.grid(128, selection="attention", window_queries="text")
    with pytest.raises(ConfigError, match="compressing again goes on from there"):
        compatibility.check_compressible(config)


def test_a_users_score_sees_the_rows_that_vote() -> None:
    seen: list[tuple[int, ...]] = []

    class Looking(pk.Score):
        name = "looking"

        def score(self, layer: LayerView) -> torch.Tensor:
            seen.append(tuple(layer.attention.shape))
            return layer.attention[..., : layer.prefix].mean(dim=-2)

    layer_scores(view((4, 2), TAILS["last"]), [Looking(window_queries="text"), Looking()], CHUNK_BYTES)
    assert seen == [(4, 2, N), (4, 5, N)]


def test_selections_are_compared_within_the_queries_that_vote() -> None:
    """All and text are never mixed, and what asks no query is compared with both."""
    configs = pk.grid(64, selection=("attention", "two-stage", "random"), window_queries=("all", "text"))
    run = RunConfig("m", "d", configs)
    found = [(str(one.policy), str(other.policy)) for one, other in pairs(run, "attention", "two-stage")]
    assert found == [("snapkv", "snapkv"), ("snapkv(window_queries=text)", "snapkv(window_queries=text)")]
    assert len(pairs(run, "random", "attention")) == 2
    sides = "snapkv(window_queries=all):attention", "snapkv(window_queries=text):attention"
    assert pairs(run, *sides) == pairs(run, "snapkv:attention", sides[1]) == [(configs[0], configs[3])]
    groups = [sorted(run.configs[place].label() for place in group.values()) for group in group_by_selection(run)]
    assert [{"window_queries" in label for label in group if "random" not in label} for group in groups] == [
        {False}, {True},
    ]  # fmt: skip
    apart = RunConfig("m", "d", (configs[0], configs[4]))
    with pytest.raises(TraceError, match="expected configurations to compare"):
        pairs(apart, "attention", "two-stage")


def test_a_default_that_is_left_out_is_known_to_comparisons() -> None:
    """`sides` takes an option that is not there for its default."""
    options = [pair for policy in registry.all_policies() for pair in policy.options().items()]
    assert {name: option.default for name, option in options if option.omitted} == sides._OMITTED
