"""A run with `window_queries=text`: planned, stored, gone on with, and refused where it cannot mean anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import perturbkv as pk
from perturbkv.errors import ConfigError
from tests.support.models import tiny_adapter, token_ids

PROMPTS = [pk.Prompt(f"p{seed}", token_ids(60, seed=seed), 0, 20, template_tail=range(53, 58)) for seed in range(2)]
GRID = {"window": 8, "selection": ("attention", "two-stage")}


@pytest.mark.slow
def test_a_trace_of_all_queries_is_given_the_texts_and_goes_on(tmp_path: Path) -> None:
    model, path = tiny_adapter(), tmp_path / "t.h5"
    usual, both = pk.grid(20, **GRID), pk.grid(20, window_queries=("all", "text"), **GRID)
    first = pk.measure(model, PROMPTS, usual, path=path, progress=False)
    grown = pk.measure(model, PROMPTS, both, path=path, progress=False)
    assert grown.run.configs == pk.read_trace(path).run.configs == both
    assert "window_queries" not in str([config.to_document() for config in first.run.configs])
    apart = pk.measure(model, PROMPTS, both[2:], progress=False)
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
    first = dataclasses.replace(PROMPTS[0], template_tail=tail if window == 2 else PROMPTS[0].template_tail)
    prompts = [first, dataclasses.replace(PROMPTS[1], template_tail=tail)]
    configs, settings = pk.grid(20, window=window, window_queries="text"), pk.Settings(scenario=scenario)
    with pytest.raises(ConfigError, match=said) as refused:
        pk.measure(tiny_adapter(), prompts, configs, settings=settings, progress=False)
    assert "\n" not in str(refused.value)
