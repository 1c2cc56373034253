"""One prompt decoded from mixtures of two configurations' kept sets: one prefill, a row of a batch per mixture.

Mixtures that a question needs, measured prompt by prompt and written down at once; what is there is not measured.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from perturbkv import memory
from perturbkv.cache import entries as positions
from perturbkv.cache import quantisation
from perturbkv.cache.compact import CompactCache, CompactLayer, beside
from perturbkv.cache.entries import borrow, keep
from perturbkv.configs.patching import Coalition, Game, Mixture
from perturbkv.configs.resources import Resources, Shape
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ActivationError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers import grading
from perturbkv.pipeline.answers.generation import generate
from perturbkv.pipeline.answers.recompression import EvictedPrompt
from perturbkv.pipeline.run.plan import Plan, passing
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.capture import FiniteCheck
from perturbkv.pipeline.sample.decoding import decode_evicted
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.prefill import prefill
from perturbkv.pipeline.sample.sample_run import SampleRun, full_run
from perturbkv.pipeline.variants.presses import sources
from perturbkv.selection.kept_sets import ExternalGroup
from perturbkv.selection.resolved_config import ResolvedRun
from perturbkv.storage.patching_file import PER_STEP, PatchingBatch, PatchingRow, PatchingStore

MOST = 32
"""Mixtures of a batch at most: more take no less time each, and a killed run loses one batch."""
_TOTAL = {
    "drift": ("hidden_drift_l1", "hidden_noise_floor"),
    "final_drift": ("final_drift_l1", "final_noise_floor"),
    "kl": ("logit_kl", "logit_kl_noise_floor"),
    "top1": ("top1_agreement", None),
    "propagated": ("perturbation_propagated", "noise_floor"),
}
"""Quantity -> what `measure.propagated` calls it, and its noise floor."""


def rows_of(prompt: Prompt, run: ResolvedRun, shape: Shape, resources: Resources) -> int:
    """Mixtures that are decoded together: as many as fit the bound on memory, at most `MOST`, at least one."""
    context, question = prompt.parts(run.scenario)
    decoded, n = len(question) + max(run.steps, run.generate), len(context)
    row = max(shape.row_bytes(config, n, decoded, run.steps, passing(run)) for config in run.configs)
    bound = resources.max_bytes or (shape.weights_bytes + shape.full_cache_bytes(n)) // 2
    return max(1, min(MOST, bound // row))


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of a prompt: the n entries' keys and values, and both configurations' kept sets."""

    keys: Tensor
    values: Tensor
    kept: Bool[Tensor, "side kept_head key"]


