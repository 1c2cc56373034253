"""Expected Attention (Devoto et al., 2025, https://arxiv.org/abs/2510.00636): the attention of queries to come.

Queries are taken as normal, with mean μ and covariance Σ of the prompt's queries before rotation, without its first
`sinks` positions; R̄ is the mean rotation of the `n_future` positions after the prompt, c the scale of logits (1/√d).

s_j = (softmax_j (c k_j·R̄μ + c² k_jᵀ R̄ Σ R̄ᵀ k_j / 2) + epsilon) · ‖v_j‖₂

as in NVIDIA/kvpress 0.5.5 (`ExpectedAttentionPress`), with its defaults: the softmax runs over all entries but the
first `sinks`, the window's among them, in each query head, and is averaged over a group; the norm is the value's
before W_O; `sinks` first entries always stay. Σ is divided by the number of queries.

Queries, covariance and exponents in float32 or better (as there), the softmax in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import option
from perturbkv.errors import ConfigError
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.theory import WORK


@dataclass(frozen=True)
class ExpectedAttention(Score):
    """Attention that the next queries are expected to give, times ‖v‖₂."""

    name: ClassVar[str] = "expected-attention"
    summary: ClassVar[str] = "attention that later queries are expected to give, times the value's L2 norm"
    paper: ClassVar[str] = "https://arxiv.org/abs/2510.00636"
    needs: ClassVar[tuple[str, ...]] = ("unrotated", "rotations", "keys", "values")
    own_defaults: ClassVar[tuple[str, ...]] = ("pool", "epsilon")
    by_place: ClassVar[tuple[str, ...]] = ("sinks",)
    holds_norms: ClassVar[bool] = True
    plain_logits: ClassVar[str] = "it takes a logit for normal where queries are"
    n_future: int = option(512, "positions after the prompt whose rotation is averaged", low=1, high=2**20)
    sinks: int = option(4, "first entries that stay and are looked at by nothing")
    use_covariance: bool = option(True, "whether the queries' covariance counts beside their mean")
    use_vnorm: bool = option(True, "whether the value's norm is multiplied in")
    epsilon: float = option(0.0, "added to the expected attention before the value's norm")

    def __post_init__(self) -> None:
        if self.epsilon and not self.use_vnorm:
            raise ConfigError("epsilon of expected-attention has no effect with use_vnorm=false; leave it out")

    @property
    def first_entries(self) -> int:
        """Number of first entries (sinks) that are always kept."""
        return self.sinks

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the expected attention times ‖v‖₂ per query head, with 0 for the sinks."""
        if layer.prefix <= self.sinks:
            return torch.zeros(layer.heads, layer.prefix, dtype=WORK, device=layer.keys.device)
        expected, _ = layer.softmax.weights(self._exponents(layer).to(WORK))
        if self.use_vnorm:
            norms = torch.linalg.vector_norm(layer.values[:, self.sinks :], dim=-1, dtype=WORK)
            expected = (expected + self.epsilon) * layer.per_head(norms)
        return torch.nn.functional.pad(expected, (self.sinks, 0))[:, : layer.prefix]

    def _exponents(self, layer: LayerView) -> Float[Tensor, "head key"]:
        """Return the log of the expected attention weight per entry, sinks excluded, up to a constant per head."""
        unrotated = layer.unrotated
        queries = unrotated.view(layer.kv_heads, layer.group, *unrotated.shape[1:])[:, :, self.sinks :]
        keys = layer.keys[:, self.sinks :].to(queries.dtype) * layer.softmax.scale
        rotation = layer.rotations(range(layer.entries, layer.entries + self.n_future)).mean(keys.shape[-1])
        rotation = rotation.to(queries.dtype)
        return torch.cat([self._group_exponents(*shared, rotation) for shared in zip(queries, keys, strict=True)])

    def _group_exponents(
        self,
        queries: Float[Tensor, "group key d_key"],
        keys: Float[Tensor, "key d_key"],
        rotation: Float[Tensor, "d_key d_key"],
    ) -> Float[Tensor, "group key"]:
        """Return one key/value head's log expected weights; `keys` are scaled, `rotation` is the mean rotation."""
        mean = queries.mean(dim=1)
        exponents = mean @ rotation.T @ keys.T
        if self.use_covariance:
            centred = queries - mean.unsqueeze(1)
            covariance = rotation @ (centred.mT @ centred / len(keys)) @ rotation.T
            exponents += (keys @ covariance).mul_(keys).sum(dim=-1) / 2
        return exponents
