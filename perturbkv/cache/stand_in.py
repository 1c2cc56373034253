"""What stands in for the entries that went: one entry more per query head, whose value is their mean.

METHOD, the split of an evicted output: `ô + (1 − Ŝ)(μ̂_gone − ô)` is attention over the kept entries and one whose value
is `μ̂_gone` and whose logit is the predicted log-mass of what went. Its mean is taken under the mean of the window's
queries, after rotation, as the kept keys are. A head of which nothing goes has the logit −∞, and so its own output, to
the bit. Tokens decoded later, and sinks in the softmax, are of what is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from perturbkv import theory
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.precision import LINEAR, ORACLE


@dataclass(frozen=True, eq=False)
class Predicted:
    """One row of one layer; the log-mass follows the query to first order, or not at all where the keys are 0.

    Attributes:
        value: μ̂_gone of each head, before W_O.
        key: k̄_gone, the mean of the keys that went.
        bias: what is added to the key's logit; −∞ where nothing went.
    """

    value: Float[Tensor, "head d_head"]
    key: Float[Tensor, "head d_head"]
    bias: Float[Tensor, " head"]

    def logits(self, query: Float[Tensor, "head query d_head"], scale: float) -> Float[Tensor, "head query"]:
        """The predicted log-mass of what went, for each query."""
        work = torch.promote_types(query.dtype, torch.float32)
        return (query.to(work) * self.key.to(work).unsqueeze(1)).sum(dim=-1) * scale + self.bias.to(work).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class Known:
    """One row of one layer that keeps the keys that went, only to know their mass: a control.

    Attributes:
        value: μ̂_gone of each head, before W_O.
        keys: the prompt's, those that stay among them.
        gone: which of them went.
    """

    value: Float[Tensor, "head d_head"]
    keys: Float[Tensor, "kv_head key d_head"]
    gone: Bool[Tensor, "head key"]

    def logits(self, query: Float[Tensor, "head query d_head"], scale: float) -> Float[Tensor, "head query"]:
        """The log-mass of what went, for each query."""
        work = torch.promote_types(query.dtype, torch.float32)
        heads, queries, d_head = query.shape
        asked = query.to(work).reshape(len(self.keys), -1, d_head) * scale
        logits = (asked @ self.keys.to(work).transpose(1, 2)).view(heads, queries, -1)
        return logits.masked_fill(~self.gone.unsqueeze(1), -torch.inf).logsumexp(dim=-1)


StandIn = Predicted | Known


def windows(configs: Iterable[EvictionConfig]) -> list[int]:
    """Windows of which the mean query is needed."""
    return list(dict.fromkeys(config.window for config in configs if config.corrected))


def stand_in(
    correction: Choice,
    query: Float[Tensor, "head d_head"],
    keys: Float[Tensor, "kv_head key d_head"],
    values: Float[Tensor, "kv_head key d_head"],
    gone: Bool[Tensor, "head key"],
    scale: float,
) -> StandIn:
    """What stands in for the entries that are `gone`, under the mean `query`; rounded as the cache's own numbers."""
    logits = theory.decode_logits(query, keys, scale).masked_fill(~gone, -torch.inf)
    weights = logits.softmax(dim=-1).where(gone, 0).unsqueeze(0)
    value = theory.weighted_sums(weights, values)[0].to(values.dtype)
    if correction.name == ORACLE:
        return Known(value, keys, gone)
    key = theory.weighted_sums(weights, keys)[0].to(keys.dtype)
    key = key if correction["mass"] == LINEAR else torch.zeros_like(key)
    bias = logits.logsumexp(dim=-1) - (query.to(theory.WORK) * key.to(theory.WORK)).sum(dim=-1) * scale
    return Predicted(value, key, bias.to(keys.dtype))


def joined(
    stand_ins: Mapping[int, StandIn],
    output: Float[Tensor, "row head query d_head"],
    total: Float[Tensor, "row head query"],
    query: Float[Tensor, "row head query d_head"],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention over some entries and its log-sum-exps, joined in place with what stands in, by row."""
    for row, one in stand_ins.items():
        logit = one.logits(query[row], scale).to(total.dtype)
        joint = torch.logaddexp(total[row], logit)
        own, other = ((weight - joint).exp().unsqueeze(-1) for weight in (total[row], logit))
        output[row] = output[row] * own + one.value.to(output.dtype).unsqueeze(1) * other
        total[row] = joint
    return output, total
