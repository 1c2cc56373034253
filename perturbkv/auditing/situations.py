"""Situations of an audit: a prompt alone, with a block of tokens after it, or in a left-padded batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

BLOCK = 8
"""Tokens of the first forward pass in the situation `block`."""
_SHORTER = 8
"""The second prompt of a batch is the first one without the first of this many equal parts."""


@dataclass(frozen=True, eq=False)
class Situation:
    """Prompts in the form in which an eviction gets them, and the tokens that follow.

    Attributes:
        name: a key of `SITUATIONS`.
        ids: prompts, padded on the left.
        attention_mask: 0 at padding.
        chunks: tokens of each forward pass after the eviction, the same in every row.
        counts_padding: whether the first entry has position 0 even where it is padding.
        cached: per forward pass, as far as known, the number of entries after which new tokens stand, where positions
            are those in the cache; None: the prompt's own positions.
    """

    name: str
    ids: Int[Tensor, "row token"]
    attention_mask: Int[Tensor, "row token"]
    chunks: tuple[Int[Tensor, " new"], ...]
    counts_padding: bool = False
    cached: tuple[int, ...] | None = None

    @property
    def rows(self) -> int:
        """Number of prompts in the batch."""
        return len(self.ids)

    @property
    def padding(self) -> list[int]:
        """Number of padding entries before each prompt."""
        return [int(count) for count in (self.attention_mask == 0).sum(dim=-1)]

    @property
    def entries(self) -> int:
        """Number of entries in the full cache, padding included."""
        return self.ids.shape[1]

    def prompt_positions(self) -> Int[Tensor, "row token"]:
        """Return the positions of the prompts' tokens, as the eviction counts them."""
        if self.counts_padding:
            return torch.arange(self.entries, device=self.ids.device).expand(self.rows, -1)
        return (self.attention_mask.cumsum(dim=-1) - 1).clamp(min=0)

    def positions(self, chunk: int) -> Int[Tensor, "row new"]:
        """Return the positions of a chunk's tokens: n, n + 1, … in each row, or as many as are cached, and so on."""
        first, known = self.prompt_positions()[:, -1:] + 1, 0
        if self.cached is not None:
            known = min(chunk, len(self.cached) - 1)
            first = torch.full_like(first, self.cached[known])
        previous = sum(len(tokens) for tokens in self.chunks[known:chunk])
        return first + previous + torch.arange(len(self.chunks[chunk]), device=self.ids.device)

    def new_tokens(self, chunk: int) -> Int[Tensor, "row new"]:
        """Return the tokens of the chunk of index `chunk`, the same in every row."""
        return self.chunks[chunk].expand(self.rows, -1)


def situation(name: str, ids: Int[Tensor, " token"], tokens: Int[Tensor, " new"], steps: int) -> Situation:
    """Return a prompt in the named situation, followed by `steps` forward passes over `tokens`.

    In a batch the second row is the prompt without its first eighth: one prompt is enough for an audit, and nearly
    every budget that fits the first fits the second.
    """
    first = BLOCK if name == "block" else 1
    chunks = tuple(torch.split(tokens[: first + steps - 1], [first, *[1] * (steps - 1)]))
    if name != "batch":
        return Situation(name, ids.unsqueeze(0), torch.ones_like(ids).unsqueeze(0), chunks)
    cut = max(1, len(ids) // _SHORTER)
    mask = torch.ones(2, len(ids), dtype=ids.dtype, device=ids.device)
    mask[1, :cut] = 0
    padded = torch.cat([_padding_token(ids).expand(cut), ids[cut:]])
    return Situation(name, torch.stack([ids, padded]), mask, chunks)


def _padding_token(ids: Int[Tensor, " token"]) -> Int[Tensor, " one"]:
    """Return a token that the prompt lacks, so that no entry of it equals padding; its last one if none is found."""
    absent = torch.isin(torch.arange(int(ids.amax()), device=ids.device), ids, invert=True).nonzero()[:1, 0]
    return absent.to(ids.dtype) if len(absent) else ids[-1:]


def token_count(steps: int, names: Sequence[str]) -> int:
    """Return the maximum number of tokens that a named situation decodes in `steps` forward passes."""
    return steps + (BLOCK - 1 if "block" in names else 0)
