"""Everything the naive decoder says of one sample: what each configuration keeps, and how it decodes from that."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np

from perturbkv.configs.choice import parse
from perturbkv.configs.entry_counts import Budget
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.run import RunConfig
from tests.oracle import correction, effect, lines, pages, policies, quantisation, selection, shared, theory
from tests.oracle.decoder import Chosen, Decoder, Step
from tests.support.configs import flat

QUESTION = 7
"""Tokens of a prompt's question, its last."""


def attention_of(held: dict[str, np.ndarray], scale: float, cap: float | None = None) -> np.ndarray:
    """(head, key), with a sink's weight behind the entries' where there is one."""
    return theory.decode_attention(held["query"], held["key"], scale, held["sinks"], cap)


class FullRun:
    """A text read and decoded without eviction, and what is the same whatever a configuration keeps of it."""

    def __init__(self, model: object, ids: tuple[int, ...], steps: int, text: tuple[int, ...]) -> None:
        self.model, self.ids, self.steps, self.decoder = model, ids, steps, Decoder(model)
        self.prompt = [self.decoder.step(token) for token in ids]
        self.tokens = [text[0] if text else int(np.argmax(self.prompt[-1].logits))]
        self.full: list[Step] = []
        for step in range(steps):
            self.full.append(self.decoder.step(self.tokens[-1]))
            self.tokens.append(text[step + 1] if text else int(np.argmax(self.full[-1].logits)))

    @functools.cache  # noqa: B019
    def layer(self, layer: int, step: int) -> dict[str, np.ndarray]:
        entries = len(self.ids) + step + 1
        cell = self.decoder
        return {
            "query": self.full[step].query[layer],
            "key": np.array(cell.keys[layer])[:, :entries],
            "value": np.array(cell.values[layer])[:, :entries],
            "w_o": cell.w_o(layer) * self.full[step].gates[layer].reshape(-1),
            "sinks": cell.sinks(layer),
        }

    @functools.cache  # noqa: B019
    def gradient(self, layer: int, step: int) -> np.ndarray:
        """(d_model,): g of the text's tokens after the first decoded one."""
        text = (*self.ids, *self.tokens)
        return effect.gradient(self.model, text, self.steps, self.decoder.places[layer], len(self.ids) + step)

    @functools.cache  # noqa: B019
    def norms(self, layer: int, step: int) -> np.ndarray:
        """(head, key) of every entry that the step sees."""
        held = self.layer(layer, step)
        return theory.projected_value_norms(held["value"], held["w_o"], self.decoder.heads)

    @functools.cache  # noqa: B019
    def attention(self, layer: int, step: int) -> np.ndarray:
        """(head, key), with a sink's weight behind the entries' where there is one."""
        return attention_of(self.layer(layer, step), self.decoder.scale, self.decoder.cap)

    @functools.cache  # noqa: B019
    def read(self, n: int) -> Decoder:
        """What has read the first `n` tokens and nothing behind them."""
        decoder = Decoder(self.model)
        for token in self.ids[:n]:
            decoder.step(token)
        return decoder


full_run = functools.lru_cache(maxsize=32)(FullRun)
"""Models are told apart by identity: one that is changed in place has no second run of the same text."""


