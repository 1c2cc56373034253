"""Resources of a run: memory limits, batches of configurations, and the engine that measures samples.

Samples are measured in this process, in worker processes of this machine, or on a Ray cluster. Nothing here changes a
number except by rounding. No torch here.
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
"""Largest padding of a ragged cache, as a share of its entries."""
_INDEX_BYTES = 12
"""Bytes of an entry's two indices: into the prompt and into the full cache."""
_UNITS = {"": 2**20, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True)
class Resources:
    """Limits on the resources of a run.

    Attributes:
        chunk_bytes: working memory of the value norms and of the sums over entries.
        max_bytes: largest size of the evicted caches in one batch; None: half of weights and full cache, or more where
            answers are generated and memory is free.
        norm_kernel: implementation of the value norms, a key of `scoring.value_norms.NORM_KERNELS`.
    """

    chunk_bytes: int = CHUNK_BYTES
    max_bytes: int | None = None
    norm_kernel: str = "auto"


def parse_size(option: str, text: str) -> int:
    """Return the bytes of a size such as `512MiB`, `2GiB`, `800MB`, or `512`, read as MiB.

    Raises ConfigError, which names the option, for any other text.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].lower() not in _UNITS or not float(match[1]) > 0:
        raise ConfigError(f"{option} takes a size such as 512MiB or 2GiB, got '{text}'")
    size = float(match[1]) * _UNITS[match[2].lower()]
    numbers.check_number(f"{option} in bytes", size)
    return int(size)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that its memory depends on.

    Attributes:
        layers: number of measured layers that fill a cache.
        heads, kv_heads: query heads and key/value heads of a layer.
        d_key, d_value: components of a head's keys and values.
        d_model, d_mlp: sizes of the residual stream and of the MLP's inside.
        vocab: size of the vocabulary.
        itemsize: bytes per number of the caches.
        weights_bytes: bytes of the weights.
        sliding: number of other layers whose cache holds at most `window` entries.
        window: entries of a sliding layer's window or chunk; 0 without such layers.
        sliding_width: numbers of one entry's keys and values in all sliding layers together.
        state: numbers in the recurrent states of one text; 0 where they are not known, before the weights are read.
        latent: numbers that the cache of a measured layer holds of a token, where it is a latent of all heads' keys and
            values; 0 where these are held themselves, and where it is not known, before the weights are read.
        readers: number of measured layers that read another one's cache.
        unmeasured: number of decoder layers that are not measured, the sliding ones among them.
        streams: number of parallel residual streams.
    """

    layers: int
    heads: int
    kv_heads: int
    d_key: int
    d_value: int
    d_model: int
    vocab: int
    itemsize: int
    weights_bytes: int
    sliding: int = 0
    window: int = 0
    d_mlp: int = 0
    state: int = 0
    sliding_width: int = 0
    latent: int = 0
    readers: int = 0
    unmeasured: int = 0
    streams: int = 1

    @classmethod
    def from_config(cls, config: Any, itemsize: int, weights_bytes: int) -> Self:
        """Return the dimensions of a model from its transformers configuration, as far as that tells them.

        A family that does not name a size has the usual one: as many key/value heads as heads, an MLP four times as
        wide as the model, keys and values as wide as a head.
        """
        own = layer_types.measured_config(config)
        heads, d_model = int(own.num_attention_heads), int(config.hidden_size)
        d_head = getattr(own, "head_dim", None) or d_model // heads
        d_key, d_value = (getattr(own, name, None) or d_head for name in ("qk_head_dim", "v_head_dim"))
        kv_heads = getattr(own, "num_key_value_heads", None) or heads
        d_mlp = getattr(own, "intermediate_size", None) or 4 * d_model
        widest = max(d_mlp) if isinstance(d_mlp, list) else d_mlp  # of the layers, where each has its own
        measured, readers = layer_types.measured_layers(config), layer_types.reading_layers(config)
        layers, sliding = len(set(measured) - readers), layer_types.sliding_layers(config)
        return cls(
            layers, heads, int(kv_heads), int(d_key), int(d_value), d_model, int(config.vocab_size), itemsize,
            weights_bytes, sliding, layer_types.configured_window(config) or 0, int(widest),
            sliding_width=sliding * int(kv_heads) * 2 * int(d_head), readers=len(measured) - layers,
            unmeasured=int(config.num_hidden_layers) - len(measured),
            streams=int(getattr(config, "altup_num_inputs", 1)),  # of alternating updates (AltUp)
        )  # fmt: skip

    @property
    def measured(self) -> int:
        """Number of measured layers, those that read another one's cache included."""
        return self.layers + self.readers

    @property
    def decoder_layers(self) -> int:
        """Number of decoder layers, measured or not."""
        return self.measured + self.unmeasured

    def full_cache_bytes(self, tokens: int) -> int:
        """Return the bytes of the full cache for a prompt of `tokens` tokens, beside latents those of what is read."""
        others = self.layers * self.latent * tokens + self.unmeasured_numbers(tokens)
        return self._entries_bytes(self.kv_heads * tokens) + others * self.itemsize

    def unmeasured_numbers(self, tokens: int) -> int:
        """Return how many numbers the cache holds that no eviction touches: of sliding windows and recurrent states."""
        return self.sliding_width * min(tokens, self.window) + self.state

    def cache_share(self, entries: int, tokens: int) -> float:
        """Return the share of the full cache that an evicted one is, by its entries in all measured layers.

        What no eviction touches is in both. Without such layers it is the share of the entries, or of the latents.
        """
        count, numbers = self.stored_entries
        others = self.unmeasured_numbers(tokens) / numbers  # in entries
        return (entries + others) / (count * tokens + others)

    @property
    def stored_entries(self) -> tuple[int, int]:
        """Numbers of entries that the cache stores of a token in all measured layers together, and of their numbers."""
        return (self.layers, self.latent) if self.latent else (self.layers * self.kv_heads, self.d_key + self.d_value)

    def kept_bytes(self, config: EvictionConfig, tokens: int) -> int:
        """Return the bytes of a configuration's kept entries of a prompt, the same total for every policy.

        For a policy that reads pages, those of the bounds by which pages are chosen; for one with a sparse prefill,
        those of the whole cache.
        """
        return self._entries_bytes(config.cache_contents.row_entries(config, tokens, self.heads, self.kv_heads))

    def row_bytes(self, config: EvictionConfig, tokens: int, decoded: int, steps: int, passing: bool = False) -> int:
        """Return the bytes that a configuration adds to a batch: padded cache, decoded tokens and records of steps.

        Of the `decoded` tokens, `steps` are recorded. A `passing` cache holds the indices of its entries instead of
        copies.
        """
        tails = (self.layers * self.kv_heads * self._entry_bytes + self.sliding_width * self.itemsize) * decoded
        kept = self.kept_bytes(config, tokens)
        own = kept * _INDEX_BYTES // self._entry_bytes if passing else int(kept * (1 + SLACK))
        cached = own if config.cache_contents.copied else kept
        states = self.decoder_layers * self.streams
        recorded = (2 * self.measured + states) * self.d_model * self.itemsize  # queries and head outputs beside states
        logits = (4 * 8 + self.itemsize * (steps - 1)) * self.vocab  # KL, its terms in float64; later steps' own
        return cached + tails + recorded * steps + logits + self.state * self.itemsize

    @property
    def _entry_bytes(self) -> int:
        """Bytes of the key and the value of one entry."""
        return (self.d_key + self.d_value) * self.itemsize

    def _entries_bytes(self, entries: int) -> int:
        """Return the bytes of `entries` entries in all measured layers together."""
        return self.layers * entries * self._entry_bytes


