"""How a run may use the machine. Nothing here changes what is measured, but for its rounding. No torch here.

Where samples are measured: in this process, in worker processes of this machine, or on a Ray cluster.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from perturbkv.configs import layer_types
from perturbkv.configs import option as numbers
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, UnknownNameError

CHUNK_BYTES = 256 * 2**20
SLACK = 1 / 8
"""Most padding of a ragged cache, as a share of the entries in it."""
_PLACE_BYTES = 12
"""Of where an entry stands in the prompt, and in the full cache."""
_UNITS = {"": 2**20, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class Resources:
    """What a run may take.

    Attributes:
        chunk_bytes: working memory of the value norms and of the sums over entries.
        max_bytes: what evicted caches that are decoded together may take; None: half of what weights and full cache do,
            or more where answers are generated and memory is free.
        norm_kernel: how value norms are computed, a key of `scoring.value_norms.NORM_KERNELS`.
    """

    chunk_bytes: int = CHUNK_BYTES
    max_bytes: int | None = None
    norm_kernel: str = "auto"


def parse_size(option: str, text: str) -> int:
    """'512MiB', '2GiB', '800MB', or MiB where no unit is given, in bytes. Raises ConfigError for anything else."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS or not float(found[1]) > 0:
        msg = f"{option} takes a size such as 512MiB or 2GiB, got '{text}'"
        raise ConfigError(msg)
    size = float(found[1]) * _UNITS[found[2].lower()]
    numbers.check_number(f"{option} in bytes", size)
    return int(size)


@dataclass(frozen=True)
class Shape:
    """A model's shape, as far as memory depends on it; `itemsize` in bytes per number of the caches.

    `layers` are measured; `sliding` ones beside them hold at most their `window` of entries.
    """

    layers: int
    heads: int
    kv_heads: int
    d_head: int
    d_model: int
    vocab: int
    itemsize: int
    weights_bytes: int
    sliding: int = 0
    window: int = 0

    @classmethod
    def of(cls, config: Any, itemsize: int, weights_bytes: int) -> Self:
        """From transformers' configuration of a model."""
        heads = int(config.num_attention_heads)
        d_head = getattr(config, "head_dim", None) or config.hidden_size // heads
        layers = len(layer_types.measured(config))
        return cls(
            layers, heads, int(config.num_key_value_heads), int(d_head), int(config.hidden_size),
            int(config.vocab_size), itemsize, weights_bytes, int(config.num_hidden_layers) - layers,
            layer_types.own_window(config) or 0,
        )  # fmt: skip

    def full_cache_bytes(self, tokens: int) -> int:
        """Bytes of the full cache of a prompt."""
        windows = self.sliding * self._layer_bytes(self.kv_heads * min(tokens, self.window))
        return self._entries_bytes(self.kv_heads * tokens) + windows

    def kept_bytes(self, config: EvictionConfig, tokens: int) -> int:
        """Bytes of the entries that a configuration keeps of a prompt: every policy spends the same total.

        Of one that reads pages of the full cache, what these are chosen by; of one with its own prefill all of that.
        """
        if config.reads:
            return self._entries_bytes(self.kv_heads * config.blocks(tokens).before)
        if config.lined:
            return self._entries_bytes(self.kv_heads * tokens)
        sets = self.heads if config.granularity.name == "query" else self.kv_heads
        return self._entries_bytes(sets * config.kept_entries(tokens))

    def row_bytes(self, config: EvictionConfig, tokens: int, decoded: int, steps: int, passing: bool = False) -> int:
        """Bytes that a configuration adds to a batch: its cache with its padding, its tail, what is recorded of it.

        Of the `decoded` tokens `steps` are recorded. A `passing` cache holds places of its entries and no copies.
        """
        tails = (self.layers + self.sliding) * self._layer_bytes(self.kv_heads * decoded)
        kept = self.kept_bytes(config, tokens)
        held = kept * _PLACE_BYTES // (2 * self.d_head * self.itemsize) if passing else int(kept * (1 + SLACK))
        held = kept if config.lined else held
        recorded = 3 * self.layers * self.d_model * self.itemsize
        logits = 4 * 8 * self.vocab  # the divergence of a row in float64, and what it is made of
        return held + tails + recorded * steps + logits

    def _entries_bytes(self, entries_of_a_layer: int) -> int:
        return self.layers * self._layer_bytes(entries_of_a_layer)

    def _layer_bytes(self, entries: int) -> int:
        return 2 * entries * self.d_head * self.itemsize


@dataclass(frozen=True)
class Batches:
    """Which configurations are decoded together.

    Attributes:
        places: configurations of each batch, by their place in the run.
        rows: rows of every batch, the one that keeps everything first; short ones are filled up with more of those, so
            that all batches and the reference go through linear layers of the same shape.
        largest_bytes: of the largest batch, planned.
        bound_bytes: what a batch may take.
    """

    places: tuple[tuple[int, ...], ...]
    rows: int
    largest_bytes: int
    bound_bytes: int


