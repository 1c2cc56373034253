"""Isolated quantities per layer and propagated ones per step, from decoded runs.

Row 0 of an evicted batch keeps everything: it is the noise floor; row c + 1 is configuration c.

Entries that are not the full cache's (moved keys, few bits, corrections) are measured under the full run's query too.
They change every weight, so that A' is the softmax over a row's own logits and not N⊙A / ΣNA: the bounds of eviction
alone (θ, θ̂) do not hold for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from perturbkv import theory
from perturbkv.cache.entries import KeptEntries
from perturbkv.cache.makers import Entries, OwnEntries
from perturbkv.configs.entry_counts import round_down_entries
from perturbkv.devices import stack_on_device
from perturbkv.models.adapter import Adapter
from perturbkv.models.proof.calls import LOGIT_ERRORS
from perturbkv.pipeline.sample.capture import FiniteCheck
from perturbkv.pipeline.sample.decoding import StepRecord
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.schema import VARIABLES
from perturbkv.theory import WORK, Distances, KeptSums, Summands

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class LayerMasks:
    """Masks over the n prompt entries of one layer, per configuration and query head: True for kept ones.

    `stage1` are the entries that are kept by attention alone, before values count.
    """

    kept: Bool[Tensor, "config head key"]
    stage1: Bool[Tensor, "config head key"]


@dataclass(frozen=True)
class Reference:
    """The quantities of one layer and step of the full run that all configurations share.

    Attributes:
        attention: A of the decoding query over the prompt and the tokens decoded so far.
        summands: summands of these entries.
        whole: Σ A V.
        slices: W_O^h of every head.
        output: o_h = Σ A V W_O^h.
        total, smallest: C = Σ A ν and M = min ν.
        largest: the largest attention mass of any 0, 1, 2, … entries, including the sink.
        sink: weight of each head's sink, which always stays; 0 where there is none.
    """

    attention: Float[Tensor, "head key"]
    summands: Summands
    whole: Float[Tensor, "1 head d_value"]
    slices: Float[Tensor, "head d_value d_model"]
    output: Float[Tensor, "head d_model"]
    total: Float[Tensor, " head"]
    smallest: Float[Tensor, " head"]
    largest: Float[Tensor, "head count"]
    sink: Float[Tensor, " head"]


def layer_reference(
    attention: Float[Tensor, "head key"],
    summands: Summands,
    slices: Float[Tensor, "head d_value d_model"],
    sink: Float[Tensor, " head"],
) -> Reference:
    """Return the quantities of the full run at one layer and step, common to all configurations."""
    everything = summands.sums(attention.unsqueeze(0))
    return Reference(
        attention=attention,
        summands=summands,
        whole=everything.mixed,
        slices=slices,
        output=theory.project_outputs(everything.mixed[0], slices),
        total=everything.weighted[0],
        smallest=summands.smallest_norms(),
        largest=theory.largest_sums(attention) + sink.unsqueeze(-1),
        sink=sink,
    )


def isolated_quantities(
    references: Sequence[Reference], masks: LayerMasks, alphas: Float[Tensor, "config head"]
) -> list[dict[str, Tensor]]:
    """Return, per step, name -> perturbation, bound or Assumption 1 (config, head), and noise floors (head,).

    Full and evicted outputs are sums over the same query, keys and values, so that a configuration that keeps
    everything differs by the rounding of `WORK` alone: one more row, the first, is that control. `references` are those
    of the steps at which `masks` hold; `alphas` are the stage-1 shares α.
    """
    kept = _kept_sums_per_step(references, masks.kept, controls=1)
    no_values = [replace(step, summands=step.summands.without_values()) for step in references]
    stage1 = _kept_sums_per_step(no_values, masks.stage1)  # the bounds of stage 1 need no mixture
    counts = round_down_entries(alphas * masks.kept.sum(dim=-1)).to(torch.int64)
    return [_step_quantities(*step, counts) for step in zip(references, kept, stage1, strict=True)]


def _kept_sums_per_step(
    references: Sequence[Reference], kept: Bool[Tensor, "config head prompt"], controls: int = 0
) -> list[KeptSums]:
    """Return, per step, the sums over the kept entries of the prompt and all decoded tokens, which always stay.

    The first `controls` rows of the sums are of configurations that keep everything. The masks are made numbers once
    for all steps, which takes as long as the sums of one.
    """
    longest, prompt = references[-1].attention.shape[-1], kept.shape[-1]
    numbers = torch.ones(controls + len(kept), kept.shape[1], longest, dtype=WORK, device=kept.device)
    numbers[controls:, :, :prompt] = kept
    return [
        theory.kept_sums(step.attention, step.summands, numbers[..., : step.attention.shape[-1]], step.sink)
        for step in references
    ]


def _step_quantities(
    reference: Reference, kept: KeptSums, stage1: KeptSums, counts: Int[Tensor, "config head"]
) -> dict[str, Tensor]:
    """Return `isolated_quantities` of one step.

    Row 0 of `kept` is the control; `counts` are ⌊αb⌋.
    """
    distances = theory.isolated_perturbation(reference.whole, kept.mixed, kept.mass, reference.slices, reference.output)
    evicted = KeptSums(kept.mass[1:], kept.weighted[1:], kept.mixed[1:])
    limits = theory.bounds(reference.total, reference.smallest, evicted, stage1)
    return {
        **_floor_variables("noise_floor_isolated", distances, reference.output, WORK),
        **_distance_variables("perturbation_isolated", distances),
        "theta": limits.theta,
        "theta_hat": limits.theta_hat,
        "theta_hat_relax": limits.theta_hat_relax,
        "sigma_stage1": limits.sigma_stage1,
        "retained_mass": limits.retained_mass,
        "sigma_topk": theory.sigma_topk(reference.largest, counts),
    }


def _distance_variables(name: str, distances: Distances, suffix: str = "") -> dict[str, Tensor]:
    """Return the configurations' distances as variables: `name` + `suffix` (L1), `name`_l2, `name`_cosine.

    Row 0 of `distances` is the control that keeps everything, and left out.
    """
    evicted = (one[1:] for one in distances.tensors())
    return dict(zip(Distances.names(name, suffix), evicted, strict=True))


def _floor_variables(
    name: str, distances: Distances, full: Float[Tensor, "*batch d_model"], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the noise floors, as variables named after `name`: the control's distances, at least one rounding.

    Row 0 of `distances` is the control that keeps everything. The rounding is that of the full run's vectors `full` in
    `dtype`, the one that was computed in.
    """
    floors = theory.noise_floors(Distances(*(one[0] for one in distances.tensors())), full, dtype)
    return dict(zip(Distances.names(name), floors.tensors(), strict=True))


