"""A layer's data for scores: queries, keys, values, window attention and derived quantities, computed on first use.

There are n entries, of which the last w are the window; prefix = n − w. A view may have a part of the layer's heads:
whole groups of query heads with their key/value heads, so that memory is bounded whatever the prompt's length.

Leaving out a query's heaviest entry is exact even where that entry has all the weight: with weights a that sum to 1, o
= Σ_j a_j v_j, and μ the mean of all values but v_j, weighted by a, a_j / (1 − a_j) · ‖o − v_j‖ = a_j · ‖μ − v_j‖. Only
the heaviest entry of a query can have more than half of its weight; for all others 1 − a_j and o − v_j lose no
precision. A sink in the softmax is another entry, of value 0.

Rotary positions follow transformers' rotation of queries and keys: component i is paired with i + half (`rotate_half`).
Only the first components of a head are rotary where cosines are fewer than d_key (Phi-3's partial rotation); cosine
and sine may both carry a factor (YaRN's), which the inverse rotation divides out.
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
from perturbkv.configs.selections import ALL_QUERIES, TEXT_QUERIES
from perturbkv.devices import to_device
from perturbkv.errors import PluginError
from perturbkv.scoring.window_attention import causal_logits
from perturbkv.theory import WORK, Softmax, softmax_with_sinks

_TINY_MASS = 1e-290
"""Weights below this are rounded or lost in float64; the mean of the other entries is then computed from logarithms."""


@dataclass(frozen=True, eq=False)
class HeaviestLeftOut:
    """The entry with the largest weight in each row of attention weights, and sums over all other entries.

    Attributes:
        index: index of the heaviest entry, the first of equals.
        weight: its weight a_j.
        mass: total weight of the other entries, 1 − a_j without its rounding.
        value: v_j.
        mean: μ, the weighted mean value of the other entries; 0 where there is none.
    """

    index: Int[Tensor, "head row"]
    weight: Float[Tensor, "head row"]
    mass: Float[Tensor, "head row"]
    value: Float[Tensor, "head row d_value"]
    mean: Float[Tensor, "head row d_value"]

    @property
    def output(self) -> Float[Tensor, "head row d_value"]:
        """Attention output Σ_j a_j v_j, over all entries, the heaviest included."""
        return self.mass.unsqueeze(-1) * self.mean + self.weight.unsqueeze(-1) * self.value

    @property
    def squared_distance(self) -> Float[Tensor, "head row"]:
        """‖μ − v_j‖₂², from the heaviest entry's value to the mean of the other entries."""
        return (self.mean - self.value).square().sum(dim=-1)


def leave_out_heaviest(
    weights: Float[Tensor, "head row key"],
    values: Float[Tensor, "kv_head key d_value"],
    logarithms: Callable[[], Float[Tensor, "head row key"]],
    sink: Float[Tensor, "head row"],
    sinks: Float[Tensor, " head"] | None = None,
) -> HeaviestLeftOut:
    """Return the heaviest entry of each row of attention weights, and the sums over all other entries.

    Args:
        weights: attention weights of the entries, which sum to 1 in each row together with that of the sink.
        values: v of the entries.
        logarithms: returns the logarithms of `weights`, up to a constant per row.
        sink: weight of the sink, which counts among the other entries, with value 0; 0 without sinks.
        sinks: logarithms of `sink`, up to the same constant; None without sinks.
    """
    weight, index = weights.max(dim=-1, keepdim=True)
    others = weights.scatter(-1, index, 0)
    mass = others.sum(dim=-1) + sink
    if weights.is_cuda or bool((mass < _TINY_MASS).any()):  # a GPU computes both rather than wait
        exact, exact_sink = softmax_with_sinks(logarithms().scatter(-1, index, -torch.inf), sinks)
        others = torch.where((mass < _TINY_MASS).unsqueeze(-1), exact.nan_to_num(0), others)
        sink = torch.where(mass < _TINY_MASS, exact_sink, sink)
    total = (others.sum(dim=-1) + sink).unsqueeze(-1)
    mean = _weighted_values(others, values.to(WORK)) / total.where(total > 0, 1)
    return HeaviestLeftOut(index.squeeze(-1), weight.squeeze(-1), mass, _gather_values(values, index), mean)