class SwapSample:
    """A prompt that was read once, with both configurations' kept sets, ready to be decoded from mixtures of them.

    Args:
        adapter: the model.
        prompt: what is read.
        run: of two configurations, the baseline first.
        resources: memory and kernels.
        rows: mixtures of a whole batch.

    Raises what `trace_sample` raises.
    """

    @memory.translate_allocation_errors()
    @torch.inference_mode()
    def __init__(self, adapter: Adapter, prompt: Prompt, run: ResolvedRun, resources: Resources, rows: int) -> None:
        positions.check_positions(run.configs, adapter.config, adapter.name)
        context, question = prompt.parts(run.scenario)
        before = prefill(adapter, prompt, run, resources, sources(adapter, context, run.configs, {}))
        again = replace(before, cache=copy.deepcopy(before.cache))
        full = {2: full_run(adapter, before, question, run.steps, 3)}
        if rows != 2:
            full[rows] = full_run(adapter, again, question, run.steps, rows + 1)
        self.sample = SampleRun(adapter, run, resources, prompt, before, full[2])
        self.adapter, self.run, self.full = adapter, run, full
        self.layers = [self._layer(self.sample.layer(index)) for index in range(len(adapter.layers))]
        self.finite, self.passing, self.rows = FiniteCheck(), passing(run), rows
        before.finite.raise_if_not(prompt.sample_id)

    @property
    def kept_heads(self) -> int:
        """Kept sets of a layer: one per query head, or per key/value head."""
        return int(self.layers[0].kept.shape[1])

    @property
    def same(self) -> Bool[Tensor, "layer kept_head"]:
        """Where both configurations keep the same entries."""
        return torch.stack([(layer.kept[0] == layer.kept[1]).all(dim=-1).cpu() for layer in self.layers])

    @memory.translate_allocation_errors()
    @torch.inference_mode()
    def measure(self, mixtures: Sequence[Mixture], by_head: Collection[Mixture] = ()) -> PatchingBatch:
        """Decode from these mixtures in one batch; `by_head` are those whose heads are told one by one.

        The baseline alone and the treatment alone, together, are decoded in the very batch that `trace_sample` makes
        of both configurations; every other batch has `rows` rows, short ones more of their last mixture. Each is
        compared with a full run of its own number of rows (METHOD: the protocol, 4).

        Raises ActivationError for NaN or Inf, NoMemoryError.
        """
        ends = {Mixture.of_layers(len(self.layers), self.kept_heads, range(side * len(self.layers))) for side in (0, 1)}
        rows = 2 if len(mixtures) == 2 and set(mixtures) == ends else self.rows
        padded = [*mixtures, *[mixtures[-1]] * (rows - len(mixtures))]
        found = [self._evict(place, padded) for place in range(len(self.layers))]
        layers = beside(self.adapter, [layer for layer, _ in found], self.sample.prefill.windows)
        cache, full = CompactCache(layers, self._behind(rows)), self.full[rows]
        asked, evicted = decode_evicted(self.adapter, cache, self.sample.question, full.tokens, full.rows, self.finite)
        steps = [measure.propagated(self.adapter, *step) for step in zip(full.steps, evicted, strict=True)]
        scores = self._scores(cache, asked, len(mixtures)) if self.run.generate else [math.nan] * (1 + len(mixtures))
        self.finite.raise_if_not(self.sample.prompt.sample_id)
        held = torch.tensor([lengths for _, lengths in found]).sum(dim=0) / self._entries()
        return _batch(self.sample.prompt.sample_id, mixtures, set(by_head), steps, held.tolist(), scores)

    def _layer(self, layer: FullLayer) -> _Layer:
        """Return what both configurations keep of one layer, whose realised attention is that of the first step."""
        attention, _ = layer.weights(self.sample.full.steps[0])
        keys, values = layer.prompt_keys.clone(), layer.prompt_values.clone()
        sides: dict[int, Tensor] = {}
        for group in replace(layer, keys=keys, values=values).groups(self.run.configs, attention):
            sides |= dict(zip(group.config_indices, group.kept_sets().kept, strict=True))
        return _Layer(keys, values, torch.stack([sides[0], sides[1]]))

    def _evict(self, place: int, mixtures: Sequence[Mixture]) -> tuple[CompactLayer, list[int]]:
        """One layer: a row that keeps everything, then one per mixture; and how many entries each of those keeps."""
        layer = self.layers[place]
        treated = torch.tensor([mixture.layers[place] for mixture in mixtures], device=layer.kept.device)
        kept = torch.where(treated.unsqueeze(-1), layer.kept[1], layer.kept[0])
        lengths = kept.sum(dim=-1).tolist()
        order = tuple(range(len(mixtures)))
        found = keep([ExternalGroup(order, kept)], order, lengths, layer.keys, layer.values)
        configs = [self.run.configs[0]] * len(mixtures)  # both sides store and place alike: `configs.swap` checks that
        turned = positions.positions_in_cache(found, configs, self.adapter.frequencies)
        entries = quantisation.stored(turned, configs).entries
        rows = [borrow(layer.keys, layer.values), *(entries[row] for row in order)]
        made = CompactLayer(rows, self.adapter.heads, self.sample.tokens, self.run.cache, self.passing)
        return made, [sum(own) for own in lengths]

    def _behind(self, rows: int) -> list[int]:
        """How far each row's next position lies before n."""
        return [0, *positions.positions_behind([self.run.configs[0]] * rows, self.sample.tokens)]

    def _entries(self) -> int:
        """Of the full cache."""
        return len(self.layers) * self.adapter.kv_heads * self.sample.tokens

    def _scores(self, cache: CompactCache, asked: Tensor | None, mixtures: int) -> list[float]:
        """How good the full cache's answer is, and each mixture's."""
        rows = range(1 + mixtures)
        cache.forget(after=len(self.sample.question))
        cache.only(rows)
        logits, prompt = self.sample.prefill.logits if asked is None else asked[: len(rows)], self.sample.prompt
        made = generate(self.adapter, EvictedPrompt(cache, logits), (), self.run.generate, check=self.finite)
        texts = [grading.text_of(tokens, self.adapter.tokenizer.decode) for tokens in made]
        graded = grading.metrics_of([prompt])
        return [grading.grade(text, prompt, graded) for text in texts]


