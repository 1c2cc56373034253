"""KVzip (Kim et al., 2025, https://arxiv.org/abs/2505.23416; code: snu-mllab/KVzip, NVIDIA/kvpress).

After the prefill the context is run once more over its own full cache, in parts of `chunk` = 2000 tokens. A pass reads
words that ask to repeat the part, the last 8 tokens of the part before it, what a chat template puts behind a user's
turn (a line end where there is none), and the part. An entry's score is the largest weight that any query of its part's
pass gives it,

    s_j = max_i softmax_j(z_ij), over the context's first `sinks` entries, the part's, and the pass' own up to i,

and a kept set of several query heads takes the largest of theirs. The first `sinks` = 4 entries always stay, as in
kvpress' port; the released code has its system prompt there. No window votes; the last entry stays (`window` = 1).

The whole of what was prefilled is replayed, a chat template's first tokens with it, which the released codes leave out
of the replay. Their softmax is in the model's precision; here it is in float32 or better.

`wording`: the words of `released` code end in a blank before the 8 tokens, those of `kvpress` do not; kvpress' parts
have 2048 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.option import option
from perturbkv.scoring.replay_view import Replay, ReplayView
from perturbkv.scoring.score import Score
from perturbkv.theory import WORK


@dataclass(frozen=True)
class KVzip(Score):
    """Largest attention weight that an entry gets in a replay of the context."""

    name: ClassVar[str] = "kvzip"
    summary: ClassVar[str] = "the most that any query gives an entry while the context is run once more"
    paper: ClassVar[str] = "https://arxiv.org/abs/2505.23416"
    needs: ClassVar[tuple[str, ...]] = ("replay",)
    own_window: ClassVar[int | None] = 1
    by_place: ClassVar[tuple[str, ...]] = ("sinks",)
    reduces: ClassVar[str] = "max"
    chunk: int = option(2000, "tokens of the context that one pass of the replay repeats", low=1)
    sinks: int = option(4, "first entries, which always stay and every pass sees")
    wording: str = option("released", "who worded what asks for a part: released, or kvpress",
                          known=("released", "kvpress"))  # fmt: skip

    @property
    def first_entries(self) -> int:
        """Number of first entries (sinks) that are always kept."""
        return self.sinks

    @property
    def replay(self) -> Replay:
        """Replay options: parts of `chunk` tokens."""
        return Replay(self.chunk, self.wording, self.sinks)

    def score_replay(self, view: ReplayView) -> Float[Tensor, "head chunk"]:
        """Return the largest attention weight on each repeated entry over the pass's queries, per query head."""
        largest = torch.zeros(len(view.queries), view.chunk, dtype=WORK, device=view.keys.device)
        for heads, _, weights in view.attention_blocks():
            largest[heads] = torch.maximum(largest[heads], weights.amax(dim=-2).to(WORK))
        return largest