def _norm_variables(name: str, full: Float[Tensor, "*batch d_model"]) -> dict[str, Tensor]:
    """Return the L1 and L2 norms of the full run's vectors, as the variables `name` and `name`_l2."""
    return {name: full.abs().sum(dim=-1), f"{name}_l2": torch.linalg.vector_norm(full, dim=-1)}


def propagated_quantities(
    adapter: Adapter, full: StepRecord, evicted: StepRecord, next_token: Int[Tensor, ""]
) -> dict[str, Tensor]:
    """Return name -> propagated perturbation of heads, drift of hidden states or divergence of logits at one step.

    `next_token` is the text's after the step; −1 where the text ends.
    Results are (config, layer, …), or (layer, …) for noise floors and norms, on the device of the logits; nothing waits
    for it. Row 0 of `evicted` keeps everything.
    """
    device, dtype = evicted.logits.device, adapter.dtype
    layers = [
        _head_variables(adapter, layer, *outputs)
        for layer, outputs in enumerate(zip(full.head_output, evicted.head_output, strict=True))
    ]
    heads = {
        name: stack_on_device(
            device, [layer[name] for layer in layers], dim=1 if "config" in VARIABLES[name].dims else 0
        )
        for name in layers[0]
    }
    states = stack_on_device(device, [layer[0] for layer in full.hidden])
    hidden = _drift_variables("hidden", states, stack_on_device(device, evicted.hidden, dim=1), dtype)
    final = _drift_variables("final", full.final[0], evicted.final, dtype)
    norms = _norm_variables("hidden_norm", states.to(WORK)) | {"final_norm": full.final[0].to(WORK).abs().sum()}
    return (
        heads
        | hidden
        | final
        | norms
        | _gate_variables(adapter, full)
        | _logit_variables(full, evicted, next_token, dtype)
    )


def _head_variables(
    adapter: Adapter,
    layer: int,
    full: Float[Tensor, "1 head d_value"],
    evicted: Float[Tensor, "row head d_value"],
) -> dict[str, Tensor]:
    """Return name -> propagated perturbation, noise floor or norm of the full run's head outputs, in one layer."""
    slices = theory.head_slices(adapter.output_projection(layer), adapter.heads)
    output, distances = theory.propagated_perturbation(full[0], evicted, slices)
    return (
        _floor_variables("noise_floor", distances, output, adapter.dtype)
        | _distance_variables("perturbation_propagated", distances)
        | _norm_variables("output_norm", output)
    )


