"""Decoding from mixtures of two configurations' kept sets: one prefill per prompt, one row of a batch per mixture.

Mixtures are measured prompt by prompt and stored at once; stored ones are not measured again.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from perturbkv import memory
from perturbkv.cache.compact import CompactCache, CompactLayer, join_layers
from perturbkv.cache.entries import borrow, check_positions, gather_kept
from perturbkv.configs.patching import Coalition, Game, Mixture
from perturbkv.configs.resources import Resources, Shape
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.prompts import decode_answer, grade, metrics_of
from perturbkv.devices import full_precision
from perturbkv.errors import ActivationError, ConfigError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.compression import EvictedPrompt
from perturbkv.pipeline.answers.generation import generate
from perturbkv.pipeline.run.plan import Plan, copies_each_pass
from perturbkv.pipeline.sample import measure
from perturbkv.pipeline.sample.capture import FiniteCheck
from perturbkv.pipeline.sample.decoding import decode_evicted
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.pipeline.sample.prefill import Source, prefill
from perturbkv.pipeline.sample.sample_run import SampleRun, full_run
from perturbkv.pipeline.variants.external_caches import ExternalCache, read_plain_caches
from perturbkv.pipeline.variants.given_sets import sources
from perturbkv.pipeline.variants.readers import maker_of
from perturbkv.selection.kept_sets import ExternalGroup
from perturbkv.selection.resolved_config import ResolvedConfig, ResolvedRun
from perturbkv.storage.patching_file import PER_STEP, PatchingBatch, PatchingRow, PatchingStore

MOST_ROWS = 32
"""Largest number of mixtures in a batch: more take no less time each, and a killed run loses one batch."""
_TOTAL_VARIABLES = {
    "drift": ("hidden_drift_l1", "hidden_noise_floor"),
    "final_drift": ("final_drift_l1", "final_noise_floor"),
    "kl": ("logit_kl", "logit_kl_noise_floor"),
    "top1": ("top1_agreement", None),
    "propagated": ("perturbation_propagated", "noise_floor"),
}
"""Quantity -> variable of `measure.propagated_quantities`, and its noise floor."""


def rows_per_batch(prompt: Prompt, run: ResolvedRun, shape: Shape, resources: Resources) -> int:
    """Return the number of mixtures per batch that fits the memory bound, between 1 and `MOST_ROWS`."""
    context, question = prompt.parts(run.scenario)
    decoded, n = len(question) + max(run.steps, run.generate), len(context)
    row = max(shape.row_bytes(config, n, decoded, run.steps, copies_each_pass(run)) for config in run.configs)
    bound = resources.max_bytes or (shape.weights_bytes + shape.full_cache_bytes(n)) // 2
    return max(1, min(MOST_ROWS, bound // row))


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of a prompt with its n entries alone, and the kept sets of baseline and treatment."""

    full: FullLayer
    kept: Bool[Tensor, "side kept_head key"]


