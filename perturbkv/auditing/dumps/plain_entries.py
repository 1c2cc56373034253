"""The plain model's entries of a dump's requests, their noise floors, and how far the engine's rounding moves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from perturbkv.analyses.audit.cache_entries import FLOORS
from perturbkv.analyses.measurements import Floats
from perturbkv.auditing.dumps.dump_entries import (
    MEDIANS,
    Entries,
    EntryDistances,
    Limits,
    Pair,
)
from perturbkv.auditing.dumps.dump_file import REMOVED, Dump, of_heads
from perturbkv.auditing.forward_passes import make_situation
from perturbkv.auditing.reference import decode, entry_distances, entry_floors, prompt_entries, read_prompts
from perturbkv.auditing.unmeasured import fill_cache
from perturbkv.cache.entries import rotate_keys
from perturbkv.cache.external_cache import Layers
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.models.interface import AttentionFunction
from perturbkv.pipeline.sample.capture import Observer, capture, intercept_attention

_TOKENS_PER_PASS = 256
_COARSE = 0.3
"""Distance up to which an entry may be `FLOORS` times as far as rounding moved it; beyond, twice."""
_SHORT = 64
"""Tokens of a request below which it is also read with others after it: products of few rows are summed otherwise."""
_SAME_ROUNDING = 0.6
"""Share of the typical distance up to which a value may be from the nearest reading that is rounded as the engine's."""
_ROUNDINGS = 8
"""Readings of a model of 16 bits whose products are rounded otherwise."""


@dataclass(frozen=True)
class ExpectedDistances:
    """The distances from the plain model of a request's entries in one layer, that the engine's rounding gives.

    Attributes:
        typical: median of keys and of values.
        largest: of each token, over heads and readings, of keys and of values.
    """

    typical: tuple[float, float]
    largest: tuple[Float[Tensor, " token"], Float[Tensor, " token"]]

    @classmethod
    def of_layer(cls, readings: Sequence[Float[Tensor, "2 kv_head token"]]) -> Self:
        """Return the distances in one layer, given those of every reading.

        A key's distance is at least position · ε/2: its angle is rounded to float32.
        """
        keys, values = torch.stack(list(readings), dim=1)  # each (reading, kv_head, token)
        least = torch.arange(keys.shape[-1], device=keys.device) * (torch.finfo(torch.float32).eps / 2)
        largest_keys, largest_values = (kind.amax(dim=(0, 1)) for kind in (keys, values))
        return cls((float(keys.median()), float(values.median())), (torch.maximum(largest_keys, least), largest_values))

    def limits(self, positions: Int[Tensor, "kv_head entry"], least: Limits) -> Limits:
        """Return the limits of entries at these positions, each its own; `least` are those without any rounding.

        Rounding moves a few tokens' entries far, and differently in every reading; their limits are larger.
        """
        single, together = [], []
        for largest, typical, least_single, least_together in zip(
            self.largest, self.typical, least.single, least.together, strict=True
        ):
            by_token = _limits_by_token(largest).clamp(min=max(float(least_single), MEDIANS * typical))
            single.append(by_token[positions.clamp(min=0)])
            together.append(max(MEDIANS * typical, least_together))
        return Limits((single[0], single[1]), (together[0], together[1]))


def _limits_by_token(largest: Float[Tensor, " token"]) -> Float[Tensor, " token"]:
    """Return the distances up to which tokens' entries are right, given the largest to which rounding moved each."""
    return torch.maximum((FLOORS * largest).clamp(max=_COARSE), 2 * largest)


