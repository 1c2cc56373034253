"""A layer's data in one pass of a replay, in which a part of the context is run again over the context's full cache.

A replay goes through the context in parts of `chunk` tokens. In each of its passes the model reads an instruction to
repeat the part, and then the part itself; it attends to the whole cache, but a score sees three kinds of keys, in this
order: the context's first ones, those of the part, and those of the pass itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.scoring.window_attention import causal_blocks
from perturbkv.theory import WORK, Softmax


@dataclass(frozen=True)
class Replay:
    """Options of a replay; scores with equal replays share the passes.

    Attributes:
        chunk: tokens of a part.
        wording: source of the instruction, a key of `pipeline.replay.WORDINGS`.
        sinks: first entries of the context that every pass sees.
    """

    chunk: int
    wording: str
    sinks: int


@dataclass(frozen=True, eq=False)
class ReplayView:
    """One layer's data in one pass of a replay.

    Attributes:
        queries: queries of the pass (head, query, d_key), after rotation.
        keys, values: of the first entries, the part and the pass; keys after rotation.
        hidden: input of the layer's attention (query, d_model); None where no score needs `hidden`.
        projection: `o_proj.weight`.
        softmax: how logits become weights.
        sinks, chunk: number of first entries, and of entries of the part.
        layer, sample: layer index and sample id, for messages.
    """

    queries: Float[Tensor, "head query d_key"]
    keys: Float[Tensor, "kv_head key d_key"]
    values: Float[Tensor, "kv_head key d_value"]
    hidden: Float[Tensor, "query d_model"] | None
    projection: Float[Tensor, "d_model head_d_value"]
    softmax: Softmax
    sinks: int
    chunk: int
    layer: int
    sample: str

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return len(self.queries) // len(self.keys)

    @property
    def part(self) -> slice:
        """Slice of the repeated part within the keys."""
        return slice(self.sinks, self.sinks + self.chunk)

    def attention_blocks(self) -> Iterator[tuple[slice, slice, Float[Tensor, "group query chunk"]]]:
        """Yield (slice of heads, slice of queries, attention weights on the part's entries), block by block.

        The softmax is over all keys that the score sees.
        """
        dtype = torch.promote_types(self.queries.dtype, torch.float32)
        for heads, queries, weights in causal_blocks(self.queries, self.keys, self.softmax, dtype):
            yield heads, queries, weights[..., self.part]

    def norms(self) -> Float[Tensor, "head chunk"]:
        """Return the projected value norms ‖v_j W_O^h‖₂ of the part's entries: roots of v_j (W_O^h W_O^hᵀ) v_jᵀ."""
        slices = self.projection.to(WORK).view(len(self.projection), -1, self.values.shape[-1])
        products = torch.einsum("mhk,mhl->hkl", slices, slices)
        values = self.values[:, self.part].to(WORK).repeat_interleave(self.group, dim=0)
        return ((values @ products) * values).sum(dim=-1).clamp(min=0).sqrt()