STEPS_AT_ONCE = 8
"""Most steps of one forward pass: more take as many rows through the linear layers, and read nothing less often."""


@dataclass(frozen=True)
class Batches:
    """The configurations that are decoded together.

    Attributes:
        indices: configurations of each batch, by their index in the run.
        rows: rows of every batch, with a row that keeps everything first; short batches are filled up with more such
            rows, so that all batches and the reference go through linear layers of the same shape.
        largest_bytes: planned size of the largest batch.
        bound_bytes: largest allowed size of a batch.
    """

    indices: tuple[tuple[int, ...], ...]
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
    """Return the configurations in the fewest batches within the bound, balanced in bytes and in number.

    `tokens` are compressed and `decoded` tokens come after, of which `steps` are measured; `passing` caches hold no
    copies of entries. Without `max_bytes`, a configuration that exceeds half of weights and full cache is decoded
    alone. Raises ConfigError where `max_bytes` is less than one configuration needs.
    """
    sizes = [shape.row_bytes(config, tokens, decoded, steps, passing) for config in configs]
    bound = max_bytes or max((shape.weights_bytes + shape.full_cache_bytes(tokens)) // 2, max(sizes))
    if max(sizes) > bound:
        label = configs[sizes.index(max(sizes))].label()
        raise ConfigError(
            f"max_bytes (--max-memory) allows {_format_size(bound)}, less than the {_format_size(max(sizes))} that "
            f"'{label}' takes at {tokens} tokens; raise it or lower the budget"
        )
    count = math.ceil(sum(sizes) / bound)
    while (largest := max(sum(sizes[index] for index in batch) for batch in _distribute(sizes, count))) > bound:
        count += 1
    batches = _distribute(sizes, count)
    return Batches(batches, 1 + max(map(len, batches)), largest, bound)


def _format_size(size: int) -> str:
    """Return a size as text in MiB, or in KiB below 1 MiB, rounded up."""
    unit, name = (2**20, "MiB") if size >= 2**20 else (2**10, "KiB")
    return f"{math.ceil(size / unit):,} {name}"


def _distribute(sizes: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Return the configuration indices of `count` balanced batches; `sizes` are in bytes.

    The largest is dealt first, in alternating direction.
    """
    batches: list[list[int]] = [[] for _ in range(min(count, len(sizes)))]
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    for turn, index in enumerate(order):
        lap, position = divmod(turn, len(batches))
        batches[position if lap % 2 == 0 else -1 - position].append(index)
    return tuple(tuple(sorted(batch)) for batch in batches)


ENGINES = {
    "here": "this process, one sample after the other",
    "workers": "worker processes on this machine, one per GPU or per few cores",
    "ray": "actors of a Ray cluster, one per GPU or per few cores",
}
MOST_WORKERS = 4096
NEEDS: dict[str, tuple[str, ...]] = {
    "workers": ("workers", "ray"),
    "ray_address": ("ray",),
    "cpus_per_worker": ("workers", "ray"),
    "timeout_per_sample": ("workers", "ray"),
    "by_configs": ("workers", "ray"),
}
"""Option -> the engines that it has an effect on."""


@dataclass(frozen=True)
class Workers:
    """The engine that measures the samples of a run. Numbers depend on it only by the rounding of other batch shapes.

    Attributes:
        engine: a key of `ENGINES`.
        workers: number of workers; None: one per GPU, or as many as the cores allow.
        ray_address: address of the cluster's head, host:port; None: the variable RAY_ADDRESS.
        cpus_per_worker: cores of each worker; None: OMP_NUM_THREADS, or an even share of the machine's cores.
        timeout_per_sample: seconds after which a worker counts as hanging; None: never.
        by_configs: whether a sample's configurations are distributed over the workers, each of which repeats the
            prefill.

    Raises UnknownNameError, and ConfigError for a number out of range or without effect on the engine.
    """

    engine: str = "here"
    workers: int | None = None
    ray_address: str | None = None
    cpus_per_worker: int | None = None
    timeout_per_sample: float | None = None
    by_configs: bool = False

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise UnknownNameError(self.engine, "engine", ENGINES)
        for field in ("workers", "cpus_per_worker"):
            count = getattr(self, field)
            if count is not None and (type(count) is not int or not 1 <= count <= MOST_WORKERS):
                raise ConfigError(f"{_option_name(field)} takes a whole number from 1 to {MOST_WORKERS:,}, got {count}")
        seconds = self.timeout_per_sample
        if seconds is not None and not 0 < seconds < math.inf:
            raise ConfigError(f"{_option_name('timeout_per_sample')} takes seconds above 0, got {seconds}")
        for field in NEEDS:
            if getattr(self, field) not in (None, False) and self.engine not in NEEDS[field]:
                engines = " or ".join(f"--engine {name}" for name in NEEDS[field])
                raise ConfigError(f"{_option_name(field)} has no effect here: it needs {engines}; leave it out")


def _option_name(field: str) -> str:
    """Return an option's name on the command line and in Python: `--workers (workers=…)`."""
    name = "shard-by configs" if field == "by_configs" else field.replace("_", "-")
    return f"--{name} ({field}=…)"
