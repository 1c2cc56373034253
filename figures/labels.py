"""How figures write symbols, and results in order of what their caches hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from perturbkv.figures import style

_SYMBOLS = {
    "θ̂_relax": r"$\hat{\mathrm{θ}}_{\mathrm{relax}}$",
    "θ̂": r"$\hat{\mathrm{θ}}$",
    "‖o_h‖₁": r"$\Vert o_h\Vert_1$",
}
Result = TypeVar("Result")


def symbols(text: str) -> str:
    """The text with its symbols typeset: no underscore where an index is meant."""
    for written, typeset in _SYMBOLS.items():
        text = text.replace(written, typeset)
    return text


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
