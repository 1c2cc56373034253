"""Somebody's caches of a prompt, read and decoded as for their users (METHOD: Caches that are no kept set).

The code is a function, a Cache class or a press of kvpress, and reads the prompt into a cache. Where that is
transformers' plain `DynamicCache`, its keys and values become a row of the batch, with whatever the code made of them:
entries that are all those of the full cache are a kept set, which is measured as our own, without those that a press
only masks; others are matched with them, so that the kept set is told where each stands for one. A `bias` of a layer is
added to its logits. Any other cache, and any with a decoding of its own, may change while it decodes: it is *called*,
token by token, in passes of one row.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from perturbkv import theory
from perturbkv.cache.compact import rebuild_cache
from perturbkv.cache.entries import GatheredSet, KeptEntries, borrow
from perturbkv.cache.external_cache import (
    NOWHERE,
    STRANGE_DISTANCE,
    RecoveredLayer,
    layer_tensors,
    pair_layers,
    recover_positions,
)
from perturbkv.cache.makers import Entries, FullStep, Maker, Outputs, PrefilledLayer, StoredEntries, entry_bits
from perturbkv.cache.model_state import ModelState, describe_damage
from perturbkv.cache.sliding import Window
from perturbkv.cache.stand_in import BiasedEntries
from perturbkv.configs.number_formats import FULL_BITS
from perturbkv.errors import ConfigError, PerturbkvError
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.sample.capture import Observer, capture
from perturbkv.pipeline.sample.decoding import StepRecord, StepRecorder, decode_pass
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.prefill import Prefill
from perturbkv.selection.external_eviction import FUNCTION, Eviction, eviction_code
from perturbkv.selection.policies import caches, kvpress, registry
from perturbkv.selection.resolved_config import ResolvedConfig

_BIAS = "bias"
"""Attribute of a cache's layer: numbers that are added to the logits of its entries."""
_MASKED = "masked_key_indices"
"""Attribute of an attention module: indices (batch, head, entry) of entries that a press masks in its cache."""
_OTHER_KERNEL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest relative distance of a last hidden state, or a head's output, that another kernel rounded."""
_ROUNDING = 1e-5
"""Largest distance, in norms of a head, of keys and values that another kernel rounded; less in finer types."""
_FILE_BYTES = "nbytes"
"""Attribute of a cache: the bytes that a file of it would hold."""


class NamedCacheMaker(Maker):
    """The maker of somebody's caches before a prompt is read, when nothing of it is known but that it is their own."""

    has_own_tensors: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class ExternalEntries(StoredEntries):
    """Entries of somebody's cache in a layer, where they are no kept set.

    Attributes:
        stand_in: its entries, where they have biases.
        called: number of entries of the full cache at a step -> Σ A' V', in `theory.WORK`, where the cache was called;
            else it follows from the entries.
    """

    stand_in: BiasedEntries | None = None
    called: Mapping[int, Float[Tensor, "head d_value"]] = field(kw_only=True)

    @property
    def attended_entries(self) -> int:
        """Number of entries that one decoding query attends to, added up over the kept sets."""
        return self.row.stored_entries if self.stand_in is None else self.stand_in.keys.shape[:2].numel()

    def outputs(self, step: FullStep) -> Outputs:
        """Return the outputs of the kept set and of these entries at one decode step of the full run."""
        evicted, entries = step.attend(self.kept), step.keys.shape[1]
        if self.called:
            return Outputs(evicted, self.called[entries], None)
        if self.stand_in is None:
            return Outputs(evicted, step.attend(self.row), None)
        return Outputs(evicted, step.attend_with_bias(self.stand_in), None)


