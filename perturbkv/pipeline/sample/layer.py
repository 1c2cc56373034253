"""What every configuration keeps in one layer, and the isolated quantities of every decode step, for all of them.

Nothing here waits for the device, so that a GPU works through all layers before anyone asks for a number.

What single evicted entries add to a head's output under full attention: those of the largest ‖A_i 𝒱_i‖₁ = A_i ν_i.

Of the first decode step, for every configuration and head. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from perturbkv import theory
from perturbkv.devices import to_device, working_bytes
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.measure import LayerMasks
from perturbkv.pipeline.sample.prefill import layer_norms
from perturbkv.pipeline.sample.sample_run import SampleRun
from perturbkv.pipeline.variants import page_reading, sparse_prefill
from perturbkv.selection.kept_sets import KeptSets
from perturbkv.selection.page_selection import AnyGroup, PageGroup
from perturbkv.selection.resolved_config import ResolvedConfig
from perturbkv.theory import WORK

ENTRIES = 10
"""How many are told of each head."""


@dataclass(frozen=True)
class Outputs:
    """A ν of a layer's prompt entries, the largest first; equal ones as they stand in the prompt (METHOD: ties).

    Attributes:
        position: of the entries.
        output: A ν of each.
    """

    position: Int[Tensor, "head key"]
    output: Float[Tensor, "head key"]


def ordered_lost(
    attention: Float[Tensor, "head seen"], norms: Float[Tensor, "head seen"], prompt_tokens: int
) -> Outputs:
    """The first `prompt_tokens` entries in the order of what each adds to the output."""
    added = (attention * norms.to(WORK))[:, :prompt_tokens]
    output, position = added.sort(dim=-1, descending=True, stable=True)
    return Outputs(position, output)


def largest_lost(given: Outputs, kept: Bool[Tensor, "config head key"]) -> dict[str, Tensor]:
    """The evicted entries that add most, (config, head, ENTRIES): −1 and NaN where fewer went."""
    gone = ~kept.gather(-1, given.position.expand_as(kept))
    ranks = torch.arange(1, ENTRIES + 1, dtype=torch.int32, device=kept.device)
    counted = gone.cumsum(dim=-1, dtype=torch.int32)
    place = torch.searchsorted(counted, ranks.expand(*kept.shape[:2], -1).contiguous())
    there, place = place < kept.shape[-1], place.clamp(max=kept.shape[-1] - 1)
    position, output = (
        row.expand(*kept.shape[:2], -1).gather(-1, place) for row in (given.position, given.output)
    )  # fmt: skip
    return {"lost_position": position.where(there, -1), "lost_output": output.where(there, torch.nan)}


_ENTRY_BYTES = 10
"""Of the sums over entries, per entry, head and configuration: two masks, and weights."""


@dataclass(frozen=True)
class LayerResult:
    """One layer of one sample.

    Attributes:
        groups: what every configuration keeps.
        isolated: per step, name -> (config, head), or (head,) for noise floors; configurations in `groups`' order.
        lost: of the first step, name -> (config, head, lost_entry), or (head,) for C.
        attention: reference attention per step (head, key), where the run saves outputs.
    """

    groups: list[AnyGroup]
    isolated: list[dict[str, Tensor]]
    lost: dict[str, Tensor]
    attention: list[Tensor]


def order(found: Sequence[AnyGroup]) -> list[int]:
    """The configurations as groups list them: the same in all layers."""
    return [place for group in found for place in group.config_indices]


def measure_layer(sample: SampleRun, index: int) -> LayerResult:
    """Select for every configuration in one layer, and measure what that alone changes at every step."""
    layer, full, configs, n = sample.layer(index), sample.full.steps, sample.run.configs, sample.tokens
    heads, keys = sample.adapter.heads, layer.keys
    weights = [layer.weights(one) for one in full]
    attention = [seen for seen, _ in weights]
    with phase("select"):
        found: list[AnyGroup] = [
            *layer.groups(configs, attention[0]),
            *page_reading.groups(layer, configs, [one.query[index][0] for one in full]),
        ]
        along = sparse_prefill.line_groups(layer, configs)
    decoded_norms = layer_norms(layer.values[:, n:], layer.projection, sample.resources)
    norms = torch.cat([layer.statistics.norms[index], decoded_norms], dim=-1)
    summands = theory.stack_summands(layer.values, norms)
    steps = [
        measure.reference(step, summands.first_entries(step.shape[-1]), layer.slices, sink) for step, sink in weights
    ]
    added = ordered_lost(attention[0], norms[:, : attention[0].shape[-1]], n)
    parts, gone = [], []
    working = working_bytes(keys.device, sample.resources.chunk_bytes)
    for group, rows in _parts(found, heads * keys.shape[1], working):
        masks = _masks(group, rows, heads, len(steps))
        alphas = _every_alpha(layer, configs, group, rows)
        parts.append([measure.isolated(step, own, alphas) for step, own in zip(steps, masks, strict=True)])
        gone.append(largest_lost(added, masks[0].kept))
    for lines in along:
        alphas = _every_alpha(layer, configs, lines, slice(None))
        parts.append([sparse_prefill.isolated_by_lines(layer, lines, summands, alphas)])
        gone.append(largest_lost(added, lines.decoding_mask(heads)))
    isolated = [_joined(step) for step in zip(*parts, strict=True)]
    if along:
        isolated[0] |= _largest_floors([step[0] for step in parts])
    most = _joined(gone) | {"weighted_norm": steps[0].total}
    return LayerResult([*found, *along], isolated, most, attention if "outputs" in sample.run.save else [])


def _parts(found: Sequence[AnyGroup], entries: int, working: int) -> Iterator[tuple[AnyGroup, slice]]:
    """As many configurations at once as fit the working memory."""
    size = max(1, working // (_ENTRY_BYTES * entries))
    return (
        (group, slice(start, start + size)) for group in found for start in range(0, len(group.config_indices), size)
    )


def _masks(group: AnyGroup, rows: slice, heads: int, steps: int) -> list[LayerMasks]:
    """What is looked at in each step: what stays, or the pages that the step's query chooses."""
    if isinstance(group, PageGroup):
        return [_per_query_head(sets, heads) for sets in group.kept_sets_per_step(rows)]
    return [_per_query_head(group.kept_sets(rows), heads)] * steps


