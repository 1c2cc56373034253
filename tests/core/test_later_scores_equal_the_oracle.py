"""Scores of LAVa, DefensiveKV, R-KV, RandKV; what policies keep that look at all layers, or have a stage 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import perturbkv as pk
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import CHUNK_BYTES
from perturbkv.errors import ConfigError
from perturbkv.pipeline.sample.prefill import Statistics
from perturbkv.scoring import score_registry
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.scoring.scores import defensive, r_kv
from perturbkv.scoring.scores.defensive import Defensive
from perturbkv.scoring.scores.lava import LAVa
from perturbkv.scoring.scores.r_kv import RKV
from perturbkv.scoring.scores.randkv import RandKV
from perturbkv.selection import compatibility
from perturbkv.selection.grid import configuration
from perturbkv.selection.layer_statistics import LayerStatistics
from perturbkv.selection.policies import registry
from perturbkv.selection.policies.lava import entropy
from perturbkv.selection.ranking import Scores
from perturbkv.selection.resolved_config import ResolvedConfig, resolve
from tests.oracle import later_scores as naive
from tests.oracle import policies
from tests.oracle.selection import top
from tests.oracle.theory import pool
from tests.support.layers import SCALE, layer_view
from tests.support.models import HEADS
from tests.support.resolved import ranking_groups, select

LAYERS, WINDOW = 3, 5
KINDS = [("max", 7), ("average", 5), ("none", 1)]


def scored(score: Score, seen: LayerView) -> torch.Tensor:
    return layer_scores(seen, [score], CHUNK_BYTES)[score]


def rows(seen: LayerView) -> np.ndarray:
    return policies.rows(seen.queries.numpy(), seen.keys.numpy(), SCALE, seen.entries - WINDOW)


@pytest.mark.parametrize(("kind", "kernel"), KINDS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_lavas_score(heads: tuple[int, int], kind: str, kernel: int) -> None:
    """Heads are pooled each by itself, before the largest of a group is taken."""
    seen = layer_view(*heads, n=24, seed=3, window=WINDOW)
    expected = np.array(naive.lava(rows(seen), seen.values.numpy(), kind, kernel, seen.prefix))
    score = LAVa(pool=kind, kernel=kernel)
    for granularity, kept in (("query", heads[0]), ("kv", heads[1])):
        chosen = config("lava", granularity=granularity, pool=kind, kernel=kernel if kind != "none" else None)
        given_rows = LayerStatistics(scored(score.unpooled(), seen), seen.norms[:, :-WINDOW], heads[1], 0, 1, "s")
        largest = expected.reshape(kept, -1, seen.prefix).max(axis=1)
        np.testing.assert_allclose(Scores(given_rows).attention(resolve(chosen)).numpy(), largest, rtol=1e-10)


@pytest.mark.parametrize(("kind", "kernel"), KINDS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_defensives_score(heads: tuple[int, int], kind: str, kernel: int) -> None:
    seen = layer_view(*heads, n=24, seed=4, window=WINDOW)
    expected = naive.defensive(rows(seen), seen.norms.numpy(), heads[1], kind, kernel, seen.prefix)
    np.testing.assert_allclose(scored(Defensive(pool=kind, kernel=kernel), seen).numpy(), expected, rtol=1e-10)


def test_defensives_score_is_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms are shared out over all key/value heads, however few are looked at at once."""
    score, drawn = Defensive(), {"heads": 6, "kv_heads": 3, "n": 24, "seed": 4, "window": WINDOW}
    whole, lone = scored(score, layer_view(**drawn)), layer_view(**drawn)
    monkeypatch.setattr(defensive, "CHUNK_BYTES", 1)
    assert torch.equal(scored(score, lone), whole)
    assert "attention" not in vars(lone), "rows of all heads lay there at once"


