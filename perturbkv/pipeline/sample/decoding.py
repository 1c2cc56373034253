"""Decoding of the same tokens from the full cache and from a compact one, with records of each step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import Cache

from perturbkv.cache.compact import CompactCache, SharedCache, restore_states
from perturbkv.devices import copy_to_device, to_device
from perturbkv.models.adapter import Adapter
from perturbkv.models.forward import run_with_cache
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
        gradient: ∂ log p of the text / ∂ `head_output` (head, d_value), of the full run where effects are measured.
        read: what attention read of row 0 in layers whose cache holds latents; empty once it is stored in the prefill.
    """

    query: list[Float[Tensor, "row head d_key"]] = field(default_factory=list)
    head_output: list[Float[Tensor, "row head d_value"]] = field(default_factory=list)
    hidden: list[Float[Tensor, "row streams"]] = field(default_factory=list)
    final: Float[Tensor, "row d_model"] = field(default_factory=lambda: torch.empty(0, 0))
    logits: Float[Tensor, "row vocab"] = field(default_factory=lambda: torch.empty(0, 0))
    entries: int = 0
    gates: dict[int, Float[Tensor, "row head_d_value"]] = field(default_factory=dict)
    gradient: list[Float[Tensor, "head d_value"]] = field(default_factory=list)
    read: EntriesRead = field(default_factory=dict)


@dataclass
class _StepRecorder:
    """The callbacks that fill `record` with a decode step at the last of its tokens; `finite` records activations."""

    adapter: Adapter
    rows: int
    finite: FiniteCheck
    record: StepRecord = field(default_factory=StepRecord)

    def record_query(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Record the last token's queries in a layer: an `Observer.attention`."""
        self.record.query.append(query[:, :, -1])
        if self.adapter.layer_facts(layer).latent:
            self.record.read[layer] = key[0], value[0]

    def record_head_output(self, layer: int, mixed: Tensor) -> None:
        """Record the last token's head outputs in a layer: an `Observer.head_output`."""
        self.record.head_output.append(mixed[:, -1].view(self.rows, self.adapter.heads, self.adapter.d_value))

    def record_gate(self, layer: int, gate: Tensor) -> None:
        """Record the last token's γ in a layer with a gate: an `Observer.gate`."""
        self.record.gates[layer] = gate[:, -1]

    def record_hidden(self, number: int, output: Tensor) -> None:
        """Record the last token's hidden state after a decoder layer: an `Observer.hidden`."""
        self.finite(number, output)
        self.record.hidden.append(output[:, -1])

    def record_final(self, output: Tensor) -> None:
        """Record the last token's hidden state after the final norm: an `Observer.final`."""
        self.finite.check(FINAL_NORM, output)
        self.record.final = output[:, -1]


@torch.inference_mode()
def decode_full(
    adapter: Adapter, prefill: Prefill, question: Sequence[int], steps: int, rows: int
) -> tuple[list[StepRecord], Int[Tensor, " step"]]:
    """Decode the question and then `steps` greedy steps from the full cache; return the steps' records and tokens.

    The batch has `rows` identical rows so that the linear layers see the evicted runs' shapes; row 0 is recorded. The
    first token is the greedy choice after the prompt and its question. The measured layers' cache grows by all decoded
    tokens, others are put back; `prefill.finite` checks the activations.
    """
    cache = SharedCache(prefill.cache, prefill.states, rows)
    logits = prefill.logits
    if question:
        ids = to_device(question, adapter.device)
        logits = _decode_step(adapter, cache, decode_shared(adapter), ids, rows, prefill.finite).logits[0]
    tokens, records = [logits.argmax()], []
    for _ in range(steps):
        record = _decode_step(adapter, cache, decode_shared(adapter), tokens[-1].view(1), rows, prefill.finite)
        prefill.read.update(record.read)
        records.append(_first_row(record))
        tokens.append(record.logits[0].argmax())
    restore_states(prefill.cache, prefill.states)
    return records, torch.stack(tokens[:steps])  # the one after the last step is not read


def count_text_steps(tokens: Int[Tensor, " step"], ends: Collection[int]) -> int:
    """Return the number of decode steps before the first end token, at least 1 (METHOD, protocol 8).

    It is the number of all tokens where none is in `ends`. With several steps, this waits for the device.
    """
    if len(tokens) == 1:
        return 1
    decoded = tokens.tolist()
    return max(1, next((step for step, token in enumerate(decoded) if token in ends), len(decoded)))


@torch.inference_mode()
def decode_evicted(
    adapter: Adapter,
    cache: CompactCache,
    question: Sequence[int],
    tokens: Int[Tensor, " step"],
    rows: int,
    finite: FiniteCheck,
) -> tuple[Float[Tensor, "row vocab"] | None, list[StepRecord]]:
    """Decode the question and then the given `tokens` (teacher-forced) from a compact cache, one row per configuration.

    Returns the logits after the question (None without one) and the records of the steps. `cache.forget` can go back to
    the question's end.
    """
    question_logits = None
    if question:
        ids = to_device(question, adapter.device)
        question_logits = _decode_step(adapter, cache, decode_from(adapter, cache), ids, rows, finite).logits
        cache.mark()
    steps = [
        _decode_step(adapter, cache, decode_from(adapter, cache), token, rows, finite)
        for token in torch.split(tokens, 1)
    ]
    return question_logits, steps


def _decode_step(
    adapter: Adapter,
    cache: Cache,
    attention: AbstractContextManager[None],
    tokens: Int[Tensor, " token"],
    rows: int,
    finite: FiniteCheck,
) -> StepRecord:
    """Run one forward pass with the same tokens in all rows, and return the record at the last token.

    `attention` is the context inside which the model attends to `cache`.
    """
    recorder = _StepRecorder(adapter, rows, finite)
    record = recorder.record
    ids = copy_to_device(tokens, adapter.device).unsqueeze(0).expand(rows, -1)
    observer = Observer(
        recorder.record_query,
        recorder.record_head_output,
        recorder.record_hidden,
        recorder.record_final,
        gate=recorder.record_gate,
    )
    with attention, capture(adapter, observer):
        record.logits = run_with_cache(adapter.model, ids, cache, logits_to_keep=1).logits[:, -1]
    finite.check(LOGITS, record.logits)
    record.entries = cache.get_seq_length()
    return record


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