class Reference:
    """Everything the oracle says of one sample."""

    def __init__(
        self,
        model: object,
        ids: tuple[int, ...],
        run: RunConfig,
        template: range = range(0),
        text: tuple[int, ...] = (),
    ) -> None:
        whole = full_run(model, ids, run.steps, text)
        self.run, self.decoder, self.template, self.model, self.ids = run, whole.decoder, template, model, ids
        self.n = len(ids) - (QUESTION if run.scenario == "context-only" else 0)
        self.prompt, self.full, self.tokens = whole.prompt, whole.full, list(whole.tokens)
        self.layer, self.attention = whole.layer, whole.attention
        self.norms, self.gradient = whole.norms, whole.gradient
        self._read_first = whole.read

    @functools.cache  # noqa: B019
    def selecting(self, layer: int, config: EvictionConfig) -> np.ndarray:
        """(head, n) of the prompt's entries, as a configuration selects by: under the window's mean |γ| unless told."""
        flattened, gates = flat(config), [np.abs(step.gates[layer]) for step in self.prompt[: self.n]]
        gate = np.mean(gates[-config.window :], axis=0)
        if config.selection.name == "hindsight":
            gate = self.full[0].gates[layer]
        if config.selection.options.get("gate") == "none":
            gate = np.ones_like(gate)
        w_o = self.decoder.w_o(layer) * gate.reshape(-1)
        value = self.layer(layer, 0)["value"][:, : self.n]
        return theory.projected_value_norms(value, w_o, self.decoder.heads, euclidean=flattened.norm == "l2")

    def kept(self, layer: int, config: EvictionConfig, step: int = 0) -> list[tuple[list[int], list[int]]]:
        """Per query head, what stays and stage 1 of it; where pages are read, what the full run's step reads.

        Where the prompt is read along lines, what its last query looks at.
        """
        if config.has_sparse_prefill:
            return [tuple(own.seen(self.n - 1) for own in one) for one in self.lines(layer, config)]  # type: ignore[misc]
        return self.read_at(layer, config, step) if config.reads_pages else self._kept(layer, config)

    @functools.cache  # noqa: B019
    def read_at(self, layer: int, config: EvictionConfig, step: int) -> list[tuple[list[int], list[int]]]:
        return self._read(layer, config, self.full[step].query[layer])

    def _read(self, layer: int, config: EvictionConfig, query: np.ndarray) -> list[tuple[list[int], list[int]]]:
        keys = [list(head[: self.n]) for head in self.decoder.keys[layer]]
        norms = self.selecting(layer, config)
        return pages.choose(flat(config), query, keys, norms, self.n, self.decoder.scale)

    @functools.cache  # noqa: B019
    def _kept(self, layer: int, config: EvictionConfig) -> list[tuple[list[int], list[int]]]:
        if flat(config).fill:
            entries = quantisation.entries_of(flat(config), self.n, self.decoder.d_head)
            config = replace(config, budget=Budget(entries), precision=parse("full"))
        if flat(config).reduce == "union" or config.granularity.name in ("head", "model"):
            found = self._shared(config)
            return [found[layer, head] for head in range(self.decoder.heads)]
        accumulated, realised = self._accumulated(layer, config), self._realised(layer)
        norms = self.selecting(layer, config)
        place = (layer, self.decoder.layers, self.run.head_scores)
        other = norms if flat(config).norm == "l2" else None
        return selection.select(config, accumulated, norms, realised, self.n, self.decoder.kv_heads, *place, other)

    def _accumulated(self, layer: int, config: EvictionConfig) -> np.ndarray:
        """(head, n − w), the policy's score."""
        held = self.layer(layer, 0)
        query = np.stack([step.query[layer] for step in self.prompt[: self.n]], axis=1)
        return policies.accumulate(
            config, query, held["key"][:, : self.n], self.decoder.scale, held["sinks"], self.template, self.decoder.cap
        )

    def _realised(self, layer: int) -> np.ndarray:
        """(head, key), attention of the first decoded token."""
        return self.attention(layer, 0)[:, : len(self.ids) + 1]

    @functools.cache  # noqa: B019
    def _shared(self, config: EvictionConfig) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
        """(layer, head) -> what stays and stage 1 of it, where heads or layers share a set."""
        prefix = self.n - min(config.window, self.n)
        rows = [
            shared.Layer(
                self._accumulated(layer, config),
                self.selecting(layer, config)[:, :prefix],
                self._realised(layer)[:, :prefix],
            )
            for layer in range(self.decoder.layers)
        ]
        return shared.select(config, rows, self.n, self.decoder.kv_heads)

    @functools.cache  # noqa: B019
    def lines(self, layer: int, config: EvictionConfig) -> list[tuple[lines.Lines, lines.Lines]]:
        """Per query head all lines and those of stage 1, as the full prefill's queries choose them."""
        keys = [list(head[: self.n]) for head in self.decoder.keys[layer]]
        queries = [[step.query[layer][head] for step in self.prompt[: self.n]] for head in range(self.decoder.heads)]
        norms = self.selecting(layer, config)
        return lines.choose(flat(config), queries, keys, norms, self.decoder.scale)

    def read_along(self, config: EvictionConfig) -> Decoder:
        """What has read what is compressed along lines."""
        return self._read_along(config)[0]

    def looked_at(self, config: EvictionConfig) -> list[int]:
        """Per layer, how many entries all queries of all heads look at in that."""
        return self._read_along(config)[1]

    @functools.cache  # noqa: B019
    def _read_along(self, config: EvictionConfig) -> tuple[Decoder, list[int]]:
        decoder, counts = Decoder(self.model), []
        along = lines.along(flat(config), decoder)

        def counted(*layer: Any) -> list[list[list[int]]]:
            seen = along(*layer)
            counts.append(sum(len(entries) for head in seen for entries in head))
            return seen

        decoder.prefill(self.ids[: self.n], counted)
        return decoder, counts

    def stored(self, layer: int, config: EvictionConfig, inside: bool = False) -> list[dict[int, tuple[Any, Any]]]:
        """Per query head what a configuration in few bits keeps, as it is stored; nothing in 16 bits."""
        if not config.quantised:
            return [{} for _ in range(self.decoder.heads)]
        found = []
        for head, (kept, _) in enumerate(self.kept(layer, config)):
            own = head // (self.decoder.heads // self.decoder.kv_heads)
            keys, values = self.decoder.keys[layer][own], self.decoder.values[layer][own]
            held = [keys[position] for position in kept]
            if inside:
                place = self.decoder.places[layer]
                unturned = [self.decoder.unrotated[place][own][position] for position in kept]
                held = [self.decoder.rotate(one, stands, layer) for stands, one in enumerate(unturned)]
            few = [held, [values[position] for position in kept]]
            found.append(quantisation.stored(flat(config), kept, *few, self.n, self.decoder.places[layer]))
        return found

    @functools.cache  # noqa: B019
    def extras(self, layer: int, config: EvictionConfig) -> list[correction.Extra | None]:
        """Per query head what stands in for the prompt's entries that went."""
        if not config.corrected:
            return [None for _ in range(self.decoder.heads)]
        sharing, last = self.decoder.heads // self.decoder.kv_heads, range(self.n - config.window, self.n)
        found = []
        for head, (kept, _) in enumerate(self.kept(layer, config)):
            keys, values = (kind[layer][head // sharing][: self.n] for kind in (self.decoder.keys, self.decoder.values))
            queries = [self.prompt[place].query[layer][head] for place in last]
            found.append(correction.extra(flat(config).mass, queries, kept, keys, values, self.decoder.scale))
        return found

    def evicted(self, config: EvictionConfig) -> list[Step]:
        """Decode again, entries outside the kept sets masked in every layer, from the question on."""
        return self.decoded(config)[len(self.ids) - self.n :]

    def decoded(self, config: EvictionConfig) -> list[Step]:
        """The same with the question's own steps, of the tokens that there are now."""
        return self._decoded(config, self._tokens_after_prompt())

    def _tokens_after_prompt(self) -> tuple[int, ...]:
        return (*self.ids[self.n :], *self.tokens[: self.run.steps])

    @functools.cache  # noqa: B019
    def _decoded(self, config: EvictionConfig, tokens: tuple[int, ...]) -> list[Step]:
        return self._decode(config, tokens, {})

    def _decode(
        self, config: EvictionConfig, tokens: tuple[int, ...], moved: dict[tuple[int, int], np.ndarray]
    ) -> list[Step]:
        if config.has_sparse_prefill:
            decoder = self.read_along(config).copy()
            return [decoder.step(token) for token in tokens]
        decoder = self._read_first(self.n).copy()
        decoder.moved = moved
        sets, inside = [self.kept(layer, config) for layer in range(decoder.layers)], flat(config).positions
        stored = [self.stored(layer, config, inside == "in-cache") for layer in range(decoder.layers)]
        extras = [self.extras(layer, config) for layer in range(decoder.layers)]
        records = []
        for later, token in enumerate(tokens):
            masks = [np.ones((decoder.heads, self.n + later), dtype=bool) for _ in sets]
            for mask, layer_sets in zip(masks, sets, strict=True):
                mask[:, : self.n] = [[position in kept for position in range(self.n)] for kept, _ in layer_sets]
            seen = [self._seen(layer, config, mask) for layer, mask in enumerate(masks)]
            records.append(decoder.step(token, seen, inside == "in-cache", stored, extras))
        return records

    def evicted_log_p(self, config: EvictionConfig, moved: dict[tuple[int, int], np.ndarray]) -> float:
        """log p of the text's tokens after its first over a configuration's cache, with attention outputs moved."""
        steps = self._decode(config, self._tokens_after_prompt(), moved)[len(self.ids) - self.n :]
        return sum(
            float(step.logits[token] - np.logaddexp.reduce(step.logits))
            for step, token in zip(steps, self.tokens[1:], strict=True)
        )

    def evicted_derivative(self, config: EvictionConfig, layer: int, step: int, moved: np.ndarray) -> float:
        """The change of that log p per unit of what is added (d_model) to a layer's attention output at a step."""
        place = self.decoder.places[layer], len(self.ids) + step
        return effect.difference(lambda size: self.evicted_log_p(config, {place: size * moved}))

    def _seen(self, layer: int, config: EvictionConfig, mask: np.ndarray) -> np.ndarray | Chosen:
        """The mask of a step, or what makes it of the step's own query."""
        if not config.reads_pages:
            return mask

        def chosen(query: np.ndarray) -> np.ndarray:
            made = mask.copy()
            made[:, : self.n] = [[i in read for i in range(self.n)] for read, _ in self._read(layer, config, query)]
            return made

        return chosen
