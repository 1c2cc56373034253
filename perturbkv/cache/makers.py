"""Caches made from a prefill: what a maker of caches is given, and what it must return.

Every configuration has a `Maker`, which `begin`s with each prompt. For each layer of the prefilled prompt, `make` gets
the layer, and the kept set that was chosen there by policy and budget or handed over, and returns `Entries`: what the
configuration's row of a `CompactCache` holds of the layer. The pipeline asks the entries what they are, and never what
the configuration is called:

- `Entries`: a kept set, entries of the full cache as they are. S, σ and θ hold for it, and its isolated perturbation
  follows from the set alone.
- `OwnEntries`: keys, values, positions or an additional entry that the full cache has not. No bound holds. Isolated
  perturbation is that of their `outputs`; propagated perturbation, drift and KL come from decoding, as for all.
- `Entries` of a `Reader` (`pipeline.variants.readers`): all entries of the full cache, of which every query reads some.

Rows of all configurations go into one cache, and kept sets of all are gathered in one step: a maker works on tensors
that are there already, on their device, and must not wait for it (no `.item()`, no `nonzero`), nor make anything of
size n × n. Numbers of entries are Python integers, known beforehand (`KeptEntries.lengths`).

A maker that halves the values of what was kept:

>>> import torch
>>> class Halved(Maker):
...     has_own_tensors = True
...     def make(self, layer, kept):
...         sets = kept.entries.sets()
...         row = KeptEntries.of([keys for keys, _ in sets], [values / 2 for _, values in sets])
...         return StoredEntries(row, entry_bits(row), kept=kept.entries)
>>> keys, values = torch.randn(2, 1, 6, 4)  # of one key/value head, 6 entries of 4 components
>>> position = torch.tensor([0, 3, 4, 5])  # of the kept ones, in the prompt
>>> kept = GatheredSet(KeptEntries.of([keys[0, position]], [values[0, position]]), position)
>>> made = Halved().make(None, kept)
>>> made.row.lengths, made.bits, torch.equal(made.row.values, values[0, position] / 2)
([4], 512, True)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from perturbkv import theory
from perturbkv.cache.entries import GatheredSet, KeptEntries, close_gaps, positions_before
from perturbkv.cache.quantisation import quantise_entries
from perturbkv.cache.stand_in import BiasedEntries, Correction, StandIn, make_stand_in
from perturbkv.configs.choice import Choice
from perturbkv.configs.number_formats import FULL_BITS
from perturbkv.configs.precision import correction_bits, has_few_bits, stored_bits
from perturbkv.configs.resources import Resources
from perturbkv.devices import to_device
from perturbkv.models.adapter import Adapter
from perturbkv.selection.layer_statistics import LayerStatistics
from perturbkv.selection.resolved_config import ResolvedConfig

_Result = TypeVar("_Result")


@runtime_checkable
class PrefilledLayer(Protocol):
    """One layer of a prefilled prompt, as makers see it: `pipeline.sample.full_layer.FullLayer`."""

    @property
    def adapter(self) -> Adapter:
        """The model."""

    @property
    def index(self) -> int:
        """Index among the measured layers."""

    @property
    def tokens(self) -> int:
        """Number of the prompt's entries, n."""

    @property
    def keys(self) -> Float[Tensor, "kv_head key d_key"]:
        """Keys of the prompt's entries, then of the decoded ones."""

    @property
    def prompt_keys(self) -> Float[Tensor, "kv_head n d_key"]:
        """Keys of the prompt's entries."""

    @property
    def prompt_values(self) -> Float[Tensor, "kv_head n d_value"]:
        """Values of the prompt's entries."""

    @property
    def softmax(self) -> theory.Softmax:
        """The layer's softmax, by which logits become attention weights."""

    def mean_query(self, window: int) -> Float[Tensor, "head d_key"]:
        """Return the mean of the last `window` queries, which corrected configurations ask a prefill for."""

    def statistics_of(self, config: ResolvedConfig) -> LayerStatistics:
        """Return the scores and norms of the entries before the window that a configuration ranks by."""

    def compute_once(self, key: Hashable, make: Callable[[], _Result]) -> _Result:
        """Return make(), computed once per key and shared by all configurations of the layer."""


@runtime_checkable
class ActivationCheck(Protocol):
    """A record of whether activations are finite, read at the end.

    `pipeline.sample.capture.FiniteCheck` alone implements it. The protocol exists because `cache` lies below `pipeline`
    and imports none of its modules.
    """

    def check(self, where: str, activations: Tensor) -> None:
        """Record whether activations are finite; `where` describes them in an error message."""


