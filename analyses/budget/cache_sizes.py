"""How many bytes a cache takes at a length and a batch of the reader's own: full, and evicted to a budget."""

from __future__ import annotations

from dataclasses import dataclass

from perturbkv.analyses.budget.criteria import ANALYSIS
from perturbkv.analyses.measurements import values
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.numbers import check
from perturbkv.errors import ConfigError
from perturbkv.trace import Trace


@dataclass(frozen=True)
class CacheSize:
    """Caches of one length and batch, in the model's shape and the run's number type.

    Attributes:
        length: entries of the prompt.
        batch: prompts at once.
        token_bytes: of one entry's keys and values in all layers of the full cache.
        entries: mean entries of the trace's prompts.
    """

    length: int
    batch: int
    token_bytes: float
    entries: float

    @property
    def full(self) -> float:
        """Bytes of the full caches."""
        return self.token_bytes * self.length * self.batch

    def evicted(self, config: EvictionConfig, held: float) -> float:
        """Bytes of the caches that a configuration evicts to, which held the share `held` of the trace's prompts.

        A budget in entries keeps as many at every length: `held` then tells how many sets of them there are.
        """
        if isinstance(config.budget.value, float):
            return self.full * held
        sets = held * self.entries / min(config.budget.value, self.entries)
        return self.full * sets * min(config.budget.value, self.length) / self.length


def check_size(length: int | None, batch: int) -> None:
    """Raise ConfigError for numbers that are none to count with, and for a batch of no length."""
    if length is None and batch != 1:
        msg = f"for_batch (--for-batch {batch}) has no effect without for_length (--for-length); give both"
        raise ConfigError(msg)
    for name, number in (("for_length (--for-length)", length), ("for_batch (--for-batch)", batch)):
        if number is not None:
            check(name, number)
            if number < 1:
                msg = f"{name} must be at least 1, got {number}"
                raise ConfigError(msg)


def cache_size(trace: Trace, length: int, batch: int) -> CacheSize:
    """The size of the trace's caches at another length and batch.

    What an entry takes is what the evicted caches of the run took over what they held. Raises TraceError where the
    trace does not say what its caches took.
    """
    taken = values(trace, "cache_bytes", ANALYSIS) - values(trace, "cache_padding_bytes", ANALYSIS)
    tokens = values(trace, "prompt_tokens", ANALYSIS)
    held = (values(trace, "held_share", ANALYSIS).sum(axis=1) * tokens).sum()
    return CacheSize(length, batch, float(taken.sum() / held), float(tokens.mean()))