class PlainEntries:
    """The plain model's entries of all requests, with their noise floors.

    Attributes:
        adapter: the model.
        tokens: request -> its tokens.
        layers: request -> keys and values (1, kv_head, entry, width) of each layer.
        queries: request -> the last token's query (head, d_key) in each layer.
        gates: request -> its γ (head · d_value) in each layer with a gate.
        floors: (layer, kind) largest distance of an entry where the model reads the tokens in parts or by another
            kernel.
        expected: request -> the distances that the engine's rounding gives, in each layer; without those where it is
            not known.
        rounded_values: request -> values (reading, kv_head, token, width) of the first two layers, read with the
            engine's rounding; of the same requests.
        moved: request -> the largest distance of each token's keys and values (kind, token), in each layer, where
            products are rounded otherwise; of requests of which it was asked.
    """

    def __init__(self, adapter: Adapter, dump: Dump) -> None:
        self.adapter: Adapter = adapter
        self.tokens: dict[str, Int[Tensor, " token"]] = {}
        self.layers: dict[str, Layers] = {}
        self.queries: dict[str, dict[int, Tensor]] = {}
        self.gates: dict[str, dict[int, Tensor]] = {}
        self.expected: dict[str, list[ExpectedDistances]] = {}
        self.rounded_values: dict[str, list[Float[Tensor, "reading kv_head token width"]]] = {}
        self.moved: dict[str, list[Float[Tensor, "2 token"]]] = {}
        floors: list[Floats] = []
        for request in dump.requests:
            ids = self.tokens[request.id] = torch.tensor(request.token_ids, device=adapter.device)
            alone = make_situation("single", ids, ids[:1], 1)
            if request.finished:
                self.layers[request.id], _ = read_prompts(adapter, alone)
                continue
            if len(ids) > 1:
                entries = prompt_entries(adapter, alone)
                full = entries.full
                self.queries[request.id], self.gates[request.id] = _last_query(adapter, ids, full)
                floors.append(entries.floors.T.double().numpy())
            else:
                full, _ = read_prompts(adapter, alone)
            self.layers[request.id] = full
            if len(ids) < _SHORT:
                longer = [_read_further(adapter, ids)]
                floors.append(entry_floors(full, longer, alone, torch.finfo(adapter.dtype).eps).T.double().numpy())
            readings, first_values = [], []
            for rounded in dump.rounded_entries(adapter, request.token_ids):
                readings.append([_layer_distances(*layer) for layer in zip(rounded, full, strict=True)])
                first_values.append([values[0] for _, values in rounded[:2]])
            if readings:
                self.rounded_values[request.id] = [torch.stack(layer) for layer in zip(*first_values, strict=True)]
                self.expected[request.id] = [
                    ExpectedDistances.of_layer(distances) for distances in zip(*readings, strict=True)
                ]
        least = np.full((len(adapter.layers), 2), torch.finfo(adapter.dtype).eps)
        self.floors: Floats = np.max([least, *floors], axis=0)

    def layer(self, index: int) -> Mapping[str, Pair]:
        """Return request -> keys and values (kv_head, entry, width) in one layer."""
        return {name: (layers[index][0][0], layers[index][1][0]) for name, layers in self.layers.items()}

    def expected_distance(self, index: int, kind: int) -> float | None:
        """Return the median distance of keys (`kind` 0) or values (1) that rounding gives; None where not known."""
        known = [layers[index].typical[kind] for layers in self.expected.values()]
        return max(known) if known else None

    def limits(self, name: str, index: int, limits: Limits, positions: Int[Tensor, "kv_head entry"]) -> Limits:
        """Return the limits of a request's entries in a layer: at each position its own if rounding is known."""
        return self.expected[name][index].limits(positions, limits) if name in self.expected else limits

    def moved_values(self, name: str, index: int, entries: Entries) -> Bool[Tensor, " token"]:
        """Return of which tokens the values are none that the engine's rounding gives.

        As a mean over heads they are farther from every reading than any two readings are from each other, and than
        `_SAME_ROUNDING` of what rounding typically moves them by: an engine that read the same text rounds most numbers
        as the readings do. The entries are those of all tokens, in order, in layer 0 or 1, of a request whose rounding
        is known.
        """
        readings, full = self.rounded_values[name][index], self.layer(index)[name][1]
        away = [entry_distances(entries.values, one, full).mean(dim=0) for one in readings]
        apart = [entry_distances(*two, full).mean(dim=0) for two in combinations(readings, 2)]
        least = _SAME_ROUNDING * self.expected[name][index].typical[1]
        return (torch.stack(away).amin(dim=0) > torch.stack(apart).amax(dim=0).clamp(min=least)).cpu()

    def raised_limits(
        self, name: str, index: int, limits: Limits, entries: Entries, measured: EntryDistances
    ) -> Limits | None:
        """Return the limits of a layer's entries, higher for tokens that other roundings move far.

        None for a model that does not compute in 16 bits, and where limits are an engine's.
        """
        if self.adapter.dtype.itemsize != 2 or name in self.expected:
            return None
        if name not in self.moved:
            self.moved[name] = _moved_by_rounding(self.adapter, self.tokens[name], self.layers[name])
        keys, values = (
            torch.maximum(one * norm, _limits_by_token(moved)[entries.positions.clamp(min=0)])
            for one, norm, moved in zip(limits.single, measured.norm, self.moved[name][index], strict=True)
        )
        return Limits((keys, values), limits.together)


