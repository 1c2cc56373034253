"""Prompts and grading of `decoding.py`: three kinds whose answers are long, lines of right answers, and loops."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

import perturbkv as pk

GIVEN = 4
"""Lines of an answer that stand in the prompt."""
BLOCK, TIMES = 32, 4
"""A loop is a block of so many tokens at most, at least so many times."""
MODULES = (
    "a queue with priorities that are changed later", "a cache that forgets what was used least recently",
    "a parser of arithmetic expressions with brackets", "a matrix class with products and inverses",
    "a tokenizer of a small language", "a text adventure with five rooms", "a bank with accounts and transfers",
)  # fmt: skip
NAMES = (
    "Anna Boris Clara David Elena Felix Greta Henry Irene James Karen Louis Maria Nadia Oscar Paula Quinn Robert Sarah "
    "Thomas Ursula Victor Wendy Xavier Yusuf Zelda Alice Bruno Carol Diana Emil Fiona George Helen Ivan Julia Kevin "
    "Laura Martin Nora"
).split()


@dataclass(frozen=True)
class Task:
    """A prompt: its kind, name and text, the lines of a right answer, of code none, and the numbers that they add.

    The first `GIVEN` lines are the beginning of the answer, which the model goes on with.
    """

    kind: str
    name: str
    text: str
    lines: tuple[str, ...] = ()
    added: tuple[int, ...] = ()

    def row(self) -> dict[str, str]:
        """Return the prompt as a row of a jsonl file."""
        begun = {"answer_prefix": "".join(f"{line}\n" for line in self.lines[:GIVEN])} if self.lines else {}
        return {"id": self.name, "prompt": self.text, **begun}

    def share_right(self, text: str) -> float | None:
        """Return the share of lines that an answer has right; None for code.

        A sum is right where it adds its number to the total of the line before, be that right or wrong.
        """
        said = [*self.lines[:GIVEN], *(line.strip() for line in text.splitlines())]
        if self.added:
            steps = {(before, line) for before, line in pairwise(said)}
            right = [any(line == sum_line(number, before, one) for before, line in steps)
                     for number, one in enumerate(self.added, 1)]  # fmt: skip
        else:
            right = [line in said for line in self.lines]
        return float(np.mean(right[GIVEN:])) if right else None


def sum_line(number: int, before: str, added: int) -> str:
    """Return the line that adds a number to the total at the end of the line before; empty where that has none."""
    total = before.rpartition(" ")[2]
    return f"{number}. {total} + {added} = {int(total) + added}" if total.isdecimal() else ""


def code_task(place: int) -> Task:
    """Return the prompt for a module."""
    name = MODULES[place]
    text = f"Write a complete Python module for {name}, with docstrings, type hints and tests for every function."
    return Task("code", name, text)


def needle_task(place: int, persons: int = 36) -> Task:
    """Return the prompt for a sentence per person of a table."""
    draw = random.Random(f"decoding/needle/{place}")
    rooms = {name: draw.randrange(1000, 10000) for name in draw.sample(NAMES, persons)}
    lines = [f"{number}. {name} lives in room {room}." for number, (name, room) in enumerate(rooms.items(), 1)]
    table = "\n".join(f"{name}: {room}" for name, room in rooms.items())
    asked = f"Write a numbered sentence for each of these {persons} persons, in this order, nothing else."
    return Task("needle", f"rooms {place}", f"Each person has a room.\n\n{table}\n\n{asked}", tuple(lines))


def arithmetic_task(place: int, numbers: int = 39) -> Task:
    """Return the prompt for the running total of a list of numbers."""
    draw = random.Random(f"decoding/arithmetic/{place}")
    added = [draw.randrange(2, 10) for _ in range(numbers)]
    lines = ["0. 0 + 0 = 0"]
    for number, one in enumerate(added, 1):
        lines.append(sum_line(number, lines[-1], one))
    given = "\n".join(f"{number}. {one}" for number, one in enumerate(added, 1))
    asked = (
        f"Write a numbered line for each of these {numbers} numbers, in this order, nothing else. Each line adds its "
        "number to the total of the line before."
    )
    text = f"Add these numbers to a total, one after the other:\n{given}\n\n{asked}"
    return Task("arithmetic", f"totals {place}", text, tuple(lines[1:]), tuple(added))


KINDS: dict[str, Callable[[int], Task]] = {"needle": needle_task, "arithmetic": arithmetic_task, "code": code_task}


def tasks(count: int) -> list[Task]:
    """Return `count` prompts of each kind, the kinds in turn.

    Raises PerturbkvError for more than there are.
    """
    if count > len(MODULES):
        raise pk.PerturbkvError(f"expected at most {len(MODULES)} prompts of a kind (--samples), got {count}")
    return [make(place) for place in range(count) for make in KINDS.values()]


def answer_of(task: Task, tokens: Sequence[int], text: str, longest: int) -> dict[str, Any]:
    """Return what is told of an answer: its tokens, whether it ended, loops, and the share of right lines."""
    ended = len(tokens) < longest
    told = {"tokens": len(tokens), "ended": ended, "loops": not ended and loops(tokens)}
    return {**told, "lines": task.share_right(text), "text": text}


def loops(tokens: Sequence[int]) -> bool:
    """Return whether the last tokens, at least `BLOCK`, are a block of at most `BLOCK` tokens `TIMES` times or more."""
    for length in range(1, BLOCK + 1):
        span = max(TIMES * length, BLOCK)
        tail = tokens[-span:]
        if len(tail) == span and all(map(int.__eq__, tail[length:], tail)):
            return True
    return False
