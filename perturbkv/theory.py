"""The paper's quantities for one layer: pure functions of tensors.

Axes: `config` are eviction configurations, `head` query heads, `key` the n+t+1 entries that the decoding query sees
(prompt, tokens decoded before it, itself), `d_key` and `d_value` the components of a head's keys and values. Masks are
True where an entry is kept. Everything is computed in `WORK` precision whatever the model's dtype; bounds have the unit
of the L1 norm of a head's contribution to the output.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

WORK = torch.float64
"""Precision of every sum over entries (METHOD: float32 or better, float64 on the CPU path)."""
Mask = Bool[Tensor, "config head key"] | Float[Tensor, "config head key"]
"""N of each entry: whether it is kept, or as a number, which saves the conversion where it is used again."""


@dataclass(frozen=True, eq=False)
class Softmax:
    """The softmax of a layer: how logits become attention weights (METHOD: soft caps, sinks in the softmax).

    Attributes:
        scale: factor on the product of query and key.
        cap: soft cap c, by which a logit z becomes c · tanh(z / c); None: logits are not capped.
        sinks: logit of each head's sink, an entry without a value that is never evicted; None without sinks.
    """

    scale: float
    cap: float | None = None
    sinks: Float[Tensor, " head"] | None = None

    def of_heads(self, heads: slice) -> Softmax:
        """Return the softmax of some of the layer's heads."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[heads])

    def cap_logits(self, logits: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return scaled products of queries and keys as logits: capped where the layer caps."""
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def logits(
        self, query: Float[Tensor, "*batch query d_key"], key: Float[Tensor, "*#batch key d_key"]
    ) -> Float[Tensor, "*batch query key"]:
        """Return the logits of queries on keys, in the dtype of both."""
        return self.cap_logits(query @ key.mT * self.scale)

    def logits_of_scaled(
        self, query: Float[Tensor, "*batch query d_key"], key: Float[Tensor, "*#batch key d_key"]
    ) -> Float[Tensor, "*batch query key"]:
        """Return what `logits` does up to rounding, faster for few queries: these are scaled, and not the products."""
        return self.cap_logits(query * self.scale @ key.mT)

    def weights(
        self, logits: Float[Tensor, "head *query key"]
    ) -> tuple[Float[Tensor, "head *query key"], Float[Tensor, head * query]]:
        """Return the attention weights of entries with these logits, and those of the heads' sinks (0 without)."""
        return softmax_with_sinks(logits, self.sinks)

    def log_total(self, logits: Float[Tensor, "head *query key"]) -> Float[Tensor, head * query]:
        """Return log Z, the logarithm of the softmax's denominator: log-sum-exp of the logits, the sink's too."""
        total = logits.logsumexp(dim=-1)
        if self.sinks is None:
            return total
        return torch.logaddexp(total, self.sinks.to(total.dtype).view(-1, *[1] * (total.ndim - 1)))


def softmax_with_sinks(
    logits: Float[Tensor, "head *query key"], sinks: Float[Tensor, " head"] | None
) -> tuple[Float[Tensor, "head *query key"], Float[Tensor, head * query]]:
    """Return the softmax weights of entries and sinks; a sink is one more logit in every row of its head."""
    if sinks is None:
        return logits.softmax(dim=-1), torch.zeros_like(logits[..., 0])
    sink_logits = sinks.to(logits.dtype).view(-1, *[1] * (logits.ndim - 1)).expand(*logits.shape[:-1], 1)
    both = torch.cat([logits, sink_logits], dim=-1).softmax(dim=-1)
    return both[..., :-1], both[..., -1]


def decode_attention(
    query: Float[Tensor, "head d_key"], key: Float[Tensor, "kv_head key d_key"], softmax: Softmax
) -> Float[Tensor, "head key"]:
    """Return A, the softmax attention weights of one decoding query over all its entries (paper, eq. 2)."""
    return decode_weights(query, key, softmax)[0]


def decode_weights(
    query: Float[Tensor, "head d_key"],
    key: Float[Tensor, "kv_head key d_key"],
    softmax: Softmax,
    present: Bool[Tensor, "kv_head key"] | None = None,
) -> tuple[Float[Tensor, "head key"], Float[Tensor, " head"]]:
    """Return a decoding query's attention weights A, and the attention weight of every head's sink (0 without a sink).

    Keys that are not `present` take no part in the softmax.
    """
    return softmax.weights(decode_logits(query, key, softmax, present))


def decode_logits(
    query: Float[Tensor, "head d_key"],
    key: Float[Tensor, "kv_head key d_key"],
    softmax: Softmax,
    present: Bool[Tensor, "kv_head key"] | None = None,
) -> Float[Tensor, "head key"]:
    """Return the logits of a decoding query, whose softmax is A; −∞ for keys that are not `present`."""
    heads, d_key = query.shape
    grouped = query.to(WORK).view(key.shape[0], heads // key.shape[0], d_key)
    logits = softmax.logits(grouped, key.to(WORK))
    if present is not None:
        logits = logits.masked_fill(~present.unsqueeze(1), -torch.inf)
    return logits.flatten(0, 1)


def attention_output(
    query: Float[Tensor, "head d_key"],
    key: Float[Tensor, "kv_head key d_key"],
    value: Float[Tensor, "kv_head key d_value"],
    softmax: Softmax,
    present: Bool[Tensor, "kv_head key"] | None = None,
) -> Float[Tensor, "head d_value"]:
    """Return Σ A V over the given entries, with A the softmax over these entries, and the sinks, alone.

    Keys that are not `present` take no part. It serves entries that are stored in few bits: their weights are no
    renormalised part of the full A.
    """
    weights, _ = decode_weights(query, key, softmax, present)
    return weighted_sums(weights.unsqueeze(0), value)[0]


def weighted_sums(
    weights: Float[Tensor, "config head key"], summands: Float[Tensor, "kv_head key column"]
) -> Float[Tensor, "config head column"]:
    """Return the sums of `summands` over every head's entries, weighted by `weights`, per column."""
    return _grouped_sums(_by_kv_head(weights, len(summands)).contiguous(), summands.to(weights.dtype))


def _by_kv_head(
    weights: Shaped[Tensor, "config head key"], kv_heads: int
) -> Shaped[Tensor, "kv_head config group key"]:
    """Return a view of the weights with query heads grouped by key/value head."""
    return weights.view(len(weights), kv_heads, -1, weights.shape[-1]).transpose(0, 1)


def _grouped_sums(
    weights: Float[Tensor, "kv_head config group key"], summands: Float[Tensor, "kv_head key column"]
) -> Float[Tensor, "config head column"]:
    """Return the weighted sums of `summands` per query head, from weights grouped by key/value head."""
    sums = weights.flatten(1, 2) @ summands  # equal rows give equal bits; transposed, which is faster, they do not
    return sums.view(*weights.shape[:3], -1).transpose(0, 1).flatten(1, 2)


def gated_projection(
    w_o: Float[Tensor, "d_model head_d_value"], gate: Float[Tensor, " head_d_value"] | None
) -> Float[Tensor, "d_model head_d_value"]:
    """Return the output projection with γ before it, diag(γ) W_O, in `WORK`; W_O itself where there is no gate."""
    return w_o if gate is None else w_o.to(WORK) * gate.to(WORK)


def head_slices(w_o: Float[Tensor, "d_model head_d_value"], heads: int) -> Float[Tensor, "head d_value d_model"]:
    """Return W_O^h, every head's slice of the output projection, in `WORK` precision; `w_o` is `o_proj.weight`."""
    return w_o.to(WORK).view(len(w_o), heads, -1).permute(1, 2, 0)


def project_outputs(
    head_output: Float[Tensor, "*batch head d_value"], slices: Float[Tensor, "head d_value d_model"]
) -> Float[Tensor, "*batch head d_model"]:
    """Return x_h W_O^h: the projection of every head's vector x_h (METHOD: o_h)."""
    return torch.einsum("...hk,hkd->...hd", head_output.to(WORK), slices)


@dataclass(frozen=True)
class KeptSums:
    """Sums over the kept entries of each head, with N = 1 for a kept entry, attention A and value norm ν.

    Attributes:
        mass: S = Σ N A; of stage 1 and the always-kept entries it is `sigma_stage1`.
        weighted: Σ N A ν.
        mixed: Σ N A V, before the output projection.
    """

    mass: Float[Tensor, "config head"]
    weighted: Float[Tensor, "config head"]
    mixed: Float[Tensor, "config head d_value"]


@dataclass(frozen=True)
class Summands:
    """The columns summed over a layer's entries, concatenated so that one product gives all sums.

    Attributes:
        columns: V, then ν of each query head of the group, then 1.
        d_value: how many of the columns are V.
    """

    columns: Float[Tensor, "kv_head key column"]
    d_value: int

    def first_entries(self, entries: int) -> Summands:
        """Return the summands of the first `entries` entries, as a view."""
        return Summands(self.columns[:, :entries], self.d_value)

    def without_values(self) -> Summands:
        """Return the summands without the V columns, as a view."""
        return Summands(self.columns[..., self.d_value :], 0)

    def norms(self) -> Float[Tensor, "head key"]:
        """Return the value norms ν."""
        return self.columns[..., self.d_value : -1].transpose(1, 2).flatten(0, 1)

    def smallest_norms(self) -> Float[Tensor, " head"]:
        """Return M per head: the smallest value norm ν over the entries."""
        return self.columns[..., self.d_value : -1].amin(dim=1).flatten()

    def sums(self, weights: Float[Tensor, "config head key"]) -> KeptSums:
        """Return the weighted sums of the summands over the entries, using every head's own value norms ν."""
        return self._split_columns(weighted_sums(weights, self.columns))

    def kept_sums(self, attention: Float[Tensor, "head key"], kept: Mask) -> KeptSums:
        """Return the sums, weighted by A, of the summands over the kept entries of every head and configuration."""
        mask, full = (_by_kv_head(tensor, len(self.columns)) for tensor in (kept, attention.unsqueeze(0)))
        weights = torch.mul(full, mask, out=attention.new_empty(mask.shape))
        return self._split_columns(_grouped_sums(weights, self.columns))

    def _split_columns(self, sums: Float[Tensor, "config head column"]) -> KeptSums:
        """Return column sums as `KeptSums`; of a group's value-norm columns, a head's own is taken."""
        configs, heads, _ = sums.shape
        own = self.d_value + torch.arange(heads, device=sums.device) % (heads // len(self.columns))
        weighted = sums.gather(-1, own.view(1, -1, 1).expand(configs, -1, 1)).squeeze(-1)
        return KeptSums(mass=sums[..., -1], weighted=weighted, mixed=sums[..., : self.d_value])


def stack_summands(value: Float[Tensor, "kv_head key d_value"], norms: Float[Tensor, "head key"]) -> Summands:
    """Return a layer's `Summands`, from its values V and value norms ν, in `WORK` precision."""
    per_head = norms.view(value.shape[0], -1, norms.shape[1]).transpose(1, 2).to(WORK)
    columns = torch.cat([value.to(WORK), per_head, torch.ones_like(per_head[..., :1])], dim=-1)
    return Summands(columns, value.shape[-1])


def kept_sums(
    attention: Float[Tensor, "head key"],
    summands: Summands,
    kept: Mask,
    sink: Float[Tensor, " head"] | None = None,
) -> KeptSums:
    """Return the sums over kept entries for perturbation and bounds, the sink's mass included.

    `sink` is the weight of each head's sink, which is never evicted and adds only to the mass.
    """
    sums = summands.kept_sums(attention, kept)
    return sums if sink is None else replace(sums, mass=sums.mass + sink)


@dataclass(frozen=True)
class Distances:
    """Distances between two sets of vectors u and v (METHOD: L1, and the other measures reported with it).

    Attributes:
        l1, l2: ‖v − u‖₁ and ‖v − u‖₂.
        cosine: 1 − cos(u, v), in [0, 2].
    """

    l1: Float[Tensor, "*batch"]
    l2: Float[Tensor, "*batch"]
    cosine: Float[Tensor, "*batch"]

    @classmethod
    def names(cls, quantity: str, l1_suffix: str = "") -> tuple[str, ...]:
        """Return the names of a quantity's variables: `quantity` + `l1_suffix`, `quantity`_l2, `quantity`_cosine."""
        return tuple(quantity + (l1_suffix if field.name == "l1" else f"_{field.name}") for field in fields(cls))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the distances, in the order of `names`."""
        return tuple(getattr(self, field.name) for field in fields(self))


def distances(full: Float[Tensor, "*#batch d_model"], moved: Float[Tensor, "*batch d_model"]) -> Distances:
    """Return the L1, L2 and cosine distances between u = `full` and v = u + δ, where δ is `moved`.

    1 − cos is not computed by subtracting cos from 1, which leaves nothing below 1e-16: δ is split into its component
    along u and the orthogonal rest p, so that with t the component of v along u, 1 − cos = p² / (‖v‖ (‖v‖ + t)), exact
    to about ε ‖δ‖ / ‖p‖. Two zero vectors are at distance 0. A vector that is zero, or no longer than the rounding
    error of the other one, has no direction and is at distance 1 from any other.
    """
    length = torch.linalg.vector_norm(full, dim=-1)
    safe = length.where(length > 0, 1)
    along = (moved * full).sum(dim=-1) / safe
    across = torch.linalg.vector_norm(torch.addcmul(moved, (along / safe).unsqueeze(-1), full, value=-1), dim=-1)
    toward = length + along
    other = torch.hypot(toward, across)
    near = across / other * (across / (other + toward))
    distance = torch.where(toward > 0, near, 1 - toward / other)
    nowhere = (length > 0).to(distance.dtype).expand_as(distance)
    return Distances(
        l1=moved.abs().sum(dim=-1),
        l2=torch.hypot(along, across),
        cosine=torch.where(other > 4 * torch.finfo(WORK).eps * length, distance, nowhere),
    )


def noise_floors(measured: Distances, full: Float[Tensor, "*batch d_model"], inputs: torch.dtype) -> Distances:
    """Return the noise floors of u = `full`: the larger of `measured`, distances without eviction, and rounding error.

    `inputs` is the dtype in which both sides were computed, ε its machine epsilon. Rounding moves a vector by ε times
    its norm, in L1 as in L2; as 1 − cos that is ε²/2, the distance between vectors at an angle of ε, which `distances`
    resolves.
    """
    epsilon = torch.finfo(inputs).eps
    return Distances(
        l1=floor_at_rounding(measured.l1, epsilon * full.abs().sum(dim=-1)),
        l2=floor_at_rounding(measured.l2, epsilon * torch.linalg.vector_norm(full, dim=-1)),
        cosine=floor_at_rounding(measured.cosine, torch.full_like(measured.cosine, epsilon**2 / 2)),
    )


def floor_at_rounding(measured: Float[Tensor, "*batch"], rounding: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Return a noise floor: the larger of `measured` and `rounding`, and always above 0 (METHOD, protocol 4)."""
    return torch.maximum(measured, rounding).clamp(min=torch.finfo(WORK).tiny)


def isolated_perturbation(
    whole: Float[Tensor, "*config head d_value"],
    mixed: Float[Tensor, "config head d_value"],
    mass: Float[Tensor, "config head"],
    slices: Float[Tensor, "head d_value d_model"],
    output: Float[Tensor, "head d_model"],
) -> Distances:
    """Return the distances (config, head) between a head's output o_h and its output from the kept entries alone.

    The L1 distance is L_h (paper, eq. 5 and Theorem 1). `whole` is Σ A V over all entries and `output` its projection
    by `project_outputs`; `mixed` is Σ N A V and `mass` Σ N A over the kept entries.
    """
    return distances(output, project_outputs(mixed / mass.unsqueeze(-1) - whole, slices))


def corrected_output(
    mixed: Float[Tensor, "head d_value"],
    mass: Float[Tensor, " head"],
    mean: Float[Tensor, "head d_value"],
    predicted: Float[Tensor, " head"],
) -> Float[Tensor, "head d_value"]:
    """Return the corrected head output ô + (1 − Ŝ)(μ̂_gone − ô) before W_O (METHOD: the split of an evicted output).

    `mixed` is Σ N A V and `mass` S = Σ N A of the kept entries; `mean` is μ̂_gone, and `predicted` the predicted mass
    of the evicted entries. Both masses are shares of the full softmax: 1 − Ŝ = predicted / (S + predicted).
    """
    return (mixed + predicted.unsqueeze(-1) * mean.to(WORK)) / (mass + predicted).unsqueeze(-1)


def propagated_perturbation(
    full: Float[Tensor, "head d_value"],
    evicted: Float[Tensor, "row head d_value"],
    slices: Float[Tensor, "head d_value d_model"],
) -> tuple[Float[Tensor, "head d_model"], Distances]:
    """Return the full run's o_h, and its distances (row, head) from the evicted runs' outputs (METHOD: propagated).

    Output and differences go through one product: subtracting two products would leave their rounding.
    """
    vectors = full.to(WORK)
    both = project_outputs(torch.cat([vectors.unsqueeze(0), evicted.to(WORK) - vectors]), slices)
    return both[0], distances(both[0], both[1:])


def largest_sums(attention: Float[Tensor, "head key"]) -> Float[Tensor, "head count"]:
    """Return, per head and count k = 0, 1, 2, …, the sum of the k largest attention weights."""
    if attention.device.type == "cpu":  # by NumPy, which takes a tenth of torch's time
        descending = torch.from_numpy(np.sort(attention.numpy(), axis=-1)).flip(-1)
    else:
        descending = attention.sort(dim=-1, descending=True).values
    cumulative = descending.cumsum(dim=-1)
    return torch.cat([torch.zeros_like(cumulative[:, :1]), cumulative], dim=-1)


def sigma_topk(
    largest: Float[Tensor, "head count"], counts: Int[Tensor, "config head"]
) -> Float[Tensor, "config head"]:
    """Return σ, the sum of the ⌊αb⌋ largest attention weights of a head (paper, Assumption 1)."""
    clipped = counts.clamp(max=largest.shape[-1] - 1)
    return largest.expand(len(counts), -1, -1).gather(-1, clipped.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class Bounds:
    """Upper bounds of the isolated perturbation L, and their attention masses, (config, head) each."""

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
    """Return the bounds θ, θ̂ and θ̂_relax of the isolated perturbation per configuration (paper, eqs. 8, 14 and 18).

    `total` is C = Σ A ν and `smallest` is M = min ν, both over all entries; `stage1` sums over stage 1 and the
    always-kept entries, a subset of `kept`. θ̂ is evidence, and θ̂ ≤ θ̂_relax holds, only where σ > 0.5.
    """
    slope = 2 - 1 / stage1.mass
    return Bounds(
        retained_mass=kept.mass,
        sigma_stage1=stage1.mass,
        theta=total - (2 - 1 / kept.mass) * kept.weighted,
        theta_hat=total - slope * kept.weighted,
        theta_hat_relax=total - slope * stage1.weighted - smallest * slope * (kept.mass - stage1.mass),
    )


def drift(full: Float[Tensor, "*layer d_model"], evicted: Float[Tensor, "row *layer d_model"]) -> Distances:
    """Return the distances (row, *layer) of each evicted hidden state from the full run's (METHOD: Layer drift)."""
    return distances(full.to(WORK), evicted.to(WORK) - full.to(WORK))


def logit_divergence(
    log_full: Float[Tensor, " vocab"], log_evicted: Float[Tensor, "row vocab"]
) -> tuple[Float[Tensor, " row"], Bool[Tensor, " row"]]:
    """Return, per row, the next token's KL(full ‖ evicted) in nats, and whether both runs predict the same token.

    Arguments are `log_probabilities` of every token.
    """
    divergence = (log_full.exp() * (log_full - log_evicted)).sum(dim=-1)
    return divergence, log_evicted.argmax(dim=-1) == log_full.argmax(dim=-1)


def draft_acceptance(
    log_full: Float[Tensor, " vocab"], log_evicted: Float[Tensor, "row vocab"]
) -> Float[Tensor, " row"]:
    """Return, per row, the probability Σ_v min(p(v), q(v)) that a token drawn from the evicted run's q is taken.

    The full run's p verifies it by rejection sampling (Leviathan et al., 2022, arXiv 2211.17192, theorem 3.5): 1 − the
    total variation distance. Arguments are `log_probabilities` of every token.
    """
    return torch.minimum(log_full, log_evicted).exp().sum(dim=-1).clamp(max=1)


def log_probabilities(logits: Float[Tensor, "*row vocab"]) -> Float[Tensor, "*row vocab"]:
    """Return the log probability of every next token, in nats."""
    return logits.to(WORK).log_softmax(dim=-1)


def token_log_probability(log_p: Float[Tensor, "*row vocab"], token: Int[Tensor, ""]) -> Float[Tensor, " *row"]:
    """Return one token's of `log_probabilities` (METHOD: log p and perplexity); NaN for the token −1, which is none."""
    return log_p.index_select(-1, token.clamp(min=0).view(1)).squeeze(-1).where(token >= 0, torch.nan)
