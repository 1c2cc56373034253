"""What stands in for entries that are gone: one more entry per query head, or entries with a bias each.

A correction is one entry, whose value is the mean of the evicted values.

METHOD, the split of an evicted output: `ô + (1 − Ŝ)(μ̂_gone − ô)` is attention over the kept entries and one more, with
value `μ̂_gone` and the predicted log-mass of the evicted entries as logit. The mean is weighted by the attention of the
window's mean query, after rotation, like the kept keys. A head without evicted entries has the logit −∞, and so its own
output, bit for bit. Decoded tokens and sinks in the softmax count as kept. A log-mass is no logit of an entry, and no
soft cap is on it; where logits are capped, none is linear in the query.

A compacted cache has entries of its own, with a bias that is added to each logit (METHOD: Caches that are no kept set).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from perturbkv import theory
from perturbkv.configs.choice import Choice
from perturbkv.configs.precision import LINEAR, ORACLE
from perturbkv.theory import Softmax

Attended = tuple[Float[Tensor, "head #query d_value"], Float[Tensor, "head query"]]
"""Attention output per query, or the one of all queries, and the log-sum-exp of the logits."""


@dataclass(frozen=True, eq=False)
class Correction(ABC):
    """A correction of one row and layer; `value` is μ̂_gone of each head, before W_O."""

    value: Float[Tensor, "head d_value"]

    def attend(self, query: Float[Tensor, "head query d_key"], softmax: Softmax) -> Attended:
        """Return the value, and the log of its softmax term per query."""
        return self.value.unsqueeze(1), self.logits(query, softmax)

    @abstractmethod
    def logits(self, query: Float[Tensor, "head query d_key"], softmax: Softmax) -> Float[Tensor, "head query"]:
        """Return the log-mass of the evicted entries per query, the log of their summed softmax terms."""


@dataclass(frozen=True, eq=False)
class PredictedStandIn(Correction):
    """A correction whose log-mass is linear in the query, or constant where the key is 0.

    Attributes:
        key: k̄_gone, the mean of the evicted keys.
        bias: offset of the key's logit; −∞ where nothing was evicted.
    """

    key: Float[Tensor, "head d_key"]
    bias: Float[Tensor, " head"]

    def logits(self, query: Float[Tensor, "head query d_key"], softmax: Softmax) -> Float[Tensor, "head query"]:
        """Return the predicted log-mass of the evicted entries per query, the log of their summed softmax terms."""
        work = torch.promote_types(query.dtype, torch.float32)
        products = (query.to(work) * self.key.to(work).unsqueeze(1)).sum(dim=-1)
        return products * softmax.scale + self.bias.to(work).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class OracleStandIn(Correction):
    """A correction with the true mass, from the evicted keys themselves: a control.

    Attributes:
        keys: all keys of the prompt.
        evicted: mask of the evicted ones among them.
    """

    keys: Float[Tensor, "kv_head key d_key"]
    evicted: Bool[Tensor, "head key"]

    def logits(self, query: Float[Tensor, "head query d_key"], softmax: Softmax) -> Float[Tensor, "head query"]:
        """Return the true log-mass of the evicted entries per query: the log-sum-exp of their logits."""
        work = torch.promote_types(query.dtype, torch.float32)
        heads, queries, d_key = query.shape
        grouped = query.to(work).reshape(len(self.keys), -1, d_key)
        logits = softmax.logits_of_scaled(grouped, self.keys.to(work)).view(heads, queries, -1)
        return logits.masked_fill(~self.evicted.unsqueeze(1), -torch.inf).logsumexp(dim=-1)


@dataclass(frozen=True, eq=False)
class BiasedEntries:
    """Entries with a bias each, which stand in for all of the prompt's in one row and layer.

    Attributes:
        keys, values: of each key/value head, in the cache's dtype.
        bias: added to the logits of the query heads that share the entries; −∞ for none of an entry.
    """

    keys: Float[Tensor, "kv_head entry d_key"]
    values: Float[Tensor, "kv_head entry d_value"]
    bias: Float[Tensor, "head entry"]

    def attend(self, query: Float[Tensor, "head query d_key"], softmax: Softmax) -> Attended:
        """Return the attention output over the entries, and the log-sum-exp of their logits, per query."""
        work = torch.promote_types(query.dtype, torch.float32)
        heads, queries, d_key = query.shape
        grouped = query.to(work).reshape(len(self.keys), -1, d_key)
        logits = softmax.logits_of_scaled(grouped, self.keys.to(work)).view(heads, queries, -1)
        logits = logits + self.bias.to(work).unsqueeze(1)
        logsumexp = logits.logsumexp(dim=-1)
        weights = (logits - logsumexp.clamp(min=torch.finfo(work).min).unsqueeze(-1)).exp()  # of none: 0
        weights = weights.view(len(self.keys), -1, logits.shape[-1])
        return (weights @ self.values.to(work)).view(heads, queries, -1), logsumexp


StandIn = Correction | BiasedEntries


def make_stand_in(
    correction: Choice,
    query: Float[Tensor, "head d_key"],
    keys: Float[Tensor, "kv_head key d_key"],
    values: Float[Tensor, "kv_head key d_value"],
    evicted: Bool[Tensor, "head key"],
    softmax: Softmax,
) -> Correction:
    """Return the correction for the `evicted` entries: vectors in the cache's dtype, log-masses in float32.

    Evicted values and keys are averaged with the attention weights of `query`, the window's mean query.
    """
    logits = theory.decode_logits(query, keys, softmax).masked_fill(~evicted, -torch.inf)
    weights = logits.softmax(dim=-1).where(evicted, 0).unsqueeze(0)
    value = theory.weighted_sums(weights, values)[0].to(values.dtype)
    if correction.name == ORACLE:
        return OracleStandIn(value, keys, evicted)
    key = theory.weighted_sums(weights, keys)[0].to(keys.dtype)
    key = key if correction["mass"] == LINEAR else torch.zeros_like(key)
    bias = logits.logsumexp(dim=-1) - (query.to(theory.WORK) * key.to(theory.WORK)).sum(dim=-1) * softmax.scale
    return PredictedStandIn(value, key, bias.to(torch.promote_types(keys.dtype, torch.float32)))


def merge_stand_ins(
    stand_ins: Mapping[int, StandIn],
    output: Float[Tensor, "row head query d_value"],
    logsumexp: Float[Tensor, "row head query"],
    query: Float[Tensor, "row head query d_key"],
    softmax: Softmax,
) -> tuple[Tensor, Tensor]:
    """Return attention outputs and log-sum-exps after adding what stands in; both as they are without any.

    `stand_ins` maps rows to it; `output` is the attention over some entries, `logsumexp` that of their logits.
    """
    if not stand_ins:
        return output, logsumexp
    before, logsumexp_before = output, logsumexp
    output, logsumexp = output.clone(), logsumexp.clone()  # what a backward pass reads must stay
    for row, stand_in in stand_ins.items():
        own, logit = stand_in.attend(query[row], softmax)
        logit = logit.to(logsumexp.dtype)
        joint = torch.logaddexp(logsumexp_before[row], logit)
        kept_mass, evicted_mass = ((one - joint).exp().unsqueeze(-1) for one in (logsumexp_before[row], logit))
        output[row] = before[row] * kept_mass + own.to(output.dtype) * evicted_mass
        logsumexp[row] = joint
    return output, logsumexp
