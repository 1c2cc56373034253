r"""Figures that know their caption, and the caption as text of LaTeX.

A figure of style "paper" or "talk" has no notes in its picture: they are its caption, sentences that begin with the
result's conclusion. `save_caption` writes it beside the picture as plain text, and with LaTeX's own characters escaped,
so that a paper can `\input` it as it is.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from perturbkv.escaping import escape_line

MADE_BY_US = "% Caption by perturbkv"
"""The beginning of a caption's LaTeX file."""
INTERVAL_MARKS = "bars, bands and brackets"
"""What a figure's note on intervals is about; its caption names those of them that there are."""
_SAMPLES, _NO_INTERVALS = re.compile(r",? over (n = [0-9,]+ samples)"), re.compile(f"{INTERVAL_MARKS}: .*?(n = |$)")
_BRACKETS = re.compile(r"\[[−<>]?\d|\([^()]* … ")
_INSEPARABLE = re.compile(r"\[[^\]]*\]|\d %|\S+ [=×≤] \S+")
_NO_BREAK = "\u00a0"
_LONG = 260
"""A longer conclusion is for a text, not for a caption."""
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


def keep_together(text: str) -> str:
    r"""Return text in which an interval, a per cent and an equation have no-break spaces, so that each stays on a line.

    Example:
        >>> keep_together("9 % [4, 14]").count("\u00a0")
        2
    """
    return _INSEPARABLE.sub(lambda found: found[0].replace(" ", _NO_BREAK), text)


def to_latex(text: str) -> str:
    r"""Return plain text as LaTeX: its special characters escaped, the package's symbols in math.

    Lines do not break inside an interval or an equation, or before a per cent sign. Other letters, such as those of a
    name in Chinese, stay as they are; signs that LaTeX would join stay apart, and control characters are shown by
    their numbers.

    Example:
        >>> to_latex("95 % of b_1 & θ̂ ≤ 2")
        '95~\\% of b\\_1 \\& $\\hat{\\theta}$~$\\le$~2'
    """
    text = keep_together(text)
    for written, tex in SYMBOLS.items():
        head, *rest = text.split(written)
        if rest:
            return tex.join(map(to_latex, [head, *rest]))
    latex = ""
    for written in (_ESCAPES.get(character, character) for character in escape_line(text)):
        latex += f"{{}}{written}" if latex[-1:] + written[:1] in _LIGATURES else written
    return latex


def _one_line(text: str) -> str:
    """Return text of a figure as part of a sentence: on one line, with semicolons for its middle dots."""
    return " ".join(text.split()).replace(" · ", "; ")


def panel_sentence(title: str, remarks: Iterable[str], names: Sequence[str] = ()) -> str:
    r"""Return what a caption says of a panel: its title, whose lines are clauses, and its remarks.

    There is at most one colon. The first letter is a capital; a name or a symbol has "For" before it.

    Args:
        title: of the panel, with line breaks.
        remarks: what is said of it besides.
        names: words that are never capitalised.

    Example:
        >>> panel_sentence("drift, everything kept", ["2 of 0 not drawn"])
        'Drift, everything kept: 2 of 0 not drawn'
        >>> panel_sentence("b=64\ncache share: 0.3", ["1 head: outside"])
        'For b=64, cache share: 0.3, 1 head outside'
    """
    clauses = ", ".join(filter(None, map(_one_line, title.replace(" /\n", " / ").split("\n"))))
    more = "; ".join(dict.fromkeys(filter(None, map(_one_line, remarks))))
    colon = ": " in clauses + more
    whole = (", " if colon else ": ").join(filter(None, (clauses, more)))
    first, *others = whole.split(": ")  # the first of several colons stays
    return _begin_sentence(": ".join(filter(None, (first, " ".join(others)))), names, "For ")