class MixtureSample:
    """A prompt after its prefill, from which mixtures of two configurations' kept sets are decoded.

    Args:
        adapter: the model.
        prompt: the prompt.
        run: a run of two configurations, the baseline first.
        resources: memory and kernels.
        rows: number of mixtures in a full batch.

    Raises what `trace_sample` raises.
    """

    @memory.translate_allocation_errors()
    @full_precision()
    @torch.inference_mode()
    def __init__(self, adapter: Adapter, prompt: Prompt, run: ResolvedRun, resources: Resources, rows: int) -> None:
        check_positions(run.configs, adapter.config, adapter.name)
        adapter.check_own_caches("a mixture of kept sets")
        context, question = prompt.parts(run.scenario)
        external = sources(adapter, context, run.configs, {})
        prefilled = prefill(adapter, prompt, run, resources, external)
        external |= {config: _kept_set(config, cache) for config, cache in
                     read_plain_caches(adapter, run.configs, context, prefilled).items()}  # fmt: skip
        repeated = replace(prefilled, cache=copy.deepcopy(prefilled.cache), read=dict(prefilled.read))
        text = prompt.forced_tokens(run.text)
        full = {2: full_run(adapter, prefilled, question, run.steps, 3, text)}
        if rows != 2:
            full[rows] = full_run(adapter, repeated, question, run.steps, rows + 1, text)
        self.sample: SampleRun = SampleRun(adapter, run, resources, prompt, prefilled, full[2])
        self.adapter = adapter
        self.run = run
        self.full = full
        self.rows = rows
        self.layers: list[_Layer] = [self._layer(self.sample.layer(index)) for index in range(len(adapter.layers))]
        self.finite: FiniteCheck = FiniteCheck()
        self.passing: bool = copies_each_pass(run)
        prefilled.finite.raise_if_not(prompt.sample_id)

    @property
    def kept_heads(self) -> int:
        """Number of kept sets in a layer: the query heads or the key/value heads, by granularity."""
        return int(self.layers[0].kept.shape[1])

    @property
    def equal_sets(self) -> Bool[Tensor, "layer kept_head"]:
        """Mask of the kept sets on which baseline and treatment agree."""
        return torch.stack([(layer.kept[0] == layer.kept[1]).all(dim=-1).cpu() for layer in self.layers])

    @memory.translate_allocation_errors()
    @full_precision()
    @torch.inference_mode()
    def measure(self, mixtures: Sequence[Mixture], by_head: Collection[Mixture] = ()) -> PatchingBatch:
        """Decode from the given mixtures in one batch, and return their measurements.

        `by_head` are the mixtures whose perturbation is recorded per head. The mixtures of the baseline alone and of
        the treatment alone are decoded in the very batch that `trace_sample` makes of both configurations; every other
        batch has `rows` rows, and repeats its last mixture where it is short. Each batch is compared with a full run of
        its own number of rows (METHOD: the protocol, 4).

        Raises ActivationError for NaN or Inf, NoMemoryError.
        """
        layers = len(self.layers)  # no treated layer: the baseline alone; all of them: the treatment alone
        both = {Mixture.of_layers(layers, self.kept_heads, range(treated)) for treated in (0, layers)}
        rows = 2 if len(mixtures) == 2 and set(mixtures) == both else self.rows
        padded = [*mixtures, *[mixtures[-1]] * (rows - len(mixtures))]
        evicted_layers = [self._evict(index, padded) for index in range(layers)]
        caches = [cache_layer for cache_layer, _ in evicted_layers]
        cache, full = CompactCache(join_layers(self.adapter, caches, self.sample.prefill.states)), self.full[rows]
        question_logits, decoded = decode_evicted(self.adapter, cache, self.sample.question, full.tokens, self.finite)
        evicted = list(decoded)
        for expected, found in zip(full.steps, evicted, strict=True):
            measure.check_everything_kept(self.finite, self.adapter, expected.logits[0], found.logits[0])
        each = zip(full.steps, evicted, full.next_tokens.unbind(), strict=True)
        steps = [measure.propagated_quantities(self.adapter, *step) for step in each]
        scores = (
            self._grade_answers(cache, question_logits, len(mixtures))
            if self.run.generate
            else [math.nan] * (1 + len(mixtures))
        )
        self.finite.raise_if_not(self.sample.prompt.sample_id)
        entries = torch.tensor([lengths for _, lengths in evicted_layers]).sum(dim=0).tolist()
        shares = [self.adapter.shape.cache_share(count, self.sample.tokens) for count in entries]
        return _make_batch(self.sample.prompt.sample_id, mixtures, set(by_head), steps, shares, scores)

    def _layer(self, layer: FullLayer) -> _Layer:
        """Return copies of a layer's entries, with the kept sets of baseline and treatment."""
        prompt = replace(layer, keys=layer.prompt_keys.clone(), values=layer.prompt_values.clone())
        return _Layer(prompt, torch.stack(prompt.kept_masks(self.run.configs, self.sample.first_step_attention)))

    def _evict(self, index: int, mixtures: Sequence[Mixture]) -> tuple[CompactLayer, list[int]]:
        """Return one layer of the evicted cache, and the number of kept entries in that layer per mixture.

        Its rows are one that keeps everything, and one per mixture.
        """
        layer, full = self.layers[index], self.layers[index].full
        treated = torch.tensor([mixture.layers[index] for mixture in mixtures], device=layer.kept.device)
        kept = torch.where(treated.unsqueeze(-1), layer.kept[1], layer.kept[0])
        lengths = kept.sum(dim=-1).tolist()
        order = tuple(range(len(mixtures)))
        sets = gather_kept([ExternalGroup(order, kept)], order, lengths, full.keys, full.values, full.latent).sets()
        maker = maker_of(self.run.configs[0])  # of both configurations, as `configs.patching` checks
        rows = [borrow(full.keys, full.values), *(maker.make(full, sets[row]).row for row in order)]
        cache_layer = CompactLayer(rows, self.adapter.heads, self.sample.tokens, self.run.cache, self.passing)
        return cache_layer, [row.stored_entries for row in rows[1:]]

    def _grade_answers(self, cache: CompactCache, question_logits: Tensor | None, mixtures: int) -> list[float]:
        """Return the scores of the answers from the full cache and from the first `mixtures` mixtures."""
        rows = range(1 + mixtures)
        cache.forget(after=len(self.sample.question))
        cache.keep_rows(rows)
        logits = self.sample.prefill.logits if question_logits is None else question_logits[: len(rows)]
        prompt = self.sample.prompt
        answers = generate(self.adapter, EvictedPrompt(cache, logits), (), self.run.generate, check=self.finite)
        texts = [decode_answer(tokens, self.adapter.tokenizer.decode) for tokens in answers]
        graded = metrics_of([prompt])
        return [grade(text, prompt, graded) for text in texts]


