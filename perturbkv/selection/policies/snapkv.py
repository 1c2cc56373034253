"""SnapKV (Li et al., 2024, https://arxiv.org/abs/2404.14469): the window's attention votes, every head keeps b.

Defaults: window 32 and max-pooling of width 7 as in the CriticalKV paper, section 4.2 (SnapKV's own code: 32 to 64,
average of width 5); both are fields of `EvictionConfig`.
"""

from __future__ import annotations

from perturbkv.selection.policies.base import Policy


class SnapKV(Policy):
    """Window votes, uniform budgets."""