def _batch(
    sample: str,
    mixtures: Sequence[Mixture],
    by_head: set[Mixture],
    steps: Sequence[dict[str, Tensor]],
    held: Sequence[float],
    scores: Sequence[float],
) -> PatchingBatch:
    """What a batch showed as plain numbers, without the rows that filled it up."""
    totals = [_totals(step) for step in steps]
    heads = torch.stack([step["perturbation_propagated"] for step in steps], dim=1).cpu().tolist()
    rows = [
        PatchingRow(
            mixture=mixture,
            held=held[place],
            values={name: tuple(step[name][0][place] for step in totals) for name in PER_STEP},
            score=scores[1 + place],
            heads=heads[place] if mixture in by_head else None,
        )
        for place, mixture in enumerate(mixtures)
    ]
    floors = {name: tuple(step[name][1] for step in totals) for name in PER_STEP}
    told = (_of_heads(steps, name) if by_head else None for name in ("noise_floor", "output_norm"))
    return PatchingBatch(sample, tuple(rows), floors, scores[0], *told)


def _totals(step: dict[str, Tensor]) -> dict[str, tuple[list[float], float]]:
    """Per quantity each row's value and the noise floor: of drifts the last layer's, of heads the sum."""
    found = {}
    for name, (variable, floor) in _TOTAL.items():
        values, noise = step[variable].double(), torch.zeros(()) if floor is None else step[floor].double()
        if name == "drift":
            values, noise = values[:, -1], noise[-1]
        found[name] = (values.flatten(1).sum(dim=-1) if values.ndim > 1 else values).tolist(), float(noise.sum())
    return found


def _of_heads(steps: Sequence[dict[str, Tensor]], name: str) -> Any:
    """(step, layer, head) as lists."""
    return torch.stack([step[name] for step in steps]).cpu().tolist()


Told = Callable[[int, int], None]
"""Gets how many mixtures are measured, and how many there will be at most."""


class Measuring:
    """Measures mixtures that a store lacks, prompt by prompt; prompts stay read as long as memory holds them."""

    def __init__(self, ready: Plan, game: Game, store: PatchingStore, told: Told) -> None:
        self.ready, self.game, self.store, self.told = ready, game, store, told
        self.named = [game.baseline_everywhere, *(mixture for _, mixture in game.mixtures)]
        self.prompts = {prompt.sample_id: prompt for prompt in ready.prompts}
        self.model: Adapter | None = None
        self.read: dict[str, SwapSample] = {}
        self.most, self.expected, self.again = 1, 0, False

    def expect(self, mixtures: int, again: bool) -> None:
        """How many of each prompt are to come at most, and whether prompts come back when all are."""
        self.expected, self.again = mixtures * len(self.prompts), again

    def everywhere(self, mixtures: Sequence[Mixture]) -> None:
        """In every prompt: both sides alone, what was asked for by name, then these; NaN or Inf gives one up."""
        for sample in self.prompts:
            try:
                self._measure(sample, [self.game.baseline_everywhere, self.game.treatment_everywhere])
                self._measure(sample, [*self.named, *mixtures])
            except ActivationError as error:
                self.store.add_failure(sample, str(error))

    def of(self, coalitions: Sequence[Coalition], samples: Sequence[str]) -> None:
        """In some prompts. Raises ActivationError for NaN or Inf."""
        for sample in samples:
            self._measure(sample, [self.game.mixture(one) for one in coalitions])

    def _measure(self, sample: str, mixtures: Sequence[Mixture]) -> None:
        """Those that are not there yet, a batch at a time."""
        by_head = frozenset(self.named)
        lacking = self.store.missing(sample, mixtures, by_head)
        rows = rows_of(self.prompts[sample], self.ready.resolved, shape_of(self.ready), self.ready.resources)
        for start in range(0, len(lacking), rows):
            held = self._sample(sample, rows)
            self.store.add(held.measure(lacking[start : start + rows], by_head), held.same.numpy())
            self._tell()

    def _sample(self, sample: str, rows: int) -> SwapSample:
        """A prompt that is read; the one read first is forgotten where memory holds no more."""
        if self.model is None:
            self.model = self.ready.model()
            self.most = _held_at_once(self.ready) if self.again else 1
        if sample not in self.read:
            while len(self.read) >= self.most:
                del self.read[next(iter(self.read))]
            prompt, run = self.prompts[sample], self.ready.resolved
            self.read[sample] = SwapSample(self.model, prompt, run, self.ready.resources, rows)
        return self.read[sample]

    def _tell(self) -> None:
        done = sum(map(len, self.store.rows.values()))
        self.told(min(done, self.expected), self.expected)


def _held_at_once(ready: Plan) -> int:
    """Prompts whose full caches take at most half of what is free."""
    tokens = max(len(prompt.token_ids) for prompt in ready.prompts)
    return max(1, memory.free_bytes(ready.placement.device) // 2 // max(1, shape_of(ready).full_cache_bytes(tokens)))


def shape_of(ready: Plan) -> Shape:
    """The model's shape, in the run's precision."""
    dtype = ready.placement.dtype
    return Shape.from_config(ready.files.config, dtype.itemsize, ready.files.weights_bytes(dtype))
