"""Effect of lost entries on a text, to first order (METHOD: effect on the text).

The gradient of the text's log p is taken where the heads' outputs stand apart, at the input of the output projection:
⟨∂ log p / ∂ o, x W_O^h⟩ = ⟨∂ log p / ∂ x_h, x⟩ for every vector x of head h, so that W_O is not needed. One forward and
backward pass over all of the text's tokens gives it for all layers and steps; the prompt's cache is a constant. The
mean with the evicted run's gradient takes such a pass over every evicted cache, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache

from perturbkv import memory, theory
from perturbkv.cache.compact import CompactCache, rebuild_cache
from perturbkv.devices import copy_to_device, stack_on_device, to_device
from perturbkv.errors import ModelError
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.pipeline.sample.capture import FiniteCheck, Observer, capture, decode_from
from perturbkv.pipeline.sample.decoding import StepRecord
from perturbkv.pipeline.sample.measure import check_everything_kept
from perturbkv.pipeline.sample.prefill import Prefill
from perturbkv.theory import WORK


def add_gradients(
    adapter: Adapter, prefill: Prefill, question: Sequence[int], steps: Sequence[StepRecord], text: Int[Tensor, " text"]
) -> None:
    """Fill `gradient` of the full run's steps with ∂ log p / ∂ (input of the output projection) of a fixed text.

    Step t decodes token t of the text, and its logits predict token t + 1: the text has one token more than there are
    steps, −1 where it has ended, and log p is the sum over those that steps predict. `prefill.finite` checks the
    gradients, and that one pass over the text gives the steps' logits. Raises ModelError where the backward pass
    fails.
    """
    tokens = prefill.statistics.tokens
    owned = [adapter.cache_layer(prefill.cache, layer) for layer in adapter.holders]
    entries = [(layer.keys[0, ..., :tokens, :], layer.values[0, ..., :tokens, :]) for layer in owned]
    with torch.inference_mode(False), torch.no_grad():
        cache = rebuild_cache(adapter, entries, prefill.states)  # the question is read with the text
    found = _gradients(adapter, cache, nullcontext(), question, steps, text, 1, prefill.finite)
    for step, gradient in zip(steps, found, strict=True):
        step.gradient = gradient


def average_gradients(
    adapter: Adapter,
    cache: CompactCache,
    question: Sequence[int],
    steps: Sequence[StepRecord],
    text: Int[Tensor, " text"],
    finite: FiniteCheck,
) -> None:
    """Replace `gradient` of the evicted runs' steps, the full run's, by its mean with their own, row by row.

    `cache` has decoded nothing, has the first rows of the steps, no padding rows, and no tensors of inference mode. The
    backward pass holds of all rows and layers the entries, copied in float32 for a model in 16 bits, attention weights
    and activations (`pipeline.run.footprint` estimates them). Otherwise as `add_gradients`.
    """
    found = _gradients(adapter, cache, decode_from(adapter, cache), question, steps, text, cache.rows, finite)
    for step, gradient in zip(steps, found, strict=True):
        step.gradient = [(full + own) / 2 for full, own in zip(step.gradient, gradient, strict=True)]


def _gradients(
    adapter: Adapter,
    cache: Cache,
    attention: AbstractContextManager[None],
    question: Sequence[int],
    steps: Sequence[StepRecord],
    text: Int[Tensor, " text"],
    rows: int,
    finite: FiniteCheck,
) -> list[list[Tensor]]:
    """Return each step's `StepRecord.gradient` in a run that reads question and text over a prompt's cache.

    The run has `rows` rows.
    """
    ids = torch.cat([to_device(question, text.device, torch.int64), text[:-1]])
    try:
        with memory.translate_allocation_errors():
            logits, gradients = _backward(adapter, cache, attention, ids.expand(rows, -1), text)
    except RuntimeError as error:
        raise ModelError(
            f"--save effect needs a backward pass through '{adapter.name}', which failed "
            f"({' '.join(str(error).split())[:200] or type(error).__name__})"
        ) from error
    complaint = "decodes a text's tokens one by one otherwise than together"
    decoded = torch.stack([step.logits[0] for step in steps])  # row 0 keeps everything
    check_everything_kept(finite, adapter, copy_to_device(decoded, logits.device), logits[0], complaint)
    by_step: list[list[Tensor]] = [[] for _ in steps]
    for layer, gradient in zip(adapter.layer_indices, gradients, strict=True):
        finite.check_derived(f"the gradient of layer {layer}", gradient)
        for found, of_step in zip(by_step, gradient[:, -len(steps) :].unbind(1), strict=True):
            found.append(of_step.reshape(rows, adapter.heads, adapter.d_value).to(WORK))
    return by_step


@torch.inference_mode(False)
def _backward(
    adapter: Adapter,
    cache: Cache,
    attention: AbstractContextManager[None],
    ids: Int[Tensor, "row token"],
    text: Int[Tensor, " text"],
) -> tuple[Float[Tensor, "row step vocab"], tuple[Float[Tensor, "row token head_d_value"], ...]]:
    """Return the logits of the text's steps, and per measured layer the gradient of log p where heads stand apart.

    Every row's gradient is that of its own log p. `attention` is the context inside which the model attends to `cache`.
    Raises RuntimeError without a gradient.
    """
    received: list[Tensor] = []

    def receive(layer: int, mixed: Tensor) -> Tensor:
        if received and not mixed.requires_grad:
            raise RuntimeError(f"nothing flows through the attention of layer {adapter.layer_indices[layer]}")
        received.append(torch.zeros_like(mixed, requires_grad=True))
        return mixed + received[-1]

    with torch.enable_grad(), attention, capture(adapter, Observer(head_output=receive)):
        logits = run_with_cache(
            adapter.model, copy_to_device(ids.clone(), adapter.device), cache, logits_to_keep=len(text) - 1
        ).logits
        predicted = copy_to_device(text[1:].clone(), logits.device)  # no tensor of inference mode
        log_p = logits.to(WORK).log_softmax(dim=-1)[:, torch.arange(len(predicted)), predicted.clamp(min=0)]
        gradients = torch.autograd.grad(log_p[:, predicted >= 0].sum(), received)
    return logits.detach(), gradients


@dataclass(frozen=True)
class EntryEffects:
    """The effect of a layer's entries on the text's log p at one step, in nat, to first order.

    Attributes:
        attention: A of the entries that the step sees.
        sink: weight of each head's sink, which always stays.
        effect: ⟨g, 𝒱_i⟩ of each entry, of one gradient for all configurations or one each.
    """

    attention: Float[Tensor, "head key"]
    sink: Float[Tensor, " head"]
    effect: Float[Tensor, "row head key"]

    def isolated(self, kept: Bool[Tensor, "config head n"]) -> dict[str, Tensor]:
        """Return the isolated effect (config, head) of losing what is not `kept`, and entries' parts.

        The part of an evicted entry is A_i ⟨g, ô_h − 𝒱_i⟩, that of a kept one 0. A head's effect ⟨g, ô_h − o_h⟩ is the
        sum of its parts; `entry_effect` (config, n) sums an entry's over heads.
        """
        n, weighted = kept.shape[-1], self.attention * self.effect
        rows = torch.cat([kept, kept.new_ones(*kept.shape[:2], weighted.shape[-1] - n)], dim=-1)
        output = (weighted * rows).sum(dim=-1) / ((self.attention * rows).sum(dim=-1) + self.sink)  # ⟨g, ô_h⟩
        parts = (self.attention[:, :n] * output.unsqueeze(-1) - weighted[..., :n]).masked_fill(kept, 0)
        return {"effect_isolated": parts.sum(dim=-1), "entry_effect": parts.sum(dim=1)}

    def floor(self) -> Float[Tensor, " head"]:
        """Return the noise floor of isolated effects, a rounding, by the first row's gradient."""
        rounding = torch.finfo(WORK).eps * (self.attention * self.effect[0]).abs().sum(dim=-1)
        return theory.floor_at_rounding(rounding, rounding)


def propagated_effects(full: StepRecord, evicted: StepRecord) -> dict[str, Tensor]:
    """Return the heads' propagated effects (config, layer, head) at a step and their noise floor (layer, head), in nat.

    Gradients are those of the evicted run's record. Row 0 of `evicted` keeps everything: its size is the floor, at
    least one rounding of the model's type. Padding rows are left out.
    """
    device = evicted.logits.device
    effects, roundings = [], []
    for before, after, gradient in zip(full.head_output, evicted.head_output, evicted.gradient, strict=True):
        effects.append(((after[: len(gradient)].to(WORK) - before.to(WORK)) * gradient).sum(dim=-1))
        sizes = (before[0].to(WORK) * gradient[0]).abs().sum(dim=-1)
        roundings.append(torch.finfo(before.dtype).eps * sizes)
    rows = stack_on_device(device, effects, dim=1)
    floor = theory.floor_at_rounding(rows[0].abs(), stack_on_device(device, roundings))
    return {"effect_propagated": rows[1:], "effect_noise_floor": floor}