@dataclass(frozen=True, eq=False)
class ExternalCache(Maker):
    """Somebody's cache of one prompt: the maker of its row, and what it decoded itself.

    Attributes:
        layers: keys and values (kv_head, entry, …) that it holds of the prompt, per layer that fills a cache.
        biases: per layer the bias (head, entry); empty where it has none.
        matched: per layer the entries' positions in the prompt.
        kept: per layer the mask (kv_head, n) of the entries that they stand for, without masked ones.
        bits, resident_bits: of all of it, in a file and in memory; the former NaN where it does not tell.
        reads_plainly: whether the prompt was read as the plain model reads it; else it has no isolated perturbation.
        is_called: whether it decodes for itself.
        attends_plainly: whether its attention is the softmax over all that it gets, token by token of the text; else it
            has no isolated perturbation either.
        question_logits: those after the question (vocab,), of a cache that was called in a context-only run.
        steps: the decode steps of a cache that was called; empty for others.
        outputs: layer -> `ExternalEntries.called`.
    """

    has_own_tensors: ClassVar[bool] = True
    layers: Sequence[tuple[Tensor, Tensor]]
    biases: Sequence[Tensor]
    matched: Sequence[RecoveredLayer]
    kept: Sequence[Bool[Tensor, "kv_head key"]]
    bits: float
    resident_bits: float
    reads_plainly: bool
    is_called: bool
    attends_plainly: bool = True
    question_logits: Tensor | None = None
    steps: Sequence[StepRecord] = ()
    outputs: Mapping[int, Mapping[int, Tensor]] = field(default_factory=dict)

    @property
    def kind(self) -> int:
        """What it holds, as the trace's variable `own_entries` tells."""
        return 0 if self.is_kept_set else 1 if self.stands_for_entries else 2

    @property
    def is_kept_set(self) -> bool:
        """Whether it holds entries of the full cache as they are, in any order, each at most once, and only these."""
        distances = [one for layer in self.matched for one in (*layer.key_distance, *layer.value_distance) if len(one)]
        most = min(_ROUNDING, 64 * torch.finfo(self.layers[0][0].dtype).eps)
        unchanged = all(float(distance.max()) <= most for distance in distances)
        return self.stands_for_entries and unchanged and not self.is_called

    @property
    def stands_for_entries(self) -> bool:
        """Whether each of its entries is like one of the prompt's, key and value, and no two like the same.

        A key may stand elsewhere where its value is unchanged. Entries with biases, and those that attention does not
        weigh by their logits, are like none.
        """
        far = any(
            bool(((value > STRANGE_DISTANCE) | ((key > STRANGE_DISTANCE) & (value > _ROUNDING))).any())
            for layer in self.matched
            for key, value in zip(layer.key_distance, layer.value_distance, strict=True)
        )
        strange = any(sum(layer.stranger_counts) or sum(layer.duplicate_counts) for layer in self.matched)
        return not (far or strange or self.biases) and self.attends_plainly

    def kept_set(
        self, layer: int, key: Float[Tensor, "kv_head key d_key"], value: Float[Tensor, "kv_head key d_value"]
    ) -> Bool[Tensor, "kv_head key"]:
        """Return the mask of the prompt's entries that a layer's stand for, none where not each stands for one.

        It is a `Source`.
        """
        if self.stands_for_entries:
            return self.kept[layer]
        return torch.zeros(key.shape[:2], dtype=torch.bool, device=key.device)

    def make(self, layer: PrefilledLayer, kept: GatheredSet) -> Entries:
        """Return what the row holds of a layer: the kept set, or the cache's own entries."""
        share = len(self.layers)
        if self.is_kept_set:
            whole = min(kept.entries.lengths) == layer.tokens
            row = borrow(layer.prompt_keys, layer.prompt_values) if whole else kept.entries
            bits = entry_bits(row) if math.isnan(self.bits) else self.bits / share
            return Entries(row, bits, resident_bits=self.resident_bits / share)
        keys, values = self.layers[layer.index]
        sizes: Any = {"bits": self.bits / share, "resident_bits": self.resident_bits / share}
        common: Any = {"has_rounded_numbers": True, "kept": kept.entries, "called": self.outputs.get(layer.index, {})}
        if not self.biases:
            return ExternalEntries(KeptEntries.of(list(keys), list(values)), **sizes, **common)
        empty = KeptEntries.of(list(keys[:, :0]), list(values[:, :0]))
        return ExternalEntries(empty, stand_in=BiasedEntries(keys, values, self.biases[layer.index]), **sizes, **common)