def _make_batch(
    sample: str,
    mixtures: Sequence[Mixture],
    by_head: set[Mixture],
    steps: Sequence[dict[str, Tensor]],
    cache_shares: Sequence[float],
    scores: Sequence[float],
) -> PatchingBatch:
    """Return a batch's measurements as plain numbers, without padding rows.

    `by_head` are the mixtures whose perturbation is recorded per head; `steps` the propagated quantities of each step;
    `cache_shares` those of the mixtures; `scores` begin with that of the full cache.
    """
    totals = [_step_totals(step) for step in steps]
    heads = torch.stack([step["perturbation_propagated"] for step in steps], dim=1).cpu().tolist()
    rows = [
        PatchingRow(
            mixture=mixture,
            held=cache_shares[index],
            values={name: tuple(step[name][0][index] for step in totals) for name in PER_STEP},
            score=scores[1 + index],
            heads=heads[index] if mixture in by_head else None,
        )
        for index, mixture in enumerate(mixtures)
    ]
    floors = {name: tuple(step[name][1] for step in totals) for name in PER_STEP}
    by_head_lists = (  # (step, layer, head)
        torch.stack([step[name] for step in steps]).cpu().tolist() if by_head else None
        for name in ("noise_floor", "output_norm")
    )
    return PatchingBatch(sample, tuple(rows), floors, scores[0], *by_head_lists)


def _step_totals(step: dict[str, Tensor]) -> dict[str, tuple[list[float], float]]:
    """Return name -> (value per row, noise floor) at one step: drift at the last layer, or a sum over heads."""
    totals = {}
    for name, (variable, floor) in _TOTAL_VARIABLES.items():
        values = step[variable].double()  # (row, layer, head), (row, layer) or (row,)
        noise = torch.zeros(()) if floor is None else step[floor].double()
        if name == "drift":
            values, noise = values[:, -1], noise[-1]
        per_row = values.flatten(1).sum(dim=-1) if values.ndim > 1 else values
        totals[name] = per_row.tolist(), float(noise.sum())
    return totals


def _kept_set(config: ResolvedConfig, cache: ExternalCache) -> Source:
    """Return the kept sets of somebody's cache. Raises ConfigError where it holds other entries than a kept set."""
    if not cache.is_kept_set:
        raise ConfigError(f"expected kept sets to swap; policy '{config.policy}' holds entries of its own")
    return cache.kept_set