def _gate_variables(adapter: Adapter, full: StepRecord) -> dict[str, Tensor]:
    """Return the mean |γ| of each head (layer, head) as a variable, 1 in a layer without a gate; empty without any."""
    if not full.gates:
        return {}
    one = torch.ones(adapter.heads, 1, dtype=WORK)
    gates = [full.gates[layer][0] if layer in full.gates else one for layer in range(len(adapter.layers))]
    sizes = (gate.to(WORK).view(adapter.heads, -1).abs().mean(dim=-1) for gate in gates)
    return {"gate_size": stack_on_device(full.logits.device, sizes)}


def _drift_variables(
    name: str,
    full: Float[Tensor, "*layer d_model"],
    evicted: Float[Tensor, "row *layer d_model"],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return the drift of hidden states and its noise floor, as variables whose names begin with `name`.

    `dtype` is the one that the model computed in.
    """
    distances = theory.drift(full, evicted)
    floors = _floor_variables(f"{name}_noise_floor", distances, full.to(WORK), dtype)
    return floors | _distance_variables(f"{name}_drift", distances, suffix="_l1")


def _logit_variables(
    full: StepRecord, evicted: StepRecord, token: Int[Tensor, ""], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return KL, its noise floor, top-1 agreement, draft acceptance and log p of the text's next token, by name.

    The floor is row 0's divergence, at least one rounding of a log-probability of 1 nat in `dtype`.
    """
    log_full, log_evicted = map(theory.log_probabilities, (full.logits[0], evicted.logits))
    divergence, agreement = theory.logit_divergence(log_full, log_evicted)
    rounding = torch.full_like(divergence[0], torch.finfo(dtype).eps)
    return {
        "logit_kl_noise_floor": theory.floor_at_rounding(divergence[0], rounding),
        "logit_kl": divergence[1:],
        "top1_agreement": agreement[1:],
        "draft_acceptance": theory.draft_acceptance(log_full, log_evicted[1:]),
        "text_logp": theory.token_log_probability(log_evicted[1:], token),
        "text_logp_full": theory.token_log_probability(log_full, token),
    }


def raw_outputs(full: StepRecord, evicted: StepRecord) -> dict[str, Tensor]:
    """Return name -> head outputs or hidden states of the full or evicted runs in float32, for `--save outputs`.

    Row 0 of `evicted`, which keeps everything, is left out.
    """
    device = evicted.logits.device
    return {
        "head_output_full": stack_on_device(device, [layer[0].float() for layer in full.head_output]),
        "head_output": stack_on_device(device, [layer[1:].float() for layer in evicted.head_output], dim=1),
        "hidden_full": stack_on_device(device, [layer[0].float() for layer in full.hidden]),
        "hidden": stack_on_device(device, [layer[1:].float() for layer in evicted.hidden], dim=1),
    }


def to_numpy(tensor: Tensor, dtype: str) -> NDArray[Any]:
    """Return a tensor as a NumPy array of the given dtype of a trace variable."""
    return tensor.cpu().numpy().astype(np.dtype(dtype))


CHANGED_VARIABLES = (*theory.Distances.names("perturbation_isolated"), "perturbation_change", "effect_isolated")
"""Variables measured of own entries: the distance from the full output, in L1 from the kept set's alone, the effect."""


def check_everything_kept(
    finite: FiniteCheck,
    adapter: Adapter,
    full: Float[Tensor, "*token vocab"],
    kept: Float[Tensor, "*token vocab"],
    told: str = "decodes otherwise from all entries of its cache than from the cache itself",
) -> None:
    """Record whether a compact cache that keeps everything decodes as the model does from its own, by their logits.

    What a short text could not show at the door, such as a rule for long prompts, shows here. `told` is the error.
    """
    expected, found = full.double(), kept.double()
    length = (expected - expected.mean(dim=-1, keepdim=True)).norm().clamp(min=1e-30)
    finite.check_agreement(
        f"model '{adapter.name}' {told}", (found - expected).norm() / length, LOGIT_ERRORS[adapter.dtype]
    )


def check_head_outputs(
    finite: FiniteCheck, layer: FullLayer, step: StepRecord, whole: Float[Tensor, "head d_value"]
) -> None:
    """Record whether a layer's projection received Σ A V, times γ, at a decode step; `whole` is Σ A V by the formulas.

    A scale, a window, sinks or an order of heads that long prompts alone have show here.
    """
    expected, found = layer.gated(step, whole), step.head_output[layer.index][0].to(WORK)
    number, adapter = layer.adapter.layer_indices[layer.index], layer.adapter
    finite.check_agreement(
        f"layer {number} of model '{adapter.name}' has other heads' outputs than its attention's formula gives",
        (found - expected).norm() / expected.norm().clamp(min=1e-30),
        LOGIT_ERRORS[adapter.dtype],
    )


def check_stored_entries(finite: FiniteCheck, layer: int, entries: KeptEntries) -> None:
    """Record whether a layer's entries are finite: 16-bit scales overflow for large numbers, and other code may err.

    `layer` is the layer's number in an error message.
    """
    for kind, numbers in (("keys", entries.keys), ("values", entries.values)):
        finite.check(f"the stored {kind} of layer {layer}", numbers)


class OwnOutputs(NamedTuple):
    """The change by a row's own entries in one layer under the full run's query; NaN where they are the full cache's.

    Attributes:
        perturbations: `CHANGED_VARIABLES` but for the effect.
        moved: per step the difference of Σ A V from the full cache's, times γ where the layer has a gate; empty where
            effects are not measured.
    """

    perturbations: Float[Tensor, "step name head"]
    moved: list[Float[Tensor, "head d_value"]]

    def with_effect(self, gradients: Sequence[Float[Tensor, "head d_value"]]) -> Float[Tensor, "step name head"]:
        """Return the perturbations and, where effects are measured, that by the steps' `gradients` after them."""
        if not self.moved:
            return self.perturbations
        effect = [(moved * own).sum(dim=-1) for moved, own in zip(self.moved, gradients, strict=True)]
        return torch.cat([self.perturbations, torch.stack(effect).unsqueeze(1)], dim=1)


def own_outputs(layer: FullLayer, full: Sequence[StepRecord], rows: Mapping[int, Entries]) -> dict[int, OwnOutputs]:
    """Return index -> what the rows with entries of their own change at the steps `full` of the full run."""
    own = {index: entries for index, entries in rows.items() if isinstance(entries, OwnEntries)}
    steps = [_step_outputs(layer, step, own) for step in full] if own else []
    result = {}
    for index in own:
        perturbations, moved = zip(*(step[index] for step in steps), strict=True)
        result[index] = OwnOutputs(torch.stack(perturbations), list(moved) if full[0].gradient else [])
    return result


def isolated_floors(
    layer: FullLayer, full: Sequence[StepRecord], outputs: Mapping[int, Tensor]
) -> Float[Tensor, "step distance head"]:
    """Return the distances, in the order of `Distances.names`, of a plain cache's outputs from the full run's.

    `outputs` are Σ A V (head, d_value) by the number of entries that a step attends to.
    """
    found = []
    for record in full:
        step, slices = layer.full_step(record), layer.slices_at(record)
        output = theory.project_outputs(step.mixed, slices)
        moved = theory.project_outputs(outputs[record.entries] - step.mixed, slices)
        found.append(torch.stack(theory.distances(output, moved).tensors()))
    return torch.stack(found)


def _step_outputs(
    layer: FullLayer, record: StepRecord, rows: Mapping[int, OwnEntries]
) -> dict[int, tuple[Float[Tensor, "name head"], Float[Tensor, "head d_value"]]]:
    """Return index -> what rows with entries of their own change at one step, as in `OwnOutputs`."""
    step, slices, result = layer.full_step(record), layer.slices_at(record), {}
    output = theory.project_outputs(step.mixed, slices)
    for index, entries in rows.items():
        if entries.is_full_cache(step.tokens):
            numbers = output.new_full((len(CHANGED_VARIABLES) - 1, len(output)), torch.nan)  # without the effect
            result[index] = numbers, torch.full_like(step.mixed, torch.nan)
            continue
        evicted, own, changed = entries.outputs(step)
        from_full = theory.distances(output, theory.project_outputs(own - step.mixed, slices))
        from_kept_set = theory.project_outputs(own - evicted, slices).abs().sum(dim=-1)
        numbers = torch.stack([*from_full.tensors(), from_kept_set])
        moved = layer.gated(record, own - step.mixed)
        if changed is not None:
            numbers, moved = numbers.where(changed, torch.nan), moved.where(changed.unsqueeze(-1), torch.nan)
        result[index] = numbers, moved
    return result