def read_caches(
    adapter: Adapter,
    configs: Sequence[ResolvedConfig],
    context: Sequence[int],
    question: Sequence[int],
    tokens: Int[Tensor, " step"],
    prefilled: Prefill,
    reference: Sequence[StepRecord],
) -> dict[ResolvedConfig, ExternalCache]:
    """Return configuration -> somebody's cache of a context, for those that have one.

    Args:
        adapter: the model, restored after each.
        configs: the run's configurations.
        context: token ids that are compressed.
        question: token ids that are read over the caches.
        tokens: token ids of the text that is decoded.
        prefilled: the context's full cache.
        reference: the full run's steps, under whose queries outputs are compared.

    Raises ConfigError, which names the policy, for code that fails, a cache that cannot be read, or a changed model.
    """
    found = {}
    for config in configs:
        if registry.has_own_code(config.policy.name):
            with phase("somebody's cache"):
                reading = _Reading(adapter, _eviction(config, len(context)), context, question, prefilled)
                found[config] = reading.measure(tokens.tolist(), reference)
    return found


def read_plain_caches(
    adapter: Adapter, configs: Sequence[ResolvedConfig], context: Sequence[int], prefilled: Prefill
) -> dict[ResolvedConfig, ExternalCache]:
    """Return what `read_caches` does, where nothing is measured. Raises ConfigError for a cache that is called, too."""
    return read_caches(adapter, configs, context, (), torch.empty(0, dtype=torch.int64), prefilled, ())


class Control(NamedTuple):
    """A plain cache that is called as others are: its steps, and its isolated outputs as in `ExternalCache`."""

    steps: list[StepRecord]
    outputs: Mapping[int, Mapping[int, Tensor]]


def read_control(
    adapter: Adapter,
    context: Sequence[int],
    question: Sequence[int],
    tokens: Int[Tensor, " step"],
    prefilled: Prefill,
    reference: Sequence[StepRecord],
) -> Control:
    """Return the steps and outputs of a plain cache that is called. Args are those of `read_caches`."""
    eviction = Eviction("the plain cache", FUNCTION, lambda *_: plain_cache(adapter, prefilled))
    plain = _Reading(adapter, eviction, context, question, prefilled)
    outputs = plain.isolated(plain.read(), tokens.tolist(), reference).outputs
    return Control(plain.steps(tokens.tolist(), reference)[0], outputs)


def plain_cache(adapter: Adapter, prefilled: Prefill) -> Cache:
    """Return a full cache of the context, apart from the prefill's."""
    layers = (FullLayer.from_prefill(adapter, prefilled, index) for index in adapter.holders)
    entries = [(layer.prompt_keys, layer.prompt_values) for layer in layers]
    return rebuild_cache(adapter, entries, prefilled.states)


def answer_from(
    adapter: Adapter,
    config: ResolvedConfig,
    context: Sequence[int],
    question: Sequence[int],
    prefilled: Prefill,
    most: int,
    ends: Collection[int],
) -> list[int]:
    """Return the greedy answer of at most `most` tokens, up to one in `ends`, of a cache that has to be called."""
    return _Reading(adapter, _eviction(config, len(context)), context, question, prefilled).answer(most, ends)


