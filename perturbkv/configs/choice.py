"""`name(option=value, …)`: how a policy or a selection is written with its own parameters. One parser, one printer.

A value is a number, true, false, none, a name, quoted text, or a call again; the first may stand without a name:
`adakv(floor=0.1, safeguard=guaranteed)`, `outer(inner(window=64), alpha=0.25)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from perturbkv.errors import ConfigError
from perturbkv.escaping import line

_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[^\s(),=\"']+")
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
_WORDS = {"true": True, "false": False, "none": None}
_PREFIX = re.compile(r".*\.py|kvpress|given")
"""What stands before a colon and belongs to the name behind it."""
DEEPEST = 16
"""Calls inside each other."""
FIRST = ""
"""The name of an option that was given without one."""


@dataclass(frozen=True)
class Choice:
    """A name and its options.

    Attributes:
        name: what is chosen.
        options: name -> number, truth, None, text or `Choice`; `FIRST` for the one without a name.
        usual: of a resolved choice, which holds every option that makes a difference: those at their default, which are
            left out where the choice is shown. None: of a choice that was not resolved yet.

    Raises ConfigError for a name or a text with characters that are not seen, as no label shows them.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    usual: frozenset[str] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for text in (self.name, *self.options, *self.options.values()):
            if isinstance(text, str) and line(text) != text:
                msg = f"expected a name or a text of characters that are seen, got '{line(text)}'"
                raise ConfigError(msg)

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

    def __hash__(self) -> int:
        return hash((self.name, frozenset(self.options.items())))

    @property
    def told(self) -> dict[str, Any]:
        """The options that are shown."""
        return {name: value for name, value in self.options.items() if name not in (self.usual or ())}

    def without(self, names: Iterable[str]) -> Choice:
        """The choice without these options."""
        gone = set(names)
        left = {name: value for name, value in self.options.items() if name not in gone}
        return Choice(self.name, left, None if self.usual is None else self.usual & left.keys())

    def __str__(self) -> str:
        names = self.usual is not None  # an owner of its options takes `none` for the name that it is
        told = {name: value if names and value == "none" else _shown(value) for name, value in self.told.items()}
        shown = [f"{name}={value}" if name else value for name, value in told.items()]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


def as_choice(given: Choice | str) -> Choice:
    """The choice itself, or the one that a text writes. Raises ConfigError that points at the character."""
    return given if isinstance(given, Choice) else parse(given)


def parse(text: str) -> Choice:
    """Read a choice. Raises ConfigError that points at the character where it stops being one."""
    reader = _Reader(text)
    found = reader.choice()
    reader.skip()
    if reader.place < len(text):
        reader.refuse("nothing more")
    return found


def split(text: str, separator: str) -> list[str]:
    """Parts of a text between separators that stand outside all brackets and quotes."""
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


def halves(text: str) -> list[str]:
    """Policy and selection of `policy:selection`, or the text alone; `my_file.py:MyScore` is one name."""
    first, *rest = split(text, ":")
    if rest and _PREFIX.fullmatch(first):
        first, *rest = f"{first}:{rest[0]}", *rest[1:]
    return [first, ":".join(rest)] if rest else [first]


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Choice) and not value.told:
        return f"{value}()"  # a call: a bare name is text
    text = str(value)
    typed = isinstance(value, str) and _typed(text) != text
    if typed or not (isinstance(value, Choice) or _NAME.fullmatch(text)):
        quote = "'" if '"' in text else '"'
        return f"{quote}{text}{quote}"
    return text


def _typed(word: str) -> Any:
    """What a bare word is: a number, true, false, none, or itself."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return _WORDS.get(word, word)


class _Reader:
    """Reads one text from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.place, self.depth = text, 0, 0

    def skip(self) -> None:
        found = _SPACE.match(self.text, self.place)
        self.place = found.end() if found else self.place

    def refuse(self, expected: str) -> NoReturn:
        """Raise ConfigError with the place where something else was expected."""
        rest = self.text[self.place :]
        got = f"'{rest[:12]}{'…' if len(rest) > 12 else ''}'" if rest else "its end"
        msg = (
            f"'{self.text}' at character {self.place + 1}: expected {expected}, got {got}; write name(option=value, …)"
        )
        raise ConfigError(msg)

    def taken(self, letter: str) -> bool:
        """Whether the next letter is this one, which is then passed."""
        self.skip()
        if not self.text.startswith(letter, self.place):
            return False
        self.place += len(letter)
        return True

    def word(self, expected: str) -> str:
        self.skip()
        found = _NAME.match(self.text, self.place)
        if found is None:
            self.refuse(expected)
        self.place = found.end()
        return found.group()

    def choice(self) -> Choice:
        name = self.word("a name")
        return Choice(name, self.options()) if self.taken("(") else Choice(name)

    def options(self) -> dict[str, Any]:
        self.depth += 1
        if self.depth > DEEPEST:
            self.refuse(f"at most {DEEPEST} calls inside each other")
        found: dict[str, Any] = {}
        while not self.taken(")"):
            if found and not self.taken(","):
                self.refuse("',' or ')'")
            begin = self.place
            name, value = self.option(first=not found)
            if name in found:
                self.place = begin
                self.refuse(f"{name} once")
            found[name] = value
        self.depth -= 1
        return found

    def option(self, first: bool) -> tuple[str, Any]:
        self.skip()
        begin = self.place
        value = self.value()
        if isinstance(value, str) and self.taken("="):
            return value, self.value()
        if not first:
            self.place = begin
            self.refuse("option=value")
        return FIRST, value

    def value(self) -> Any:
        self.skip()
        quoted = _QUOTED.match(self.text, self.place)
        if quoted:
            self.place = quoted.end()
            return quoted.group()[1:-1]
        word = self.word("a value")
        return Choice(word, self.options()) if self.taken("(") else _typed(word)
