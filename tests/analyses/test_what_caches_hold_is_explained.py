"""cache share in captions: what it is, when it was counted, and why some of it exceeds 1."""

from __future__ import annotations

import numpy as np

import perturbkv as pk
from perturbkv.analyses import text
from tests.support.swept import swept

ABOVE = "Above 1 nothing is saved: every query head keeps a set of its own; --granularity kv keeps one for all"


def test_shares_above_1_are_explained_and_others_are_not() -> None:
    assert text.cache_share_note([0.2, 1.0, float("nan")]) == text.CACHE_SHARE_NOTE
    assert text.cache_share_note([0.2, 1.01]).startswith(f"{text.CACHE_SHARE_NOTE} {ABOVE}")
    assert text.cache_share_note([0.2], "above 1,200 entries") == (
        f"{text.CACHE_SHARE_NOTE} As the answers began; caches were compressed again above 1,200 entries."
    )


def test_curves_over_budgets_explain_them_too() -> None:
    made = swept(np.full((8, 2, 5), 0.1))
    assert not pk.budget_curves(made).caveats()
    made.arrays["held_share"] = 3 * np.asarray(made.arrays["held_share"])  # type: ignore[index]
    assert pk.budget_curves(made).caveats() == [f"Cache share: {text.ABOVE_FULL}"]
    assert ABOVE in pk.budget_curves(made).notes()
