"""The paper's quantities for one layer: pure functions of tensors.

Axes: `config` are eviction configurations, `head` query heads, `key` the n+t+1 entries that the decoding query sees
(prompt, tokens decoded before it, itself). Masks are True where an entry is kept. Everything is computed in `WORK`
precision whatever the model's dtype; units are the L1 norm of a head's contribution to the attention output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

WORK = torch.float64
"""Precision of every sum over entries (METHOD: float32 or better, float64 on the CPU path)."""


def decode_attention(
    query: Float[Tensor, "head d_head"], key: Float[Tensor, "kv_head key d_head"], scale: float
) -> Float[Tensor, "head key"]:
    """A: softmax attention weights of one decoding query over all its entries (paper, eq. 2)."""
    heads, d_head = query.shape
    grouped = query.to(WORK).view(key.shape[0], heads // key.shape[0], d_head)
    logits = grouped @ key.to(WORK).transpose(1, 2) * scale
    return logits.flatten(0, 1).softmax(dim=-1)


def weighted_sums(
    weights: Float[Tensor, "config head key"], quantities: Float[Tensor, "kv_head key column"]
) -> Float[Tensor, "config head column"]:
    """Σ_i weights_i x_i of each head's entries; all configurations of a key/value head go through one product."""
    configs, heads, keys = weights.shape
    kv_heads = quantities.shape[0]
    grouped = weights.view(configs, kv_heads, -1, keys).transpose(0, 1).reshape(kv_heads, -1, keys)
    sums = grouped @ quantities.to(weights.dtype)
    return sums.view(kv_heads, configs, heads // kv_heads, -1).transpose(0, 1).flatten(1, 2)


def projected_l1(
    head_output: Float[Tensor, "*batch head d_head"], w_o: Float[Tensor, "d_model head_d_head"]
) -> Float[Tensor, "*batch head"]:
    """‖x_h W_O^h‖₁ of each head's vector x_h, with `w_o` as `o_proj.weight` holds it."""
    heads, d_head = head_output.shape[-2:]
    per_head = w_o.to(head_output.dtype).view(-1, heads, d_head)
    return torch.einsum("...hk,dhk->...hd", head_output, per_head).abs().sum(dim=-1)


@dataclass(frozen=True)
class KeptSums:
    """What the kept entries of each head add up to.

    Attributes:
        mass: S = Σ N A; of stage 1 and the always-kept entries it is `sigma_stage1`.
        weighted: Σ N A ν.
        mixed: Σ N A V, before the output projection.
    """

    mass: Float[Tensor, "config head"]
    weighted: Float[Tensor, "config head"]
    mixed: Float[Tensor, "config head d_head"]


def quantities(
    value: Float[Tensor, "kv_head key d_head"], norms: Float[Tensor, "head key"]
) -> Float[Tensor, "kv_head key column"]:
    """What is summed over entries: V, then ν of each of the group's heads, then 1."""
    per_head = norms.view(value.shape[0], -1, norms.shape[1]).transpose(1, 2).to(WORK)
    return torch.cat([value.to(WORK), per_head, torch.ones_like(per_head[..., :1])], dim=-1)


def kept_sums(
    attention: Float[Tensor, "head key"],
    summed: Float[Tensor, "kv_head key column"],
    kept: Bool[Tensor, "config head key"],
) -> KeptSums:
    """All sums over kept entries that perturbation and bounds are made of, in one product.

    `summed` are `quantities`; without their first columns, V, nothing is mixed.
    """
    heads, group = len(attention), len(attention) // len(summed)
    d_head = summed.shape[-1] - group - 1
    sums = weighted_sums(attention * kept, summed)
    own = d_head + torch.arange(heads, device=sums.device) % group
    weighted = sums.gather(-1, own.view(1, -1, 1).expand(len(kept), -1, 1)).squeeze(-1)
    return KeptSums(mass=sums[..., -1], weighted=weighted, mixed=sums[..., :d_head])


def isolated_perturbation(
    whole: Float[Tensor, "*config head d_head"],
    mixed: Float[Tensor, "config head d_head"],
    mass: Float[Tensor, "config head"],
    w_o: Float[Tensor, "d_model head_d_head"],
) -> Float[Tensor, "config head"]:
    """L_h = ‖Σ_i (A_i − A'_i) V_i W_O^h‖₁ with A' = N⊙A / ΣNA (paper, eq. 5 and Theorem 1).

    `whole` is Σ A V over all entries; `mixed` Σ N A V and `mass` Σ N A over the kept ones.
    """
    return projected_l1(whole - mixed / mass.unsqueeze(-1), w_o)


def largest_sums(attention: Float[Tensor, "head key"]) -> Float[Tensor, "head count"]:
    """The largest attention that any 0, 1, 2, … entries hold."""
    cumulative = attention.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    return torch.cat([torch.zeros_like(cumulative[:, :1]), cumulative], dim=-1)


def sigma_topk(
    largest: Float[Tensor, "head count"], counts: Int[Tensor, "config head"]
) -> Float[Tensor, "config head"]:
    """Σ Top_{b'}(A) out of the `largest_sums` of A (paper, Assumption 1); `counts` is b' = ⌊αb⌋."""
    clipped = counts.clamp(max=largest.shape[-1] - 1)
    return largest.expand(len(counts), -1, -1).gather(-1, clipped.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class Bounds:
    """Upper bounds of L and what they are made of, each (config, head)."""

    retained_mass: Float[Tensor, "config head"]
    sigma_stage1: Float[Tensor, "config head"]
    theta: Float[Tensor, "config head"]
    theta_hat: Float[Tensor, "config head"]
    theta_hat_relax: Float[Tensor, "config head"]


def bounds(
    total: Float[Tensor, " head"],
    smallest: Float[Tensor, " head"],
    kept: KeptSums,
    stage1: KeptSums,
) -> Bounds:
    """θ, θ̂ and θ̂_relax of each configuration (paper, eqs. 8, 14 and 18).

    `total` is C = Σ A ν and `smallest` M = min ν, both over all entries; `stage1` holds stage 1 and the always-kept
    entries, a subset of `kept`. θ̂ is evidence, and θ̂ ≤ θ̂_relax holds, only where σ > 0.5.
    """
    slope = 2 - 1 / stage1.mass
    return Bounds(
        retained_mass=kept.mass,
        sigma_stage1=stage1.mass,
        theta=total - (2 - 1 / kept.mass) * kept.weighted,
        theta_hat=total - slope * kept.weighted,
        theta_hat_relax=total - slope * stage1.weighted - smallest * slope * (kept.mass - stage1.mass),
    )


@dataclass(frozen=True)
class Drift:
    """How far a hidden state moved, per row."""

    l1: Float[Tensor, " row"]
    l2: Float[Tensor, " row"]
    cosine: Float[Tensor, " row"]


def drift(full: Float[Tensor, " d_model"], evicted: Float[Tensor, "row d_model"]) -> Drift:
    """L1, L2 and cosine distance of each evicted hidden state from the full run's (METHOD: Layer drift)."""
    full, evicted = full.to(WORK), evicted.to(WORK)
    difference = evicted - full
    return Drift(
        l1=difference.abs().sum(dim=-1),
        l2=difference.square().sum(dim=-1).sqrt(),
        cosine=1 - torch.cosine_similarity(evicted, full.unsqueeze(0), dim=-1, eps=1e-300),
    )


def logit_divergence(
    full: Float[Tensor, " vocab"], evicted: Float[Tensor, "row vocab"]
) -> tuple[Float[Tensor, " row"], Bool[Tensor, " row"]]:
    """KL(full ‖ evicted) in nats, and whether both pick the same token."""
    log_full = full.to(WORK).log_softmax(dim=-1)
    log_evicted = evicted.to(WORK).log_softmax(dim=-1)
    divergence = (log_full.exp() * (log_full - log_evicted)).sum(dim=-1)
    return divergence, evicted.argmax(dim=-1) == full.argmax(dim=-1)