def alike(heads: int, kv_heads: int, **options: Any) -> LayerView:
    """Keys of which many are near another one."""
    keys = layer_view(heads, kv_heads, n=24, seed=6).keys
    near = torch.cat([keys[:, :8], keys[:, :8] + 0.3 * keys[:, 8:16], keys[:, 16:]], dim=1)
    return layer_view(heads, kv_heads, n=24, seed=6, keys=near, **{"window": WINDOW, **options})


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", {}),
        ("lambda=0.6", {"weight": 0.6}),
        ("lambda=0, spared=0", {"weight": 0.0, "spared": 0}),
        ("lambda=1, pool=none", {"weight": 1.0, "kind": "none"}),
        ("threshold=0.2, spared=2, pool=average, kernel=3",
         {"threshold": 0.2, "spared": 2, "kind": "average", "kernel": 3}),
        ("spared=40", {"spared": 40}),
    ],
)  # fmt: skip
def test_r_kvs_score(heads: tuple[int, int], options: str, named: dict[str, Any]) -> None:
    seen = alike(*heads)
    expected = naive.r_kv(seen.queries.numpy(), seen.keys.numpy(), SCALE, WINDOW, **named)
    found = scored(score_registry.build(f"r-kv({options})" if options else "r-kv"), seen)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-10)


def test_r_kvs_options_each_make_a_difference() -> None:
    seen = alike(4, 2)
    texts = ("", "(lambda=0.1)", "(threshold=0.2)", "(spared=0)", "(spared=2)", "(pool=none)", "(kernel=3)")
    found = [tuple(scored(score_registry.build(f"r-kv{text}"), seen).flatten().tolist()) for text in texts]
    assert len(set(found)) == len(texts)


def test_r_kvs_cosines_are_the_same_row_by_row_and_know_nothing_of_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scored(RKV(), alike(4, 2))
    assert torch.equal(scored(RKV(), alike(4, 2, sinks=torch.tensor([1.0, -2.0, 0.5, 3.0]))), whole)
    monkeypatch.setattr(r_kv, "CHUNK_BYTES", 1)
    torch.testing.assert_close(scored(RKV(), alike(4, 2)), whole, rtol=1e-12, atol=0)


def test_a_lambda_is_an_option_of_that_name() -> None:
    (chosen,) = pk.grid(12, policy="r-kv(lambda=0.1)", selection="attention")
    assert chosen.window == 8
    assert chosen.label() == "r-kv(lambda=0.1):attention b=12 w=8 query"
    assert EvictionConfig.from_document(chosen.to_document()) == chosen
    assert pk.grid(12, policy="r-kv", selection="attention", **{"lambda": 0.1}) == (chosen,)
    with pytest.raises(ConfigError, match=r"lambda of policy 'r-kv' must lie in \[0, 1\], got 2"):
        pk.grid(12, policy="r-kv(lambda=2)", selection="attention")
    with pytest.raises(ConfigError, match="has no option 'lambda_'; its options: pool, lambda, threshold, spared"):
        pk.grid(12, policy="r-kv(lambda_=0.1)", selection="attention")


@pytest.mark.parametrize("granularity", ["kv", "query"])
@pytest.mark.parametrize(("prompt", "budget", "seed"), [(6, 14, 0), (0, 9, 3), (8, 13, 1)])
def test_randkv_keeps_what_a_pool_gives(prompt: int, budget: int, seed: int, granularity: str) -> None:
    seen = layer_view(4, 2, n=24, seed=3, window=WINDOW, layer=1, sample="prompt 7/12")
    chosen = config(f"randkv(prompt={prompt}, seed={seed})", budget, granularity=granularity)
    accumulated = scored(chosen.score, seen)
    kept = select(chosen, LayerStatistics(accumulated, seen.norms[:, :-WINDOW], 2, 1, 2, "s"), 24).kept
    for place, row in enumerate(kept):
        head = place if granularity == "kv" else place // 2
        drawn = naive.randkv(range(prompt, 24 - WINDOW), budget - prompt - WINDOW, seed, "prompt 7/12", 1, head)
        assert row.nonzero().flatten().tolist() == sorted([*range(prompt), *drawn, *range(24 - WINDOW, 24)])


