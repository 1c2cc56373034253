"""Foreign words on every screen and in every file that is left, and screens of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.attack.odd_words import WORDS
from tests.attack.readers import Shop, open_shop
from tests.attack.running import Case, Outcome
from tests.attack.screens import Screen
from tests.attack.shown import Place, places
from tests.attack.shown import kept as screen_is_kept

_ERROR = ("list", "none.h5")
_SCREENS: dict[str, tuple[Screen, int | None]] = {
    **{f"COLUMNS={width}": (Screen({"COLUMNS": width}), 0) for width in ("0", "1", "7", "1000000", "-5", "x", "")},
    "ASCII": (Screen({"PYTHONIOENCODING": "ascii"}), 0),
    "strict latin-1": (Screen({"PYTHONIOENCODING": "latin-1:strict"}), 0),
    "the locale C": (Screen({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}), 0),
    "POSIX": (Screen({"LC_ALL": "POSIX"}), 0),
    "a dumb terminal": (Screen({"TERM": "dumb"}), 0),
    "an unknown terminal": (Screen({"TERM": "\x1b[2J"}), 0),
    "NO_COLOR": (Screen({"NO_COLOR": "1"}), 0),
    "TTY_COMPATIBLE": (Screen({"TTY_COMPATIBLE": "x"}), 0),
    "closed early": (Screen(streams="| head -c 20"), None),
    "closed at once": (Screen(streams="| true"), None),
    "no room": (Screen(streams=">/dev/full"), 2),
    "no room for both": (Screen(streams=">/dev/full 2>/dev/full"), 2),
    "stdout is closed": (Screen(streams=">&-"), None),
    "stderr is closed": (Screen(streams="2>&-"), 0),
    "stdin is closed": (Screen(streams="<&-"), 0),
    "all are closed": (Screen(streams="<&- >&- 2>&-"), None),
}
"""Screen -> the exit code that is right for a command that works; None: any of a reader that went away."""
_GONE = (0, 141)


@dataclass(frozen=True)
class Kind:
    """One kind of case, made only when it is its turn."""

    name: str
    make: Callable[[Shop, Path], Case]


def cases(workshop: Path, seed: int, count: int) -> Iterator[Case]:
    """Places × words, screens × commands; in an order of the seed."""
    kinds = _kinds()
    random.Random(seed).shuffle(kinds)
    shop = open_shop(workshop)
    for number, kind in enumerate(kinds[:count]):
        folder = workshop / f"case-{number}"
        folder.mkdir()
        yield kind.make(shop, folder)


def _kinds() -> list[Kind]:
    words = [
        Kind(f"{name}: {what}", _of_word(f"{name}: {what}", place, word))
        for name, place in places().items()
        for what, word in WORDS.items()
        if place.takes(word)
    ]
    screens = [
        Kind(
            f"{name}: {' '.join(argv[:1])} {argv[-1]}", _of_screen(f"{name}: {argv[0]} {argv[-1]}", screen, code, argv)
        )
        for name, (screen, code) in _SCREENS.items()
        for argv in (
            ("list", "policies"),
            ("list", "TRACE", "--json"),
            ("heads", "TRACE", "-o", "out", "--format", "svg"),
            _ERROR,
        )
    ]
    return words + screens


def _of_word(name: str, place: Place, word: str) -> Callable[[Shop, Path], Case]:
    def make(shop: Shop, folder: Path) -> Case:
        argv = place.prepare(shop, folder, word)
        return Case(name, folder, argv, lambda outcome: place.flaw(outcome, folder, word))

    return make


def _of_screen(name: str, screen: Screen, code: int | None, argv: tuple[str, ...]) -> Callable[[Shop, Path], Case]:
    wanted = 2 if argv is _ERROR else code

    def make(shop: Shop, folder: Path) -> Case:
        words = tuple(str(shop.trace) if word == "TRACE" else word for word in argv)
        return Case(name, folder, words, lambda outcome: _flaw(outcome, screen, wanted), start=screen.run)

    return make


def _flaw(outcome: Outcome, screen: Screen, wanted: int | None) -> str | None:
    """What is wrong with what a screen shows, or with how a command ends that has none."""
    if flaw := screen_is_kept(outcome):
        return flaw
    if outcome.code not in ((*_GONE, 2) if wanted is None else (wanted,)):
        return f"exit code {outcome.code}, not {wanted}: {outcome.err[-200:]!r}"
    if "\ufffd" in outcome.out + outcome.err:
        return f"not {screen.encoding}"
    if wanted is None and outcome.err and "|" in screen.streams:
        return f"says to nobody: {outcome.err!r}"
    return None


COUNT = len(_kinds())