def _weighted_values(
    weights: Float[Tensor, "head row key"], values: Float[Tensor, "kv_head key d_value"]
) -> Float[Tensor, "head row d_value"]:
    """Return Σ_j a_j v_j, the values summed with each row's weights."""
    heads, rows, keys = weights.shape
    return (weights.reshape(len(values), -1, keys) @ values).view(heads, rows, -1)


def _gather_values(
    values: Float[Tensor, "kv_head key d_value"], index: Int[Tensor, "head row 1"]
) -> Float[Tensor, "head row d_value"]:
    """Return the values of the entries at the given index per row."""
    heads, rows, _ = index.shape
    component_index = index.view(len(values), -1, 1).expand(-1, -1, values.shape[-1])
    return values.to(WORK).gather(1, component_index).view(heads, rows, -1)


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotations at some positions, as cosines and sines of the rotary components of a head."""

    cosine: Float[Tensor, "position rotary"]
    sine: Float[Tensor, "position rotary"]

    def unrotate(self, vectors: Float[Tensor, "head position d_key"]) -> Float[Tensor, "head position d_key"]:
        """Return the vectors at these positions with their rotation undone, in float32 or better."""
        work = torch.promote_types(vectors.dtype, torch.float32)
        cosine, sine = self.cosine.to(WORK), self.sine.to(WORK)
        stretched = cosine.square() + sine.square()
        cosine, sine = (cosine / stretched).to(work), (sine / stretched).to(work)
        size, half = cosine.shape[-1], cosine.shape[-1] // 2
        result = vectors.to(work, copy=True)
        rotary, turned = vectors[..., :size].to(work), result[..., :size]
        turned.mul_(cosine)
        turned[..., :half].addcmul_(rotary[..., half:], sine[:, :half])
        turned[..., half:].addcmul_(rotary[..., :half], sine[:, half:], value=-1)
        return result

    def mean(self, d_key: int) -> Float[Tensor, "d_key d_key"]:
        """Return R̄, the mean rotation matrix over the positions, in `WORK` precision.

        Components that are not rotary have the identity.
        """
        size = self.cosine.shape[-1]
        cosine, sine = (part.to(WORK).mean(dim=0) for part in (self.cosine, self.sine))
        pairs = torch.arange(size, device=cosine.device)
        matrix = torch.eye(d_key, dtype=WORK, device=cosine.device)
        matrix[pairs, pairs] = cosine
        matrix[pairs, pairs.roll(size // 2)] = torch.where(pairs < size // 2, -sine, sine)
        return matrix


NEEDS = {
    "queries": "all n queries after rotation (head, n, d_key)",
    "keys": "after rotation (kv_head, n, d_key)",
    "values": "(kv_head, n, d_value)",
    "attention": "softmax rows of the window's queries, causal inside it (head, w, n), float64",
    "logits": "what `attention` is the softmax of, −inf after each query (head, w, n), float64",
    "outputs": "o_i = Σ_j a_ij v_j of the window's queries, before W_O (head, w, d_value), float64",
    "distances": "‖v_j − o_i‖₂² (head, w, n), float64",
    "left_out": "for each window query its heaviest entry, and the mean of the values of all others, float64",
    "norms": "ν = ‖V_i W_O^h‖₁ (head, n); with a gate, of its mean size over the window",
    "w_o": "W_O^h of each head (head, d_value, d_model); with a gate, behind its mean size over the window",
    "hidden": "what goes into the layer's attention (n, d_model)",
    "unrotated": "all n queries before rotation (head, n, d_key), float32 or better",
    "rotations": "the model's rotation of any range of positions, also of those after the prompt",
    "replay": "the context, run once more over its own full cache: scored by `score_replay`, pass by pass",
}
"""Names that `Score.needs` may list -> shape and meaning."""
PROMPT_ALONE = ("queries", "hidden", "unrotated", "replay")
"""Data that exist only during the prefill, and not when a cache that decoding has filled is compressed again."""
OF_WINDOW = frozenset({"attention", "logits", "outputs", "distances", "left_out"})
"""Data with a row per query of the window that votes: w of them, fewer where `window_queries` is `text`."""
_Captured = TypeVar("_Captured")
_ROW_BYTES = 48
"""Working memory of one attention weight: its logit, its softmax and a score's temporary, in float64."""


