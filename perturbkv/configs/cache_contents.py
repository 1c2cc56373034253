"""What the cache of a configuration holds of a prompt, how large that is, and what its budget counts.

*Evicted.* The cache holds the kept entries, and a budget counts them.

*Pages.* A page reader evicts nothing: at every step each head reads the pages of the prompt that it selects then. Pages
are laid out like blocks (`configs.selections`), and a budget buys as many: b counts the entries that a head *reads* at
a step, the tail included. The cache holds all entries, and the bounds of each page by which it is selected.

*Sparse prefill.* Such a policy evicts nothing either, but has a prefill of its own in which every query attends along
some lines only. Its cache is whole, and each decoding query attends to all of it. A budget b is the most entries that a
query of the prompt attends to: the local band, which is the window, the first entries, and as many lines as remain
(METHOD: Lines that a prefill looks along).

*Somebody's.* What a function or a Cache class of somebody's leaves of a prompt (METHOD: Caches that are no kept set).
Its own options say how much that is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from perturbkv.configs import layer_types
from perturbkv.configs.choice import Choice
from perturbkv.configs.selections import Blocks
from perturbkv.errors import ConfigError

PAGE_SIZE = 16
"""Entries of a page (Quest, https://arxiv.org/abs/2406.10774, section 4.1)."""


class SizedConfig(Protocol):
    """A configuration (`configs.eviction.EvictionConfig`), as far as the size of its cache depends on it."""

    @property
    def granularity(self) -> Choice:
        """The choice of what shares a kept set."""

    def kept_entries(self, prompt_tokens: int) -> int:
        """Return the number of kept entries per head."""

    def blocks(self, prompt_tokens: int) -> Blocks:
        """Return the division of a prompt's entries into blocks."""


@dataclass(frozen=True)
class CacheContents:
    """The contents of the cache of a configuration that evicts: its kept entries.

    Attributes:
        unit: what a cache is divided into where that is more than an entry.
        note: what a cache share means, where entries are not evicted.
        evicts: whether entries are removed for good.
        copied: whether a row of a batch holds its entries by itself, apart from the full cache.
    """

    unit: str = "block"
    note: str = ""
    evicts: bool = True
    copied: bool = True

    def unit_size(self, policy: Choice, granularity: Choice) -> int:
        """Return the number of entries of a block or page. Raises ConfigError for an invalid page size."""
        return int(granularity.options.get("block", 1))

    def row_entries(self, config: SizedConfig, tokens: int, heads: int, kv_heads: int) -> int:
        """Return the number of entries of one layer that a row takes in memory, for a prompt of `tokens` tokens.

        `heads` and `kv_heads` are the layer's numbers of query heads and of key/value heads.
        """
        return (heads if config.granularity.name == "query" else kv_heads) * config.kept_entries(tokens)


@dataclass(frozen=True)
class PagedCache(CacheContents):
    """All entries, of which every decoding query reads some pages; a row takes the pages' bounds besides."""

    unit: str = "page"
    note: str = "nothing is evicted; the cache share is what each head reads at a step, and all stays in memory."
    evicts: bool = False

    def unit_size(self, policy: Choice, granularity: Choice) -> int:
        """Return the page size of the policy, in entries. Raises ConfigError for one that is no positive integer."""
        size = policy.options.get("page", PAGE_SIZE)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"page of policy '{policy.name}' must be a whole number of at least 1, got {size}")
        return size

    def row_entries(self, config: SizedConfig, tokens: int, heads: int, kv_heads: int) -> int:
        """Return the number of pages before the tail: a page's bounds, two vectors, take the memory of one entry."""
        return kv_heads * config.blocks(tokens).full


@dataclass(frozen=True)
class WholeCache(CacheContents):
    """All entries, as a prefill of its own left them."""

    note: str = (
        "nothing is evicted; the cache share is that of the pairs of query and entry that its own prefill looks at; "
        "isolated is a mean over 32 queries of the prompt."
    )
    evicts: bool = False
    copied: bool = False

    def row_entries(self, config: SizedConfig, tokens: int, heads: int, kv_heads: int) -> int:
        """Return the number of entries of one layer, all of which a row holds."""
        return kv_heads * tokens


@dataclass(frozen=True)
class SomebodysCache(CacheContents):
    """Whatever somebody's code leaves in it: entries of the full cache, or entries of its own."""

    def row_entries(self, config: SizedConfig, tokens: int, heads: int, kv_heads: int) -> int:
        """Return the number of entries of one layer that a row may hold: all of them."""
        return kv_heads * tokens


DEFAULT_STEPS = 8
"""Default number of decode steps (METHOD: the protocol, 2)."""
EVICTED, PAGES_READ, SPARSE_PREFILL, SOMEBODYS = CacheContents(), PagedCache(), WholeCache(), SomebodysCache()
CACHE_PREFIX = "cache:"
"""Beginning of the name of a policy that is somebody's cache."""
WITHOUT_EVICTION: Mapping[str, CacheContents] = {"quest": PAGES_READ, "vertical-slash": SPARSE_PREFILL}
"""Policy that evicts nothing -> the contents of its cache."""


def contents_of(policy: Choice) -> CacheContents:
    """Return the contents of a policy's cache."""
    return SOMEBODYS if policy.name.startswith(CACHE_PREFIX) else WITHOUT_EVICTION.get(policy.name, EVICTED)


def default_steps(policies: Sequence[Choice]) -> int:
    """Return the default number of decode steps: 1 with a sparse prefill."""
    return 1 if any(contents_of(policy) is SPARSE_PREFILL for policy in policies) else DEFAULT_STEPS


def check_sparse_prefill(
    policies: Sequence[Choice], steps: int, generate: int, save: Sequence[str], model_config: Any, model: str
) -> None:
    """Raise ConfigError for a sparse-prefill run with several steps, generation, effects or mixed layer types."""
    name = next((policy.name for policy in policies if contents_of(policy) is SPARSE_PREFILL), None)
    if name is None:
        return
    for applies, what, instead in (
        (steps > 1, f"{steps} decode steps", "the prompt's queries have no steps: use --steps 1"),
        ("effect" in save, "--save effect", "it evicts nothing whose loss could cost a text: leave it out"),
        (generate > 0, f"answers of {generate} tokens", "it is measured and does not answer: generate nothing"),
        (layer_types.is_mixed(model_config) or layer_types.is_recurrent(model_config),
         f"model '{model}', some of whose layers slide or are recurrent",
         "windows and states, which all caches share, would be others: choose another model"),
    ):  # fmt: skip
        if applies:
            raise ConfigError(
                f"policy '{name}' reads the prompt in a prefill of its own and expects no {what}; {instead}"
            )