class _Reading:
    """One reading of a context by somebody's code, and the decoding from its cache.

    Args as of `read_caches`.
    """

    def __init__(
        self,
        adapter: Adapter,
        eviction: Eviction,
        context: Sequence[int],
        question: Sequence[int],
        prefilled: Prefill,
    ) -> None:
        self.adapter, self.eviction, self.context, self.question = adapter, eviction, context, question
        self.prefilled, self.decoded = prefilled, 0

    def measure(self, tokens: Sequence[int], reference: Sequence[StepRecord]) -> ExternalCache:
        """Return the cache, with its own steps where it has to be called."""
        passes: list[Tensor] = []
        n = len(self.context)
        with self._somebodys_code():
            with capture(self.adapter, Observer(final=lambda hidden: passes.append(hidden[0]))):
                cache = self.read()
            masked = [getattr(attention, _MASKED, None) for attention in self.adapter.attentions]
            plainly = self._read_plainly(passes)
            windows = FULL_BITS * self.adapter.shape.unmeasured_numbers(n)  # counted with those of all
            file_bits = self._file_bits(cache) - windows
            resident = tensor_bits(cache, self.adapter.model, self.adapter.dtype) - windows
            layers, called = [], dict[str, Any]()
            whole = self._holds_windows(cache)
            if is_plain := whole and self._is_plain(cache):
                layers = self._entries_of(cache)
            elif not tokens:
                raise ConfigError(
                    "it decodes for itself, which is not possible here; perturbkv quality has its answers"
                )
            else:
                isolated = self.isolated(cache, tokens, reference)
                layers = list(isolated.held.values())
                called = {"outputs": isolated.outputs, "attends_plainly": isolated.attends_plainly}
                called["steps"], called["question_logits"] = self.steps(tokens, reference)
            biases = self._biases(cache) if is_plain else []
            held = [(keys.unsqueeze(0), values.unsqueeze(0)) for keys, values in layers]
            matched = recover_positions(held, self._full(), numbers=self.adapter.layer_indices)
            kept = [_without_masked(*pair).mask(n) for pair in zip(matched, masked, strict=True)]
            plainly &= whole  # windows that it changed change queries of later layers
            sizes = (file_bits, resident, plainly, not is_plain)
            found = ExternalCache(layers, biases, matched, kept, *sizes, **called)
            if not found.is_kept_set and any(mask is not None and len(mask[0]) for mask in masked):
                raise ConfigError("it masks entries of a cache whose entries it changed, too; let it remove them")
        return found

    def answer(self, most: int, ends: Collection[int]) -> list[int]:
        """Return the greedy answer."""
        answer: list[int] = []
        with self._somebodys_code():
            cache, logits = self.read(), self.prefilled.logits
            if self.question:
                logits = self._decode(cache, self.question)[0, -1]
            while (token := int(logits.argmax())) not in ends:
                answer.append(token)
                if len(answer) == most:
                    break
                logits = self._decode(cache, [token])[0, -1]
        return answer

    @contextmanager
    def _somebodys_code(self) -> Iterator[None]:
        """Run code of somebody's inside the block, with random numbers by the prompt; put the model back afterwards.

        Raises ConfigError for what it raises, and where it changed the model.
        """
        state = ModelState.capture(self.adapter.model)
        devices = [self.adapter.device] if self.adapter.device.type == "cuda" else []
        damage = ""
        try:
            with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=devices):
                torch.manual_seed(zlib.crc32(str(list(self.context)).encode()))
                yield
        except PerturbkvError as error:
            raise ConfigError(f"policy '{self.eviction.name}': {error}") from error
        finally:
            damage = describe_damage(state.restore())
        if damage:
            raise ConfigError(f"policy '{self.eviction.name}': {damage}, so that nothing after it would be right")

    def read(self) -> Cache:
        """Return the cache that the code makes of the context."""
        self.decoded = 0
        ids = torch.tensor([list(self.context)], device=self.adapter.device)
        cache = self.eviction.read(self.adapter.model, ids, torch.ones_like(ids))
        rows = {len(layer.keys) for layer in cache.layers if isinstance(getattr(layer, "keys", None), Tensor)}
        if rows - {0, 1}:
            raise ConfigError(f"expected a cache of one row, got one of {max(rows)}")
        if self.eviction.masks:
            raise ConfigError("it masks entries that its cache holds; let it remove them, or audit it")
        return cache

    def _is_plain(self, cache: Cache) -> bool:
        """Return whether a cache is transformers' own that holds what it is given, so that it need not be called."""
        measured = [cache.layers[index] for index in self.adapter.layer_indices if index < len(cache.layers)]
        own = any("update" in vars(one) for one in (cache, *cache.layers))
        plain = type(cache) is DynamicCache and {*map(type, measured)} == {DynamicLayer}
        return plain and not own and self.eviction.decode is None

    def _holds_windows(self, cache: Cache) -> bool:
        """Return whether sliding layers hold what they do in the full cache; False where layers are recurrent."""
        for index, window in self.prefilled.states.items():
            layer: Any = cache.layers[index] if index < len(getattr(cache, "layers", ())) else None
            for held, full in (("keys", window.keys), ("values", window.values)) if isinstance(window, Window) else ():
                own = getattr(layer, held, None)
                size = full.shape[1]
                if not isinstance(own, Tensor) or own.ndim != 4 or not torch.equal(own[0, :, -size:], full):
                    return False
            if not isinstance(window, Window):
                return False
        return True

    def _read_plainly(self, passes: Sequence[Tensor]) -> bool:
        """Return whether the prompt was read as by the plain model, in parts or by every one of several whole passes.

        `passes` are the last hidden states (token, d_model) of all passes of the code; those behind the prompt's last
        token are of what it reads besides. Which of several passes filled the cache is not known.
        """
        n = len(self.context)
        whole = [torch.cat(list(passes))] if sum(map(len, passes)) == n else passes
        return bool(passes) and all(len(one) >= n and self._is_near(one[n - 1], self.prefilled.final) for one in whole)

    def _is_near(self, hidden: Tensor, expected: Tensor) -> bool:
        """Return whether a hidden state differs from another by rounding alone."""
        distance = (hidden.double() - expected.double()).norm() / expected.double().norm()
        return bool(distance <= _OTHER_KERNEL[self.adapter.dtype])

    def _full(self) -> list[tuple[Tensor, Tensor]]:
        """Return the context's entries in the full cache, keys and values (1, kv_head, n, …) per layer."""
        layers = (FullLayer.from_prefill(self.adapter, self.prefilled, index) for index in self.adapter.holders)
        return [(layer.prompt_keys.unsqueeze(0), layer.prompt_values.unsqueeze(0)) for layer in layers]

    def _entries_of(self, cache: Cache) -> list[tuple[Tensor, Tensor]]:
        """Return copies of the keys and values of a plain cache. Raises ConfigError for another type or device."""
        numbers = self.adapter.layer_indices
        pairs = pair_layers(layer_tensors(cache, numbers), self._full(), numbers=numbers)
        layers = []
        for number, ((keys, values), (full, _)) in zip(numbers, pairs, strict=True):
            for kind, tensor in (("keys", keys), ("values", values)):
                if (tensor.dtype, tensor.device) != (full.dtype, full.device):
                    raise ConfigError(
                        f"{kind} of layer {number} are {tensor.dtype} on {tensor.device}, the model's {full.dtype} on "
                        f"{full.device}"
                    )
            layers.append((keys.clone(), values.clone()))
        return layers

    def _biases(self, cache: Cache) -> list[Tensor]:
        """Return the bias (head, entry) of each layer; empty for a cache without.

        Raises ConfigError for a bias of another shape.
        """
        layers = [cache.layers[index] for index in self.adapter.layer_indices]
        if not any(hasattr(layer, _BIAS) for layer in layers):
            return []
        biases, heads = [], self.adapter.heads
        for number, layer in zip(self.adapter.layer_indices, layers, strict=True):
            entries, kv_heads = layer.keys.shape[2], layer.keys.shape[1]
            bias = getattr(layer, _BIAS, None)
            shape = tuple(bias.shape) if isinstance(bias, Tensor) else ()
            if not isinstance(bias, Tensor) or shape not in ((1, kv_heads, entries), (1, heads, entries)):
                raise ConfigError(
                    f"expected a bias (1, {heads} heads or {kv_heads} key/value heads, {entries} entries) in layer "
                    f"{number}, got {shape or type(bias).__name__}"
                )
            biases.append(bias[0].to(layer.keys.device, theory.WORK).repeat_interleave(heads // bias.shape[1], dim=0))
        return biases

    def steps(
        self, tokens: Sequence[int], reference: Sequence[StepRecord]
    ) -> tuple[list[StepRecord], Float[Tensor, " vocab"] | None]:
        """Return the steps of a cache that was read anew, decoded token by token, and the logits after the question.

        Raises ConfigError where its decoding runs the model more often than once for a token.
        """
        cache, steps, question_logits = self.read(), list[StepRecord](), None
        if self.question:
            question_logits = self._decode(cache, self.question)[0, -1]
        for token, step in zip(tokens, reference, strict=True):
            recorder = StepRecorder(self.adapter, 1, self.prefilled.finite, [StepRecord()])
            with capture(self.adapter, recorder.observer()):
                logits = self._decode(cache, [token])
            recorder.record_end(logits, step.entries)
            if len(recorder.records[0].head_output) != len(self.adapter.layers):
                raise ConfigError("its decode runs the model more often than once for a token, which is not measured")
            steps += recorder.records
        return steps, question_logits

    def isolated(self, cache: Cache, tokens: Sequence[int], reference: Sequence[StepRecord]) -> _IsolatedOutputs:
        """Return what attention does in each layer where all layers before it give what they do in the full run.

        Queries and entries of new tokens are thereby the full run's, at the positions where the cache decodes.
        """
        outputs, read = _IsolatedOutputs(self.adapter), list[StepRecord]()
        if self.question:
            plain, ids = plain_cache(self.adapter, self.prefilled), torch.tensor(self.question)
            read = decode_pass(self.adapter, plain, nullcontext(), ids, 1, self.prefilled.finite, len(ids))
        with capture(self.adapter, outputs.observer()):
            if self.question:
                outputs.expect([step.head_output for step in read], None)
                self._decode(cache, self.question)
            for token, step in zip(tokens, reference, strict=True):
                outputs.expect([step.head_output], step.entries)
                self._decode(cache, [token])
        return outputs

    def _decode(self, cache: Cache, tokens: Sequence[int]) -> Float[Tensor, "1 new vocab"]:
        """Return the logits of new tokens, decoded as its users do, or by plain calls behind the context."""
        ids, begin = torch.tensor([list(tokens)], device=self.adapter.device), len(self.context) + self.decoded
        what = f"decoding token {self.decoded}"
        if self.eviction.decode is not None:
            logits = self.eviction.logits(self.adapter.model, cache, ids, self.decoded, what)
        else:
            positions = torch.arange(begin, begin + len(tokens), device=ids.device).unsqueeze(0)
            with eviction_code(f"{what} raises"):
                logits = run_with_cache(self.adapter.model, ids, cache, position_ids=positions).logits
        self.decoded += len(tokens)
        return logits

    def _file_bits(self, cache: Cache) -> float:
        """Return the bits that a file of a cache would hold, as it tells; NaN where it does not tell."""
        with eviction_code(f"{_FILE_BYTES} of its cache raises"):
            told = getattr(cache, _FILE_BYTES, None)
            told = told() if callable(told) else told
        if told is None:
            return math.nan
        if isinstance(told, bool) or not isinstance(told, int | float) or not 0 < told < math.inf:
            raise ConfigError(f"expected {_FILE_BYTES} of its cache to be a number of bytes above 0, got {told!r}")
        return 8.0 * told


def _eviction(config: ResolvedConfig, tokens: int) -> Eviction:
    """Return the code of a configuration's policy, which keeps what its budget asks of a prompt of `tokens` tokens."""
    if kvpress.is_press(config.policy):
        return kvpress.press_eviction(config.policy, config.kept_entries)
    return caches.load(config.policy, config.kept_entries(tokens))


def _without_masked(matched: RecoveredLayer, masked: Any) -> RecoveredLayer:
    """Return the entries of a layer without those at the indices `masked` (batch, head, entry), None for none."""
    if masked is None:
        return matched
    positions = [position.clone() for position in matched.positions]
    _, heads, entries = (torch.as_tensor(kind).cpu() for kind in masked)
    for head, position in enumerate(positions):
        position[entries[heads == head].to(position.device)] = NOWHERE
    return RecoveredLayer(tuple(positions), matched.key_distance, matched.value_distance)


class _IsolatedOutputs:
    """The callbacks that compute each layer's output from a cache and put the full run's in its place.

    Attributes:
        held: layer -> keys and values of the first pass but for its new tokens: what the cache holds of the context.
        outputs: layer -> number of entries of the full cache at a step -> Σ A' V' in `theory.WORK`.
        attends_plainly: whether the model's attention gave just that, in one pass for each token.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.held: dict[int, tuple[Tensor, Tensor]] = {}
        self.outputs: dict[int, dict[int, Tensor]] = {}
        self.expected: list[list[Tensor]] = []
        self.entries: int | None = None
        self.attends_plainly = True
        self.gate: Tensor | None = None

    def observer(self) -> Observer:
        """Return the observer of its passes."""
        return Observer(attention=self.record, head_output=self.replace, gate=self.record_gate)

    def record_gate(self, layer: int, gate: Tensor) -> None:
        """Keep γ of a layer's last token: an `Observer.gate`."""
        self.gate = gate[0, -1]

    def expect(self, head_outputs: list[list[Tensor]], entries: int | None) -> None:
        """Expect a pass of tokens with these head outputs (row, head, d_value) per token and layer.

        `entries` are those of the full cache that its only token attends to, None for a question.
        """
        self.expected, self.entries = head_outputs, entries

    def record(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Compute a layer's output, in the pass of a step: an `Observer.attention`."""
        if layer not in self.held:
            new = len(self.expected)
            self.held[layer] = key[0, :, :-new].clone(), value[0, :, :-new].clone()
        if self.entries is not None:
            mixed = theory.attention_output(query[0, :, -1], key[0], value[0], self.adapter.softmax(layer))
            self.outputs.setdefault(layer, {})[self.entries] = mixed

    def replace(self, layer: int, mixed: Tensor) -> Tensor:
        """Return the full run's output of the layer instead of its own: an `Observer.head_output`."""
        if mixed.shape[1] != len(self.expected):
            self.attends_plainly = False
            return mixed
        if self.entries is not None:
            own = self.outputs[layer][self.entries].flatten()
            own = own if self.gate is None else own * self.gate
            distance = (own - mixed[0, -1]).norm() / own.norm().clamp(min=torch.finfo(theory.WORK).tiny)
            self.attends_plainly &= bool(distance <= _OTHER_KERNEL[self.adapter.dtype])
        self.gate = None
        return torch.stack([token[layer][0].flatten() for token in self.expected]).unsqueeze(0).to(mixed.dtype)


_NO_HOLDERS = (ModuleType, type, FunctionType, MethodType, BuiltinFunctionType)
"""Types of objects whose attributes are no part of what refers to them."""


def tensor_bits(cache: object, model: torch.nn.Module, dtype: torch.dtype) -> float:
    """Return the bits of all tensors that an object holds, each storage once; a number of `dtype` counts 16 bits.

    What belongs to the model is left out.
    """
    storages: dict[int, float] = {}
    seen = set(map(id, model.modules()))
    waiting: list[Any] = [cache]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _NO_HOLDERS):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            size = FULL_BITS if one.dtype == dtype else 8 * one.itemsize
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes() // one.itemsize * size
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset | deque):
            waiting += one
        else:
            waiting += getattr(one, "__dict__", {}).values()
            waiting += [getattr(one, name, None) for name in getattr(type(one), "__slots__", ())]
    return float(sum(storages.values()))
