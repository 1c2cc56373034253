"""A naive float64 decoder of the five families, with an eviction mask per layer and query head.

One token at a time from the beginning: keys and values are appended, nothing is batched. Keys are also kept without
rotation, so that a step can place those that a head sees anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.oracle.theory import Array, softmax


@dataclass
class Step:
    """Per layer: query (head, d_head), head_output (head, d_head), hidden (d_model); then final and logits."""

    query: list[Array] = field(default_factory=list)
    head_output: list[Array] = field(default_factory=list)
    hidden: list[Array] = field(default_factory=list)
    final: Any = None
    logits: Any = None


class Decoder:
    """Weights of a transformers model as float64, and a cache that grows by a token a step."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.weights = {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
        self.heads, self.kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        self.d_head = getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads
        self.layers = self.config.num_hidden_layers
        self.keys: list[list[list[Array]]] = [[[] for _ in range(self.kv_heads)] for _ in range(self.layers)]
        self.values: list[list[list[Array]]] = [[[] for _ in range(self.kv_heads)] for _ in range(self.layers)]
        self.unrotated: list[list[list[Array]]] = [[[] for _ in range(self.kv_heads)] for _ in range(self.layers)]
        self.position = 0

    def step(self, token: int, kept: list[Array] | None = None, in_cache: bool = False) -> Step:
        """Decode a token; `kept[layer]` (head, entries so far) masks older entries, the token's own is always seen.

        With `in_cache` a head's first entry that it sees stands at 0, the next one at 1, …; the query at its own.
        """
        record = Step()
        hidden = self.weights["model.embed_tokens.weight"][token].copy()
        for layer in range(self.layers):
            mask = None if kept is None else kept[layer]
            normed = self._norm(hidden, f"{layer}.input_layernorm")
            hidden = hidden + self._attention(layer, normed, mask, in_cache, record)
            hidden = hidden + self._mlp(layer, self._norm(hidden, f"{layer}.post_attention_layernorm"))
            record.hidden.append(hidden.copy())
        record.final = _rms(hidden, self.weights["model.norm.weight"], self.config.rms_norm_eps)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        record.logits = head @ record.final
        self.position += 1
        return record

    def _norm(self, hidden: Array, name: str) -> Array:
        return _rms(hidden, self.weights[f"model.layers.{name}.weight"], self.config.rms_norm_eps)

    def _linear(self, name: str, vector: Array) -> Array:
        out = self.weights[f"{name}.weight"] @ vector
        return out + self.weights.get(f"{name}.bias", 0.0)

    def _attention(self, layer: int, hidden: Array, kept: Array | None, in_cache: bool, record: Step) -> Array:
        prefix = f"model.layers.{layer}.self_attn"
        unrotated, key, value = self._projections(prefix, hidden)
        query = self._rotate(unrotated, self.position)
        for head in range(self.kv_heads):
            self.unrotated[layer][head].append(key[head])
            self.keys[layer][head].append(self._rotate(key[head : head + 1], self.position)[0])
            self.values[layer][head].append(value[head])
        mixed = np.zeros((self.heads, self.d_head))
        for head in range(self.heads):
            kv_head = head // (self.heads // self.kv_heads)
            entries = len(self.keys[layer][kv_head])
            seen = [i for i in range(entries) if kept is None or i == entries - 1 or kept[head, i]]
            keys = [self.keys[layer][kv_head][i] for i in seen]
            if in_cache:
                entries = [self.unrotated[layer][kv_head][i][None] for i in seen]
                keys = [self._rotate(entry, stands)[0] for stands, entry in enumerate(entries)]
                query[head] = self._rotate(unrotated[head : head + 1], len(seen) - 1)[0]
            scores = [float(query[head] @ key) / self.d_head**0.5 for key in keys]
            for weight, i in zip(softmax(scores), seen, strict=True):
                mixed[head] += weight * self.values[layer][kv_head][i]
        record.query.append(query)
        record.head_output.append(mixed)
        return self._linear(f"{prefix}.o_proj", mixed.reshape(-1))

    def _projections(self, prefix: str, hidden: Array) -> tuple[Array, Array, Array]:
        sizes = [self.heads * self.d_head, self.kv_heads * self.d_head, self.kv_heads * self.d_head]
        if f"{prefix}.qkv_proj.weight" in self.weights:
            parts = np.split(self._linear(f"{prefix}.qkv_proj", hidden), np.cumsum(sizes)[:-1])
        else:
            parts = [self._linear(f"{prefix}.{name}_proj", hidden) for name in "qkv"]
        query, key, value = (part.reshape(-1, self.d_head) for part in parts)
        if f"{prefix}.q_norm.weight" in self.weights:
            eps = self.config.rms_norm_eps
            query = np.stack([_rms(row, self.weights[f"{prefix}.q_norm.weight"], eps) for row in query])
            key = np.stack([_rms(row, self.weights[f"{prefix}.k_norm.weight"], eps) for row in key])
        return query, key, value

    def _rotate(self, rows: Array, position: int) -> Array:
        rotary = int(self.d_head * self.config.rope_parameters.get("partial_rotary_factor", 1.0))
        half, theta = rotary // 2, self.config.rope_parameters["rope_theta"]
        angles = position / theta ** (np.arange(half) * 2 / rotary)
        first, second, rest = rows[:, :half], rows[:, half:rotary], rows[:, rotary:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=1)

    def _mlp(self, layer: int, hidden: Array) -> Array:
        prefix = f"model.layers.{layer}.mlp"
        if f"{prefix}.gate_up_proj.weight" in self.weights:
            gate, up = np.split(self._linear(f"{prefix}.gate_up_proj", hidden), 2)
        else:
            gate, up = self._linear(f"{prefix}.gate_proj", hidden), self._linear(f"{prefix}.up_proj", hidden)
        return self._linear(f"{prefix}.down_proj", gate / (1 + np.exp(-gate)) * up)


def _rms(vector: Array, weight: Array, eps: float) -> Array:
    return vector / np.sqrt(np.mean(vector**2) + eps) * weight
