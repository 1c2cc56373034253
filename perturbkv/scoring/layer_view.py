"""What one layer shows of a prompt to the scores of its entries; everything is made when it is first asked for.

n entries, of which the last w are the window; prefix = n − w. Heads may be a part of the layer's: whole groups of query
heads with their key/value heads, so that memory stays bounded whatever the prompt's length.

What a query would give without its heaviest entry, exact even where that entry takes all the weight.

With weights a that add up to 1, o = Σ_j a_j v_j and μ the mean of the values of all entries but j, weighted by a,
a_j / (1 − a_j) · ‖o − v_j‖ = a_j · ‖μ − v_j‖. Only the heaviest entry of a query can have more than half of its weight;
for all others 1 − a_j and o − v_j lose nothing. A sink in the softmax is one of the others, its value 0.

Rotary positions as transformers turns queries and keys by them: component i is paired with i + half (`rotate_half`).

Only the first components of a head are rotary where cosines are fewer than d_head (Phi-3's partial rotation); cosine
and sine may both carry a factor (YaRN's), which turning back divides out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv import theory
from perturbkv.errors import PluginError
from perturbkv.scoring.window_attention import causal_logits
from perturbkv.theory import WORK, softmax_with_sinks

_LOST = 1e-290
"""Weights below this one are rounded or gone in float64, so that the mean of the others is made of logarithms."""


@dataclass(frozen=True, eq=False)
class HeaviestLeftOut:
    """The heaviest entry of each row, and what the others add up to.

    Attributes:
        place: where the heaviest entry stands, the first of equals.
        weight: its weight a_j.
        mass: the others' weights together, 1 − a_j without its rounding.
        value: v_j.
        mean: μ, the others' mean value; 0 where there is no other.
    """

    place: Int[Tensor, "head row"]
    weight: Float[Tensor, "head row"]
    mass: Float[Tensor, "head row"]
    value: Float[Tensor, "head row d_head"]
    mean: Float[Tensor, "head row d_head"]

    @property
    def whole(self) -> Float[Tensor, "head row d_head"]:
        """Σ_j a_j v_j over all entries."""
        return self.mass.unsqueeze(-1) * self.mean + self.weight.unsqueeze(-1) * self.value

    @property
    def apart(self) -> Float[Tensor, "head row"]:
        """‖μ − v_j‖₂²."""
        return (self.mean - self.value).square().sum(dim=-1)


def leave_out_heaviest(
    weights: Float[Tensor, "head row key"],
    values: Float[Tensor, "kv_head key d_head"],
    logarithms: Callable[[], Float[Tensor, "head row key"]],
    sink: Float[Tensor, "head row"],
    sinks: Float[Tensor, " head"] | None = None,
) -> HeaviestLeftOut:
    """Of rows of weights that add up to 1 with those of the `sink`, which is one of the others and has no value.

    `logarithms` gives those of the weights, up to a constant per row, and `sinks` the sinks' in the same unit.
    """
    weight, place = weights.max(dim=-1, keepdim=True)
    others = weights.scatter(-1, place, 0)
    mass = others.sum(dim=-1) + sink
    if bool((mass < _LOST).any()):
        left, gone = softmax_with_sinks(logarithms().scatter(-1, place, -torch.inf), sinks)
        alone = left.nan_to_num(0)
        others = torch.where((mass < _LOST).unsqueeze(-1), alone, others)
        sink = torch.where(mass < _LOST, gone, sink)
    total = (others.sum(dim=-1) + sink).unsqueeze(-1)
    mean = _per_group(others, values.to(WORK)) / total.where(total > 0, 1)
    return HeaviestLeftOut(place.squeeze(-1), weight.squeeze(-1), mass, _picked(values, place), mean)


def _per_group(
    weights: Float[Tensor, "head row key"], values: Float[Tensor, "kv_head key d_head"]
) -> Float[Tensor, "head row d_head"]:
    """Σ_j a_j v_j, the query heads of a key/value head in one product."""
    heads, rows, keys = weights.shape
    return (weights.reshape(len(values), -1, keys) @ values).view(heads, rows, -1)


def _picked(
    values: Float[Tensor, "kv_head key d_head"], place: Int[Tensor, "head row 1"]
) -> Float[Tensor, "head row d_head"]:
    """The value at each row's place."""
    heads, rows, _ = place.shape
    index = place.view(len(values), -1, 1).expand(-1, -1, values.shape[-1])
    return values.to(WORK).gather(1, index).view(heads, rows, -1)


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of each of some positions; columns of both are the rotary components of a head."""

    cosine: Float[Tensor, "place rotary"]
    sine: Float[Tensor, "place rotary"]

    def turned_back(self, vectors: Float[Tensor, "head place d_head"]) -> Float[Tensor, "head place d_head"]:
        """Rotated vectors at these positions as they were before, in float32 or better."""
        work = torch.promote_types(vectors.dtype, torch.float32)
        cosine, sine = self.cosine.to(WORK), self.sine.to(WORK)
        stretched = cosine.square() + sine.square()
        cosine, sine = (cosine / stretched).to(work), (sine / stretched).to(work)
        size, half = cosine.shape[-1], cosine.shape[-1] // 2
        found = vectors.to(work, copy=True)
        rotary, turned = vectors[..., :size].to(work), found[..., :size]
        turned.mul_(cosine)
        turned[..., :half].addcmul_(rotary[..., half:], sine[:, :half])
        turned[..., half:].addcmul_(rotary[..., :half], sine[:, half:], value=-1)
        return found

    def mean(self, d_head: int) -> Float[Tensor, "d_head d_head"]:
        """R̄: the mean over the positions of the matrices that turn a vector, in `WORK`."""
        size = self.cosine.shape[-1]
        cosine, sine = (part.to(WORK).mean(dim=0) for part in (self.cosine, self.sine))
        pairs = torch.arange(size, device=cosine.device)
        matrix = torch.eye(d_head, dtype=WORK, device=cosine.device)
        matrix[pairs, pairs] = cosine
        matrix[pairs, pairs.roll(size // 2)] = torch.where(pairs < size // 2, -sine, sine)
        return matrix


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
