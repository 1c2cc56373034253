"""SnapKV (Li et al., 2024, https://arxiv.org/abs/2404.14469): the window's attention votes, every head keeps b.

Defaults: window 32 and max-pooling of width 7 as in the CriticalKV paper, section 4.2 (SnapKV's own code: 32 to 64,
average of width 5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perturbkv.selection.policies.base import Pooled


@dataclass(frozen=True)
class SnapKV(Pooled):
    """Window votes, uniform budgets."""

    name: ClassVar[str] = "snapkv"
    summary: ClassVar[str] = "the last queries' attention votes; the same budget for every head"
    paper: ClassVar[str] = "https://arxiv.org/abs/2404.14469"
