"""Judges that are planted: `python judges.py NAME` reads questions and writes what NAME says, right or wrong."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

Questions = list[dict[str, Any]]


def planted_judge(name: str) -> str:
    """The command that runs one of them."""
    return f"'{sys.executable}' '{Path(__file__).resolve()}' {name}"


def length(asked: Questions) -> Iterator[Any]:
    """An answer's characters, the last question first."""
    for one in reversed(asked):
        yield {"id": one["id"], "score": len(one["answer"]), "comment": f"{len(one['answer'])} long"}


def ten(asked: Questions) -> Iterator[Any]:
    """The best, to everybody."""
    for one in asked:
        yield {"id": one["id"], "score": 10}


def longer(asked: Questions) -> Iterator[Any]:
    """Of two answers the longer one."""
    for one in asked:
        first, second = len(one["a"]), len(one["b"])
        yield {"id": one["id"], "winner": "tie" if first == second else "a" if first > second else "b"}


def first(asked: Questions) -> Iterator[Any]:
    """Whatever stands first."""
    for one in asked:
        yield {"id": one["id"], "winner": "a"}


def half(asked: Questions) -> Iterator[Any]:
    """The first half, then a failure."""
    yield from length(asked[: len(asked) // 2])
    sys.stdout.flush()
    sys.exit("no credit left\x1b[2J")


def few(asked: Questions) -> Iterator[Any]:
    """One too few."""
    yield from length(asked[1:])


def twice(asked: Questions) -> Iterator[Any]:
    """The same one again."""
    yield from length([asked[0], asked[0]])


def unknown(asked: Questions) -> Iterator[Any]:
    """An id that nobody gave."""
    yield {"id": "nobody's", "score": 1}


def prose(asked: Questions) -> Iterator[Any]:
    """No JSON."""
    yield "I think it is good."


def silent(asked: Questions) -> Iterator[Any]:
    """One answer, then nothing for a long time."""
    yield from length(asked[:1])
    time.sleep(600)


def unnumbered(asked: Questions) -> Iterator[Any]:
    """A score that is none."""
    yield {"id": asked[0]["id"], "score": "good"}


def unfinite(asked: Questions) -> Iterator[Any]:
    """NaN, which Python writes into JSON."""
    yield {"id": asked[0]["id"], "score": float("nan")}


def huge(asked: Questions) -> Iterator[Any]:
    """Beyond every scale."""
    yield {"id": asked[0]["id"], "score": 10**400}


def undecided(asked: Questions) -> Iterator[Any]:
    """A winner that is neither."""
    yield {"id": asked[0]["id"], "winner": "both"}


def write(said: Iterable[Any]) -> None:
    for one in said:
        sys.stdout.write((one if isinstance(one, str) else json.dumps(one)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    judge: Callable[[Questions], Iterator[Any]] = globals()[sys.argv[1]]
    if len(sys.argv) > 2:  # a file that counts what was asked
        given = sys.stdin.read()
        with Path(sys.argv[2]).open("a") as log:
            log.write(given)
        write(judge([json.loads(line) for line in given.splitlines()]))
    else:
        write(judge([json.loads(line) for line in sys.stdin]))
