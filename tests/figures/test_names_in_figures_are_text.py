"""Names of models, data and samples stand in figures as they are written: no TeX, no escape code, valid files."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from perturbkv.analyses.heads.heads import compare_heads
from perturbkv.analyses.tokens.tokens import tokens
from perturbkv.cli.saving import save_figure
from perturbkv.figures import style
from perturbkv.figures.style import symbols_to_tex, typeset
from tests.support import prompts

WORDS = [r"$\frac{1", "$x_1^2$ $", r"a_b^c\d{e}~#%", "\x1b]0;owned\x07", "<b>&]]>--", "a\nb", "\ud800", "_hidden"]


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
def test_every_format_holds_a_foreign_name_as_text(tmp_path: Path, word: str) -> None:
    trace = prompts.made(prompts.sample(word), model=word, dataset=word)
    results = [compare_heads(trace, "attention", ["two-stage"]), tokens(trace)]
    for number, result in enumerate(results):
        saved = save_figure(result.plot(), result.identity, tmp_path / str(number), ["png", "svg", "pdf"])
        (svg,) = [path for path in saved if path.endswith(".svg")]
        words = "".join("".join(ET.parse(svg).getroot().itertext()).split())
        shown = word.encode("unicode_escape").decode() if not word.isprintable() else word
        assert "".join(shown.split()) in words
        assert all(Path(path).stat().st_size > 1000 for path in saved)
    assert b"/Title" in (tmp_path / "0.pdf").read_bytes()


def test_only_symbols_of_ours_are_typeset() -> None:
    with style.use():
        axes = style.figure(84, 60).subplots()
        ours, theirs = axes.set_title(symbols_to_tex("θ̂ / L")), axes.set_xlabel(symbols_to_tex("θ̂ of $5"))
        plain = axes.set_ylabel("$5 and $6")
    assert not any(text.get_parse_math() for text in (ours, theirs, plain))
    typeset([ours, theirs])
    assert [text.get_parse_math() for text in (ours, theirs, plain)] == [True, False, False]