def _begin_sentence(text: str, names: Sequence[str], before_a_name: str = "") -> str:
    """Return a text as a sentence: with a capital first, or after `before_a_name` where a name or symbol comes first.

    `names` are words that are never capitalised.
    """
    word = re.split(r"[\s,:;]", text, maxsplit=1)[0]
    if not text or not text[0].isalpha() or text[0].isupper():
        return text
    if word in names or not re.fullmatch(r"[a-z][a-z’'-]+", word):
        return before_a_name + text
    return text[0].upper() + text[1:]


class CaptionedFigure(Figure):
    """A matplotlib figure with its caption; a notebook displays it without pyplot.

    Attributes:
        headline: what is shown, in a few words.
        conclusion: the result's conclusion, a sentence; empty where it has none.
        subtitle: what is compared, and how.
        titles: whole title of each panel whose title was folded or shortened.
        remarks: small remarks, each with its panel; an empty one where the panel's title is not all in the picture.
        notes: on what is drawn, on intervals and counts, and on model and configurations.
        names: of policies and selections, which are never capitalised.
        provenance: trace and version.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.headline = self.conclusion = self.subtitle = self.provenance = ""
        self.titles: dict[Axes, str] = {}
        self.remarks: list[tuple[Axes, str]] = []
        self.notes: list[str] = []
        self.names: Sequence[str] = ()

    @property
    def caption(self) -> str:
        """The conclusion, else the headline, then panels with a remark, and notes, as one paragraph of plain text."""
        conclusion = " ".join(self.conclusion.split())
        first = _begin_sentence(conclusion, self.names) if 0 < len(conclusion) <= _LONG else self.headline
        remarks: dict[Axes, list[str]] = {}
        for axes, remark in self.remarks:
            remarks.setdefault(axes, []).append(remark)
        panels = [panel_sentence(self._title(axes), texts, self.names) for axes, texts in remarks.items()]
        said = [first, *(_begin_sentence(_one_line(text), self.names) for text in (self.subtitle, *panels))]
        notes = [_begin_sentence(_one_line(self._name_marks(note, said)), self.names) for note in self.notes]
        sentences = [sentence.rstrip(".;") for sentence in dict.fromkeys([*said, *notes])]
        return " ".join(sentence if sentence[-1] in "?!" else f"{sentence}." for sentence in sentences if sentence)

    def _title(self, axes: Axes) -> str:
        """Return a panel's whole title."""
        return self.titles.get(axes) or axes.get_title(loc="left") or axes.get_title()

    def _name_marks(self, note: str, said: Iterable[str]) -> str:
        """Return a note that names, of all marks of intervals, those in the picture and in what is `said` before it.

        The number of samples is not said twice.
        """
        known = " ".join(said)
        note = _SAMPLES.sub(lambda found: "" if found[1] in known else found[0], note)
        drawn = [one for axes in self.axes if not hasattr(axes, "_colorbar") for one in axes.collections]
        written = [text.get_text() for text in self.findobj(Text) if isinstance(text, Text)]
        there = {
            "bars": any(isinstance(one, LineCollection) for one in drawn),
            "bands": any(isinstance(one, PolyCollection) for one in drawn),
            "brackets": any(_BRACKETS.search(text) for text in (*written, known)),
        }
        *others, last = [mark for mark, is_there in there.items() if is_there] or [""]
        marks = " and ".join(filter(None, (", ".join(others), last)))
        return note.replace(INTERVAL_MARKS, marks) if marks else _NO_INTERVALS.sub(r"\1", note)

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
        """Return ending of a caption's file -> its content: plain text, and LaTeX, which a comment begins.

        The trace and the version are in that comment, and below the plain text.
        """
        caption, made = self.caption, escape_line(self.provenance)
        comment = f"{MADE_BY_US}: {made}" if made else MADE_BY_US
        below = f"\n{made[:1].upper()}{made[1:]}.\n" if made else ""
        return {".caption.txt": f"{caption}\n{below}", ".caption.tex": f"{comment}\n{to_latex(caption)}%\n"}

    def _repr_png_(self) -> bytes:
        """Return the figure as a PNG file for a notebook."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=_SCREEN_DPI)
        return buffer.getvalue()
