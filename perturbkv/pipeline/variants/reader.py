"""Readers of the full cache: configurations that evict nothing, and read some entries at each step or in a prefill."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from perturbkv.cache.makers import Maker
from perturbkv.pipeline.sample.full_layer import FullLayer
from perturbkv.selection.page_selection import AnyGroup
from perturbkv.selection.resolved_config import ResolvedConfig


class Reader(Maker):
    """The maker of a configuration that evicts nothing.

    Its rows hold the whole prompt. For isolated quantities it says which entries are read; these are stored as its kept
    sets, and its budget counts them.
    """

    @classmethod
    @abstractmethod
    def groups(
        cls, layer: FullLayer, configs: Sequence[ResolvedConfig], queries: Sequence[Float[Tensor, "head d_head"]]
    ) -> Sequence[AnyGroup]:
        """Return the entries of one layer that the reader's configurations among `configs` read.

        `queries` are those of the full run's decode steps.
        """