@pytest.mark.parametrize("score", [LAVa(), Defensive(), RKV(), RandKV(prompt=3)], ids=lambda score: score.name)
def test_scores_of_bfloat16_layers_are_finite_and_of_prompts_inside_the_window_empty(score: Score) -> None:
    given_view = layer_view(4, 2, n=24, seed=5, window=WINDOW)
    low = {name: getattr(given_view, name).bfloat16() for name in ("queries", "keys", "values", "projection")}
    assert scored(score, layer_view(4, 2, n=24, seed=5, window=WINDOW, **low)).isfinite().all()
    assert scored(score, layer_view(4, 2, n=4, seed=5, window=WINDOW)).shape[-1] == 0


def config(policy: str, budget: int = 14, **fields: object) -> ResolvedConfig:
    given_fields = {name: value for name, value in fields.items() if value is not None}
    return resolve(configuration(budget, policy=policy, selection="attention", **{"window": WINDOW, **given_fields}))


def statistics(chosen: ResolvedConfig, heads: int, kv_heads: int, n: int, seed: int, ties: bool = False) -> Statistics:
    """Layers unlike each other: some spread widely, some of small numbers."""
    draw, prefix = np.random.default_rng(seed), max(0, n - WINDOW)

    def made(spread: float, size: float) -> torch.Tensor:
        found = draw.dirichlet(np.full(prefix, spread), size=heads) if prefix else np.zeros((heads, 0))
        return torch.from_numpy((np.round(found * 12) / 12 + 1e-3 if ties else found) * size)

    shapes = [(2.0, 1.0), (0.1, 0.7), (0.5, 0.3)]
    wanted = {one: [made(*shape) for shape in shapes] for one in resolve(chosen).requests}
    norms = [torch.from_numpy(draw.lognormal(size=(heads, n))) for _ in shapes]
    return Statistics("s", n, kv_heads, LAYERS, wanted, {0: norms})


def found(chosen: ResolvedConfig, given_scores: Statistics) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
    """(layer, kept head): positions kept, and those of stage 1."""
    kept, first = [], []
    for layer in range(LAYERS):
        (group,) = ranking_groups([chosen], given_scores.scorer(layer), given_scores.tokens)
        sets = group.kept_sets()
        kept.append([row.nonzero().flatten().tolist() for row in sets.kept[0]])
        first.append([row.nonzero().flatten().tolist() for row in sets.stage1[0]])
    return kept, first


