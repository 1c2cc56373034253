"""VATP (Guo et al., 2024, https://arxiv.org/abs/2406.12335): attention times the norm of the value, first tokens kept.

s_j = mean over the window's queries i of a_ij · ‖v_j‖₁, the value before W_O; `sinks` = 20 first entries always stay
(`--sink_len 20` of guozhiyu/vatp). The authors weigh H2O's sum over all queries, or the mean of the last 400 beside a
recent window of 10 (Scissorhands): `value-norm` with `window` = 400 is nearest to the latter. A row per query head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import option
from perturbkv.scoring.layer_view import LayerView
from perturbkv.scoring.score import Score
from perturbkv.theory import WORK


@dataclass(frozen=True)
class ValueNorm(Score):
    """Mean attention of the window's queries times ‖v‖₁."""

    name: ClassVar[str] = "value-norm"
    summary: ClassVar[str] = "mean attention of the window's queries times the value's L1 norm; first entries stay"
    paper: ClassVar[str] = "https://arxiv.org/abs/2406.12335"
    needs: ClassVar[tuple[str, ...]] = ("attention", "values")
    by_place: ClassVar[tuple[str, ...]] = ("sinks",)
    holds_norms: ClassVar[bool] = True
    sinks: int = option(20, "first entries that stay")

    @property
    def first_entries(self) -> int:
        """Number of first entries (sinks) that are always kept."""
        return self.sinks

    def score(self, layer: LayerView) -> Float[Tensor, "rows prefix"]:
        """Return the window's mean attention on the entry times ‖v‖₁, per query head."""
        norms = torch.linalg.vector_norm(layer.values[:, : layer.prefix], ord=1, dim=-1, dtype=WORK)
        return layer.attention[..., : layer.prefix].mean(dim=-2) * layer.per_head(norms)
