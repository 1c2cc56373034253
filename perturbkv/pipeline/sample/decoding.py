"""Decoding of the same tokens from the full cache and from a compact one, with records of each step.

The tokens of all steps are known before they are measured, so that one forward pass decodes several: weights and kept
entries are read once for them. Both runs take the same passes (METHOD: protocol, 4).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from perturbkv.cache.compact import CompactCache, SharedCache, prompt_states, restore_states
from perturbkv.configs.resources import STEPS_AT_ONCE
from perturbkv.devices import copy_to_device, to_device
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.sample.capture import (
    FINAL_NORM,
    LOGITS,
    FiniteCheck,
    Observer,
    capture,
    decode_from,
    decode_shared,
)
from perturbkv.pipeline.sample.prefill import EntriesRead, Prefill


@runtime_checkable
class Compresses(Protocol):
    """A compressor of the rows of a cache on the way through a text: `compression.Compressor`."""

    def store_queries(self, layer: int, query: Float[Tensor, "row head query d_key"]) -> None:
        """Take a layer's newest queries."""

    def store_gates(self, layer: int, gate: Float[Tensor, "row query head_d_value"]) -> None:
        """Take γ of a layer's newest queries."""

    def compress(self, read: int) -> None:
        """Compress every row that is due after `read` tokens."""

    def tokens_until_due(self, read: int) -> int:
        """Return how many tokens can be decoded after `read` before any row may be due."""
        ...


@dataclass
class StepRecord:
    """One decode step of a batch of rows; lists are per measured layer, `hidden` per decoder layer.

    Attributes:
        query: decoding query after RoPE (row, head, d_key).
        head_output: input of the output projection (row, head, d_value).
        hidden: residual stream after the layer (row, d_model), or several streams side by side.
        final: after the final norm (row, d_model).
        logits: (row, vocab).
        entries: number of entries that the query attends to in the full cache, its own included.
        gates: layer -> γ (row, head · d_value), of the layers with a gate.
        gradient: ∂ log p of the text / ∂ `head_output` (row, head, d_value), where effects are measured: in the
            full run's record its own; in an evicted run's the full run's, or its mean with each row's own. No padding
            rows.
        read: what attention read of row 0 in layers whose cache holds latents, in the last step of a pass alone; empty
            once it is stored in the prefill.
    """

    query: list[Float[Tensor, "row head d_key"]] = field(default_factory=list)
    head_output: list[Float[Tensor, "row head d_value"]] = field(default_factory=list)
    hidden: list[Float[Tensor, "row streams"]] = field(default_factory=list)
    final: Float[Tensor, "row d_model"] = field(default_factory=lambda: torch.empty(0, 0))
    logits: Float[Tensor, "row vocab"] = field(default_factory=lambda: torch.empty(0, 0))
    entries: int = 0
    gates: dict[int, Float[Tensor, "row head_d_value"]] = field(default_factory=dict)
    gradient: list[Float[Tensor, "row head d_value"]] = field(default_factory=list)
    read: EntriesRead = field(default_factory=dict)


