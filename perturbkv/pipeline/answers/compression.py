"""Decode-time eviction: compress a row of a compact cache to its budget again and again (paper, appendix K).

A compression selects by the last queries of the row among the entries that are still cached. Its perturbation is
measured at once, on the last query. Where positions are those in the cache, the remaining entries get new positions,
and the row's next token follows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import Cache

from perturbkv import theory
from perturbkv.cache.compact import CompactCache
from perturbkv.cache.entries import KeptEntries
from perturbkv.cache.makers import Entries
from perturbkv.configs.resources import Resources
from perturbkv.devices import move_to_first_device, to_device
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.sample.capture import Observer
from perturbkv.pipeline.sample.prefill import (
    Rotations,
    Statistics,
    accumulated_request,
    layer_value_norms,
    mean_size,
)
from perturbkv.pipeline.variants.readers import maker_of
from perturbkv.scoring.compute import layer_scores
from perturbkv.scoring.layer_view import LayerView, Rotation
from perturbkv.scoring.score import Score
from perturbkv.scoring.value_norms import euclidean_value_norms
from perturbkv.selection.kept_sets import KeptSets, move_rankings, rankings, select
from perturbkv.selection.layer_statistics import LayerStatistics, join_layers
from perturbkv.selection.ranking import Scores
from perturbkv.selection.resolved_config import ResolvedConfig, ResolvedRun


@dataclass(frozen=True)
class Compression:
    """One compression of one row.

    Attributes:
        config: index of the configuration.
        generated: number of tokens generated before it.
        before, after: mean numbers of entries per kept set, over kept sets and layers.
        perturbation: isolated perturbation (layer, head) on the last query, compared with the row before.
        output_norm: ‖o_h‖₁ (layer, head) of that query before the compression.
        retained_mass: S (layer, head).
    """

    config: int
    generated: int
    before: float
    after: float
    perturbation: Float[Tensor, "layer head"]
    output_norm: Float[Tensor, "layer head"]
    retained_mass: Float[Tensor, "layer head"]


class CacheSize(NamedTuple):
    """The size of one row of a cache in one layer: entries that a query attends to, bits as stored and in memory."""

    entries: int
    bits: int | float
    resident_bits: int | float

    @classmethod
    def of(cls, entries: Entries) -> CacheSize:
        """Return the size of what a row holds."""
        resident = entries.bits if entries.resident_bits is None else entries.resident_bits
        return cls(entries.attended_entries, entries.bits, resident)


@dataclass(frozen=True)
class EvictedPrompt:
    """A prompt with its evicted cache.

    Attributes:
        cache: one row per configuration, after a row that keeps everything where requested.
        logits: logits of the context's last position, for all rows or per row.
        queries: per layer the last queries (head, query, d_key), as many as the largest window; empty where nothing
            is compressed again.
        sizes: per layer that of the full cache, then of each configuration's; empty where they are not asked for.
        gates: layer -> γ of the last queries (query, head · d_value), of the layers with a gate.
        full: the full cache, where it holds latents; else its entries are those of a row that keeps everything.
        attention: index of a configuration whose score accumulates -> per layer what `held_attention` returns.
    """

    cache: CompactCache
    logits: Float[Tensor, "*row vocab"]
    queries: list[Tensor] = field(default_factory=list)
    sizes: list[list[CacheSize]] = field(default_factory=list)
    gates: Mapping[int, Tensor] = field(default_factory=dict)
    full: Cache | None = None
    attention: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)


def held_attention(
    statistics: Statistics, config: ResolvedConfig, layer: int, heads: int, kept: Tensor, longest: int
) -> Float[Tensor, "head longest"]:
    """Return the attention of all queries of the prompt on what a configuration keeps, by a score that accumulates.

    `kept` (kept_head, n) is its mask, `longest` the length of its longest kept set; shorter ones are padded by zeros at
    the start.
    """
    mean = statistics.scored[accumulated_request(config)][layer]
    total = (mean * statistics.tokens).repeat_interleave(heads // len(mean), dim=0)
    return _take_kept(total, kept.repeat_interleave(heads // len(kept), dim=0), longest)


class Compressor:
    """The compressor of the rows of a compact cache while it is decoded from.

    Args:
        adapter: the model.
        prompt: the evicted prompt; its cache has the run's configurations after a row that keeps everything, its
            queries are at least the window's.
        run: the run of the configurations, with budgets in tokens, and when they are compressed again.
        sample: the sample's id, for seeds.
        resources: memory and kernel for value norms.
        held: per layer and configuration the mask of what the row holds of the prompt (kept_set, n); empty where nobody
            asks which entries stay.
        question: number of tokens of the prompt that are read over the compressed cache.

    Attributes:
        compressions: what was measured of each compression.
        attention: row whose score accumulates -> per layer the attention that what it held after its last compression
            had had till then (head, longest).
        read_before: row whose score accumulates -> number of tokens read before its last compression.
        kept_sets: tokens read -> index of a configuration -> per layer what its row then holds of all entries so far,
            as masks (kept_set, key); empty without `held`.
    """

    def __init__(
        self,
        adapter: Adapter,
        prompt: EvictedPrompt,
        run: ResolvedRun,
        sample: str,
        resources: Resources,
        held: Sequence[Sequence[Bool[Tensor, "kept_set n"]]] = (),
        question: int = 0,
    ) -> None:
        self.adapter = adapter
        self.cache: CompactCache = prompt.cache
        compressed = prompt.cache.evicted_layers[0].seen
        self.configs: tuple[ResolvedConfig, ...] = tuple(
            config.while_decoding(compressed, question) for config in run.configs
        )
        self.rows: list[int] = [1 + index for index, config in enumerate(run.configs) if not config.is_external]
        self.every: int = run.compress_every
        self.over: int = run.compress_over
        self.sample = sample
        self.resources = resources
        self.head_scores: tuple[tuple[float, ...], ...] = run.head_scores
        self.window: int = run.largest_window
        rows = prompt.cache.rows
        self.queries: list[Tensor] = [
            last[:, -self.window :].unsqueeze(0).expand(rows, -1, -1, -1) for last in prompt.queries
        ]
        self.gates: dict[int, Tensor] = {
            layer: last[-self.window :].expand(rows, -1, -1) for layer, last in prompt.gates.items()
        }
        self.attention: dict[int, Sequence[Tensor]] = {1 + index: own for index, own in prompt.attention.items()}
        self.read_before: dict[int, int] = dict.fromkeys(self.attention, compressed)
        self.rotations: Rotations = Rotations(adapter)
        self.compressions: list[Compression] = []
        self.held: list[dict[int, Tensor]] = [dict(enumerate(masks, start=1)) for masks in held]
        self.kept_sets: dict[int, dict[int, list[KeptSets]]] = {}

    def observer(self) -> Observer:
        """Return the observer that stores the newest queries and their gates while the cache is decoded from."""
        return Observer(
            attention=lambda layer, query, key, value: self.store_queries(layer, query), gate=self.store_gates
        )

    def store_queries(self, layer: int, query: Float[Tensor, "row head query d_key"]) -> None:
        """Store the newest queries of a layer: the window's, and all since the last compression that sums count."""
        newest = torch.cat([self.queries[layer], query], dim=2)
        self.queries[layer] = newest if self.attention else newest[:, :, -self.window :]

    def store_gates(self, layer: int, gate: Float[Tensor, "row query head_d_value"]) -> None:
        """Store γ of a layer's newest queries."""
        self.gates[layer] = torch.cat([self.gates[layer], gate], dim=1)[:, -self.window :]

    def compress(self, read: int) -> None:
        """Compress every row that is due; `read` is the number of tokens of the text or answer that are decoded.

        Waits for the device once per row, for the sizes of its kept sets, and once for what was measured.
        """
        tokens = self.cache.evicted_layers[0].seen + self.cache.evicted_layers[0].length
        measured: list[Tensor] = []
        sizes: list[tuple[int, float, float]] = []
        for row in self.rows:
            before = mean_entries(self.cache, row)
            if self.over:
                is_due = before > self.over
            else:
                is_due = read > 0 and read % self.every == 0 and before > self.configs[row - 1].budget.value
            if is_due:
                measured += self._compress_row(row, read, tokens)
                sizes.append((row - 1, before, mean_entries(self.cache, row)))
        if measured:
            by_row = torch.stack(move_to_first_device(measured)).cpu().view(len(sizes), len(self.queries), 3, -1)
            self.compressions += [  # the 3: perturbation, output norm, retained mass
                Compression(index, 1 + read, before, after, *layers.unbind(dim=1))
                for (index, before, after), layers in zip(sizes, by_row, strict=True)
            ]
        if self.attention:
            counted = max(self.window, *(tokens - before for before in self.read_before.values()))
            self.queries = [queries[:, :, -counted:] for queries in self.queries]

    def tokens_until_due(self, read: int) -> int:
        """Return the number of tokens, at least 1, that can be decoded after `read` before any row may be due."""
        if self.every:
            return self.every - read % self.every
        fullest = max((mean_entries(self.cache, row) for row in self.rows), default=0.0)
        return max(1, int(self.over - fullest) + 1)

    def _compress_row(self, row: int, read: int, tokens: int) -> list[Tensor]:
        """Compress one row after `read` tokens, and return per layer what was measured, stacked: (3, head).

        These are the perturbation, the output norm and the retained mass; `tokens` is the number of all tokens read,
        prompt and question among them.
        """
        config = self.configs[row - 1]
        views = [self._view(layer, row, config, 1 + read, tokens) for layer in range(len(self.queries))]
        sums = self._attention_sums(row, views, tokens)
        means = [total / tokens for total in sums] if sums else [view.scores(config) for view in views]
        layers = [view.statistics(config, self.head_scores, mean) for view, mean in zip(views, means, strict=True)]
        shared = {config: rankings(config, Scores(join_layers(layers)))} if config.shares_layers else {}
        sets = [
            select(config, layer, view.longest, move_rankings(shared, layer.norms.device))
            for layer, view in zip(layers, views, strict=True)
        ]
        kept = [of_layer.kept for of_layer in sets]
        counts = torch.stack(move_to_first_device(masks.sum(dim=-1) for masks in kept)).tolist()
        for view, masks, lengths in zip(views, kept, counts, strict=True):
            indices = view.kept_indices(masks, lengths)
            frequencies = self.adapter.frequencies if config.in_cache else torch.empty(0)
            remaining = maker_of(config).make_compressed(view.take(indices), indices, view.lengths, frequencies)
            self.cache.evicted_layers[view.layer].replace_rows({row: remaining})
        if sums:
            self.read_before[row] = tokens
            self.attention[row] = [
                _take_kept(total, masks.repeat_interleave(view.group, dim=0), max(lengths))
                for total, view, masks, lengths in zip(sums, views, kept, counts, strict=True)
            ]
        if self.held:
            self.kept_sets.setdefault(read, {})[row - 1] = self._sets_of_all(row, sets)
        return [torch.stack(view.perturbation(masks)) for view, masks in zip(views, kept, strict=True)]

    def _attention_sums(self, row: int, views: Sequence[_RowView], tokens: int) -> list[Tensor]:
        """Return, per layer, the attention that what a row holds has had (head, longest); empty if no score sums it."""
        if row not in self.attention:
            return []
        score, since = self.configs[row - 1].requests[0].score, tokens - self.read_before[row]
        return [
            torch.nn.functional.pad(before, (0, view.longest - before.shape[-1])) + view.attention_sums(score, since)
            for before, view in zip(self.attention[row], views, strict=True)
        ]

    def _sets_of_all(self, row: int, sets: Sequence[KeptSets]) -> list[KeptSets]:
        """Return a row's kept sets as masks over all entries so far; `sets` are masks of what it held, per layer."""
        found = []
        for held, of_layer, layer in zip(self.held, sets, self.cache.evicted_layers, strict=True):
            before = held[row].repeat_interleave(len(of_layer.kept) // len(held[row]), dim=0)
            entries = layer.seen + layer.length
            before = torch.nn.functional.pad(before, (0, entries - before.shape[-1]), value=True)
            found.append(KeptSets(_place(of_layer.kept, before), _place(of_layer.stage1, before)))
            held[row] = found[-1].kept
        return found

    def _view(self, layer: int, row: int, config: ResolvedConfig, generated: int, tokens: int) -> _RowView:
        """Return the entries of one row in one layer, with a kept set per query head where the configuration has."""
        sets = self.cache.evicted_layers[layer].entries(row).sets()
        if config.granularity.name == "query":
            sets = [kept_set for kept_set in sets for _ in range(self.adapter.heads // len(sets))]
        sample = f"{self.sample}/{generated}"
        w_o, gates = self.adapter.output_projection(layer), self.gates.get(layer)
        gate = None if gates is None else gates[row]
        projections = (
            theory.gated_projection(w_o, mean_size(gate, config.gate_window)),
            theory.gated_projection(w_o, None if gate is None else gate[-1]),
        )
        queries, rotations = self.queries[layer][row], partial(self.rotations, device=sets[0][0].device)
        return _RowView(self.adapter, sets, queries, projections, layer, sample, tokens, rotations, self.resources)


class _RowView:
    """The entries of one row in one layer as data for selection; shorter kept sets are padded by zeros at the start.

    Args:
        adapter: the model.
        sets: keys and values (entry, …) of each kept set.
        queries: the row's last queries (head, query, d_key).
        projections: the output projection under the gates' mean size, for ν, and under the last query's gate.
        layer: index of the layer.
        sample: the sample's id, for seeds.
        tokens: number of all tokens read.
        rotations: the model's rotation of ranges of positions.
        resources: memory and kernel for value norms.

    Attributes:
        keys, values: per kept set (entry, …).
        lengths: number of entries of each kept set.
        longest: the largest of them, to which sets are padded.
        group: number of query heads that share a kept set.
        parts: slices of the kept sets that are computed on together: all where they are equally long, else each alone.
        norms: projected value norms ν (head, longest), padded by zeros at the start.
    """

    def __init__(
        self,
        adapter: Adapter,
        sets: Sequence[tuple[Tensor, Tensor]],
        queries: Tensor,
        projections: tuple[Tensor, Tensor],
        layer: int,
        sample: str,
        tokens: int,
        rotations: Callable[[range], Rotation],
        resources: Resources,
    ) -> None:
        self.adapter, self.queries, self.layer, self.sample = adapter, queries, layer, sample
        self.tokens, self.rotations = tokens, rotations
        self.projection, self.last_projection = projections
        self.resources = resources
        self.keys, self.values = zip(*sets, strict=True)
        self.lengths = [len(keys) for keys in self.keys]
        self.sets, self.longest = len(sets), max(self.lengths)
        self.group = adapter.heads // self.sets
        even = len(set(self.lengths)) == 1
        self.parts = [slice(0, self.sets)] if even else [slice(index, index + 1) for index in range(self.sets)]
        norms = [
            layer_value_norms(torch.stack(self.values[part]), self._projection(part), resources) for part in self.parts
        ]
        self.norms = _align_ends(norms, self.longest)

    def scores(self, config: ResolvedConfig) -> Float[Tensor, "row prefix"]:
        """Return the scores of the entries before the window, padded by zeros at the start."""
        score = config.requests[0].score  # the policy's
        views = [self._view_part(part, str(part.start)).with_window(config.window) for part in self.parts]
        found = [layer_scores(view, [score], self.resources.chunk_bytes)[score] for view in views]
        return _align_ends(found, self.longest - min(config.window, self.longest))

    def attention_sums(self, score: Score, count: int) -> Float[Tensor, "head longest"]:
        """Return the sums over the row's last `count` queries of a score that is a mean over all queries."""
        views = [self._view_part(part, str(part.start)) for part in self.parts]
        views = [replace(view, queries=view.queries[:, -count:]) for view in views]
        means = [layer_scores(view, [score], self.resources.chunk_bytes)[score] for view in views]
        heads = [view.heads // len(mean) for view, mean in zip(views, means, strict=True)]
        each = [mean.repeat_interleave(sharing, dim=0) for mean, sharing in zip(means, heads, strict=True)]
        return _align_ends(each, self.longest) * count

    def statistics(
        self, config: ResolvedConfig, head_scores: Sequence[Sequence[float]], scores: Float[Tensor, "row key"]
    ) -> LayerStatistics:
        """Return the layer's norms, and the scores of the entries before the window, by which kept sets are selected.

        `scores` may go on into the window.
        """
        window = min(config.window, self.longest)
        lengths = to_device(self.lengths, self.norms.device)
        indices = torch.arange(self.longest - window, device=self.norms.device)
        euclidean = None
        if config.euclidean:
            values = ((torch.stack(self.values[part]), self._projection(part)) for part in self.parts)
            norms = [euclidean_value_norms(*of_part, self.resources.chunk_bytes) for of_part in values]
            euclidean = _align_ends(norms, self.longest)[:, : self.longest - window]
        return LayerStatistics(
            accumulated=scores[:, : self.longest - window],
            norms=self.norms[:, : self.longest - window],
            kv_heads=self.sets,
            layer=self.layer,
            layers=len(self.adapter.layers),
            sample=self.sample,
            head_scores=head_scores,
            valid=indices >= (self.longest - lengths).unsqueeze(-1),
            euclidean=euclidean,
        )

    def kept_indices(self, kept: Bool[Tensor, "kept_head key"], counts: Sequence[int]) -> list[Tensor]:
        """Return, per kept set, the indices of its `counts` kept entries in the unpadded set, in order."""
        order = (~kept).to(torch.int8).argsort(dim=-1, stable=True)  # kept ones first; nonzero would wait
        return [
            row[:count] - (self.longest - length)
            for row, count, length in zip(order, counts, self.lengths, strict=True)
        ]

    def take(self, indices: Sequence[Tensor]) -> KeptEntries:
        """Return copies of the entries at the given indices, one index tensor per kept set."""
        keys, values = (
            [vectors[rows] for vectors, rows in zip(sets, indices, strict=True)] for sets in (self.keys, self.values)
        )
        return KeptEntries.of(keys, values)

    def perturbation(self, kept: Bool[Tensor, "kept_head key"]) -> tuple[Tensor, Tensor, Tensor]:
        """Return isolated perturbation, output norm ‖o_h‖₁ and retained mass S on the last query, each (head,)."""
        views = [self._view_part(part, "") for part in self.parts]
        weights = [theory.decode_weights(part.queries[:, -1], part.keys, part.softmax) for part in views]
        attention = _align_ends([entry_weights for entry_weights, _ in weights], self.longest)
        sink = torch.cat([sink_weights for _, sink_weights in weights])
        value = _align_ends([keys.unsqueeze(0).transpose(1, 2) for keys in self.values], self.longest)
        summands = theory.stack_summands(value.transpose(1, 2), self.norms)
        everything = summands.sums(attention.unsqueeze(0)).mixed
        sums = theory.kept_sums(attention, summands, kept.repeat_interleave(self.group, dim=0).unsqueeze(0), sink)
        slices = theory.head_slices(self.last_projection, len(attention))
        output = theory.project_outputs(everything[0], slices)
        distances = theory.isolated_perturbation(everything, sums.mixed, sums.mass, slices, output)
        return distances.l1[0], output.abs().sum(dim=-1), sums.mass[0]

    def _head_slice(self, part: slice) -> slice:
        """Return the slice of the query heads that share the kept sets in the slice `part`."""
        return slice(part.start * self.group, part.stop * self.group)

    def _view_part(self, part: slice, name: str) -> LayerView:
        """Return the layer view of the kept sets in the slice `part`, of one length; `name` extends the sample's id."""
        heads = self._head_slice(part)
        keys, values = torch.stack(self.keys[part]), torch.stack(self.values[part])
        return LayerView(
            queries=self.queries[heads],
            keys=keys,
            values=values,
            norms=self.norms[heads, self.longest - keys.shape[1] :],
            projection=self._projection(part),
            softmax=self.adapter.softmax(self.layer).of_heads(heads),
            layer=self.layer,
            layers=len(self.adapter.layers),
            sample=f"{self.sample}/{name}",
            window=0,
            position=self.tokens,
            rotary=self.rotations,
        )

    def _projection(self, part: slice) -> Tensor:
        """Return the columns of ν's projection for the query heads of the kept sets in the slice `part`."""
        heads, d_value = self._head_slice(part), self.adapter.d_value
        return self.projection[:, heads.start * d_value : heads.stop * d_value]


def _align_ends(tensors: Sequence[Tensor], longest: int) -> Tensor:
    """Return the tensors (…, length) concatenated after padding with zeros at the start to length `longest`."""
    return torch.cat([torch.nn.functional.pad(tensor, (longest - tensor.shape[-1], 0)) for tensor in tensors])


def _take_kept(
    numbers: Float[Tensor, "head key"], kept: Bool[Tensor, "head key"], longest: int
) -> Float[Tensor, "head longest"]:
    """Return the numbers of kept entries, in order and padded by zeros at the start; `longest` is the largest count."""
    order = kept.to(torch.int8).argsort(dim=-1, stable=True)  # kept ones last; a mask as index would wait
    return (numbers * kept).gather(-1, order)[:, -longest:]


def _place(
    chosen: Bool[Tensor, "kept_set longest"], held: Bool[Tensor, "kept_set key"]
) -> Bool[Tensor, "kept_set key"]:
    """Return the mask of the held entries that are `chosen`, where they are the last ones of each row, in order."""
    rank = held.cumsum(dim=-1) + (chosen.shape[-1] - held.sum(dim=-1, keepdim=True)) - 1
    return held & chosen.gather(-1, rank.clamp(min=0))


def mean_entries(cache: CompactCache, row: int) -> float:
    """Return a row's mean number of entries per kept set, over layers and kept sets."""
    lengths: list[int] = [length for layer in cache.evicted_layers for length in layer.lengths(row)]
    return sum(lengths) / len(lengths)
