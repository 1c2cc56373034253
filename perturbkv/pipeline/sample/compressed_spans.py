"""Isolated quantities where caches are compressed again while they are decoded from (METHOD: decode-time eviction).

Kept sets hold between two compressions, a span of steps. At each compression stands what the entries gone before cost
(carried), what it adds, and where the entries stood that go; at every step the attention that falls on what is gone.
Perturbations and bounds stand at the steps of compressions and at chosen ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from perturbkv import theory
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.measure import LayerMasks, Reference
from perturbkv.schema import PLACES, isolated_steps
from perturbkv.selection.kept_sets import KeptSets
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.theory import WORK

LaterSets = Mapping[int, Mapping[int, Sequence[KeptSets]]]
"""Tokens of the text that are read -> index of a configuration -> per layer what its row then holds of all entries."""
SINKS, RECENT = 4, 64
"""First entries of a prompt that count as sinks, and last entries before a compression that count as recent."""
SPAN_BYTES, PLACE_BYTES = 5, 64
"""Working bytes per entry, head and configuration: masks and places of each span; places as numbers, and a copy."""
_SINK, _PROMPT, _OWN, _RECENT = range(len(PLACES))
_HELD = -1


@dataclass(frozen=True, eq=False)
class Span:
    """The steps of one layer between two compressions, of some configurations.

    Attributes:
        first: the first of its steps.
        attention: the full run's at each step.
        references: step -> the full run's quantities, of the steps that are measured; the first is one.
        masks: what rows hold, of the entries before the first step, or at the prompt's end of the prompt's.
        before: likewise what they held before the compression.
        compressed: configurations that were compressed right before the first step.
        place: places where entries stood when they went, as places of `PLACES`; −1 for held ones.
        went: mask of the entries that went right before the first step.
        context: number of entries before the text.
    """

    first: int
    attention: Sequence[Float[Tensor, "head _"]]
    references: Mapping[int, Reference]
    masks: LayerMasks
    before: Bool[Tensor, "config head key"]
    compressed: Bool[Tensor, " config"]
    place: Int[Tensor, "config head key"]
    went: Bool[Tensor, "config head key"]
    context: int

    def measure(self, alphas: Float[Tensor, "config head"]) -> list[dict[str, Tensor]]:
        """Return, per step, name -> isolated quantity (config, head, …), or noise floor (head,).

        `alphas` are the stage-1 shares α. Steps that are not measured hold NaN.
        """
        measured = measure.isolated_quantities(list(self.references.values()), self.masks, alphas)
        by_step = dict(zip(self.references, measured, strict=True))
        unknown = {name: torch.full_like(tensor, torch.nan) for name, tensor in measured[0].items()}
        nothing = dict.fromkeys(_AT_COMPRESSIONS, unknown["retained_mass"])
        none_went = dict.fromkeys(_WENT, self.attention[0].new_zeros(*self.went.shape[:2], len(PLACES)))
        gone, quantities = (self.place != _HELD).sum(dim=-1), []
        configs, heads, keys = self.place.shape
        attention = torch.stack([weights[:, :keys] for weights in self.attention], dim=-1)  # (head, key, step)
        masks = torch.stack([self.place == place for place in range(len(PLACES))], dim=1).to(WORK)
        sums = masks.permute(2, 0, 1, 3).reshape(heads, -1, keys) @ attention  # on what is gone, by where it stood
        by_step_and_place = sums.view(heads, configs, len(PLACES), -1).permute(3, 1, 0, 2)
        for step, gone_attention in enumerate(by_step_and_place, start=self.first):
            known = by_step.get(step, unknown) | (nothing | none_went if step > self.first else self._at_compression())
            held = (self.context + step + 1 - gone).to(WORK)
            quantities.append(known | {"gone_attention": gone_attention, "held_entries": held})
        return quantities

    def _at_compression(self) -> dict[str, Tensor]:
        """Return what the compression before the first step did; NaN for configurations that had none."""
        step = self.references[self.first]
        missing = self.attention[0].shape[-1] - self.before.shape[-1]  # the last entries that it sees are held
        earlier, later = (
            theory.kept_sums(step.attention, step.summands, pad(mask, (0, missing), value=True).to(WORK), step.sink)
            for mask in (self.before, self.masks.kept)
        )
        carried = theory.isolated_perturbation(step.whole, earlier.mixed, earlier.mass, step.slices, step.output).l1
        held = [sums.mixed / sums.mass.unsqueeze(-1) for sums in (earlier, later)]
        added = theory.project_outputs(held[1] - held[0], step.slices).abs().sum(dim=-1)
        compressed = self.compressed.unsqueeze(-1)
        weighted = (step.attention * step.summands.norms())[:, : self.went.shape[-1]]
        return {
            "perturbation_carried": carried.where(compressed, torch.nan),
            "perturbation_added": added.where(compressed, torch.nan),
            "went_entries": self._by_place(self.went.to(WORK)),
            "went_output": self._by_place(self.went * weighted) / step.total.unsqueeze(-1),
        }

    def _by_place(self, numbers: Float[Tensor, "config head key"]) -> Float[Tensor, "config head place"]:
        """Return the sums of numbers of entries that are gone, by the place where they stood."""
        return torch.stack([(numbers * (self.place == place)).sum(dim=-1) for place in range(len(PLACES))], dim=-1)

    def missed(self) -> Float[Tensor, "config token"]:
        """Return the attention on each of the text's tokens that are gone, mean over heads, sum over the steps."""
        keys = self.place.shape[-1]
        attention = torch.stack([weights[:, :keys] for weights in self.attention]).sum(dim=0)
        return (attention * (self.place != _HELD)).mean(dim=1)[:, self.context :]