@dataclass(frozen=True, eq=False)
class PromptReading:
    """The inputs of a maker with a prefill of its own.

    Attributes:
        adapter: the model.
        token_ids: the prompt's part that is compressed.
        sample: the sample's id.
        resources: memory and kernels.
        finite_check: the record of whether the prefill's activations are finite.
    """

    adapter: Adapter
    token_ids: Sequence[int]
    sample: str
    resources: Resources
    finite_check: ActivationCheck


@dataclass(frozen=True)
class OwnPrefill:
    """A prefill that a configuration has to itself.

    Attributes:
        share: number of entries that its queries attend to over that of a full prefill, 0 to 1.
        seconds: its duration in seconds; None: that of the full prefill, which it equals.
    """

    share: float
    seconds: float | None


@dataclass(frozen=True, eq=False)
class FullStep:
    """One decode step of the full run in one layer, under whose query a row's outputs are compared.

    Attributes:
        query: the decoding query after rotation.
        keys, values: the prompt's entries, then the decoded ones up to the query's own.
        tokens: number of the prompt's entries.
        attention: attention weights A on the entries.
        sink: weight of each head's sink.
        softmax: how logits become attention weights.
    """

    query: Float[Tensor, "head d_key"]
    keys: Float[Tensor, "kv_head key d_key"]
    values: Float[Tensor, "kv_head key d_value"]
    tokens: int
    attention: Float[Tensor, "head key"]
    sink: Float[Tensor, " head"]
    softmax: theory.Softmax

    @cached_property
    def mixed(self) -> Float[Tensor, "head d_value"]:
        """Σ A V over all entries."""
        return theory.weighted_sums(self.attention.unsqueeze(0), self.values)[0]

    @cached_property
    def log_total(self) -> Float[Tensor, " head"]:
        """Logarithm of each head's softmax denominator."""
        return self.softmax.log_total(theory.decode_logits(self.query, self.keys, self.softmax))

    def attend(self, entries: KeptEntries) -> Float[Tensor, "head d_value"]:
        """Return Σ A' V over `entries` in the prompt's place and all decoded ones, A' the softmax over these alone."""
        sets, sharing = entries.sets(), len(entries.lengths) // len(self.keys)  # kept sets per key/value head
        kept = [pad_sequence(list(kind), batch_first=True) for kind in zip(*sets, strict=True)]
        decoded = [kind[:, self.tokens :].repeat_interleave(sharing, dim=0) for kind in (self.keys, self.values)]
        keys, values = (torch.cat(pair, dim=1) for pair in zip(kept, decoded, strict=True))
        unpadded = [kept_keys.new_ones(len(kept_keys), dtype=torch.bool) for kept_keys, _ in sets]
        present = [pad_sequence(unpadded, batch_first=True), torch.ones_like(decoded[0][..., 0], dtype=torch.bool)]
        return theory.attention_output(self.query, keys, values, self.softmax, present=torch.cat(present, dim=1))

    def attend_with_bias(self, entries: BiasedEntries) -> Float[Tensor, "head d_value"]:
        """Return Σ A' V likewise, over entries with a bias each in the prompt's place."""
        own = zip((entries.keys, entries.values), (self.keys, self.values), strict=True)
        keys, values = (torch.cat([kind, full[:, self.tokens :]], dim=1) for kind, full in own)
        bias = torch.nn.functional.pad(entries.bias, (0, keys.shape[1] - entries.bias.shape[1]))
        weights, _ = self.softmax.weights(theory.decode_logits(self.query, keys, self.softmax) + bias)
        return theory.weighted_sums(weights.unsqueeze(0), values)[0]


class Outputs(NamedTuple):
    """Head outputs before W_O under the full run's query, in float64 (`theory.WORK`), on the query's device.

    Attributes:
        evicted: of the kept set alone, as its entries are in the full cache.
        own: of the entries as the row holds them.
        changed: True for the heads whose entries are not the full cache's; None: all heads.
    """

    evicted: Float[Tensor, "head d_value"]
    own: Float[Tensor, "head d_value"]
    changed: Bool[Tensor, " head"] | None


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries that one row of a cache holds in one layer: a kept set, unless they are `OwnEntries`.

    Attributes:
        row: keys and values per kept set: indices into the full cache until they are copied, or tensors of their own.
        bits: bits that they take in a file, with everything that is stored beside them; a number of the full cache
            takes 16. NaN where somebody's code does not tell.
        read_entries: number of them that one decoding query attends to, added up over the kept sets; None: all.
        stand_in: an additional entry per query head, with a bias; None without.
        has_rounded_numbers: whether numbers were rounded, so that large ones may have overflowed.
        resident_bits: bits that they take in memory while a query attends to them, at 16 bits per number of the model;
            None: `bits`.
    """

    row: KeptEntries
    bits: int | float
    read_entries: int | None = None
    stand_in: StandIn | None = None
    has_rounded_numbers: bool = False
    resident_bits: float | None = None

    @property
    def attended_entries(self) -> int:
        """Number of entries that one decoding query attends to, added up over the kept sets; a latent counts once."""
        return self.row.stored_entries if self.read_entries is None else self.read_entries


class OwnEntries(Entries):
    """Entries that are not the full cache's: their outputs follow from themselves, and the bounds of eviction fail."""

    @abstractmethod
    def outputs(self, step: FullStep) -> Outputs:
        """Return the outputs of the kept set and of these entries at one decode step of the full run."""

    def is_full_cache(self, tokens: int) -> bool:
        """Return whether these are all the entries of the full cache of so many tokens, as they are."""
        return False


