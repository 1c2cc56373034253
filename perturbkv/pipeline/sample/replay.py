"""Replay of a context over its own full cache, part by part, for scores that need it (KVzip).

The model attends to the whole cache, and the cache does not change: a layer gets its own tensors back as soon as it is
done, so that no more than one layer's entries exist twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import Cache

from perturbkv.cache.compact import prompt_states, restore_states
from perturbkv.datasets.sample import text_after_turn
from perturbkv.devices import to_device
from perturbkv.errors import DatasetError
from perturbkv.models.adapter import Adapter, check_long_rotations, check_sliding_window
from perturbkv.models.forward import run_with_cache
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.sample.capture import FiniteCheck, Observer, capture
from perturbkv.scoring.compute import compute_replay
from perturbkv.scoring.replay_view import Replay, ReplayView
from perturbkv.scoring.score import Score
from perturbkv.selection.resolved_config import ScoreRequest

WORDINGS = {
    "released": (
        "\n\nRepeat the previous context exactly.",
        "\n\nRepeat the part of the previous context exactly, starting with ",
    ),
    "kvpress": (
        "\n\nRepeat the previous context exactly.",
        "\n\nRepeat the part of the previous context exactly, starting with",
    ),
}
"""Requests for the first part and for each other one, as worded in the released code and in kvpress' port."""
_OVERLAP = 8
"""Number of last tokens of a part that follow the request for the next one."""


def append_replay_scores(
    adapter: Adapter,
    context: Sequence[int],
    cache: Cache,
    scored: dict[ScoreRequest, list[Tensor]],
    sample: str,
    finite: FiniteCheck,
) -> None:
    """Append the scores that need a replay to `scored`, layer by layer; scores with equal replays share the passes.

    `cache` is the full cache of the `context`, and `finite` records whether the scores are finite. Raises DatasetError
    or ModelError where the replay does not fit the model.
    """
    replays = {request.score: request.score.replay for request in scored if request.score.replay is not None}
    for replay in dict.fromkeys(replays.values()):
        scores = [score for score, own_replay in replays.items() if own_replay == replay]
        parts: dict[Score, list[list[Tensor]]] = {score: [[] for _ in adapter.holders] for score in scores}
        with phase("replay"):
            for part, tokens in replay_passes(adapter.tokenizer, context, replay):  # part: a slice of the context
                check_positions_left(adapter, len(context), len(tokens), sample)
                _Pass(adapter, cache, replay, part, parts, sample).run(tokens)
        for request in (request for request in scored if request.score in scores):
            prefix = max(0, len(context) - request.window)
            joined = (torch.cat(layer, dim=-1) for layer in parts[request.score])  # from all passes
            scored[request] += [rows[:, :prefix] for rows in joined]
            for layer, rows in enumerate(scored[request]):
                finite.check_derived(
                    f"the scores '{request.score.display_name}' of layer {adapter.layer_indices[layer]}", rows
                )


def replay_passes(tokenizer: object, context: Sequence[int], replay: Replay) -> Iterator[tuple[slice, list[int]]]:
    """Yield, per part of the context, its slice and the tokens of the replay pass that repeats it."""
    first, later = (tokenize(tokenizer, request) for request in WORDINGS[replay.wording])
    turn_end = tokenize(tokenizer, text_after_turn(tokenizer) or "\n")
    for start in range(0, len(context), replay.chunk):
        part = slice(start, min(start + replay.chunk, len(context)))
        request = [*later, *context[max(0, start - min(replay.chunk, _OVERLAP)) : start]] if start else first
        yield part, [*request, *turn_end, *context[part]]


def tokenize(tokenizer: object, text: str) -> list[int]:
    """Return the token ids of a text without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[operator]


def check_positions_left(adapter: Adapter, context: int, pass_tokens: int, sample: str) -> None:
    """Raise DatasetError or ModelError if a context and a replay pass exceed the model's positions."""
    if context + pass_tokens > adapter.positions:
        raise DatasetError(
            f"sample '{sample}' has {context} tokens, with the {pass_tokens} of a replay's pass more than the model's "
            f"{adapter.positions} positions; use --max-tokens or a smaller chunk of the score that replays"
        )
    check_sliding_window(adapter.config, context + pass_tokens, sample, adapter.name, pass_tokens)
    check_long_rotations(adapter.config, context, context + pass_tokens, sample, adapter.name, pass_tokens)


class _Pass:
    """One pass of a replay over the full cache, which repeats the slice `part` of the context.

    It appends each score's values to `results`, per layer.
    """

    def __init__(
        self, adapter: Adapter, cache: Cache, replay: Replay, part: slice, results: dict[Score, list[list[Tensor]]],
        sample: str,
    ) -> None:  # fmt: skip
        self.adapter, self.cache, self.part, self.results, self.sample = adapter, cache, part, results, sample
        self.sinks = min(replay.sinks, part.start)
        layers = [adapter.cache_layer(cache, index) for index in range(len(adapter.layers))]
        self.entries = [(layer.keys, layer.values) for layer in layers]
        self.states = prompt_states(adapter, cache)
        self.input: Tensor | None = None

    def run(self, tokens: Sequence[int]) -> None:
        """Read the tokens over the cache, then restore the cache to its state before."""
        needs_input = any("hidden" in score.needs for score in self.results)
        observer = Observer(
            attention=self._score_layer,
            hidden=self._restore_layer,
            attention_input=self._keep_input if needs_input else None,
        )
        ids = to_device([tokens], self.adapter.device)
        with capture(self.adapter, observer):
            run_with_cache(self.adapter.base, ids, self.cache)
        restore_states(self.cache, self.states)

    def _keep_input(self, layer: int, hidden: Tensor) -> None:
        """Store a layer's attention input until the layer's scores are computed: an `Observer.attention_input`."""
        self.input = hidden[0]

    def _score_layer(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Compute all of the pass's scores in one layer that fills a cache: an `Observer.attention`."""
        if layer not in self.adapter.holders:
            return
        count = query.shape[2]
        view = ReplayView(
            queries=query[0],
            keys=self._visible_entries(key[0], count),
            values=self._visible_entries(value[0], count),
            hidden=self.input,
            projection=self.adapter.output_projection(layer),
            softmax=self.adapter.softmax(layer),
            sinks=self.sinks,
            chunk=self.part.stop - self.part.start,
            layer=layer,
            sample=self.sample,
        )
        for score, layers in self.results.items():
            layers[layer].append(compute_replay(score, view))

    def _visible_entries(self, entries: Tensor, count: int) -> Tensor:
        """Return the entries visible to the scores: the context's first ones, the repeated part and the pass's `count`.

        `entries` are keys or values (kv_head, key, …).
        """
        return torch.cat([entries[:, : self.sinks], entries[:, self.part], entries[:, -count:]], dim=1)

    def _restore_layer(self, number: int, hidden: Tensor) -> None:
        """Remove the pass's entries from a measured layer of the cache after its forward pass: an `Observer.hidden`."""
        if (layer := self.adapter.measured_index.get(number)) is not None:
            cached = self.adapter.cache_layer(self.cache, layer)
            cached.keys, cached.values = self.entries[layer]
