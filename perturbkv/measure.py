"""From decoded runs to the arrays of a trace: isolated quantities per layer, propagated ones per step.

Row 0 of an evicted batch keeps everything: it is the noise floor; row c + 1 is configuration c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from perturbkv import theory
from perturbkv.config import EvictionConfig
from perturbkv.decoding import StepRecord
from perturbkv.models import Adapter
from perturbkv.theory import WORK

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class LayerMasks:
    """Masks of all configurations in one layer, per query head, over the n prompt entries."""

    kept: Bool[Tensor, "config head key"]
    stage1: Bool[Tensor, "config head key"]


def isolated(
    attention: Float[Tensor, "head key"],
    value: Float[Tensor, "kv_head key d_head"],
    norms: Float[Tensor, "head key"],
    w_o: Float[Tensor, "d_model head_d_head"],
    masks: LayerMasks,
    configs: Sequence[EvictionConfig],
) -> dict[str, Tensor]:
    """Perturbation, bounds and Assumption 1 of one layer and step, each (config, head), and the noise floor (head,).

    `key` counts the prompt and the tokens decoded so far, which every configuration keeps.
    """
    decoded = attention.shape[-1] - masks.kept.shape[-1]
    kept, stage1 = _with_decoded(masks.kept, decoded), _with_decoded(masks.stage1, decoded)
    everything = torch.ones_like(kept[:1])
    perturbation = theory.isolated_perturbation(attention, torch.cat([everything, kept]), value, w_o)
    limits = theory.bounds(attention, norms, kept, stage1)
    budgets = masks.kept.sum(dim=-1)
    alphas = torch.tensor([config.alpha for config in configs], dtype=WORK, device=budgets.device)
    counts = torch.floor(alphas.unsqueeze(-1) * budgets + 1e-9).to(torch.int64)
    return {
        "noise_floor_isolated": perturbation[0],
        "perturbation_isolated": perturbation[1:],
        "theta": limits.theta,
        "theta_hat": limits.theta_hat,
        "theta_hat_relax": limits.theta_hat_relax,
        "sigma_stage1": limits.sigma_stage1,
        "retained_mass": limits.retained_mass,
        "sigma_topk": theory.sigma_topk(attention, counts),
    }


def _with_decoded(mask: Bool[Tensor, "config head prompt"], decoded: int) -> Bool[Tensor, "config head key"]:
    return torch.cat([mask, mask.new_ones(*mask.shape[:2], decoded)], dim=-1)


def propagated(adapter: Adapter, full: StepRecord, evicted: StepRecord) -> dict[str, Tensor]:
    """Perturbation of heads, drift of layers and of the logits in one step; layers stacked behind `config`."""
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
    perturbation = torch.stack([layer.cpu() for layer in heads], dim=1)
    l1 = torch.stack([layer.l1.cpu() for layer in drifts], dim=1)
    return {
        "noise_floor": perturbation[0],
        "perturbation_propagated": perturbation[1:],
        "output_norm": torch.stack([layer.cpu() for layer in norms]),
        "hidden_noise_floor": l1[0],
        "hidden_drift_l1": l1[1:],
        "hidden_drift_l2": torch.stack([layer.l2.cpu() for layer in drifts], dim=1)[1:],
        "hidden_drift_cosine": torch.stack([layer.cosine.cpu() for layer in drifts], dim=1)[1:],
        "hidden_norm": torch.stack([hidden[0].to(WORK).abs().sum().cpu() for hidden in full.hidden]),
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
    return {
        "head_output_full": torch.stack([layer[0].float().cpu() for layer in full.head_output]),
        "head_output": torch.stack([layer[1:].float().cpu() for layer in evicted.head_output], dim=1),
        "hidden_full": torch.stack([layer[0].float().cpu() for layer in full.hidden]),
        "hidden": torch.stack([layer[1:].float().cpu() for layer in evicted.hidden], dim=1),
    }


def to_numpy(tensor: Tensor, dtype: str) -> NDArray[Any]:
    """A tensor as a NumPy array of a trace variable's type."""
    return tensor.cpu().numpy().astype(np.dtype(dtype))
