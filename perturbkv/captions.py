r"""Figures that know their caption, and the caption as text of LaTeX.

A figure of style "paper" or "talk" has no notes in its picture: they are its caption. `save_caption` writes it beside
the picture as plain text, and with LaTeX's own characters escaped, so that a paper can `\input` it as it is.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from perturbkv.escaping import escape_line

MADE_BY_US = "% Caption by perturbkv"
"""The beginning of a caption's LaTeX file."""
_SCREEN_DPI = 100

_ESCAPES = {
    **{character: f"\\{character}" for character in "%&_#${}"},
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$",
    "|": "$|$", '"': "''", "…": r"\ldots{}", "–": "--", "—": "---", "’": "'", "“": "``", "”": "''", "\u00a0": "~",
    "×": r"$\times$", "·": r"$\cdot$", "±": r"$\pm$", "−": "$-$", "≤": r"$\le$", "≥": r"$\ge$", "≡": r"$\equiv$",
    "→": r"$\to$", "←": r"$\gets$", "‖": r"$\Vert$", "Σ": r"$\Sigma$", "α": r"$\alpha$", "β": r"$\beta$",
    "δ": r"$\delta$", "θ": r"$\theta$", "μ": r"$\mu$", "ν": r"$\nu$", "ρ": r"$\rho$", "σ": r"$\sigma$",
    "Δ": r"$\Delta$", "⌊": r"$\lfloor$", "⌋": r"$\rfloor$",
    "∞": r"$\infty$", "▼": r"$\bigtriangledown$", "▲": r"$\bigtriangleup$",
    "°": r"$^{\circ}$",
    **{raised: f"$^{{{plain}}}$" for raised, plain in zip("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789", strict=True)},
    **{lowered: f"$_{{{plain}}}$" for lowered, plain in zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)},
}  # fmt: skip
SYMBOLS = {
    "θ̂_relax": r"$\hat{\theta}_{\mathrm{relax}}$",
    "θ̂": r"$\hat{\theta}$",
    "‖o_h‖₁": r"$\Vert o_h\Vert_1$",
}
"""The package's symbols of several characters, in LaTeX."""
_LIGATURES = ("--", "?`", "!`", "``", "''", ",,")
"""Neighbours that LaTeX's fonts make one sign."""


def to_latex(text: str) -> str:
    r"""Return plain text as LaTeX: its special characters escaped, the package's symbols in math.

    Other letters, such as those of a name in Chinese, stay as they are; signs that LaTeX would join stay apart, and
    control characters are shown by their numbers.

    Example:
        >>> to_latex("95 % of b_1 & θ̂ ≤ 2")
        '95 \\% of b\\_1 \\& $\\hat{\\theta}$ $\\le$ 2'
    """
    for written, tex in SYMBOLS.items():
        head, *rest = text.split(written)
        if rest:
            return tex.join(map(to_latex, [head, *rest]))
    latex = ""
    for written in (_ESCAPES.get(character, character) for character in escape_line(text)):
        latex += f"{{}}{written}" if latex[-1:] + written[:1] in _LIGATURES else written
    return latex


def _one_line(text: str) -> str:
    """Return text of a figure as part of a sentence: on one line, its dots as semicolons."""
    return " ".join(text.split()).replace(" · ", "; ")


class CaptionedFigure(Figure):
    """A matplotlib figure with its caption; a notebook displays it without pyplot.

    Attributes:
        headline: what is shown, in a few words.
        subtitle: what is compared, and how.
        remarks: small remarks, each with its panel.
        notes: on intervals and counts, and the run.
        last_steps: functions that place what needs every other artist in its place.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.headline = self.subtitle = ""
        self.remarks: list[tuple[Axes, str]] = []
        self.notes: list[str] = []
        self.last_steps: list[Callable[[], None]] = []

    @property
    def caption(self) -> str:
        """The headline, remarks named by their panels' titles, and notes, as one paragraph of plain text."""
        remarks: dict[str, list[str]] = {}
        for axes, remark in self.remarks:
            remarks.setdefault(_one_line(axes.get_title(loc="left") or axes.get_title()), []).append(_one_line(remark))
        named = [": ".join(filter(None, (title, "; ".join(dict.fromkeys(said))))) for title, said in remarks.items()]
        sentences = [
            _one_line(sentence).rstrip(".;") for sentence in (self.headline, self.subtitle, *named, *self.notes)
        ]
        return " ".join(sentence if sentence[-1] in "?!" else f"{sentence}." for sentence in sentences if sentence)

    def save_caption(self, picture: str | Path) -> list[Path]:
        r"""Write the caption beside a picture and return the paths: `heads.pdf` has `heads.caption.txt` and `.tex`.

        The second is LaTeX: `\caption{\input{heads.caption}}` needs no editing.

        Args:
            picture: path of the saved figure, with or without its ending, one of matplotlib's.

        Raises:
            OSError: the folder does not exist or cannot be written.

        Example:
            >>> import tempfile
            >>> figure = CaptionedFigure()
            >>> figure.headline = "Means of 8 samples, 95 % intervals"
            >>> plain, latex = figure.save_caption(f"{tempfile.mkdtemp()}/heads.pdf")
            >>> plain.name, latex.name, plain.read_text()
            ('heads.caption.txt', 'heads.caption.tex', 'Means of 8 samples, 95 % intervals.\n')
        """
        path = Path(picture)
        path = path.with_suffix("") if path.suffix[1:].lower() in self.canvas.get_supported_filetypes() else path
        written = {path.with_name(path.name + ending): text for ending, text in self.caption_texts().items()}
        for file, text in written.items():
            file.write_text(text, encoding="utf-8")
        return list(written)

    def caption_texts(self) -> dict[str, str]:
        """Return ending of a caption's file -> its content: plain text, and LaTeX, which a comment begins."""
        caption = self.caption
        return {".caption.txt": f"{caption}\n", ".caption.tex": f"{MADE_BY_US}\n{to_latex(caption)}%\n"}

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG file for a notebook."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=_SCREEN_DPI)
        return buffer.getvalue()
