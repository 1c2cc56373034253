"""What a terminal obeys, or nobody sees, is written out; markup and the names of emoji are text."""

from __future__ import annotations

import io
import pickle

import pytest
from rich.console import Console

from perturbkv.configs.choice import Choice, parse
from perturbkv.display import Table, as_html, as_text, print_part
from perturbkv.errors import MOST_CHARACTERS, ConfigError, MissingPackageError, PerturbkvError, UnknownNameError
from perturbkv.escaping import escape_control_characters, escape_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07", r"\x1b]0;owned\x07"),
        ("\x1b[2J", r"\x1b[2J"),
        ("good\rbad", r"good\rbad"),
        ("a\b\0\x7f\x9b", r"a\x08\x00\x7f\x9b"),
        ("\u202egnp.exe\u2066", r"\u202egnp.exe\u2066"),
        ("a\u2028b\ufeff", r"a\u2028b\ufeff"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_would_be_obeyed_or_unseen_is_written_out(text: str, shown: str) -> None:
    assert escape_control_characters(text) == escape_line(text) == shown
    assert str(PerturbkvError(text)) == str(UnknownNameError(text, "model", ()))[15 : 15 + len(shown)] == shown


def test_an_error_is_one_line_of_bounded_length() -> None:
    assert str(PerturbkvError("two\nlines")) == "two lines"
    assert str(MissingPackageError("psutil\x1b[2J")).startswith(r"expected the package psutil\x1b[2J, got none")
    text = str(UnknownNameError("x" * 5000, "model", ["snapkv"]))
    assert (len(text), text[:20], text[-13:]) == (MOST_CHARACTERS + 3, "unknown model 'xxxxx", "known: snapkv")
    assert pickle.loads(pickle.dumps(PerturbkvError("a\x1b"))).args == ("a\x1b",)


def test_letters_of_all_scripts_stay_as_they_are() -> None:
    text = "é 漢字 עברית می\u200cخواهم 👩\u200d🔬 ‘θ̂’ \u00a0 [/INST] :smile: $x$ \\n"
    assert escape_control_characters(text) == escape_line(text) == text


def test_a_name_is_one_line_and_a_text_keeps_its_own() -> None:
    assert escape_control_characters("a\n\tb") == "a\n\tb"
    assert escape_line("a\n\tb") == r"a\n\tb"


def test_tables_and_lines_show_foreign_words_as_they_are_written() -> None:
    word = "[/INST] [bold]x[/bold] :smile: \x1b[2J"
    drawn = as_text([Table(word, (word, "#n", "m"), [(word, word, word)]), word], width=300)
    assert drawn.count(r"[/INST] [bold]x[/bold] :smile: \x1b[2J") == 6
    assert "\x1b" not in drawn + as_html([Table(word, (word,), [(word,)]), word])


def test_colours_are_ours_alone() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    print_part(console, "\x1b[31mred")
    assert console.file.getvalue() == "\\x1b[31mred\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["a\x1b[2J", "a(b=\u202e)", "a(b='x\x07')", "a(b\u2066=1)"])
def test_a_name_with_unseen_characters_is_no_choice(text: str) -> None:
    with pytest.raises(ConfigError, match="of visible characters, got"):
        parse(text)
    with pytest.raises(ConfigError, match="of visible characters, got"):
        Choice("a", {"b": "line\nbreak"})


def test_an_unknown_name_is_told_where_nothing_is_known() -> None:
    assert str(UnknownNameError("x", "name", [])) == "unknown name 'x'; known: "
