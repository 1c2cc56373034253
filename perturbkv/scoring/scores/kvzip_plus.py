"""KVzip+ (NVIDIA/kvpress, `kvzip_plus_normalization`): KVzip's weights as parts of the residual stream.

    s_j = max_i softmax_j(z_ij) · ‖v_j W_O^h‖₂ / ‖h_i‖₂

over the same replay as `kvzip` (its file says which), h_i what goes into attention at the replay's query i; a kept set
of several query heads takes the largest of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.errors import PluginError
from perturbkv.scoring.replay_view import ReplayView
from perturbkv.scoring.scores.kvzip import KVzip
from perturbkv.theory import WORK


@dataclass(frozen=True)
class KVzipPlus(KVzip):
    """Largest contribution of an entry to the residual stream of a replay's query."""

    name: ClassVar[str] = "kvzip-plus"
    summary: ClassVar[str] = "kvzip's weights times projected value norms, over the norm of what attends"
    needs: ClassVar[tuple[str, ...]] = ("replay", "hidden")
    holds_norms: ClassVar[bool] = True

    def score_replay(self, view: ReplayView) -> Float[Tensor, "head chunk"]:
        """Return the largest weight over the query's input norm, times the projected value norm, per query head."""
        if view.hidden is None:
            raise PluginError("hidden of the layer was not captured: no score of the run needs it")
        input_norms = view.hidden.to(WORK).norm(dim=-1)
        largest = torch.zeros(len(view.queries), view.chunk, dtype=WORK, device=view.keys.device)
        for heads, queries, weights in view.attention_blocks():
            relative = (weights.to(WORK) / input_norms[queries].unsqueeze(-1)).amax(dim=-2)
            largest[heads] = torch.maximum(largest[heads], relative)
        return largest * view.norms()