Progress = Callable[[int, int], None]
"""Callback with the number of measured mixtures and the largest number to come."""


class MixtureMeasurer:
    """The measurer of the mixtures that a store lacks, prompt by prompt; prefills stay as long as memory suffices.

    Args:
        planned: the plan of a run of baseline and treatment.
        game: the players, and the mixtures that have names.
        store: where measurements are stored, and looked up.
        progress: called with the numbers of measured and of expected mixtures after each batch.
    """

    def __init__(self, planned: Plan, game: Game, store: PatchingStore, progress: Progress) -> None:
        self.planned = planned
        self.game = game
        self.store = store
        self.progress = progress
        self.named: list[Mixture] = [game.baseline_everywhere, *(mixture for _, mixture in game.mixtures)]
        self.prompts: dict[str, Prompt] = {prompt.sample_id: prompt for prompt in planned.prompts}
        self.model: Adapter | None = None
        self.samples: dict[str, MixtureSample] = {}
        self.most_samples: int = 1
        self.expected: int = 0
        self.repeated: bool = False

    def expect(self, mixtures: int, repeated: bool) -> None:
        """Set the largest expected number of mixtures per prompt, and whether prompts are measured repeatedly."""
        self.expected, self.repeated = mixtures * len(self.prompts), repeated

    def measure_all(self, mixtures: Sequence[Mixture]) -> None:
        """Measure the baseline alone, the treatment alone, the game's named mixtures and `mixtures`, in every prompt.

        A prompt with NaN or Inf is stored as failed.
        """
        for sample in self.prompts:
            try:
                self._measure(sample, [self.game.baseline_everywhere, self.game.treatment_everywhere])
                self._measure(sample, [*self.named, *mixtures])
            except ActivationError as error:
                self.store.add_failure(sample, str(error))

    def measure_coalitions(self, coalitions: Sequence[Coalition], samples: Sequence[str]) -> None:
        """Measure the coalitions' mixtures in the prompts with ids `samples`. Raises ActivationError for NaN or Inf."""
        for sample in samples:
            self._measure(sample, [self.game.mixture(coalition) for coalition in coalitions])

    def _measure(self, sample: str, mixtures: Sequence[Mixture]) -> None:
        """Measure and store, batch by batch, the mixtures of one prompt that the store lacks."""
        by_head = frozenset(self.named)
        lacking = self.store.missing_mixtures(sample, mixtures, by_head)
        rows = rows_per_batch(self.prompts[sample], self.planned.resolved, self.planned.shape, self.planned.resources)
        for start in range(0, len(lacking), rows):
            prefilled = self._prefilled_sample(sample, rows)
            self.store.add(prefilled.measure(lacking[start : start + rows], by_head), prefilled.equal_sets.numpy())
            done = sum(map(len, self.store.rows.values()))
            self.progress(min(done, self.expected), self.expected)

    def _prefilled_sample(self, sample: str, rows: int) -> MixtureSample:
        """Return a prompt after its prefill, which stays in memory; the oldest one is dropped when memory is full.

        The first call loads the model.
        """
        if self.model is None:
            self.model = self.planned.model()
            self.most_samples = _prompts_in_memory(self.planned) if self.repeated else 1
        if sample not in self.samples:
            while len(self.samples) >= self.most_samples:
                del self.samples[next(iter(self.samples))]
            prompt, run = self.prompts[sample], self.planned.resolved
            self.samples[sample] = MixtureSample(self.model, prompt, run, self.planned.resources, rows)
        return self.samples[sample]


def _prompts_in_memory(planned: Plan) -> int:
    """Return the number of prompts whose full caches take at most half of the free memory."""
    tokens = max(len(prompt.token_ids) for prompt in planned.prompts)
    return max(1, memory.free_bytes(planned.placement.device) // 2 // max(1, planned.shape.full_cache_bytes(tokens)))
