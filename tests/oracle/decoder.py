"""A naive float64 decoder of every family, with an eviction mask per measured layer and query head.

One token at a time from the beginning: keys and values are appended, nothing is batched. Keys are also kept without
rotation, so that a step can place those that a head sees anew. Where layers are of two kinds, those with a sliding
window see what they see whatever is evicted, and are neither recorded nor counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.oracle.correction import Extra
from tests.oracle.theory import Array, capped, softmax

_GEMMA = ("gemma2", "gemma3_text")
Stored = list[dict[int, tuple[Array, Array]]]
"""Per query head: position -> key and value."""
Chosen = Callable[[Array], Array]
"""From a step's query (head, d_head) in a measured layer to what each head sees of older entries."""

Along = Callable[[int, list[Array], list[list[Array]], list[list[Array]]], list[list[list[int]]]]
"""From a layer's queries (head, d_head) at all positions, keys and values to what each sees: per head, per position."""


@dataclass
class Step:
    """Per measured layer: query (head, d_head), head_output (head, d_value); hidden (d_model) per layer; final, logits.

    `gates` are γ (head, d_value) of every measured layer, 1 where there are none; head outputs are multiplied by them.
    """

    query: list[Array] = field(default_factory=list)
    head_output: list[Array] = field(default_factory=list)
    hidden: list[Array] = field(default_factory=list)
    gates: list[Array] = field(default_factory=list)
    final: Any = None
    logits: Any = None


