"""Results in order of what their caches hold, and how that is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from perturbkv.figures import style

Result = TypeVar("Result")


def by_held(results: Sequence[Result], held: Callable[[Result], float]) -> list[Result]:
    """In order of what the caches hold, least first: of 800 tokens a budget of 0.2 lies above 128.

    As they came where one of them does not tell.
    """
    shares = [held(result) for result in results]
    if np.isnan(shares).any():
        return list(results)
    return [results[place] for place in np.argsort(shares, kind="stable")]


def held_sides(shares: tuple[float, float]) -> str:
    """What both sides' caches hold over the full one: once where it is the same."""
    return " → ".join(dict.fromkeys(map(style.number, shares)))