def _read_further(adapter: Adapter, ids: Int[Tensor, " token"]) -> Layers:
    """Return the entries of tokens that are read with others after them, their own once more and so on."""
    cache = DynamicCache()
    run_with_cache(adapter.base, ids.repeat(-(-_SHORT // len(ids)) + 1).unsqueeze(0), cache)
    return [(layer.keys[:, :, : len(ids)], layer.values[:, :, : len(ids)]) for layer in cache.layers]


def _moved_by_rounding(adapter: Adapter, ids: Int[Tensor, " token"], full: Layers) -> list[Float[Tensor, "2 token"]]:
    """Return, per layer, how far other roundings move each token's keys and values, at most over heads and readings."""
    found = []
    for seed in range(_ROUNDINGS):
        cache = DynamicCache()
        with RoundedProducts(partial(_move_at_random, torch.Generator().manual_seed(seed))):
            run_with_cache(adapter.base, ids.unsqueeze(0), cache)
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        found.append([_layer_distances(*layer).amax(dim=1) for layer in zip(layers, full, strict=True)])
    return [torch.stack(distances).amax(dim=0) for distances in zip(*found, strict=True)]


class RoundedProducts(TorchFunctionMode):
    """Products with weights, within the block, of numbers that are rounded by a function."""

    def __init__(self, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rounded = rounded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; in a product, with its first argument rounded."""
        if func is nn.functional.linear:
            args = (self.rounded(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _move_at_random(noise: torch.Generator, given: Tensor) -> Tensor:
    """Return numbers moved by up to ε/2 of themselves.

    An engine rounds other numbers than the model does: its kernels do several operations at once.
    """
    moves = (torch.rand(given.shape, generator=noise) - 0.5) * torch.finfo(given.dtype).eps
    return (given.float() * (1 + moves.to(given.device))).to(given.dtype)


def _layer_distances(rounded: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor]) -> Float[Tensor, "2 kv_head token"]:
    """Return the distances of a layer's rounded keys and values (1, kv_head, token, width) from the plain model's."""
    return torch.stack([entry_distances(own[0], full[0], full[0]) for own, full in zip(rounded, plain, strict=True)])


def _last_query(adapter: Adapter, ids: Tensor, full: Layers) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return, per layer, the last token's query (head, d_key) and γ (head · d_value), given the entries of all tokens.

    γ is of the layers with a gate alone.
    """
    before = [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in full]
    kept = [torch.ones_like(keys[..., 0], dtype=torch.bool) for keys, _ in before]
    last, cache = make_situation("single", ids[:-1], ids[-1:], 1), fill_cache(adapter, (before, {}))
    gates: dict[int, Tensor] = {}
    with capture(adapter, Observer(gate=lambda layer, gate: gates.update({layer: gate[0, -1]}))):
        (record,) = decode(adapter, cache, last, [kept])
    return {layer: query[0, :, -1] for layer, query in record.query.items()}, gates


@dataclass(frozen=True)
class Computation:
    """A fault of what an engine computes: attention that differs from the plain model's in some layers.

    Attributes:
        layers: those layers.
        angles: by how many radians queries and keys are rotated too far; None: by none.
        heads: the key/value head that each query head reads; empty: its own.
        copied: whether attention reads what was computed, of which only a copy was rounded and stored.
        ratios: layer -> what stored keys, and values, are multiplied by when they are read.
    """

    layers: frozenset[int] = frozenset()
    angles: Float[Tensor, "token frequency"] | None = None
    heads: tuple[int, ...] = ()
    copied: bool = False
    ratios: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def rotate(self, layer: int, part: Float[Tensor, "... token width"], first: int) -> Tensor:
        """Return the queries or keys of the tokens from `first` on, rotated as far as in this layer."""
        if self.angles is None or layer not in self.layers:
            return part
        return rotate_keys(part, self.angles[first : first + part.shape[-2]].to(part.device))

    def attention(self, adapter: Adapter) -> AbstractContextManager[None]:
        """Let the model's attention compute so inside the block, but for its keys."""

        def attend(stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any) -> Any:
            """Return the attention output, of queries that are rotated or read other heads."""
            layer, (query, key, *others) = adapter.layer_of(module), args
            args = self.rotate(layer, query, key.shape[-2] - query.shape[-2]), key, *others
            if not self.heads or layer not in self.layers:
                return stock(module, *args, **kwargs)
            return attend_to_heads(torch.tensor([self.heads]), stock, module, args, kwargs), None

        return intercept_attention(adapter, attend)


def attend_to_heads(
    heads: Int[Tensor, "row head"], stock: AttentionFunction, module: nn.Module, args: Any, kwargs: Any
) -> Float[Tensor, "row query head d_value"]:
    """Return the attention output of one text, for each row of key/value heads that the query heads read.

    `stock`, `module`, `args` and `kwargs` are those of an attention replacement.
    """
    query, key, value, *others = args
    outputs = []
    for kv_head in range(key.shape[1]):
        same = [kv_head] * key.shape[1]
        outputs.append(stock(module, query, key[:, same], value[:, same], *others, **kwargs)[0][0].transpose(0, 1))
    return torch.stack(outputs)[heads, torch.arange(heads.shape[1])].transpose(1, 2)


@dataclass
class StoredEntries:
    """A request's dumped entries in all layers, by token, with what they were rounded by.

    Attributes:
        layers: keys and values (kv_head, token, width) of each layer; NaN where a token has no entry.
        scales: of keys and of values, of each layer, as in `LayerDump`.
        dtype: type of the stored numbers.
        divided: layer -> its entries without a factor that all were multiplied by.
    """

    layers: list[Pair] = field(default_factory=list)
    scales: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    dtype: torch.dtype = torch.float32
    divided: dict[int, Pair] = field(default_factory=dict)

    def round(self, index: int, kind: int, new: Float[Tensor, "kv_head token width"]) -> Tensor:
        """Return keys (`kind` 0) or values (1) of a layer as they would be read after they were stored."""
        scale = of_heads(self.scales[index][kind]).to(new.device)
        return ((new / scale).to(self.dtype).to(new.dtype) * scale).to(new.dtype)


class LayerReached(Exception):
    """The forward pass has computed the keys and values that it was run for."""


class StoredCache(DynamicCache):  # type: ignore[misc]
    """A cache whose attention reads entries that were stored before, as an engine's own does.

    What the model computes for each layer, given the stored entries of the layers below, is in `computed_entries`.
    Where a stored entry is NaN or infinite, or is one of `replaced`, attention reads the computed one, rounded.

    Attributes:
        stored: the entries.
        replaced: layer -> keys and values that were not there when the engine read them (kind, kv_head, token).
        computation: what the engine computes otherwise.
        last: layer after whose keys and values the forward pass ends, with `LayerReached`; −1: none.
    """

    def __init__(
        self,
        stored: StoredEntries,
        replaced: Mapping[int, Bool[Tensor, "2 kv_head token"]],
        computation: Computation,
        last: int = -1,
    ) -> None:
        super().__init__()
        self.stored: StoredEntries = stored
        self.replaced: Mapping[int, Tensor] = replaced
        self.computation: Computation = computation
        self.last: int = last
        self.read: dict[int, Pair] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return the stored ones of the same tokens (1, kv_head, key, width)."""
        key_states = self.computation.rotate(layer_idx, key_states, self.get_seq_length(layer_idx))
        end = super().update(key_states, value_states, layer_idx, *args, **kwargs)[0].shape[2]
        if layer_idx == self.last:
            raise LayerReached
        first, both = end - key_states.shape[2], []
        ratios = self.computation.ratios.get(layer_idx)
        layers = self.stored.divided if layer_idx in self.replaced else self.stored.layers
        for kind, new in enumerate((key_states[0], value_states[0])):
            stored = layers[layer_idx][kind][:, first:end]
            wrong = ~stored.isfinite().all(dim=-1)
            if layer_idx in self.replaced:
                wrong |= self.replaced[layer_idx][kind][:, first:end].to(wrong.device)
            rounded = new if self.computation.copied else self.stored.round(layer_idx, kind, new)
            read = torch.where(wrong.unsqueeze(-1) | self.computation.copied, rounded, stored)
            read = read if ratios is None else (read * ratios[kind].to(read.device)).to(new.dtype)
            both.append(torch.cat([self.read[layer_idx][kind], read], dim=1) if first else read)
        self.read[layer_idx] = (both[0], both[1])
        return both[0].unsqueeze(0), both[1].unsqueeze(0)

    def computed_entries(self, index: int) -> Pair:
        """Return the keys and values (kv_head, token, width) that the model computed for a layer."""
        return self.layers[index].keys[0], self.layers[index].values[0]


def arrange_by_token(entries: Entries, tokens: int, like: Tensor) -> Pair:
    """Return keys and values (kv_head, token, width) of so many tokens, in the type and on the device of `like`.

    NaN where a token has no entry.
    """
    keys, values = (
        by_token(part, entries.positions, part.new_full((len(part), tokens, part.shape[-1]), torch.nan)).to(like)
        for part in entries.pair
    )
    return keys, values


def by_token(
    part: Shaped[Tensor, "kv_head entry ..."], positions: Int[Tensor, "kv_head entry"], empty: Tensor
) -> Shaped[Tensor, "kv_head token ..."]:
    """Return entries, or what is known of each, by the tokens at `positions`; of others what `empty` has."""
    there = positions != REMOVED
    heads = torch.arange(len(there)).unsqueeze(-1).expand_as(there)
    empty[heads[there], positions[there]] = part[there]
    return empty


def unrotate_to_tokens(entries: Entries, frequencies: Float[Tensor, " frequency"]) -> Entries:
    """Return the entries with keys rotated from 0, 1, … in the cache to their tokens' positions."""
    there = entries.positions != REMOVED
    in_cache = there.cumsum(dim=-1) - 1
    moved = (entries.positions - in_cache) * there
    angles = moved.unsqueeze(-1) * frequencies.to(moved.device)
    keys = [rotate_keys(head, angle) for head, angle in zip(entries.keys, angles, strict=True)]
    return replace(entries, keys=torch.stack(keys))


def token_logprobs(
    adapter: Adapter, token_ids: Sequence[int], parts: int = 1, cache: DynamicCache | None = None
) -> tuple[Float[Tensor, " token"], float]:
    """Return each token's log-probability after those before it, 0 for the first; and how far rounding moves a logit.

    The latter is the largest logit's distance to what the model's type makes of it, at most.
    The n tokens are read in passes of min(n, 256) / `parts`, rounded up, through `cache`; None: a new one.
    """
    at_once = -(-min(len(token_ids), _TOKENS_PER_PASS) // parts)
    cache, found, last, largest = DynamicCache() if cache is None else cache, [], None, 0.0
    ids = torch.tensor([list(token_ids)], device=adapter.device)
    for first in range(0, ids.shape[1], at_once):
        part = ids[:, first : first + at_once]
        logits = run_with_cache(adapter.model, part, cache).logits[0].double()
        largest = max(largest, float(logits.abs().amax()))
        before = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
        targets = part[0, 1:] if last is None else part[0]
        found.append(before.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1).cpu())
        last = logits[-1:]
    values = torch.cat([torch.zeros(1, dtype=torch.float64), *found])
    return values, largest * torch.finfo(adapter.dtype).eps / 2