def _per_query_head(sets: KeptSets, heads: int) -> LayerMasks:
    sharing = heads // sets.kept.shape[1]
    if sharing == 1:
        return LayerMasks(sets.kept, sets.stage1)
    return LayerMasks(sets.kept.repeat_interleave(sharing, dim=1), sets.stage1.repeat_interleave(sharing, dim=1))


def _every_alpha(layer: FullLayer, configs: Sequence[ResolvedConfig], group: AnyGroup, rows: slice) -> Tensor:
    """Return α (config, head) of some of a group's configurations."""
    shares = [_alphas(configs[place], layer.index, layer.adapter.heads, group) for place in group.config_indices[rows]]
    return to_device(shares, layer.keys.device, theory.WORK)


def _alphas(config: ResolvedConfig, layer: int, heads: int, group: AnyGroup) -> list[float]:
    """α of each query head: that of its kept set."""
    sharing = heads // group.kept_heads
    return [share for share in config.alphas(layer, group.kept_heads) for _ in range(sharing)]


def _largest_floors(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Noise floors of the decode step and of the prompt's queries: one for all, the larger is the careful one."""
    floors = [name for name, tensor in parts[0].items() if tensor.ndim == 1]
    return {name: torch.stack([part[name] for part in parts]).amax(dim=0) for name in floors}


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One dictionary of all configurations; noise floors, which all parts measured, from the first."""
    return {
        name: torch.cat([part[name] for part in parts]) if first.ndim > 1 else first for name, first in parts[0].items()
    }