@dataclass
class StepRecorder:
    """The callbacks that fill `records` with the last tokens of a pass, a step each; `finite` records activations.

    `compressor`, if any, gets all queries of the pass.
    """

    adapter: Adapter
    rows: int
    finite: FiniteCheck
    records: list[StepRecord]
    compressor: Compresses | None = None

    def observer(self) -> Observer:
        """Return the observer of the pass."""
        return Observer(
            self.record_query, self.record_head_output, self.record_hidden, self.record_final, gate=self.record_gate
        )

    def _by_step(self, tensor: Tensor, dim: int = 1) -> Iterator[tuple[StepRecord, Tensor]]:
        """Yield each record with its token's part of `tensor`, whose axis `dim` are the pass's tokens."""
        return zip(self.records, tensor.unbind(dim)[-len(self.records) :], strict=True)

    def record_query(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Record the queries in a layer: an `Observer.attention`."""
        for record, own in self._by_step(query, 2):
            record.query.append(own)
        if self.compressor is not None:
            self.compressor.store_queries(layer, query)
        if self.adapter.layer_facts(layer).latent:
            self.records[-1].read[layer] = key[0], value[0]

    def record_head_output(self, layer: int, mixed: Tensor) -> None:
        """Record the head outputs in a layer: an `Observer.head_output`."""
        for record, own in self._by_step(mixed):
            record.head_output.append(own.view(self.rows, self.adapter.heads, self.adapter.d_value))

    def record_gate(self, layer: int, gate: Tensor) -> None:
        """Record γ in a layer with a gate: an `Observer.gate`."""
        if self.compressor is not None:
            self.compressor.store_gates(layer, gate)
        for record, own in self._by_step(gate):
            record.gates[layer] = own

    def record_hidden(self, number: int, output: Tensor) -> None:
        """Record the hidden states after a decoder layer: an `Observer.hidden`."""
        self.finite(number, output)
        for record, own in self._by_step(output):
            record.hidden.append(own)

    def record_final(self, output: Tensor) -> None:
        """Record the hidden states after the final norm: an `Observer.final`."""
        self.finite.check(FINAL_NORM, output)
        for record, own in self._by_step(output):
            record.final = own

    def record_end(self, logits: Tensor, entries: int) -> None:
        """Record a pass's logits, and the number of entries that its last token attends to."""
        self.finite.check(LOGITS, logits[:, -len(self.records) :])
        for step, (record, own) in enumerate(self._by_step(logits), start=1):
            record.logits, record.entries = own, entries - len(self.records) + step


@torch.no_grad()
def decode_full(
    adapter: Adapter,
    prefill: Prefill,
    question: Sequence[int],
    steps: int,
    rows: int,
    ends: Collection[int] = (),
    text: Sequence[int] = (),
) -> tuple[list[StepRecord], Int[Tensor, " step"], Int[Tensor, " step"], Float[Tensor, " vocab"]]:
    """Decode the question and then a text from the full cache, at most `steps` steps.

    Returns the steps' records and tokens, the text's token after each step (−1 where the text ends), and the logits
    before the first step. Each step reads a token of `text` that another follows, or its only one; without a text the
    greedy choices, the first of them after the prompt and its question, up to a token in `ends`.

    The batch has `rows` identical rows so that the linear layers see the evicted runs' shapes; row 0 is recorded. The
    measured layers' cache grows by the steps' tokens, others are put back; `prefill.finite` checks the activations.
    """
    cache = SharedCache(prefill.cache, prefill.states, rows)
    logits = prefill.logits
    if question:
        ids = to_device(question, adapter.device)
        logits = decode_pass(adapter, cache, decode_shared(adapter), ids, rows, prefill.finite)[0].logits[0]
    if text:
        read = to_device(text[: steps + 1], adapter.device)
        measured = max(1, len(read) - 1)
    else:
        read = _greedy_tokens(adapter, cache, logits.argmax(), steps, rows)
        measured = count_text_steps(read, ends)
    tokens, records = read[:measured], list[StepRecord]()
    for chunk in torch.split(tokens, STEPS_AT_ONCE):
        of_pass = decode_pass(adapter, cache, decode_shared(adapter), chunk, rows, prefill.finite, len(chunk))
        prefill.read.update(of_pass[-1].read)
        records += map(_first_row, of_pass)
    restore_states(prefill.cache, prefill.states)
    last = read.new_full((1,), -1) if text else records[-1].logits.argmax(dim=-1)
    following = torch.cat([read[1:], last])[:measured]
    if not text:
        following = following.masked_fill(torch.isin(tokens, to_device(sorted(ends), read.device, read.dtype)), -1)
    return records, tokens, following, logits


def _greedy_tokens(
    adapter: Adapter, cache: SharedCache, first: Int[Tensor, ""], steps: int, rows: int
) -> Int[Tensor, " step"]:
    """Return the greedy continuation of `steps` tokens from `first` on; the cache is put back to before it.

    One row decodes it, token by token, so that it does not depend on the number of configurations.
    """
    tokens = [first]
    if steps > 1:
        entries, states = cache.get_seq_length(), prompt_states(adapter, cache)
        restore_states(cache, states)
        for _ in range(steps - 1):
            ids = copy_to_device(tokens[-1], adapter.device).view(1, 1)
            tokens.append(run_with_cache(adapter.model, ids, cache, logits_to_keep=1).logits[0, -1].argmax())
        for layer in (adapter.cache_layer(cache, index) for index in adapter.holders):
            layer.keys, layer.values = layer.keys[..., :entries, :], layer.values[..., :entries, :]
        restore_states(cache, states, rows)
    return torch.stack(tokens)


def count_text_steps(tokens: Int[Tensor, " step"], ends: Collection[int]) -> int:
    """Return the number of decode steps before the first end token, at least 1 (METHOD, protocol 8).

    It is the number of all tokens where none is in `ends`. With several steps, this waits for the device.
    """
    if len(tokens) == 1:
        return 1
    decoded = tokens.tolist()
    return max(1, next((step for step, token in enumerate(decoded) if token in ends), len(decoded)))


@torch.no_grad()
def decode_evicted(
    adapter: Adapter,
    cache: CompactCache,
    question: Sequence[int],
    tokens: Int[Tensor, " step"],
    finite: FiniteCheck,
    compressor: Compresses | None = None,
) -> tuple[Float[Tensor, "row vocab"] | None, Iterator[StepRecord]]:
    """Decode the question and then the given `tokens` (teacher-forced) from a compact cache, one row per configuration.

    Returns the logits after the question (None without one) and the records of the steps, which are decoded as they are
    asked for. `compressor` compresses the cache again on the way. `cache.forget` can go back to the question's end,
    unless the cache was compressed.
    """
    question_logits = None
    if question:
        ids = to_device(question, adapter.device)
        attention = decode_from(adapter, cache)
        (record,) = decode_pass(adapter, cache, attention, ids, cache.rows, finite, compressor=compressor)
        question_logits = record.logits
        cache.mark()
    return question_logits, _decode_steps(adapter, cache, tokens, finite, compressor)


def _decode_steps(
    adapter: Adapter,
    cache: CompactCache,
    tokens: Int[Tensor, " step"],
    finite: FiniteCheck,
    compressor: Compresses | None,
) -> Iterator[StepRecord]:
    """Decode the text's tokens, pass by pass, and yield the records of the steps; see `decode_evicted`."""
    read = 0
    while read < len(tokens):
        with torch.no_grad(), phase("decode"):
            count = STEPS_AT_ONCE
            if compressor is not None:
                compressor.compress(read)
                count = min(count, compressor.tokens_until_due(read))
            chunk, attention = tokens[read : read + count], decode_from(adapter, cache)
            records = decode_pass(adapter, cache, attention, chunk, cache.rows, finite, len(chunk), compressor)
        read += len(chunk)
        yield from records


def decode_pass(
    adapter: Adapter,
    cache: Cache,
    attention: AbstractContextManager[None],
    tokens: Int[Tensor, " token"],
    rows: int,
    finite: FiniteCheck,
    steps: int = 1,
    compressor: Compresses | None = None,
) -> list[StepRecord]:
    """Run one forward pass with the same tokens in all rows, and return the records at the last `steps` tokens.

    `attention` is the context inside which the model attends to `cache`; `compressor` sees the queries.
    """
    recorder = StepRecorder(adapter, rows, finite, [StepRecord() for _ in range(steps)], compressor)
    ids = copy_to_device(tokens, adapter.device).unsqueeze(0).expand(rows, -1)
    with attention, capture(adapter, recorder.observer()):
        logits = run_with_cache(adapter.model, ids, cache, logits_to_keep=steps).logits
    recorder.record_end(logits, cache.get_seq_length())
    return recorder.records


def join_rows(records: Sequence[StepRecord]) -> StepRecord:
    """Return the records of one step, of rows that were decoded apart, as one."""
    first = records[0]

    def joined(name: str) -> list[Tensor]:
        return [torch.cat(layer) for layer in zip(*(getattr(record, name) for record in records), strict=True)]

    return replace(
        first,
        query=joined("query"),
        head_output=joined("head_output"),
        hidden=joined("hidden"),
        final=torch.cat([record.final for record in records]),
        logits=torch.cat([record.logits for record in records]),
        gates={layer: torch.cat([record.gates[layer] for record in records]) for layer in first.gates},
    )


def _first_row(record: StepRecord) -> StepRecord:
    """Return the record restricted to a copy of row 0, so that memory does not hold the identical rows."""
    return StepRecord(
        query=[tensor[:1].clone() for tensor in record.query],
        head_output=[tensor[:1].clone() for tensor in record.head_output],
        hidden=[tensor[:1].clone() for tensor in record.hidden],
        final=record.final[:1].clone(),
        logits=record.logits[:1].clone(),
        entries=record.entries,
        gates={layer: tensor[:1].clone() for layer, tensor in record.gates.items()},
    )