def reduced(raw: torch.Tensor, kept_heads: int, how: str) -> list[list[float]]:
    grouped = raw.numpy().reshape(kept_heads, len(raw) // kept_heads, raw.shape[-1])
    return (grouped.max(axis=1) if how == "max" else grouped.mean(axis=1)).tolist()


def ends(chosen: EvictionConfig, n: int) -> tuple[list[int], list[int], int]:
    """What always stays, what competes, and how much of it stays on the average."""
    always = sorted({*policies.always(chosen, n), *range(chosen.protect_first)})
    kept = min(chosen.budget.tokens(n), n)
    return always, [place for place in range(max(0, n - WINDOW)) if place not in always], kept - len(always)


shapes = st.tuples(st.integers(0, 10**6), st.sampled_from([10, 14, 23, 40]), st.sampled_from([4, 7, 23, 30]))
kinds = st.tuples(st.sampled_from(["query", "kv"]), st.sampled_from([0, 2]), st.booleans())


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(shapes, kinds, st.sampled_from(["model", "layer"]))
def test_lava_keeps_what_the_oracle_keeps(
    shape: tuple[int, int, int], kind: tuple[str, int, bool], floor_of: str
) -> None:
    (seed, budget, n), (granularity, protected, ties) = shape, kind
    chosen = config("lava", budget, granularity=granularity, protect_first=protected, floor_of=floor_of)
    given_scores = statistics(chosen, 4, 2, n, seed, ties)
    always, places, mean = ends(chosen, n)
    sets = 4 if granularity == "query" else 2
    (asked,) = given_scores.scored
    layers = []
    for raw in given_scores.scored[asked]:
        pooled = [pool(list(row), "max", 7) if places else [] for row in raw.tolist()]
        layers.append(reduced(torch.tensor(pooled, dtype=torch.float64), sets, "max"))
    counts = naive.lava_budgets(layers, places, mean, "0.2", floor_of) if mean and len(places) > 1 else None
    kept, _ = found(chosen, given_scores)
    assert sum(len(row) for layer in kept for row in layer) == LAYERS * sets * min(budget, n)
    for layer in range(LAYERS if counts else 0):
        for head in range(sets):
            scores = {place: layers[layer][head][place] for place in places}
            assert kept[layer][head] == sorted([*always, *top(scores, counts[layer][head])])


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(shapes, kinds, st.sampled_from(["defensive", "defensive-layer"]), st.sampled_from([0.0, 0.6, 0.9, 1.0]))
def test_defensive_keeps_what_the_oracle_keeps(
    shape: tuple[int, int, int], kind: tuple[str, int, bool], policy: str, mass: float
) -> None:
    (seed, budget, n), (granularity, protected, ties) = shape, kind
    chosen = config(policy, budget, granularity=granularity, protect_first=protected, mass=mass)
    given_scores = statistics(chosen, 4, 2, n, seed, ties)
    always, places, mean = ends(chosen, n)
    sets = 4 if granularity == "query" else 2
    worst, means = (given_scores.scored[asked] for asked in resolve(chosen).requests)
    scores = [reduced(raw, sets, "max") for raw in worst]
    most = max(0, min(mean, (n - WINDOW) * min(budget, n) // n - WINDOW))
    first = [naive.stage1(reduced(raw, sets, "mean"), WINDOW, mass, places, most) for raw in means]
    competing = [naive.raised(*pair) if places else pair[0] for pair in zip(scores, first, strict=True)]
    alone = [naive.largest_of([layer], places, mean)[0] for layer in competing]
    counts = naive.largest_of(competing, places, mean) if policy == "defensive-layer" else alone
    kept, stage1 = found(chosen, given_scores)
    for layer in range(LAYERS):
        for head in range(sets):
            count, own = counts[layer][head], first[layer][head]
            expected = naive.two_stages(scores[layer][head], own, places, count)
            assert kept[layer][head] == sorted([*always, *expected])
            assert stage1[layer][head] == sorted([*always, *own[:count]])


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(shapes, kinds, st.sampled_from(["model", "layer", "head"]), st.sampled_from(["kvzip", "kvzip-plus"]))
def test_kvzip_keeps_what_the_oracle_keeps(
    shape: tuple[int, int, int], kind: tuple[str, int, bool], across: str, policy: str
) -> None:
    (seed, budget, n), (granularity, _, ties) = shape, kind
    chosen = config(policy, budget, granularity=granularity, protect_first=4, across=across, sinks=0)
    by_sinks = config(policy, budget, granularity=granularity, across=across)
    given_scores = statistics(chosen, 4, 2, n, seed, ties)
    always, places, mean = ends(chosen, n)
    sets = 4 if granularity == "query" else 2
    (asked,) = given_scores.scored
    scores = [reduced(raw, sets, "max") for raw in given_scores.scored[asked]]
    alone = [naive.largest_of([layer], places, mean)[0] for layer in scores]
    counts = {
        "model": naive.largest_of(scores, places, mean),
        "layer": alone,
        "head": [[mean] * sets for _ in range(LAYERS)],
    }[across]
    kept, _ = found(chosen, given_scores)
    for layer in range(LAYERS):
        for head in range(sets):
            best = top({place: scores[layer][head][place] for place in places}, counts[layer][head])
            assert kept[layer][head] == sorted([*always, *best])
    given_scores.scored[resolve(by_sinks).requests[0]] = given_scores.scored[asked]
    assert found(by_sinks, given_scores)[0] == kept, "the first entries stay by themselves"


def test_layers_share_by_entropy() -> None:
    """By hand: one layer spread evenly over its 8 entries, one with all of it on one of them."""
    even, single = torch.ones(2, 4), torch.eye(2, 4)[:1].repeat(2, 1)
    assert float(entropy(even)) == pytest.approx(1)
    assert float(entropy(single)) == pytest.approx(np.log(2) / np.log(8))
    assert float(entropy(torch.ones(1, 1))) == float(entropy(torch.ones(2, 0))) == 0


def test_one_order_serves_every_budget_and_protected_entries_are_not_in_it() -> None:
    """What is made of all layers is made once; other ends make another."""
    given_scores = statistics(config("kvzip", 14), 4, 2, 30, seed=1)
    made = given_scores.model_results
    for budget in (12, 14, 20):
        found(config("kvzip", budget), given_scores)
    assert sum(key[0] == "order" for key in made) == 1
    assert sum(isinstance(key[0], tuple) for key in made) == 3
    found(config("kvzip", 14, protect_first=6), given_scores)
    (longer, shorter) = (len(order) for key, order in made.items() if key[0] == "order")
    assert (longer, shorter) == (LAYERS * 4 * (25 - 4), LAYERS * 4 * (25 - 6))


def test_budgets_of_the_whole_model_need_the_whole_model() -> None:
    chosen = config("lava", 14)
    alone = statistics(chosen, 4, 2, 30, seed=1).scored[resolve(chosen).requests[0]][0]
    with pytest.raises(ConfigError, match="look at all layers need a whole prompt"):
        select(chosen, LayerStatistics(alone, alone, 2, 0, LAYERS, "s"), 30)


def test_the_stage_1_of_defensive_is_bounded_by_its_share_of_the_entries_before_the_window() -> None:
    """30 % of 100 entries are 30, of the 90 before the window 27, less the 10 of the window; the mass would take 71."""
    chosen = configuration(0.3, policy="defensive", selection="attention", window=10)
    policy, flat = registry.build(chosen.policy), torch.full((2, 90), 1 / 90, dtype=torch.float64)
    assert policy.stage1_counts(chosen, flat, slice(0, 90)).tolist() == [17, 17]


@pytest.mark.parametrize("policy", ["lava", "defensive", "defensive-layer", "kvzip", "kvzip-plus"])
def test_what_decoding_forgets_cannot_be_compressed_again(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"policy '{policy}' looks at what decoding forgets, or at all layers"):
        compatibility.check_compressible(config(policy))
    with pytest.raises(ConfigError, match="by head, which a rectangular cache cannot hold"):
        compatibility.check(config(policy), "rectangular")


def test_lava_ranks_by_another_score_and_not_by_its_own() -> None:
    chosen = config("lava(by=snapkv(pool=max))")
    assert registry.build(chosen.policy).score.name == "snapkv"
    with pytest.raises(ConfigError, match="by=lava is the policy's own score"):
        config("lava(by=lava())")
    with pytest.raises(ConfigError, match="by=snapkv is the policy's own score"):
        config("adakv(by=snapkv())")
    assert config("adakv(by=lava())").policy["by"].name == "lava"


def test_signed_scores_have_no_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = config("lava")
    compatibility.check(chosen)
    monkeypatch.setattr(LAVa, "signed", True)
    with pytest.raises(ConfigError, match="policy 'lava' multiplies or mixes scores"):
        compatibility.check(chosen)


def test_blocks_of_all_layers_compete_and_a_stage_of_single_entries_has_none() -> None:
    """Budgets of 14 entries at 30 buy a tail of 6, and two blocks of 4 per kept set on the average."""
    chosen = config("kvzip(sinks=0)", 14, granularity="kv(block=4)")
    given_scores = statistics(chosen, 4, 2, 30, seed=2)
    (asked,) = given_scores.scored
    scores = [reduced(raw, 2, "max") for raw in given_scores.scored[asked]]
    summed = [[[sum(row[4 * block : 4 * block + 4]) for block in range(6)] for row in layer] for layer in scores]
    counts = naive.largest_of(summed, range(6), 2)
    kept, _ = found(chosen, given_scores)
    assert [[len(row) for row in layer] for layer in kept] == [[4 * count + 6 for count in row] for row in counts]
    with pytest.raises(ConfigError, match="policy 'defensive' chooses single entries in a stage 1 of its own"):
        compatibility.check(config("defensive", granularity="kv(block=4)"))
