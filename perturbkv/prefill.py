"""Prefill a prompt with its full cache and keep, per layer, what eviction needs: window attention and value norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import Cache, DynamicCache

from perturbkv.capture import Observer, capture
from perturbkv.errors import ActivationError
from perturbkv.models import Adapter
from perturbkv.norms import projected_value_norms
from perturbkv.policies.base import LayerAttention, Votes


@dataclass(frozen=True)
class Prefill:
    """One prompt's full cache and statistics; n entries, no array of size n × n or n × d_model.

    Attributes:
        cache: the full cache, batch 1.
        logits: of the last prompt position.
        accumulated: way to accumulate -> per layer Ā (head, n − w).
        norms: per layer ν (head, n).
        tokens: n.
    """

    cache: Cache
    logits: Float[Tensor, " vocab"]
    accumulated: dict[Votes, list[Tensor]]
    norms: list[Tensor]
    tokens: int


class FiniteCheck:
    """Remembers, layer by layer and without waiting for the device, whether activations were finite."""

    def __init__(self) -> None:
        self._finite: list[tuple[int, Tensor]] = []

    def __call__(self, layer: int, hidden: Tensor) -> None:
        """Look at one layer's activations."""
        self._finite.append((layer, torch.isfinite(hidden).all()))

    def raise_if_not(self, sample: str) -> None:
        """Raise ActivationError for the first layer that held NaN or Inf."""
        for layer, finite in self._finite:
            if not finite:
                msg = "the hidden states"
                raise ActivationError(msg, layer, sample)


@torch.inference_mode()
def prefill(
    adapter: Adapter, token_ids: Sequence[int], votes: Sequence[Votes], chunk_bytes: int, sample: str
) -> Prefill:
    """Run the prompt once. Raises ActivationError where a layer's hidden states are not finite."""
    cache, check = DynamicCache(), FiniteCheck()
    accumulated: dict[Votes, list[Tensor]] = {vote: [] for vote in votes}
    norms: list[Tensor] = []

    def observe(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        seen = LayerAttention(query[0], key[0], adapter.scale(layer), layer, sample)
        for vote, layers in accumulated.items():
            layers.append(vote(seen))
        norms.append(projected_value_norms(value[0], adapter.output_projection(layer), chunk_bytes))

    ids = torch.tensor([list(token_ids)], device=adapter.device)
    with capture(adapter, Observer(attention=observe, hidden=check)):
        logits = adapter.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    check.raise_if_not(sample)
    return Prefill(cache, logits[0, -1], accumulated, norms, len(token_ids))