def plan_batches(
    configs: Sequence[EvictionConfig],
    shape: Shape,
    tokens: int,
    decoded: int,
    steps: int,
    max_bytes: int | None,
    passing: bool = False,
) -> Batches:
    """As few batches as fit the bound, alike in bytes and in configurations.

    `tokens` are compressed and `decoded` ones come after, of which `steps` are measured; `passing` caches hold no
    copies of entries. Without `max_bytes` a configuration that exceeds half of weights and full cache is decoded alone.
    Raises ConfigError where a given bound is below what one takes.
    """
    sizes = [shape.row_bytes(config, tokens, decoded, steps, passing) for config in configs]
    bound = max_bytes or max((shape.weights_bytes + shape.full_cache_bytes(tokens)) // 2, max(sizes))
    if max(sizes) > bound:
        label = configs[sizes.index(max(sizes))].label()
        msg = (
            f"max_bytes (--max-memory) allows {_said(bound)}, less than the {_said(max(sizes))} that '{label}' takes "
            f"at {tokens} tokens; raise it or lower the budget"
        )
        raise ConfigError(msg)
    count = math.ceil(sum(sizes) / bound)
    while (largest := max(sum(sizes[place] for place in batch) for batch in _deal(sizes, count))) > bound:
        count += 1
    dealt = _deal(sizes, count)
    return Batches(dealt, 1 + max(map(len, dealt)), largest, bound)


def _said(size: int) -> str:
    """A size in MiB, or in KiB below one; rounded up."""
    unit, word = (2**20, "MiB") if size >= 2**20 else (2**10, "KiB")
    return f"{math.ceil(size / unit):,} {word}"


def _deal(sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Deal configurations to batches, largest first and back and forth, so that batches come out alike."""
    batches: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
    order = sorted(range(len(sizes)), key=lambda place: (-sizes[place], place))
    for turn, place in enumerate(order):
        there, back = divmod(turn, len(batches))
        batches[back if there % 2 == 0 else -1 - back].append(place)
    return tuple(tuple(sorted(batch)) for batch in batches)


ENGINES = {
    "here": "this process, one sample after the other",
    "workers": "worker processes on this machine, one per GPU or per few cores",
    "ray": "actors of a Ray cluster, one per GPU or per few cores",
}
MOST_WORKERS = 4096
NEEDS = {
    "workers": ("workers", "ray"),
    "ray_address": ("ray",),
    "cpus_per_worker": ("workers", "ray"),
    "timeout_per_sample": ("workers", "ray"),
    "by_configs": ("workers", "ray"),
}
"""Option -> the engines that it makes a difference to."""


@dataclass(frozen=True)
class EngineConfig:
    """How a run is spread. No number depends on it, but for the rounding of what is computed in other batches.

    Attributes:
        name: a key of `ENGINES`.
        workers: how many; None: one per GPU, or as many as the cores allow.
        ray_address: of the cluster's head, host:port; None: what RAY_ADDRESS says.
        cpus_per_worker: cores of each; None: OMP_NUM_THREADS, or an even share of what the machine has.
        timeout_per_sample: seconds after which a worker counts as hanging; None: never.
        by_configs: whether a sample's configurations are shared out over the workers, each reading the prompt again.

    Raises UnknownNameError, and ConfigError for a number that cannot be, or that makes no difference to the engine.
    """

    name: str = "here"
    workers: int | None = None
    ray_address: str | None = None
    cpus_per_worker: int | None = None
    timeout_per_sample: float | None = None
    by_configs: bool = False

    def __post_init__(self) -> None:
        check_alone(self.name, self.workers, self.cpus_per_worker, self.timeout_per_sample)
        for field in NEEDS:
            if getattr(self, field) not in (None, False) and self.name not in NEEDS[field]:
                msg = f"{_engine_said(field)} has no effect here: it needs {needs(field)}; leave it out"
                raise ConfigError(msg)


def check_alone(name: str, workers: int | None, cpus_per_worker: int | None, timeout_per_sample: float | None) -> None:
    """Raise UnknownNameError or ConfigError for what is refused whatever the other choices are."""
    if name not in ENGINES:
        raise UnknownNameError(name, "engine", ENGINES)
    _check_count("workers", workers)
    _check_count("cpus_per_worker", cpus_per_worker)
    if timeout_per_sample is not None:
        numbers.check_number(_engine_said("timeout_per_sample"), timeout_per_sample)
        if not timeout_per_sample > 0:
            msg = f"{_engine_said('timeout_per_sample')} takes seconds above 0, got {timeout_per_sample}"
            raise ConfigError(msg)


def needs(field: str) -> str:
    """The engines that an option makes a difference to, as they are typed."""
    return " or ".join(f"--engine {name}" for name in NEEDS[field])


def _check_count(field: str, value: int | None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_WORKERS:
        msg = f"{_engine_said(field)} takes a whole number from 1 to {MOST_WORKERS:,}, got {value}"
        raise ConfigError(msg)


def _engine_said(field: str) -> str:
    """The option as it is typed, with its name in Python."""
    return f"--{field.replace('_', '-')} ({field}=…)"