_AT_COMPRESSIONS = ("perturbation_carried", "perturbation_added")
_WENT = ("went_entries", "went_output")


def measured_steps(run: ResolvedRun, steps: int, later: LaterSets) -> list[int]:
    """Return the steps at which isolated quantities are measured: chosen ones, and those of compressions."""
    return sorted(
        {*np.flatnonzero(isolated_steps(np.ones((1, steps), dtype=bool), run.isolated_every)).tolist(), *later}
    )


def decoding_spans(
    masks: LayerMasks,
    configs: Sequence[int],
    later: LaterSets,
    layer: int,
    attention: Sequence[Float[Tensor, "head _"]],
    references: Mapping[int, Reference],
    context: int,
) -> list[Span]:
    """Return the spans of one layer between the compressions of some configurations.

    Args:
        masks: what they hold at the prompt's end.
        configs: their indices in the run.
        later: what all later compressions keep.
        layer: the layer's index.
        attention: the full run's at each step.
        references: step -> the full run's quantities, of the steps that `measured_steps` returns.
        context: number of entries before the text, of prompt and question.
    """
    starts = sorted({0, *(read for read, rows in later.items() if rows.keys() & {*configs})})
    before, kept, stage1 = torch.ones_like(masks.kept), masks.kept, masks.stage1
    place = _places_of_gone(before & ~kept, masks.kept.shape[-1])
    compressed, spans = (~kept).flatten(1).any(dim=-1), []
    for first, end in pairwise([*starts, len(attention)]):
        if rows := later.get(first, {}):
            entries = context + first
            kept, stage1, place = (
                pad(each, (0, entries - each.shape[-1]), value=value).clone()
                for each, value in ((kept, True), (stage1, True), (place, _HELD))
            )
            if first:
                before, compressed = kept.clone(), torch.zeros_like(compressed)
            else:  # what goes at the prompt's end and after its question is one compression
                before = torch.ones_like(kept)
            for index, config in enumerate(configs):
                if config in rows:
                    sets, heads = rows[config][layer], kept.shape[1]
                    kept[index] = sets.kept.repeat_interleave(heads // len(sets.kept), dim=0)
                    stage1[index] = sets.stage1.repeat_interleave(heads // len(sets.kept), dim=0)
                    compressed[index] = True
            place = _places_of_gone(before & ~kept, context).where(place == _HELD, place)
        of_span = {step: reference for step, reference in references.items() if first <= step < end}
        held, went = LayerMasks(kept, stage1), before & ~kept
        spans.append(Span(first, attention[first:end], of_span, held, before, compressed, place, went, context))
    return spans


def _places_of_gone(gone: Bool[Tensor, "config head key"], context: int) -> Int[Tensor, "config head key"]:
    """Return where entries stood that go at a compression, as places of `PLACES`; −1 for all others.

    `context` is the number of entries before the text.
    """
    position = torch.arange(gone.shape[-1], device=gone.device)
    place = torch.where(position < context, _PROMPT, _OWN)
    place = place.where(position < len(position) - RECENT, _RECENT).where(position >= SINKS, _SINK)
    return place.to(torch.int8).expand_as(gone).where(gone, _HELD)


def sum_missed(spans: Sequence[Span]) -> Float[Tensor, "config step"]:
    """Return the attention of later steps on each step's token while it is gone, mean over heads, sum over steps."""
    steps = sum(len(span.attention) for span in spans)
    padded = [pad(each, (0, steps - each.shape[-1])) for each in (span.missed() for span in spans)]
    return torch.stack(padded).sum(dim=0)