@dataclass(frozen=True, eq=False)
class StoredEntries(OwnEntries):
    """Keys and values of their own, such as keys at other positions and numbers in few bits.

    `kept` is the kept set that they were made from, as in the full cache. All heads differ from it where numbers are
    rounded, and else those that evict.
    """

    kept: KeptEntries = field(kw_only=True)

    def is_full_cache(self, tokens: int) -> bool:
        """Return whether nothing is evicted or rounded."""
        return not self.has_rounded_numbers and min(self.kept.lengths) == tokens

    def outputs(self, step: FullStep) -> Outputs:
        """Return the outputs of the kept set and of these entries at one decode step of the full run."""
        evicted, own, changed = step.attend(self.kept), step.attend(self.row), None
        if not self.has_rounded_numbers:
            evicts = to_device([length < step.tokens for length in self.kept.lengths], own.device)
            changed = evicts.repeat_interleave(len(own) // len(evicts))
        return Outputs(evicted, own, changed)


@dataclass(frozen=True, eq=False)
class CorrectedEntries(OwnEntries):
    """A kept set with one more entry per query head, `stand_in`, for the `evicted` entries of the prompt, a mask."""

    stand_in: Correction = field(kw_only=True)
    evicted: Bool[Tensor, "head key"] = field(kw_only=True)

    def outputs(self, step: FullStep) -> Outputs:
        """Return the outputs of the kept set and of these entries at one decode step of the full run."""
        kept_attention = step.attention.clone()
        kept_attention[:, : self.evicted.shape[1]].masked_fill_(self.evicted, 0)  # decoded entries stay
        logits = self.stand_in.logits(step.query.to(theory.WORK).unsqueeze(1), step.softmax)
        predicted_mass = (logits.squeeze(1) - step.log_total).exp()
        kept = theory.weighted_sums(kept_attention.unsqueeze(0), step.values)[0]
        kept_mass = kept_attention.sum(dim=-1) + step.sink
        own = theory.corrected_output(kept, kept_mass, self.stand_in.value, predicted_mass)
        return Outputs(kept / kept_mass.unsqueeze(-1), own, self.evicted.any(dim=-1))


def entry_bits(row: KeptEntries) -> int:
    """Return the number of bits that a row's keys and values, or their latents, take at 16 bits per number."""
    return FULL_BITS * (row.latents[1] or sum(row.widths)) * row.stored_entries


class Maker:
    """The maker of a configuration that evicts and changes nothing of what it keeps; others are its subclasses.

    Class attributes:
        has_own_tensors: whether its rows have tensors of their own, which a cache must hold; else they are taken from
            the full cache whenever they are read.
    """

    has_own_tensors: ClassVar[bool] = False

    def begin(self, prompt: PromptReading) -> Maker:
        """Return the maker for one prompt, whose layers follow; a maker with a prefill of its own runs it here."""
        return self

    @property
    def prefill(self) -> OwnPrefill | None:
        """The maker's own prefill of the prompt; None where it has none."""
        return None

    def make(self, layer: PrefilledLayer, kept: GatheredSet) -> Entries:
        """Return the entries that the configuration's row holds of a layer.

        Args:
            layer: the layer of the prefilled prompt, with tensors on the model's device and in its dtype.
            kept: the configuration's kept set in the layer, kept_head sets of different lengths, one per query head or
                per key/value head, whichever have sets of their own. `kept.entries.sets()` are keys and values (kept,
                width) of each; `kept.position` (kept,) their positions in the prompt, from 0, ascending within a set,
                one set after the other, and empty where all n are kept. A `Reader` does not need it.

        Returns:
            `Entries`, or `OwnEntries` where anything but the kept set is attended to. Its `row` has as many sets as
            `kept`, on the same device and in the same dtype; `KeptEntries.of` makes one of keys and values (kept,
            width) per set. `bits` counts all of its sets together.

        Raises nothing for numbers that are NaN or Inf: where `has_rounded_numbers` is set, the pipeline looks for them,
        and raises ActivationError for the sample.
        """
        return Entries(kept.entries, entry_bits(kept.entries))

    def make_whole(self, row: KeptEntries, layer: int) -> Entries:
        """Return the entries of decoder layer `layer` in a cache that is not evicted yet, as it is below its limit."""
        return Entries(row, entry_bits(row))

    def make_compressed(
        self,
        row: KeptEntries,
        position: Sequence[Tensor],
        ends: Sequence[int],
        frequencies: Float[Tensor, " frequency"],
    ) -> KeptEntries:
        """Return the entries that remain after one more eviction while decoding, as the cache is to hold them.

        Args:
            row: the remaining entries, keys and values (kept, width) per kept set, copied out of the cache.
            position: per kept set (kept,), the places of the remaining entries among those that the set held before,
                from 0, ascending.
            ends: per kept set, the place of the next token: the number of entries that the set held before.
            frequencies: of the model's rotation, in radians per position.
        """
        return row


@dataclass(frozen=True)
class StorageMaker(Maker):
    """The maker of entries as engines store them: keys at 0 … b − 1 of the cache, numbers in few bits, or both.

    Attributes:
        config: the configuration, whose precision and positions it applies.
    """

    has_own_tensors: ClassVar[bool] = True
    config: ResolvedConfig

    def make(self, layer: PrefilledLayer, kept: GatheredSet) -> Entries:
        """Return the kept set with its keys moved up to the prompt's end, its numbers rounded, or both, as configured.

        An engine rounds moved keys at 0 … b − 1, so that they are rounded there before they move on.
        """
        entries, position, frequencies = kept.entries, kept.position, layer.adapter.frequencies
        number = layer.adapter.layer_indices[layer.index]
        if self.config.quantised and self.config.in_cache:
            entries = close_gaps(entries, position, entries.lengths, frequencies)
            position = positions_before(entries.lengths, entries.lengths, position.device)
        if self.config.quantised:
            entries = quantise_entries(entries, self.config, number)
        if self.config.in_cache:
            entries = close_gaps(entries, position, [layer.tokens] * len(entries.lengths), frequencies)
        return self._stored(entries, kept.entries, number)

    def make_whole(self, row: KeptEntries, layer: int) -> Entries:
        """Return all entries, rounded where the configuration is quantised; none moves, as there is no gap."""
        if not self.config.quantised:
            return super().make_whole(row, layer)
        return self._stored(quantise_entries(row, self.config, layer), row, layer)

    def make_compressed(
        self,
        row: KeptEntries,
        position: Sequence[Tensor],
        ends: Sequence[int],
        frequencies: Float[Tensor, " frequency"],
    ) -> KeptEntries:
        """Return the row with keys moved up to the next token, where positions are those in the cache."""
        return close_gaps(row, torch.cat(list(position)), ends, frequencies) if self.config.in_cache else row

    def _stored(self, entries: KeptEntries, kept: KeptEntries, layer: int) -> StoredEntries:
        """Return the entries that a decoder layer's kept set became, with the bits of codes, scales and norms."""
        precision, window = self.config.precision, self.config.window
        bits = stored_bits(precision, entries.lengths, window, *entries.widths, layer)
        few = has_few_bits(precision, layer)
        return StoredEntries(
            entries, bits, has_rounded_numbers=few, resident_bits=float(entry_bits(entries)), kept=kept
        )


@dataclass(frozen=True)
class CorrectionMaker(Maker):
    """The maker of kept sets with a correction for what is evicted, weighted by the mean query of the `window`."""

    correction: Choice
    window: int

    def make(self, layer: PrefilledLayer, kept: GatheredSet) -> Entries:
        """Return the kept set with the entries that stand in for the evicted ones."""
        lengths, index, n = kept.entries.lengths, kept.entries.index, layer.tokens
        sets, sharing, stride = len(lengths), layer.adapter.heads // len(lengths), layer.keys.shape[1]
        counts = to_device(lengths, index.device)
        rows = torch.arange(sets, device=index.device).repeat_interleave(counts, output_size=len(index))
        evicted = torch.ones(sets, n, dtype=torch.bool, device=index.device)
        evicted.view(-1).index_fill_(0, rows * n + index % stride, False)  # `stride` entries from head to head
        evicted = evicted.repeat_interleave(sharing, dim=0)
        query, prompt = layer.mean_query(self.window), (layer.prompt_keys, layer.prompt_values)
        stand_in = make_stand_in(self.correction, query, *prompt, evicted, layer.softmax)
        widths = kept.entries.widths
        beside = sum(correction_bits(self.correction, n - length, sharing, *widths) for length in lengths)
        return CorrectedEntries(kept.entries, entry_bits(kept.entries) + beside, stand_in=stand_in, evicted=evicted)


def eviction_maker(config: ResolvedConfig) -> Maker:
    """Return the maker of a configuration that evicts.

    One that corrects, one that rounds numbers or moves keys, or the plain one.
    """
    if config.corrected:
        return CorrectionMaker(config.correction, config.window)
    return StorageMaker(config) if config.quantised or config.in_cache else Maker()
