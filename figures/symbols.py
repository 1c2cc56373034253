"""Symbols of ours, typeset; everything else in a figure is text, whatever dollars and backslashes a name has."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.text import Text

_SYMBOLS = {
    "θ̂_relax": r"$\hat{\mathrm{θ}}_{\mathrm{relax}}$",
    "θ̂": r"$\hat{\mathrm{θ}}$",
    "‖o_h‖₁": r"$\Vert o_h\Vert_1$",
}


def symbols(text: str) -> str:
    """The text with its symbols as TeX writes them, for `typeset`: no underscore where an index is meant."""
    for written, tex in _SYMBOLS.items():
        text = text.replace(written, tex)
    return text


def typeset(texts: Iterable[Text]) -> None:
    """Typeset the symbols in these texts, which the figures' style shows as they are written."""
    for text in texts:
        rest = text.get_text()
        for tex in _SYMBOLS.values():
            rest = rest.replace(tex, "")
        text.set_parse_math("$" not in rest)
