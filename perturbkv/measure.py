"""From decoded runs to the arrays of a trace: isolated quantities per layer, propagated ones per step.

Row 0 of an evicted batch keeps everything: it is the noise floor; row c + 1 is configuration c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from perturbkv import theory
from perturbkv.decoding import StepRecord
from perturbkv.devices import stack_on
from perturbkv.models import Adapter
from perturbkv.theory import WORK

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class LayerMasks:
    """Masks of some configurations in one layer, per query head, over the n prompt entries."""

    kept: Bool[Tensor, "config head key"]
    stage1: Bool[Tensor, "config head key"]


@dataclass(frozen=True)
class Reference:
    """One layer at one step of the full run, as far as all configurations share it.

    Attributes:
        attention: A of the decoding query over the prompt and the tokens decoded so far.
        summed: `theory.quantities` of these entries.
        d_head: how many columns of it are V.
        whole: Σ A V.
        total, smallest: C = Σ A ν and M = min ν.
        largest: the largest attention that any 0, 1, 2, … entries hold.
    """

    attention: Float[Tensor, "head key"]
    summed: Float[Tensor, "kv_head key column"]
    d_head: int
    whole: Float[Tensor, "1 head d_head"]
    total: Float[Tensor, " head"]
    smallest: Float[Tensor, " head"]
    largest: Float[Tensor, "head count"]


def reference(
    attention: Float[Tensor, "head key"], summed: Float[Tensor, "kv_head key column"], d_head: int
) -> Reference:
    """What the isolated quantities of a layer and step start from; `summed` may be a view of more entries."""
    everything = theory.kept_sums(attention, summed, torch.ones_like(attention, dtype=torch.bool).unsqueeze(0))
    smallest, largest = summed[..., d_head:-1].amin(dim=1).flatten(), theory.largest_sums(attention)
    return Reference(attention, summed, d_head, everything.mixed, everything.weighted[0], smallest, largest)


def isolated(
    given: Reference,
    w_o: Float[Tensor, "d_model head_d_head"],
    masks: LayerMasks,
    alphas: Float[Tensor, " config"],
) -> dict[str, Tensor]:
    """Perturbation, bounds and Assumption 1 of one layer and step, each (config, head), and the noise floor (head,)."""
    decoded = given.attention.shape[-1] - masks.kept.shape[-1]
    everything = torch.ones_like(masks.kept[:1])
    both = _with_decoded(torch.cat([everything, masks.kept]), decoded)
    kept = theory.kept_sums(given.attention, given.summed, both)
    no_values = given.summed[..., given.d_head :]  # the bounds of stage 1 need no mixture
    stage1 = theory.kept_sums(given.attention, no_values, _with_decoded(masks.stage1, decoded))
    perturbation = theory.isolated_perturbation(given.whole, kept.mixed, kept.mass, w_o)
    own = theory.KeptSums(kept.mass[1:], kept.weighted[1:], kept.mixed[1:])
    limits = theory.bounds(given.total, given.smallest, own, stage1)
    counts = torch.floor(alphas.unsqueeze(-1) * masks.kept.sum(dim=-1) + 1e-9).to(torch.int64)
    return {
        "noise_floor_isolated": perturbation[0],
        "perturbation_isolated": perturbation[1:],
        "theta": limits.theta,
        "theta_hat": limits.theta_hat,
        "theta_hat_relax": limits.theta_hat_relax,
        "sigma_stage1": limits.sigma_stage1,
        "retained_mass": limits.retained_mass,
        "sigma_topk": theory.sigma_topk(given.largest, counts),
    }


def _with_decoded(mask: Bool[Tensor, "config head prompt"], decoded: int) -> Bool[Tensor, "config head key"]:
    """Every configuration keeps the tokens decoded so far."""
    return torch.cat([mask, mask.new_ones(*mask.shape[:2], decoded)], dim=-1)


def propagated(adapter: Adapter, full: StepRecord, evicted: StepRecord) -> dict[str, Tensor]:
    """Perturbation of heads, drift of layers and of the logits in one step; layers stacked behind `config`.

    Everything ends on the device of the logits, which is not waited for.
    """
    device = evicted.logits.device
    heads = [
        theory.projected_l1(row.to(WORK) - reference.to(WORK), adapter.output_projection(layer))
        for layer, (reference, row) in enumerate(zip(full.head_output, evicted.head_output, strict=True))
    ]
    norms = [
        theory.projected_l1(reference[0].to(WORK), adapter.output_projection(layer))
        for layer, reference in enumerate(full.head_output)
    ]
    drifts = [theory.drift(reference[0], rows) for reference, rows in zip(full.hidden, evicted.hidden, strict=True)]
    final = theory.drift(full.final[0], evicted.final)
    divergence, agreement = theory.logit_divergence(full.logits[0], evicted.logits)
    perturbation = stack_on(device, heads, dim=1)
    l1, l2, cosine = (
        stack_on(device, [getattr(layer, kind) for layer in drifts], dim=1) for kind in ("l1", "l2", "cosine")
    )
    return {
        "noise_floor": perturbation[0],
        "perturbation_propagated": perturbation[1:],
        "output_norm": stack_on(device, norms),
        "hidden_noise_floor": l1[0],
        "hidden_drift_l1": l1[1:],
        "hidden_drift_l2": l2[1:],
        "hidden_drift_cosine": cosine[1:],
        "hidden_norm": stack_on(device, [hidden[0].to(WORK).abs().sum() for hidden in full.hidden]),
        "final_noise_floor": final.l1[0],
        "final_drift_l1": final.l1[1:],
        "final_drift_l2": final.l2[1:],
        "final_drift_cosine": final.cosine[1:],
        "final_norm": full.final[0].to(WORK).abs().sum(),
        "logit_kl_noise_floor": divergence[0],
        "logit_kl": divergence[1:],
        "top1_agreement": agreement[1:],
    }


def raw_outputs(full: StepRecord, evicted: StepRecord) -> dict[str, Tensor]:
    """Head outputs and hidden states themselves, for `--save outputs`."""
    device = evicted.logits.device
    return {
        "head_output_full": stack_on(device, [layer[0].float() for layer in full.head_output]),
        "head_output": stack_on(device, [layer[1:].float() for layer in evicted.head_output], dim=1),
        "hidden_full": stack_on(device, [layer[0].float() for layer in full.hidden]),
        "hidden": stack_on(device, [layer[1:].float() for layer in evicted.hidden], dim=1),
    }


def to_numpy(tensor: Tensor, dtype: str) -> NDArray[Any]:
    """A tensor as a NumPy array of a trace variable's type."""
    return tensor.cpu().numpy().astype(np.dtype(dtype))
