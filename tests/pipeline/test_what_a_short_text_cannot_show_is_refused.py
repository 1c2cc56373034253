"""A model whose attention changes with a prompt's length passes the door, and is refused where its numbers show it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import perturbkv as pk
from perturbkv.configs.patching import Mixture
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers import generation
from perturbkv.pipeline.variants.mixtures import MixtureSample
from perturbkv.selection.grid import configuration
from perturbkv.selection.resolved_config import ResolvedRun
from tests.support.models import tiny_adapter, token_ids
from tests.support.resolved import answer

PROMPT = pk.Prompt("s", token_ids(60), 0)
CONFIGS = tuple(configuration(budget, policy="snapkv", window=4) for budget in (20, 30))


def fading(limit: int, monkeypatch: pytest.MonkeyPatch) -> Adapter:
    """Keys of the second layer fade where attention reads more than `limit`, as it does of the plain cache alone."""
    adapter = tiny_adapter("llama")
    attention = adapter.attentions[1]
    module: Any = sys.modules[type(attention).__module__]
    stock = module.ALL_ATTENTION_FUNCTIONS.get_interface

    def interface(*asked: Any) -> Any:
        attend = stock(*asked)

        def fade(called: Any, query: Any, key: Any, value: Any, *more: Any, **options: Any) -> Any:
            long = called is attention and key.shape[2] > limit
            return attend(called, query, key * torch.linspace(0.1, 1, key.shape[2])[:, None] if long else key, value,
                          *more, **options)  # fmt: skip

        return fade

    monkeypatch.setattr(module.ALL_ATTENTION_FUNCTIONS, "get_interface", interface)
    return adapter


@pytest.mark.parametrize("what", ["measure", "patching", "divergence", "answers", "question"])
def test_it_is_refused_wherever_the_plain_cache_is_compared(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "end_tokens", lambda adapter: set())
    run = ResolvedRun.from_run(RunConfig("m", "d", CONFIGS, steps=2))

    def compare(adapter: Adapter) -> None:
        if what == "measure":
            pk.measure(adapter, [PROMPT], CONFIGS, settings=pk.Settings(steps=2), progress=False)
        elif what == "patching":
            sample = MixtureSample(adapter, PROMPT, run, Resources(), 2)
            sample.measure([Mixture.of_layers(2, sample.kept_heads, [0])])
        elif what == "question":
            asked = pk.Prompt("s", token_ids(64), 0, question_tokens=4)
            answer(adapter, asked, CONFIGS, 4, scenario="context-only")
        else:
            answer(adapter, PROMPT, CONFIGS, 4, divergence=what == "divergence")

    compare(fading(100, monkeypatch))
    with pytest.raises(ModelError, match="decodes otherwise from all entries of its cache than from the cache itself"):
        compare(fading(50, monkeypatch))


@pytest.mark.parametrize("limit", [50, 100])
@pytest.mark.parametrize("what", ["scale", "heads"])
def test_what_the_formulas_do_not_say_of_long_prompts_is_refused(what: str, limit: int) -> None:
    """A scale that attention is given, or an order of heads behind it, which the compact cache decodes with, too."""
    adapter = tiny_adapter("llama")
    attention, scale, position = adapter.attentions[1], adapter.attentions[1].scaling, [0]

    def enter(module: Any, args: Any, kwargs: Any) -> None:
        position[0] = int(kwargs["position_ids"].max())
        attention.scaling = scale * (3 if what == "scale" and position[0] > limit else 1)

    attention.register_forward_pre_hook(enter, with_kwargs=True)
    attention.o_proj.register_forward_pre_hook(
        lambda module, args: (args[0].flip(-1),) if what == "heads" and position[0] > limit else None, prepend=True
    )

    def compare() -> None:
        pk.measure(adapter, [PROMPT], CONFIGS, settings=pk.Settings(steps=2), progress=False)

    if limit > len(PROMPT.token_ids):
        compare()
    else:
        with pytest.raises(ModelError, match="layer 1 of model 'tiny-llama' has other heads' outputs than its atten"):
            compare()