@dataclass(frozen=True, eq=False)
class LayerView:
    """One layer of one prompt, or some of its heads.

    Attributes:
        queries: queries after rotation, of the last positions that are available, all of them in a prefill.
        keys, values: of all n entries, keys after rotation.
        norms: ν.
        projection: columns of `o_proj.weight` of these heads, times the gate's mean size over the window, if any.
        softmax: how logits become weights.
        layer, layers: index of the layer, and number of layers.
        sample: the sample's id, for seeds.
        window: w.
        position: number of tokens that were read, the position of the next: n, or more once entries are evicted.
        attention_input: (n, d_model); None where no score needs `hidden`.
        rotary: function from a range of positions to their rotation; None where no score needs `unrotated` or
            `rotations`.
        template: positions of the chat template's tokens behind the last message.
        window_queries: queries of the window that vote: `all`, or `text`, those outside of `template`.
    """

    queries: Float[Tensor, "head query d_key"]
    keys: Float[Tensor, "kv_head key d_key"]
    values: Float[Tensor, "kv_head key d_value"]
    norms: Float[Tensor, "head key"]
    projection: Float[Tensor, "d_model head_d_value"]
    softmax: Softmax
    layer: int
    layers: int
    sample: str
    window: int
    position: int
    attention_input: Float[Tensor, "key d_model"] | None = None
    rotary: Callable[[range], Rotation] | None = None
    template: range = range(0)
    window_queries: str = ALL_QUERIES

    @property
    def heads(self) -> int:
        """Number of query heads in the view."""
        return self.queries.shape[0]

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads in the view."""
        return self.keys.shape[0]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def entries(self) -> int:
        """Number of entries n."""
        return self.keys.shape[1]

    @property
    def prefix(self) -> int:
        """Number of entries to score, n − w: those before the window."""
        return max(0, self.entries - self.window)

    @cached_property
    def logits(self) -> Float[Tensor, "head query key"]:
        """Attention logits of the window's queries that vote, −inf on later entries."""
        rows = min(self.window, self.entries)
        logits = causal_logits(self.queries[:, -rows:].to(WORK), self.keys.to(WORK), self.softmax)
        if self.window_queries != TEXT_QUERIES:
            return logits
        text = [row for row in range(rows) if self.entries - rows + row not in self.template]
        return logits[:, to_device(text, logits.device, torch.int64)]

    @cached_property
    def weights(self) -> tuple[Float[Tensor, "head query key"], Float[Tensor, "head query"]]:
        """Softmax weights of the window's queries on the entries, and on each head's sink (0 without sinks)."""
        return self.softmax.weights(self.logits)

    @cached_property
    def log_totals(self) -> Float[Tensor, "head query"]:
        """Logarithms of the softmax denominators of the window's queries."""
        return self.softmax.log_total(self.logits)

    @property
    def attention(self) -> Float[Tensor, "head query key"]:
        """Softmax weights of the window's queries on the entries."""
        return self.weights[0]

    @property
    def sink_attention(self) -> Float[Tensor, "head query"]:
        """Softmax weights of the window's queries on each head's sink; 0 without sinks."""
        return self.weights[1]

    @cached_property
    def left_out(self) -> HeaviestLeftOut:
        """Heaviest entry of each window query, and the sums over all other entries."""
        sink, sinks = self.sink_attention, self.softmax.sinks
        return leave_out_heaviest(self.attention, self.values, lambda: self.logits, sink, sinks)

    @cached_property
    def outputs(self) -> Float[Tensor, "head query d_value"]:
        """Attention outputs of the window's queries, before W_O."""
        return self.left_out.output

    @cached_property
    def distances(self) -> Float[Tensor, "head query key"]:
        """Squared distances ‖v_j − o_i‖₂² between entries' values and the window's outputs, to about 1e-16 · ‖v_j‖².

        The distance from each query's entry of the largest weight is exact.
        """
        values, outputs = self.values.to(WORK), self.outputs
        ones = torch.ones_like(values[..., :1])
        lengths = outputs.square().sum(dim=-1, keepdim=True)  # ‖v‖² − 2 v·o + ‖o‖² is one product of both factors
        output_factors = torch.cat([-2 * outputs, torch.ones_like(lengths), lengths], dim=-1)
        value_factors = torch.cat([values, values.square().sum(dim=-1, keepdim=True), ones], dim=-1)
        grouped = output_factors.reshape(self.kv_heads, -1, output_factors.shape[-1]) @ value_factors.mT
        squared = grouped.view(self.heads, -1, self.entries).clamp_(min=0)
        left = self.left_out
        return squared.scatter_(
            -1, left.index.unsqueeze(-1), (left.mass.square() * left.squared_distance).unsqueeze(-1)
        )

    @cached_property
    def w_o(self) -> Float[Tensor, "head d_value d_model"]:
        """Slices W_O^h of the output projection, one per head."""
        return theory.head_slices(self.projection, self.heads)

    @cached_property
    def unrotated(self) -> Float[Tensor, "head query d_key"]:
        """All queries before rotation, in float32 or better."""
        return _require(self.rotary, "unrotated")(range(self.entries)).unrotate(self.queries)

    @property
    def rotations(self) -> Callable[[range], Rotation]:
        """Model's function from a range of positions to their rotation."""
        return _require(self.rotary, "rotations")

    @property
    def hidden(self) -> Float[Tensor, "key d_model"]:
        """Input of the layer's attention module, after its norm."""
        return _require(self.attention_input, "hidden")

    def per_head(self, shared: Float[Tensor, kv_head * rest]) -> Float[Tensor, head * rest]:
        """Return a tensor with one row per key/value head repeated for the query heads."""
        return shared.repeat_interleave(self.group, dim=0)

    def with_window(self, window: int) -> LayerView:
        """Return the same layer with a window of `window` entries."""
        return self if window == self.window else replace(self, window=window)

    def with_window_queries(self, window_queries: str) -> LayerView:
        """Return the same layer with `all` queries of the window, or those of the `text`."""
        return self if window_queries == self.window_queries else replace(self, window_queries=window_queries)

    def parts(self, chunk_bytes: int) -> Iterator[LayerView]:
        """Yield views of groups of heads whose attention weights fit `chunk_bytes`; the view itself if all fit."""
        kv_head_bytes = _ROW_BYTES * self.group * min(self.window, self.entries) * self.entries
        size = max(1, chunk_bytes // max(1, kv_head_bytes))
        if size >= self.kv_heads:
            yield self
            return
        for start in range(0, self.kv_heads, size):
            yield self._take_heads(slice(start, min(start + size, self.kv_heads)))

    def _take_heads(self, kv_heads: slice) -> LayerView:
        """Return the view restricted to a slice of key/value heads and their query heads."""
        heads = slice(kv_heads.start * self.group, kv_heads.stop * self.group)
        d_value = self.values.shape[-1]
        return replace(
            self,
            queries=self.queries[heads],
            keys=self.keys[kv_heads],
            values=self.values[kv_heads],
            norms=self.norms[heads],
            projection=self.projection[:, heads.start * d_value : heads.stop * d_value],
            softmax=self.softmax.of_heads(heads),
        )


def _require(data: _Captured | None, name: str) -> _Captured:
    """Return the captured data. Raises PluginError, with the data's `name`, for None."""
    if data is None:
        raise PluginError(f"{name} of the layer were not captured: no score of the run needs them")
    return data
