"""Choices with options, written `name(option=value, …)`: their parser and their printed form.

A value is a number, true, false, none, a name, quoted text, or another call; the first value may lack a name:
`adakv(floor=0.1, safeguard=guaranteed)`, `outer(inner(window=64), alpha=0.25)`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from perturbkv.errors import ConfigError
from perturbkv.escaping import escape_line

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\s(),=\"']+")
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
_WORDS = {"true": True, "false": False, "none": None}
_NAME_PREFIX = re.compile(r".*\.py|kvpress|given|cache")
"""Texts that form one name together with the colon and the text after it."""
DEEPEST = 16
"""Deepest nesting of calls."""
UNNAMED = ""
"""Key of an option that was written without a name."""


@dataclass(frozen=True)
class Choice:
    """A chosen name with its options, such as `adakv(floor=0.1)`.

    Attributes:
        name: the chosen name.
        options: option -> number, truth value, None, text or `Choice`; the key `UNNAMED` for an option without a name.
        defaults: names of the options at their default, which the printed form omits; only a resolved choice has them.
            None for a choice that is not resolved yet.

    Raises ConfigError for a name or a text with invisible characters, which no label can show.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    defaults: frozenset[str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for text in (self.name, *self.options, *self.options.values()):
            if isinstance(text, str) and escape_line(text) != text:
                raise ConfigError(f"expected a name or a text of visible characters, got '{escape_line(text)}'")

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

    def __hash__(self) -> int:
        return hash((self.name, frozenset(self.options.items())))

    @property
    def shown_options(self) -> dict[str, Any]:
        """Options in the printed form: all except those at their default."""
        return {name: value for name, value in self.options.items() if name not in (self.defaults or ())}

    def drop(self, names: Iterable[str]) -> Choice:
        """Return the choice without the named options; names that it lacks change nothing."""
        removed = set(names)
        options = {name: value for name, value in self.options.items() if name not in removed}
        return Choice(self.name, options, None if self.defaults is None else self.defaults & options.keys())

    def __str__(self) -> str:
        return self.text()

    def text(self, only: Collection[str] | None = None) -> str:
        """Return the printed form, with only the named options; None: with all that are not at their default."""
        resolved = self.defaults is not None  # it has the name `none`, not None
        parts = []
        for name, value in self.shown_options.items():
            if only is None or name in only:
                shown = value if resolved and value == "none" else _format_value(value)
                parts.append(f"{name}={shown}" if name else shown)
        return f"{self.name}({', '.join(parts)})" if parts else self.name


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a series as a tuple, and a scalar or a text as a tuple of length one."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)


def as_choice(choice: Choice | str) -> Choice:
    """Return a choice unchanged, or parse one from text. Raises ConfigError as `parse`."""
    return choice if isinstance(choice, Choice) else parse(choice)


def parse(text: str) -> Choice:
    """Return the choice written as text, such as `adakv(floor=0.1)`.

    Raises ConfigError that points at the first wrong character.
    """
    parser = _Parser(text)
    choice = parser.read_choice()
    parser.skip_spaces()
    if parser.position < len(text):
        parser.refuse("nothing more")
    return choice


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Split a text at the separators outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter == "(") - (letter == ")")
        if letter == separator and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def split_policy_and_selection(text: str) -> list[str]:
    """Split a text at the colon between policy and selection; one part where it names only one of them.

    Colons within one name do not split: `my_file.py:MyScore`, `cache:my_file.py:evict`.
    """
    first, *rest = split_outside_brackets(text, ":")
    # a prefix such as `cache` or `my_file.py` belongs to the name after it
    while rest and _NAME_PREFIX.fullmatch(first.rpartition(":")[2]):
        first, *rest = f"{first}:{rest[0]}", *rest[1:]
    return [first, ":".join(rest)] if rest else [first]


def _format_value(value: Any) -> str:
    """Return an option's value as text that parses back to it; ambiguous texts are quoted."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Choice) and not value.shown_options:
        return f"{value}()"  # a call: a bare name is text
    text = str(value)
    typed = isinstance(value, str) and _parse_word(text) != text
    if typed or not (isinstance(value, Choice) or _NAME.fullmatch(text)):
        quote = "'" if '"' in text else '"'
        return f"{quote}{text}{quote}"
    return text


def _parse_word(word: str) -> Any:
    """Return the value of a bare word: a number, true, false, none, or the word itself."""
    for number in (int, float):
        try:
            return number(word)
        except ValueError:
            pass
    return _WORDS.get(word, word)


class _Parser:
    """A parser that reads the text of a choice from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.position, self.depth = text, 0, 0

    def skip_spaces(self) -> None:
        """Skip spaces."""
        match = _SPACE.match(self.text, self.position)
        self.position = match.end() if match else self.position

    def refuse(self, expected: str) -> NoReturn:
        """Raise ConfigError with the expected and the actual text at the current position."""
        rest = self.text[self.position :]
        got = f"'{rest[:12]}{'…' if len(rest) > 12 else ''}'" if rest else "its end"
        where = f"'{self.text}' at character {self.position + 1}"
        raise ConfigError(f"{where}: expected {expected}, got {got}; write name(option=value, …)")

    def accept(self, letter: str) -> bool:
        """Skip spaces; consume `letter` if it comes next, and return whether it did."""
        self.skip_spaces()
        if not self.text.startswith(letter, self.position):
            return False
        self.position += 1
        return True

    def read_word(self, expected: str) -> str:
        """Consume and return a bare word. Raises ConfigError, naming what was `expected`, if none comes next."""
        self.skip_spaces()
        match = _NAME.match(self.text, self.position)
        if match is None:
            self.refuse(expected)
        self.position = match.end()
        return match.group()

    def read_choice(self) -> Choice:
        """Consume and return a choice: a name with optional options in brackets."""
        name = self.read_word("a name")
        return Choice(name, self.read_options()) if self.accept("(") else Choice(name)

    def read_options(self) -> dict[str, Any]:
        """Consume the options up to the closing bracket, and return name -> value."""
        self.depth += 1
        if self.depth > DEEPEST:
            self.refuse(f"at most {DEEPEST} calls inside each other")
        options: dict[str, Any] = {}
        while not self.accept(")"):
            if options and not self.accept(","):
                self.refuse("',' or ')'")
            start = self.position
            name, value = self.read_option(first=not options)
            if name in options:
                self.position = start
                self.refuse(f"{name} once")
            options[name] = value
        self.depth -= 1
        return options

    def read_option(self, first: bool) -> tuple[str, Any]:
        """Consume one option and return (name, value); the first may be without a name, and then gets `UNNAMED`."""
        self.skip_spaces()
        start = self.position
        value = self.read_value()
        if isinstance(value, str) and self.accept("="):
            return value, self.read_value()
        if not first:
            self.position = start
            self.refuse("option=value")
        return UNNAMED, value

    def read_value(self) -> Any:
        """Consume and return a value: a quoted text, a call or a bare word."""
        self.skip_spaces()
        quoted = _QUOTED.match(self.text, self.position)
        if quoted:
            self.position = quoted.end()
            return quoted.group()[1:-1]
        word = self.read_word("a value")
        return Choice(word, self.read_options()) if self.accept("(") else _parse_word(word)
