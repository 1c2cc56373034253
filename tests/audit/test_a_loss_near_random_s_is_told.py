"""A loss that is nearer to random entries' than to attention's is told on the screen."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor
from transformers import Cache

from tests.audit import planted
from tests.audit.test_planted_faults_are_told_apart import audited


def thinned(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
    """Every third entry stays."""
    cache = planted.full(model, input_ids, attention_mask)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, 2::3], layer.values[:, :, 2::3]
    return cache


@pytest.mark.parametrize(("own", "told"), [(0.44, True), (0.36, False)])
def test_it_is_told_where_it_is_nearer_to_random_s(own: float, told: bool) -> None:
    result = audited("llama", thinned, situations=["single"], losses=True)
    assert [loss.name for loss in result.losses][1:4] == ["attention", "two-stage", "random"]
    values = {"attention": 0.3, "random": 0.45}
    losses = tuple(dataclasses.replace(loss, isolated=values.get(loss.name, own)) for loss in result.losses)
    notes = [note for note in dataclasses.replace(result, losses=losses).caveats() if "random entries" in note]
    words = "It loses about what random entries do, or more: isolated 0.44, random 0.45, attention 0.3."
    assert notes == ([words] if told else [])
