"""Lines are sums along columns and diagonals, and what a query looks at is their union before it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from perturbkv.selection.grid import configuration
from perturbkv.selection.resolved_config import ResolvedConfig, resolve
from perturbkv.selection.sparse_lines import (
    LastQueries,
    Lines,
    choose_lines,
    diagonal_sums,
    last_positions,
    line_policy,
    measured_positions,
    remembered_positions,
)
from tests.support.resolved import every

WINDOW, N = 3, 23
PINNED = (52, 71, 101, 137, 165, 209)
"""Of the prompt needle-0 of 1,000 tokens, seed 0: the first six."""


def lined(
    selection: str = "attention", budget: float = 12, granularity: str = "query", **options: Any
) -> ResolvedConfig:
    looks = {} if selection.startswith("random") else {"last": 5}
    told = ", ".join(f"{name}={value}" for name, value in {"first": 2, **looks, **options}.items())
    policy = f"vertical-slash({told})"
    return resolve(configuration(budget, policy=policy, selection=selection, window=WINDOW, granularity=granularity))


def world(seed: int, heads: int = 4, queries: int = 5, n: int = N) -> LastQueries:
    """Softmax rows of the last queries, causal, with random norms."""
    made = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(heads, queries, n, generator=made, dtype=torch.float64)
    later = torch.arange(n) > torch.arange(n - queries, n).unsqueeze(-1)
    norms = 0.1 + torch.rand(heads, n, generator=made, dtype=torch.float64)
    return LastQueries(logits.masked_fill(later, -torch.inf).softmax(dim=-1), norms, 2, 0, "s")


def places(mask: torch.Tensor) -> list[int]:
    return mask.nonzero().flatten().tolist()


def slow_diagonals(weights: np.ndarray) -> np.ndarray:
    heads, queries, n = weights.shape
    found = np.zeros((heads, n))
    for head, row, entry in np.ndindex(heads, queries, n):
        position = n - queries + row
        if entry <= position:
            found[head, position - entry] += weights[head, row, entry]
    return found


@pytest.mark.parametrize("queries", [1, 5, 23])
@pytest.mark.parametrize("seed", range(3))
def test_sums_along_diagonals_are_those_of_a_loop(seed: int, queries: int) -> None:
    weights = world(seed, queries=queries).attention
    np.testing.assert_allclose(diagonal_sums(weights).numpy(), slow_diagonals(weights.numpy()), rtol=1e-13)
    assert diagonal_sums(weights).sum().item() == pytest.approx(4 * queries), "every weight is on one diagonal"


def test_a_diagonal_that_is_off_by_one_is_found() -> None:
    weights = world(0).attention
    wrong = diagonal_sums(weights).roll(1, dims=-1)
    assert not np.allclose(wrong.numpy(), slow_diagonals(weights.numpy()))


def test_a_query_looks_at_the_union_and_at_nothing_later() -> None:
    made = torch.Generator().manual_seed(0)
    vertical, slash = (torch.rand(3, N, generator=made) < 0.2 for _ in range(2))
    seen = Lines(vertical, slash).attention_mask(torch.arange(N))
    for head, position, entry in np.ndindex(3, N, N):
        expected = entry <= position and bool(vertical[head, entry] or slash[head, position - entry])
        assert bool(seen[head, position, entry]) == expected, (head, position, entry)
    some = torch.tensor([4, 17, 22])
    assert torch.equal(Lines(vertical, slash).attention_mask(some), seen[:, some])


def planted() -> LastQueries:
    """One head: a column at 7 and a diagonal at 9 before each query, the rest thin; entry 6 has a large ν."""
    weights = torch.full((1, 5, N), 0.001, dtype=torch.float64)
    for row in range(5):
        position = N - 5 + row
        weights[0, row, position + 1 :] = 0
        weights[0, row, 7], weights[0, row, position - 9] = 0.5, 0.3
        weights[0, row, 6] = 0.01
    norms = torch.ones(1, N, dtype=torch.float64)
    norms[0, 6] = 1000.0
    return LastQueries(weights, norms, 1, 0, "s")


def test_planted_lines_are_chosen() -> None:
    """w = 3, first = 2: b = 7 leaves a vertical and a slash. The diagonal at 9 passes 9 … 13 and the column 7 alone."""
    found = choose_lines(lined(budget=7), planted())
    assert places(found.lines.vertical[0]) == [0, 1, 7]
    assert places(found.lines.slash[0]) == [0, 1, 2, 9]
    refined = choose_lines(lined("two-stage(alpha=0)", 7), planted())
    assert places(refined.lines.vertical[0]) == [0, 1, 6], "0.05 · 1000 is above 2.5 · 1"
    offsets = {position - 6 for position in range(N - 5, N)}
    assert places(refined.lines.slash[0])[-1] in offsets, "all of these pass through entry 6 once"
    both = choose_lines(lined("two-stage(alpha=0.5)", 9), planted())
    assert places(both.lines.vertical[0]) == [0, 1, 6, 7] and places(both.stage1.vertical[0]) == [0, 1, 7]


def test_a_sink_lends_its_weight_to_slashes_unless_it_is_left_out() -> None:
    """Entry 0 holds 0.6 of every query: five offsets, 18 … 22, get it once each, above a diagonal of 5 · 0.08."""
    weights = torch.full((1, 5, N), 0.001, dtype=torch.float64)
    for row in range(5):
        position = N - 5 + row
        weights[0, row, position + 1 :] = 0
        weights[0, row, 0], weights[0, row, position - 9], weights[0, row, position] = 0.6, 0.08, 0.3
    given = LastQueries(weights, torch.ones(1, N, dtype=torch.float64), 1, 0, "s")
    every = choose_lines(lined(budget=8, vertical=0.0), given).lines
    assert places(every.slash[0]) == [0, 1, 2, 18, 19, 20]
    free = choose_lines(lined(budget=8, vertical=0.0, sums="free"), given).lines
    assert places(free.slash[0]) == [0, 1, 2, 3, 4, 9], "the diagonal, and of those that are alike the first"


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("budget", [6, 7, 12, 20, 22])
def test_no_query_looks_at_more_than_the_budget(budget: int, share: float) -> None:
    for selection in ("attention", "two-stage", "random"):
        found = choose_lines(lined(selection, budget, vertical=share), world(budget)).lines
        free = budget - WINDOW - 2
        assert (found.vertical.sum(dim=-1) == 2 + int(share * free + 1e-9)).all()
        assert (found.slash.sum(dim=-1) == WINDOW + free - int(share * free + 1e-9)).all()
        seen = found.attention_mask(torch.arange(N))
        assert (seen.sum(dim=-1) <= budget).all()
        assert seen[:, :WINDOW, :WINDOW].tril().equal(torch.ones(4, WINDOW, WINDOW, dtype=torch.bool).tril())


def test_with_everything_in_stage_1_both_selections_are_one() -> None:
    given = world(4)
    one, other = (choose_lines(lined(name), given).lines for name in ("attention", "two-stage(alpha=1)"))
    assert torch.equal(one.vertical, other.vertical) and torch.equal(one.slash, other.slash)
    uniform = replace(given, norms=torch.ones_like(given.norms))
    same = choose_lines(lined("two-stage(alpha=0)"), uniform).lines
    assert torch.equal(one.vertical, same.vertical) and torch.equal(one.slash, same.slash)


def test_drawn_lines_are_those_of_their_seed_alone() -> None:
    first, second, third = (
        choose_lines(lined(f"random(seed={seed})"), world(one)).lines for seed, one in ((0, 1), (0, 2), (1, 1))
    )
    assert torch.equal(first.vertical, second.vertical) and torch.equal(first.slash, second.slash)
    assert not torch.equal(first.vertical, third.vertical)


@pytest.mark.parametrize("granularity", ["kv", "kv(reduce=max)", "kv(product=mean-of-products)"])
def test_a_group_has_one_choice(granularity: str) -> None:
    assert len(choose_lines(lined("two-stage(alpha=0)", granularity=granularity), world(1)).lines.slash) == 2


def test_the_queries_that_are_measured_are_the_same_on_every_machine() -> None:
    """One in each 32nd of what lies behind the band and the first entries, whatever the budget."""
    config = resolve(configuration(128, policy="vertical-slash", selection="attention"))
    found = measured_positions(config, 1000, "needle-0")
    assert found[:6] == PINNED and len(set(found)) == 32
    for part, position in enumerate(found):
        assert 36 + part * 964 // 32 <= position < 36 + (part + 1) * 964 // 32
    assert found == measured_positions(
        resolve(configuration(256, policy="vertical-slash", selection="random")), 1000, "needle-0"
    )
    assert found != measured_positions(config, 1000, "needle-1")
    assert found != measured_positions(
        resolve(configuration(128, policy="vertical-slash(seed=1)", selection="attention")), 1000, "needle-0"
    )


def test_short_prompts_have_fewer_queries() -> None:
    config = lined()
    assert measured_positions(config, 10, "s") == (5, 6, 7, 8, 9) and measured_positions(config, 4, "s") == (3,)
    last = line_policy(config).last
    assert last_positions(last, 10) == (5, 6, 7, 8, 9) and last_positions(last, 3) == (0, 1, 2)


def test_nothing_is_remembered_where_nobody_looks_along_lines() -> None:
    others = every([configuration(128), configuration(128, policy="quest", selection="attention")])
    assert remembered_positions(others, 1000, "s") == set()
    both = [lined(), lined("two-stage")]
    assert remembered_positions(both, N, "s") == {
        last_positions(line_policy(both[0]).last, N),
        measured_positions(both[0], N, "s"),
    }