class Decoder:
    """Weights of a transformers model as float64, and a cache that grows by a token a step."""

    def __init__(self, model: Any) -> None:
        self.config = SimpleNamespace(**model.config.to_dict())
        self.weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
        self.heads, self.kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        self.d_head = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads
        every = range(self.config.num_hidden_layers)
        values = self.weights.get("model.layers.0.self_attn.v_proj.weight")
        self.d_value = self.d_head if values is None else len(values) // self.kv_heads
        self.types = getattr(self.config, "layer_types", None) or ["full_attention" for _ in every]
        self.places = [i for i in every if self.types[i] == "full_attention" or len(set(self.types)) == 1]
        self.layers = len(self.places)
        self._keys: list[list[list[Array]]] = [[[] for _ in range(self.kv_heads)] for _ in every]
        self._values: list[list[list[Array]]] = [[[] for _ in range(self.kv_heads)] for _ in every]
        self.unrotated: list[list[list[Array]]] = [[[] for _ in range(self.kv_heads)] for _ in every]
        self.position = 0
        self.moved: dict[tuple[int, int], Array] = {}
        """Layer and position -> what is added to the attention output (d_model) there."""

    @property
    def keys(self) -> list[list[list[Array]]]:
        """Of the measured layers."""
        return [self._keys[place] for place in self.places]

    @property
    def values(self) -> list[list[list[Array]]]:
        """Of the measured layers."""
        return [self._values[place] for place in self.places]

    def w_o(self, layer: int) -> Array:
        """Output projection of a measured layer."""
        return self.weights[f"model.layers.{self.places[layer]}.self_attn.o_proj.weight"]

    def sinks(self, layer: int) -> Array | None:
        """Of a measured layer's heads: logits that are in every softmax, of entries without a value."""
        return self.weights.get(f"model.layers.{self.places[layer]}.self_attn.sinks")

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        config: Any = self.config
        if hasattr(config, "query_pre_attn_scalar"):
            return float(config.query_pre_attn_scalar**-0.5)
        return float(getattr(config, "attention_multiplier", self.d_head**-0.5))

    @property
    def cap(self) -> float | None:
        """Soft cap on the logits of attention."""
        return getattr(self.config, "attn_logit_softcapping", None)

    def copy(self) -> Decoder:
        """Another with the same cache, which grows by itself."""
        made = copy(self)
        for name in ("_keys", "_values", "unrotated"):
            setattr(made, name, [[list(head) for head in layer] for layer in getattr(self, name)])
        return made

    def step(
        self,
        token: int,
        kept: Sequence[Array | Chosen] | None = None,
        in_cache: bool = False,
        stored: list[Stored] | None = None,
        extras: list[list[Extra | None]] | None = None,
    ) -> Step:
        """Decode a token; `kept[layer]` (head, entries so far), or what a call of it gives, masks older entries; the
        token's own is always seen.

        `stored[layer][head]` are keys and values of some positions as that head sees them. With `in_cache` a head's
        first entry that it sees stands at 0, the next one at 1, …; the query at its own. `extras[layer][head]` is one
        entry more that this head sees.
        """
        record, config = Step(), self.config
        hidden = self.weights["model.embed_tokens.weight"][token] * self._embedding_scale()
        for layer in range(config.num_hidden_layers):
            mask = None if kept is None or layer not in self.places else kept[self.places.index(layer)]
            normed = self._norm(hidden, f"{layer}.input_layernorm")
            held = None if stored is None or mask is None else stored[self.places.index(layer)]
            more = None if extras is None or mask is None else extras[self.places.index(layer)]
            made = self._attention(layer, normed, mask, in_cache, record, held, more)
            made = made + self.moved.get((layer, self.position), 0.0)
            hidden = self._behind(layer, hidden, made)
            record.hidden.append(hidden.copy())
        record.final = self._norm(hidden, "model.norm.weight")
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        logits = head @ record.final / getattr(config, "logits_scaling", 1.0)
        record.logits = np.array(
            [capped(float(one), getattr(config, "final_logit_softcapping", None)) for one in logits]
        )
        self.position += 1
        return record

    def prefill(self, tokens: Sequence[int], along: Along) -> None:
        """Read a prompt layer by layer instead: `along` says what each query of a layer sees, knowing all of them."""
        hidden = [self.weights["model.embed_tokens.weight"][token] * self._embedding_scale() for token in tokens]
        for layer in range(self.config.num_hidden_layers):
            queries = []
            for position, state in enumerate(hidden):
                query, key, value = self._projections(
                    f"model.layers.{layer}.self_attn", self._norm(state, f"{layer}.input_layernorm")
                )
                queries.append(self._rotate(query, position, layer))
                for head in range(self.kv_heads):
                    self._keys[layer][head].append(self._rotate(key[head : head + 1], position, layer)[0])
                    self._values[layer][head].append(value[head])
            seen = along(layer, queries, self._keys[layer], self._values[layer])
            for position, state in enumerate(hidden):
                mixed = [
                    self._mean(
                        queries[position][head], seen[head][position], layer, head // (self.heads // self.kv_heads)
                    )
                    for head in range(self.heads)
                ]
                made = self._linear(f"model.layers.{layer}.self_attn.o_proj", np.concatenate(mixed))
                hidden[position] = self._behind(layer, state, made)
        self.position = len(tokens)

    def _mean(self, query: Array, seen: Sequence[int], layer: int, kv_head: int) -> Array:
        """A query's values, weighted by its softmax over the entries that it sees."""
        keys, values = self._keys[layer][kv_head], self._values[layer][kv_head]
        weights = softmax([capped(float(query @ keys[i]) * self.scale, self.cap) for i in seen])
        return np.sum([weight * values[i] for weight, i in zip(weights, seen, strict=True)], axis=0)

    def _behind(self, layer: int, hidden: Array, made: Array) -> Array:
        """The residual stream after a layer, from what its attention made."""
        after = f"model.layers.{layer}.post_feedforward_layernorm.weight" in self.weights
        residual = getattr(self.config, "residual_multiplier", 1.0)
        hidden = hidden + residual * (self._norm(made, f"{layer}.post_attention_layernorm") if after else made)
        name = "pre_feedforward_layernorm" if after else "post_attention_layernorm"
        made = self._mlp(layer, self._norm(hidden, f"{layer}.{name}"))
        return hidden + residual * (self._norm(made, f"{layer}.post_feedforward_layernorm") if after else made)

    def _embedding_scale(self) -> float:
        if self.config.model_type in _GEMMA:
            return math.sqrt(self.config.hidden_size)
        return float(getattr(self.config, "embedding_multiplier", 1.0))

    def _norm(self, hidden: Array, name: str) -> Array:
        """A norm of the model; nothing where it has none of this name."""
        weight = self.weights.get(name if name.startswith("model") else f"model.layers.{name}.weight")
        if weight is None:
            return hidden
        return _rms(hidden, weight + (self.config.model_type in _GEMMA), self.config.rms_norm_eps)

    def _linear(self, name: str, vector: Array) -> Array:
        out = self.weights[f"{name}.weight"] @ vector
        return out + self.weights.get(f"{name}.bias", 0.0)

    def _attention(
        self,
        layer: int,
        hidden: Array,
        kept: Array | Chosen | None,
        in_cache: bool,
        record: Step,
        stored: Stored | None,
        extras: list[Extra | None] | None,
    ) -> Array:
        prefix, measured = f"model.layers.{layer}.self_attn", layer in self.places
        unrotated, key, value = self._projections(prefix, hidden)
        query = self._rotate(unrotated, self.position, layer)
        for head in range(self.kv_heads):
            self.unrotated[layer][head].append(key[head])
            self._keys[layer][head].append(self._rotate(key[head : head + 1], self.position, layer)[0])
            self._values[layer][head].append(value[head])
        kept = kept(query) if callable(kept) else kept
        mixed, scale = np.zeros((self.heads, self.d_value)), self.scale
        sinks = self.weights.get(f"{prefix}.sinks")
        for head in range(self.heads):
            kv_head = head // (self.heads // self.kv_heads)
            entries = len(self._keys[layer][kv_head])
            seen = [i for i in range(entries) if kept is None or i == entries - 1 or kept[head, i]]
            seen = seen if measured else [i for i in seen if i > self.position - self.config.sliding_window]
            keys = [self._keys[layer][kv_head][i] for i in seen]
            if in_cache and measured:
                places = [self.unrotated[layer][kv_head][i][None] for i in seen]
                keys = [self._rotate(entry, stands, layer)[0] for stands, entry in enumerate(places)]
                query[head] = self._rotate(unrotated[head : head + 1], len(seen) - 1, layer)[0]
            own = {} if stored is None else stored[head]
            keys = [own[i][0] if i in own else key for i, key in zip(seen, keys, strict=True)]
            scores = [capped(float(query[head] @ key) * scale, self.cap) for key in keys]
            values = [own[i][1] if i in own else self._values[layer][kv_head][i] for i in seen]
            extra = None if extras is None else extras[head]
            scores += [] if extra is None else [extra.logit(query[head])]
            values += [] if extra is None else [extra.value]
            scores += [] if sinks is None else [float(sinks[head])]
            for weight, value_of in zip(softmax(scores), values, strict=False):
                mixed[head] += weight * value_of
        gate = self._gate(prefix, hidden)
        mixed *= gate
        if measured:
            record.query.append(query)
            record.head_output.append(mixed)
            record.gates.append(gate)
        return self._linear(f"{prefix}.o_proj", mixed.reshape(-1))

    def _gate(self, prefix: str, hidden: Array) -> Array:
        """γ of a token, (head, d_value): the softplus of a projection of its hidden state; 1 where there is none."""
        if f"{prefix}.g_proj.weight" not in self.weights:
            return np.ones((self.heads, self.d_value))
        return np.logaddexp(0, self._linear(f"{prefix}.g_proj", hidden)).reshape(self.heads, self.d_value)

    def _projections(self, prefix: str, hidden: Array) -> tuple[Array, Array, Array]:
        sizes = [self.heads * self.d_head, self.kv_heads * self.d_head, self.kv_heads * self.d_head]
        if f"{prefix}.qkv_proj.weight" in self.weights:
            parts = np.split(self._linear(f"{prefix}.qkv_proj", hidden), np.cumsum(sizes)[:-1])
        else:
            parts = [self._linear(f"{prefix}.{name}_proj", hidden) for name in "qkv"]
        parts = [self._head_norm(part, f"{prefix}.{name}_norm.weight") for part, name in zip(parts, "qkv", strict=True)]
        widths = (self.d_head, self.d_head, self.d_value)
        query, key, value = (part.reshape(-1, width) for part, width in zip(parts, widths, strict=True))
        return query, key, value

    def _head_norm(self, rows: Array, name: str) -> Array:
        """Of each head, or of all heads of a projection together, as long as its weight is."""
        if name not in self.weights:
            return rows
        return np.concatenate([self._norm(part, name) for part in rows.reshape(-1, len(self.weights[name]))])

    def rotate(self, key: Array, position: int, layer: int) -> Array:
        """A key of a measured layer where it stands."""
        return self._rotate(key[None], position, self.places[layer])[0]

    def _rotate(self, rows: Array, position: int, layer: int) -> Array:
        asked = self.config.rope_parameters
        asked = asked.get(self.types[layer], asked)
        rotary = int(self.d_head * asked.get("partial_rotary_factor", 1.0))
        half = rotary // 2
        first, second, rest = rows[:, :half], rows[:, half:rotary], rows[:, rotary:]
        cos, sin = _turn(position, asked["rope_theta"], rotary)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=1)

    def _mlp(self, layer: int, hidden: Array) -> Array:
        prefix = f"model.layers.{layer}.mlp"
        if f"{prefix}.experts.down_proj" in self.weights:
            return self._experts(prefix, hidden)
        if f"{prefix}.gate_up_proj.weight" in self.weights:
            gate, up = np.split(self._linear(f"{prefix}.gate_up_proj", hidden), 2)
        else:
            gate, up = self._linear(f"{prefix}.gate_proj", hidden), self._linear(f"{prefix}.up_proj", hidden)
        return self._linear(f"{prefix}.down_proj", self._activated(gate) * up)

    def _activated(self, gate: Array) -> Array:
        if self.config.model_type in _GEMMA:  # the tanh approximation of GELU
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            return 0.5 * gate * (1 + np.tanh(inner))
        return gate / (1 + np.exp(-gate))

    def _experts(self, prefix: str, hidden: Array) -> Array:
        """The most probable experts of this token, each with its share among them."""
        router = f"{prefix}.router" if f"{prefix}.router.weight" in self.weights else f"{prefix}.gate"
        logits = self._linear(router, hidden)
        chosen = sorted(range(len(logits)), key=lambda expert: -logits[expert])[: self.config.num_experts_per_tok]
        shares = softmax([float(logits[expert]) for expert in chosen])
        expert_of = self._clamped_expert if self.config.model_type == "gpt_oss" else self._expert
        made = [share * expert_of(f"{prefix}.experts", expert, hidden)
                for share, expert in zip(shares, chosen, strict=True)]  # fmt: skip
        return np.sum(made, axis=0)

    def _expert(self, prefix: str, expert: int, hidden: Array) -> Array:
        gate, up = np.split(self.weights[f"{prefix}.gate_up_proj"][expert] @ hidden, 2)
        return self.weights[f"{prefix}.down_proj"][expert] @ (self._activated(gate) * up)

    def _clamped_expert(self, prefix: str, expert: int, hidden: Array) -> Array:
        """Gate and up lie alternately, are clamped to 7, and the gate's slope is 1.702."""
        both = (
            hidden @ self.weights[f"{prefix}.gate_up_proj"][expert]
            + self.weights[f"{prefix}.gate_up_proj_bias"][expert]
        )
        gate, up = np.minimum(both[::2], 7.0), np.clip(both[1::2], -7.0, 7.0)
        made = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
        return made @ self.weights[f"{prefix}.down_proj"][expert] + self.weights[f"{prefix}.down_proj_bias"][expert]


@lru_cache
def _turn(position: int, theta: float, rotary: int) -> tuple[Array, Array]:
    """Cosine and sine of each pair's angle."""
    angles = position / theta ** (np.arange(rotary // 2) * 2 / rotary)
    return np.cos(angles), np.sin(angles)


def _rms(hidden: Array, weight: Array, eps: float) -> Array:
    scaled: Array = hidden / np.sqrt((hidden * hidden).mean() + eps) * weight
    return scaled
