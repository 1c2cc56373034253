"""KVzip+ (NVIDIA/kvpress): `kvzip` with the score of `scoring/scores/kvzip_plus.py`, and all of its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perturbkv.scoring.score import Score
from perturbkv.scoring.scores import kvzip_plus
from perturbkv.selection.policies.kvzip import KVzip


@dataclass(frozen=True)
class KVzipPlus(KVzip):
    """Largest contributions of entries to the residual stream of a replay."""

    name: ClassVar[str] = "kvzip-plus"
    summary: ClassVar[str] = "what a replay of the context takes up; all layers' heads compete"

    @property
    def score(self) -> Score:
        """KVzip+'s score: the largest contribution of an entry to the residual stream of the replay."""
        return kvzip_plus.KVzipPlus(chunk=self.chunk, sinks=self.sinks, wording=self.wording)
