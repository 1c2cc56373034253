"""Replay of a context over its own full cache, part by part, for scores that need it (KVzip).

The model attends to the whole cache, and the cache does not change: a layer gets its own tensors back as soon as it is
done, so that no more than one layer's entries exist twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import Cache

from perturbkv.cache.compact import restore_windows, sliding_windows
from perturbkv.datasets.sample import text_after_turn
from perturbkv.errors import DatasetError
from perturbkv.models.adapter import Adapter, check_long_rotations, check_sliding_window
from perturbkv.pipeline.progress import phase
from perturbkv.pipeline.sample.capture import FiniteCheck, Observer, capture
from perturbkv.scoring.compute import compute_replay
from perturbkv.scoring.replay_view import Replay, ReplayView
from perturbkv.scoring.score import Score, ScoreRequest

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


def replay_scores(
    adapter: Adapter,
    context: Sequence[int],
    cache: Cache,
    scored: dict[ScoreRequest, list[Tensor]],
    sample: str,
    finite: FiniteCheck,
) -> None:
    """Fill in the scores of `scored` that need a replay, layer by layer; those of one replay share its passes.

    Raises DatasetError or ModelError where the replay does not fit the model.
    """
    wanted = {asked.score: asked.score.replay for asked in scored if asked.score.replay is not None}
    for how in dict.fromkeys(wanted.values()):
        own = [score for score, replay in wanted.items() if replay == how]
        with phase("replay"):
            made = _replay_parts(adapter, context, cache, how, own, sample)
        for asked in (asked for asked in scored if asked.score in own):
            prefix = max(0, len(context) - asked.window)
            scored[asked] += [rows[:, :prefix] for rows in made[asked.score]]
            for layer, rows in enumerate(scored[asked]):
                finite.check_derived(
                    f"the scores '{asked.score.display_name}' of layer {adapter.layer_indices[layer]}", rows
                )


def _replay_parts(
    adapter: Adapter, context: Sequence[int], cache: Cache, how: Replay, scores: Sequence[Score], sample: str
) -> dict[Score, list[Tensor]]:
    """Return, per score and layer, the scores (rows, n)."""
    parts: dict[Score, list[list[Tensor]]] = {score: [[] for _ in adapter.layers] for score in scores}
    for part, tokens in replay_passes(adapter.tokenizer, context, how):
        check_positions_left(adapter, len(context), len(tokens), sample)
        _Pass(adapter, cache, how, part, parts, sample).run(tokens)
    return {score: [torch.cat(layer, dim=-1) for layer in layers] for score, layers in parts.items()}


def replay_passes(tokenizer: object, context: Sequence[int], how: Replay) -> Iterator[tuple[slice, list[int]]]:
    """Yield the slice of each part of the context, and the tokens of the pass that repeats it."""
    first, later = (_tokenize(tokenizer, words) for words in WORDINGS[how.wording])
    turn_end = _tokenize(tokenizer, text_after_turn(tokenizer) or "\n")
    for start in range(0, len(context), how.chunk):
        part = slice(start, min(start + how.chunk, len(context)))
        request = [*later, *context[max(0, start - min(how.chunk, _OVERLAP)) : start]] if start else first
        yield part, [*request, *turn_end, *context[part]]


def _tokenize(tokenizer: object, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[operator]


def check_positions_left(adapter: Adapter, context: int, pass_tokens: int, sample: str) -> None:
    """Raise DatasetError or ModelError where context and pass need more positions than the model has."""
    if context + pass_tokens > adapter.positions:
        msg = (
            f"sample '{sample}' has {context} tokens, with the {pass_tokens} of a replay's pass more than the model's "
            f"{adapter.positions} positions; use --max-tokens or a smaller chunk of the score that replays"
        )
        raise DatasetError(msg)
    check_sliding_window(adapter.config, context + pass_tokens, sample, adapter.name, pass_tokens)
    check_long_rotations(adapter.config, context, context + pass_tokens, sample, adapter.name, pass_tokens)


class _Pass:
    """One pass of a replay over the cache."""

    def __init__(
        self, adapter: Adapter, cache: Cache, how: Replay, part: slice, made: dict[Score, list[list[Tensor]]],
        sample: str,
    ) -> None:  # fmt: skip
        self.adapter, self.cache, self.part, self.made, self.sample = adapter, cache, part, made, sample
        self.sinks = min(how.sinks, part.start)
        self.held = [
            (held.keys, held.values) for held in (adapter.cache_layer(cache, at) for at in range(len(adapter.layers)))
        ]
        self.windows = sliding_windows(adapter, cache)
        self.input: Tensor | None = None

    def run(self, tokens: Sequence[int]) -> None:
        """Read the tokens over the cache, and restore the cache."""
        needs_input = any("hidden" in score.needs for score in self.made)
        observer = Observer(
            attention=self._attention,
            hidden=self._restore_layer,
            attention_input=self._entering if needs_input else None,
        )
        ids = torch.tensor([tokens], device=self.adapter.device)
        with capture(self.adapter, observer):
            self.adapter.model.model(input_ids=ids, past_key_values=self.cache, use_cache=True)
        restore_windows(self.cache, self.windows)

    def _entering(self, layer: int, hidden: Tensor) -> None:
        self.input = hidden[0]

    def _attention(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        count = query.shape[2]
        view = ReplayView(
            queries=query[0],
            keys=self._visible_entries(key[0], count),
            values=self._visible_entries(value[0], count),
            hidden=self.input,
            projection=self.adapter.output_projection(layer),
            scale=self.adapter.scale(layer),
            sinks=self.sinks,
            chunk=self.part.stop - self.part.start,
            layer=layer,
            sample=self.sample,
            sink_logits=self.adapter.sinks(layer),
        )
        for score, layers in self.made.items():
            layers[layer].append(compute_replay(score, view))

    def _visible_entries(self, entries: Tensor, count: int) -> Tensor:
        """Return the first entries, those of the part, and the pass's own."""
        return torch.cat([entries[:, : self.sinks], entries[:, self.part], entries[:, -count:]], dim=1)

    def _restore_layer(self, layer: int, hidden: Tensor) -> None:
        held = self.adapter.cache_layer(self.cache, layer)
        held.keys, held.values = self.held[layer]
