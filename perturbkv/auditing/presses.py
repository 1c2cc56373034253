"""A press of kvpress as an eviction that is audited: it reads prompts as for its users, at the ratio of a budget."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from perturbkv.auditing.evictions import PRESS, Eviction
from perturbkv.configs.choice import parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.pipeline.variants.presses import set_ratio
from perturbkv.selection.policies import kvpress


def of_press(text: str, budget: Budget) -> Eviction:
    """The press that `kvpress:NAME(…)` writes, which keeps `budget` of each prompt.

    Raises ConfigError or UnknownNameError as `presses.Press.completed`.
    """
    choice = kvpress.policy(parse(text).name).completed(parse(text))

    def evict(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Cache:
        cache, press, tokens = DynamicCache(), kvpress.build(choice), input_ids.shape[1]
        set_ratio(press, tokens, min(tokens, budget.tokens(tokens)))
        padded = {} if bool(attention_mask.all()) else _padded(attention_mask)
        with kvpress.quiet(), torch.inference_mode(False), torch.no_grad(), press(model):
            model.model(input_ids=input_ids.clone(), past_key_values=cache, **padded)
        return cache

    return Eviction(text, PRESS, evict)


def _padded(attention_mask: Tensor) -> dict[str, Tensor]:
    places = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    return {"attention_mask": attention_mask.clone(), "position_ids": places.clone()}
