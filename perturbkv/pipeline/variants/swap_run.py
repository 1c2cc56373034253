"""Mixtures that a question needs, measured prompt by prompt and written down at once; what is there is not measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perturbkv import memory
from perturbkv.configs.mixture import Mixture
from perturbkv.configs.patching import Coalition, Game
from perturbkv.configs.resources import Shape
from perturbkv.errors import ActivationError
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.variants.mixtures import SwapSample, rows_of
from perturbkv.storage.patching_file import SwapStore

Told = Callable[[int, int], None]
"""Gets how many mixtures are measured, and how many there will be at most."""


class Measuring:
    """Measures mixtures that a store lacks, prompt by prompt; prompts stay read as long as memory holds them."""

    def __init__(self, ready: Plan, game: Game, store: SwapStore, told: Told) -> None:
        self.ready, self.game, self.store, self.told = ready, game, store, told
        self.named = [game.none, *(mixture for _, mixture in game.named)]
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
                self._measure(sample, [self.game.none, self.game.whole])
                self._measure(sample, [*self.named, *mixtures])
            except ActivationError as error:
                self.store.give_up(sample, str(error))

    def of(self, coalitions: Sequence[Coalition], samples: Sequence[str]) -> None:
        """In some prompts. Raises ActivationError for NaN or Inf."""
        for sample in samples:
            self._measure(sample, [self.game.mixture(one) for one in coalitions])

    def _measure(self, sample: str, mixtures: Sequence[Mixture]) -> None:
        """Those that are not there yet, a batch at a time."""
        by_head = frozenset(self.named)
        lacking = self.store.lacks(sample, mixtures, by_head)
        rows = rows_of(self.prompts[sample], self.ready.run, shape_of(self.ready), self.ready.resources)
        for start in range(0, len(lacking), rows):
            held = self._sample(sample, rows)
            self.store.keep(held.measure(lacking[start : start + rows], by_head), held.same.numpy())
            self._tell()

    def _sample(self, sample: str, rows: int) -> SwapSample:
        """A prompt that is read; the one read first is forgotten where memory holds no more."""
        if self.model is None:
            self.model = self.ready.model()
            self.most = _held_at_once(self.ready) if self.again else 1
        if sample not in self.read:
            while len(self.read) >= self.most:
                del self.read[next(iter(self.read))]
            prompt, run = self.prompts[sample], self.ready.run
            self.read[sample] = SwapSample(self.model, prompt, run, self.ready.resources, rows)
        return self.read[sample]

    def _tell(self) -> None:
        done = sum(map(len, self.store.rows.values()))
        self.told(min(done, self.expected), self.expected)


def _held_at_once(ready: Plan) -> int:
    """Prompts whose full caches take at most half of what is free."""
    tokens = max(len(prompt.token_ids) for prompt in ready.prompts)
    return max(1, memory.free(ready.placement.device) // 2 // max(1, shape_of(ready).full_cache_bytes(tokens)))


def shape_of(ready: Plan) -> Shape:
    """The model's shape, in the run's precision."""
    dtype = ready.placement.dtype
    return Shape.of(ready.files.config, dtype.itemsize, ready.files.weights_bytes(dtype))
