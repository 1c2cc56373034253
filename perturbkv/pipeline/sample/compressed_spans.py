"""Isolated quantities where caches are compressed again while they are decoded from (METHOD: decode-time eviction).

Kept sets hold between two compressions, a span of steps. At each compression stands what the entries gone before cost
(carried), what it adds, and where the entries stood that go; at every step the attention that falls on what is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv import theory
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.measure import LayerMasks, Reference
from perturbkv.schema import PLACES
from perturbkv.selection.kept_sets import KeptSets
from perturbkv.theory import WORK

LaterSets = Mapping[int, Mapping[int, Sequence[KeptSets]]]
"""Tokens of the text that are read -> index of a configuration -> per layer what its row then holds of all entries."""
SINKS, RECENT = 4, 64
"""First entries of a prompt that count as sinks, and last entries before a compression that count as recent."""
_SINK, _PROMPT, _OWN, _RECENT = range(len(PLACES))
_HELD = -1


@dataclass(frozen=True, eq=False)
class Span:
    """The steps of one layer between two compressions, of some configurations.

    Attributes:
        first: the first of its steps.
        references: the full run's quantities at each.
        masks: what rows hold, of the entries before the first step, or at the prompt's end of the prompt's.
        before: likewise what they held before the compression.
        compressed: configurations that were compressed right before the first step.
        place: places where entries stood when they went, as places of `PLACES`; −1 for held ones.
        went: mask of the entries that went right before the first step.
        context: number of entries before the text.
    """

    first: int
    references: Sequence[Reference]
    masks: LayerMasks
    before: Bool[Tensor, "config head key"]
    compressed: Bool[Tensor, " config"]
    place: Int[Tensor, "config head key"]
    went: Bool[Tensor, "config head key"]
    context: int

    def measure(self, alphas: Float[Tensor, "config head"]) -> list[dict[str, Tensor]]:
        """Return, per step, name -> isolated quantity (config, head, …), or noise floor (head,).

        `alphas` are the stage-1 shares α.
        """
        quantities = measure.isolated_quantities(self.references, self.masks, alphas)
        nothing = {name: torch.full_like(quantities[0]["retained_mass"], torch.nan) for name in _AT_COMPRESSIONS}
        none_went = dict.fromkeys(_WENT, self.references[0].attention.new_zeros(*self.went.shape[:2], len(PLACES)))
        entries = self.context + self.first + 1 + torch.arange(len(self.references), device=self.place.device)
        gone = (self.place != _HELD).sum(dim=-1)
        for step, (known, attention) in enumerate(zip(quantities, self._gone_attention(), strict=True)):
            known |= (nothing | none_went) if step else self._at_compression()
            known |= {"gone_attention": attention, "held_entries": (entries[step] - gone).to(WORK)}
        return quantities

    def _at_compression(self) -> dict[str, Tensor]:
        """Return what the compression before the first step did; NaN for configurations that had none."""
        step = self.references[0]
        earlier, later = (
            theory.kept_sums(step.attention, step.summands, self._padded(mask).to(WORK), step.sink)
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

    def _gone_attention(self) -> Float[Tensor, "step config head place"]:
        """Return, at each step, the attention on what is gone, by the place where it stood."""
        configs, heads, keys = self.place.shape
        attention = torch.stack([step.attention[:, :keys] for step in self.references], dim=-1)  # (head, key, step)
        masks = torch.stack([self.place == place for place in range(len(PLACES))], dim=1).to(WORK)
        sums = masks.permute(2, 0, 1, 3).reshape(heads, -1, keys) @ attention
        return sums.view(heads, configs, len(PLACES), -1).permute(3, 1, 0, 2)

    def _padded(self, mask: Bool[Tensor, "config head key"]) -> Bool[Tensor, "config head seen"]:
        """Return a mask over all entries that the first step sees; the last ones are held."""
        missing = self.references[0].attention.shape[-1] - mask.shape[-1]
        return torch.nn.functional.pad(mask, (0, missing), value=True)

    def missed(self) -> Float[Tensor, "config token"]:
        """Return the attention on each of the text's tokens that are gone, mean over heads, sum over the steps."""
        keys = self.place.shape[-1]
        attention = torch.stack([step.attention[:, :keys] for step in self.references]).sum(dim=0)
        return (attention * (self.place != _HELD)).mean(dim=1)[:, self.context :]


_AT_COMPRESSIONS = ("perturbation_carried", "perturbation_added")
_WENT = ("went_entries", "went_output")


def decoding_spans(
    masks: LayerMasks,
    configs: Sequence[int],
    later: LaterSets,
    layer: int,
    references: Sequence[Reference],
    context: int,
) -> list[Span]:
    """Return the spans of one layer between the compressions of some configurations.

    Args:
        masks: what they hold at the prompt's end.
        configs: their indices in the run.
        later: what all later compressions keep.
        layer: the layer's index.
        references: the full run's quantities, one per step.
        context: number of entries before the text, of prompt and question.
    """
    starts = sorted({0, *(read for read, rows in later.items() if rows.keys() & {*configs})})
    before, kept, stage1 = torch.ones_like(masks.kept), masks.kept, masks.stage1
    place = _places_of_gone(before & ~kept, masks.kept.shape[-1])
    compressed, spans = (~kept).flatten(1).any(dim=-1), []
    for first, end in pairwise([*starts, len(references)]):
        if rows := later.get(first, {}):
            entries = context + first
            kept, stage1, place = (
                torch.nn.functional.pad(each, (0, entries - each.shape[-1]), value=value).clone()
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
        span = LayerMasks(kept, stage1)
        spans.append(Span(first, references[first:end], span, before, compressed, place, before & ~kept, context))
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
    steps = sum(len(span.references) for span in spans)
    padded = [torch.nn.functional.pad(each, (0, steps - each.shape[-1])) for each in (span.missed() for span in spans)]
    return torch.stack(padded).sum(dim=0)
