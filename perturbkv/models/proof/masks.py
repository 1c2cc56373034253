"""Masks of attention: the rules that transformers makes them by, and the kinds that are known here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perturbkv.models.attention_facts import CHUNKED, FULL, SLIDING

_FAR = 2**20
"""Position up to which a mask's rule is looked at."""


@dataclass
class Masks:
    """The masks that transformers made in a forward pass, each with the rule that it was made by."""

    stock: Callable[..., Any]
    rules: list[tuple[Tensor, Callable[..., Any]]] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mask of the stock interface, never left out, and record its rule."""
        made: Tensor = self.stock(*args, **{**kwargs, "allow_is_causal_skip": False})
        self.rules.append((made, kwargs["mask_function"]))
        return made

    def rule(self, mask: Tensor | None, window: int | None) -> Callable[..., Any] | None:
        """Return the rule of a mask that attention got; None for a mask that was made or changed elsewhere.

        A layer may get a part of it. One on another device gets a copy, which is known by its numbers, and by the
        `window` of the layer's cache.
        """
        if mask is None:
            return None
        storage = mask.untyped_storage()
        own = [rule for made, rule in self.rules if made.untyped_storage() is storage]
        if len(own) == 1:
            return own[0]
        moved = (
            rule
            for made, rule in self.rules
            if made.device != mask.device and made.shape == mask.shape and torch.equal(made.to(mask.device), mask)
        )
        return next((rule for rule in (*own, *moved) if (mask_kind(rule) or ("", -1))[1] == window), None)


def visible(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """Return which keys each query sees, by its mask of truth values or of numbers to add; None is causal."""
    if mask is None:
        return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=key.device).tril(
            key.shape[2] - query.shape[2]
        )
    mask = mask[..., : key.shape[2]]
    return mask if mask.dtype == torch.bool else mask > -1e4


def mask_kind(rule: Callable[..., Any]) -> tuple[str, int | None] | None:
    """Return the kind and window of transformers' rule for a mask; None where it is neither full, window nor chunk."""
    zero = torch.tensor(0)

    def sees(queries: Tensor, keys: Tensor) -> Tensor:
        return torch.as_tensor(rule(zero, zero, queries, keys)).expand_as(queries)

    first = torch.arange(_FAR)
    hidden = (~sees(first, torch.zeros_like(first))).nonzero()
    window = int(hidden[0]) if len(hidden) else None
    kinds: list[tuple[str, int | None]] = [(FULL, None)] if window is None else [(SLIDING, window), (CHUNKED, window)]
    queries, keys = _sampled_positions(window)
    found = sees(queries, keys)
    return next((kind for kind in kinds if torch.equal(found, pattern(*kind, queries, keys))), None)


def _sampled_positions(window: int | None) -> tuple[Tensor, Tensor]:
    """Return pairs of positions of queries and keys at which a mask's rule is compared: near, far, and at its edges."""
    edges = [0, 1, 2, 3, 7, *((window - 1, window, window + 1, 2 * window, 3 * window) if window else ())]
    drawn = torch.randint(_FAR, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    queries = torch.tensor([*range(40), *edges, *drawn])
    distances = torch.tensor([-5, -1, *edges, *(edge + 1 for edge in edges), 100, 5000])
    generator = torch.Generator().manual_seed(1)
    anywhere = (queries.unsqueeze(-1) * torch.rand(len(queries), 8, generator=generator)).long()
    powers = queries.unsqueeze(-1) - 2 ** torch.arange(21)
    keys = torch.cat([queries.unsqueeze(-1) - distances, anywhere, powers], dim=-1)
    return queries.unsqueeze(-1).expand_as(keys)[keys >= 0], keys[keys >= 0]


def pattern(kind: str, window: int | None, queries: Tensor, keys: Tensor) -> Tensor:
    """Return which of the keys at some positions are seen by queries at some positions."""
    causal = keys <= queries
    if window is None:
        return causal
    return causal & (keys > queries - window if kind == SLIDING else keys // window == queries // window)
