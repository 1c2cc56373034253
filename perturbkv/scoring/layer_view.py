"""What one layer shows of a prompt to the scores of its entries; everything is made when it is first asked for.

n entries, of which the last w are the window; prefix = n − w. Heads may be a part of the layer's: whole groups of query
heads with their key/value heads, so that memory stays bounded whatever the prompt's length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv import theory
from perturbkv.errors import PluginError
from perturbkv.scoring.left_out import HeaviestLeftOut, leave_out_heaviest
from perturbkv.scoring.rotation import Rotation
from perturbkv.scoring.window_attention import causal_logits
from perturbkv.theory import WORK, softmax_with_sinks

NEEDS = {
    "queries": "all n queries after rotation (head, n, d_head)",
    "keys": "after rotation (kv_head, n, d_head)",
    "values": "(kv_head, n, d_head)",
    "attention": "softmax rows of the window's queries, causal inside it (head, w, n), float64",
    "logits": "what `attention` is the softmax of, −inf after each query (head, w, n), float64",
    "outputs": "o_i = Σ_j a_ij v_j of the window's queries, before W_O (head, w, d_head), float64",
    "distances": "‖v_j − o_i‖₂² (head, w, n), float64",
    "left_out": "for each window query its heaviest entry, and the mean of the values of all others, float64",
    "norms": "ν = ‖V_i W_O^h‖₁ (head, n)",
    "w_o": "W_O^h of each head (head, d_head, d_model)",
    "hidden": "what goes into the layer's attention (n, d_model)",
    "unrotated": "all n queries before rotation (head, n, d_head), float32 or better",
    "rotations": "the model's rotation of any range of positions, also of those after the prompt",
    "replay": "the context, run once more over its own full cache: scored by `replayed`, pass by pass",
}
"""What a score may need, by name."""
PROMPT_ALONE = ("queries", "hidden", "unrotated", "rotations", "replay")
"""What is there while a prompt is read, and gone when a cache that decoding has filled is compressed again."""
_Found = TypeVar("_Found")
_ROW_BYTES = 48
"""Working memory of one attention weight: its logit, its softmax and what a score makes of them, in float64."""


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer of one prompt, or some of its heads.

    Attributes:
        queries: of the last positions that are there, all of them in a prefill; after rotation.
        keys, values: of all n entries, keys after rotation.
        norms: ν.
        projection: columns of `o_proj.weight` of these heads.
        scale: factor on the logits.
        layer, layers: which of how many.
        sample: the sample's id, for seeds.
        window: w.
        attention_input: (n, d_model); None where no score asks for `hidden`.
        rotary: gives the rotation of a range of positions; None where no score asks for `unrotated` or `rotations`.
        sinks: logits that are in every softmax of these heads, of entries without a value; None where there are none.
    """

    queries: Float[Tensor, "head query d_head"]
    keys: Float[Tensor, "kv_head key d_head"]
    values: Float[Tensor, "kv_head key d_head"]
    norms: Float[Tensor, "head key"]
    projection: Float[Tensor, "d_model head_d_head"]
    scale: float
    layer: int
    layers: int
    sample: str
    window: int
    attention_input: Float[Tensor, "key d_model"] | None = None
    rotary: Callable[[range], Rotation] | None = None
    sinks: Float[Tensor, " head"] | None = None

    @property
    def heads(self) -> int:
        """Query heads shown."""
        return self.queries.shape[0]

    @property
    def kv_heads(self) -> int:
        """Key/value heads shown."""
        return self.keys.shape[0]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def entries(self) -> int:
        """N."""
        return self.keys.shape[1]

    @property
    def prefix(self) -> int:
        """N − w: entries that are to be scored."""
        return max(0, self.entries - self.window)

    @cached_property
    def logits(self) -> Float[Tensor, "head query key"]:
        """Of the window's queries."""
        rows = min(self.window, self.entries)
        grouped = self.queries[:, -rows:].view(self.kv_heads, self.group, rows, -1)
        return torch.cat(
            [
                causal_logits(query.to(WORK), key.to(WORK), self.scale, self.entries - rows)
                for query, key in zip(grouped, self.keys, strict=True)
            ]
        )

    @cached_property
    def weights(self) -> tuple[Float[Tensor, "head query key"], Float[Tensor, "head query"]]:
        """Of the window's queries: on entries, and on each head's sink; 0 where there is none."""
        return softmax_with_sinks(self.logits, self.sinks)

    @cached_property
    def totals(self) -> Float[Tensor, "head query"]:
        """Of the window's queries, the logarithm of what `weights` are divided by."""
        total = self.logits.logsumexp(dim=-1)
        return total if self.sinks is None else torch.logaddexp(total, self.sinks.to(WORK).unsqueeze(-1))

    @property
    def attention(self) -> Float[Tensor, "head query key"]:
        """Of the window's queries."""
        return self.weights[0]

    @cached_property
    def left_out(self) -> HeaviestLeftOut:
        """Of the window's queries."""
        return leave_out_heaviest(self.attention, self.values, lambda: self.logits, self.weights[1], self.sinks)

    def sinks_of(self, kv_head: int) -> Float[Tensor, " group"] | None:
        """Those of one key/value head's query heads."""
        return None if self.sinks is None else self.sinks[kv_head * self.group : (kv_head + 1) * self.group]

    @cached_property
    def outputs(self) -> Float[Tensor, "head query d_head"]:
        """Of the window's queries."""
        return self.left_out.whole

    @cached_property
    def distances(self) -> Float[Tensor, "head query key"]:
        """Squared, from one product: an error of about 1e-16 · ‖v_j‖²; each query's heaviest entry is exact."""
        values, outputs = self.values.to(WORK), self.outputs
        ones = torch.ones_like(values[..., :1])
        lengths = outputs.square().sum(dim=-1, keepdim=True)
        ours = torch.cat([-2 * outputs, torch.ones_like(lengths), lengths], dim=-1)
        theirs = torch.cat([values, values.square().sum(dim=-1, keepdim=True), ones], dim=-1)
        grouped = ours.reshape(self.kv_heads, -1, ours.shape[-1]) @ theirs.mT
        found = grouped.view(self.heads, -1, self.entries).clamp_(min=0)
        left = self.left_out
        return found.scatter_(-1, left.place.unsqueeze(-1), (left.mass.square() * left.apart).unsqueeze(-1))

    @cached_property
    def w_o(self) -> Float[Tensor, "head d_head d_model"]:
        """Slices of the output projection."""
        return theory.head_slices(self.projection, self.heads)

    @cached_property
    def unrotated(self) -> Float[Tensor, "head query d_head"]:
        """All queries before rotation."""
        return _asked_for(self.rotary, "unrotated")(range(self.entries)).turned_back(self.queries)

    @property
    def rotations(self) -> Callable[[range], Rotation]:
        """The rotation of a range of positions."""
        return _asked_for(self.rotary, "rotations")

    @property
    def hidden(self) -> Float[Tensor, "key d_model"]:
        """What goes into the layer's attention."""
        return _asked_for(self.attention_input, "hidden")

    def per_head(self, shared: Float[Tensor, kv_head * rest]) -> Float[Tensor, head * rest]:
        """What a key/value head has, for each of its query heads."""
        return shared.repeat_interleave(self.group, dim=0)

    def of_window(self, window: int) -> LayerView:
        """The same layer with another window."""
        return self if window == self.window else replace(self, window=window)

    def parts(self, chunk_bytes: int) -> Iterator[LayerView]:
        """The heads in as many parts as keep attention rows inside the working memory; itself where they fit."""
        each = _ROW_BYTES * self.group * min(self.window, self.entries) * self.entries
        size = max(1, chunk_bytes // max(1, each))
        if size >= self.kv_heads:
            yield self
            return
        for start in range(0, self.kv_heads, size):
            yield self._of(slice(start, min(start + size, self.kv_heads)))

    def _of(self, part: slice) -> LayerView:
        heads = slice(part.start * self.group, part.stop * self.group)
        d_head = self.queries.shape[-1]
        return replace(
            self,
            queries=self.queries[heads],
            keys=self.keys[part],
            values=self.values[part],
            norms=self.norms[heads],
            projection=self.projection[:, heads.start * d_head : heads.stop * d_head],
            sinks=None if self.sinks is None else self.sinks[heads],
        )


def _asked_for(found: _Found | None, name: str) -> _Found:
    if found is None:
        msg = f"{name} of the layer were not captured: no score of the run needs them"
        raise PluginError(msg)
    return found
