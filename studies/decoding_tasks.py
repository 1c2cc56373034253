"""Prompts and grading of `decoding.py`: three kinds whose answers are long, lines of right answers, and loops."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import perturbkv as pk

BLOCK, TIMES = 32, 4
"""A loop is a block of so many tokens at most, at least so many times."""
MODULES = (
    "a queue with priorities that are changed later", "a cache that forgets what was used least recently",
    "a parser of arithmetic expressions with brackets", "a matrix class with products and inverses",
    "a tokenizer of a small language", "a text adventure with five rooms", "a bank with accounts and transfers",
)  # fmt: skip
ACCOUNTS = ("Red", "Green", "Blue")
NAMES = (
    "Anna Boris Clara David Elena Felix Greta Henry Irene James Karen Louis Maria Nadia Oscar Paula Quinn Robert Sarah "
    "Thomas Ursula Victor Wendy Xavier Yusuf Zelda Alice Bruno Carol Diana Emil Fiona George Helen Ivan Julia Kevin "
    "Laura Martin Nora"
).split()


@dataclass(frozen=True)
class Task:
    """A prompt.

    Attributes:
        kind: one of `KINDS`.
        name: of the prompt.
        text: of the prompt.
        lines: of a right answer; none of code.
        given: how many of them stand in the prompt: the beginning of the answer, which the model goes on with.
        adds: what each account gets at its turn, of arithmetic.
    """

    kind: str
    name: str
    text: str
    lines: tuple[str, ...] = ()
    given: int = 0
    adds: tuple[int, ...] = ()

    def row(self) -> dict[str, str]:
        """Return the prompt as a row of a jsonl file."""
        begun = {"answer_prefix": "".join(f"{line}\n" for line in self.lines[: self.given])} if self.lines else {}
        return {"id": self.name, "prompt": self.text, **begun}

    def share_right(self, text: str) -> float | None:
        """Return the share of lines that an answer has right; None for code.

        A turn is right where it adds its number to the total that the account's turn before ends in, be that right or
        wrong. Of two lines for a turn the first counts.
        """
        if self.adds:
            right = [bool(line) and line == expected for line, expected in self._turns(text)]
        else:
            said = self._said(text)
            right = [line in said for line in self.lines]
        return float(np.mean(right[self.given :])) if right else None

    def share_resumed(self, text: str) -> float | None:
        """Return the share of turns that go on from the total of the account's turn before, whatever they make of it.

        Such a line is right up to its sum: what it took from the answer's own text. None of other kinds.
        """
        if not self.adds:
            return None
        resumed = [
            bool(expected) and line.rpartition(" ")[0] == expected.rpartition(" ")[0]
            for line, expected in self._turns(text)
        ]
        return float(np.mean(resumed[self.given :]))

    def _said(self, text: str) -> list[str]:
        """Return the lines of an answer, behind those that are given."""
        return [*self.lines[: self.given], *(line.strip() for line in text.splitlines())]

    def _turns(self, text: str) -> list[tuple[str, str]]:
        """Return of each turn its line, empty where it has none, and what would be right after the lines before."""
        lines = dict(reversed([(line.partition(". ")[0], line) for line in self._said(text)]))
        return [
            (lines.get(str(number), ""), turn_line(number, lines.get(str(number - len(ACCOUNTS)), ""), self.adds))
            for number in range(1, len(self.lines) + 1)
        ]


def turn_line(number: int, before: str, adds: Sequence[int]) -> str:
    """Return the line of a turn, whose account gets its number beside the total at the end of its turn before.

    Empty where that ends in no number.
    """
    total, account = before.rpartition(" ")[2], (number - 1) % len(ACCOUNTS)
    if not total.isdecimal():
        return ""
    return f"{number}. {ACCOUNTS[account]}: {total} + {adds[account]} = {int(total) + adds[account]}"


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
    return Task("needle", f"rooms {place}", f"Each person has a room.\n\n{table}\n\n{asked}", tuple(lines), given=4)


def arithmetic_task(place: int, turns: int = 36) -> Task:
    """Return the prompt for the totals of three accounts that get their numbers in turns."""
    draw = random.Random(f"decoding/accounts/{place}")
    first, adds = [draw.randrange(100, 500) for _ in ACCOUNTS], draw.sample(range(2, 7), len(ACCOUNTS))
    lines = [str(total) for total in first]
    for number in range(1, turns + 1):
        lines.append(turn_line(number, lines[-len(ACCOUNTS)], adds))
    text = (
        f"Three accounts, Red, Green and Blue, begin with {first[0]}, {first[1]} and {first[2]}. In turns, Red gets "
        f"{adds[0]}, Green gets {adds[1]} and Blue gets {adds[2]}. Write a numbered line for each of the first {turns} "
        "turns, in this order, nothing else. Each line adds the number to the account's total so far."
    )
    return Task("arithmetic", f"accounts {place}", text, tuple(lines[len(ACCOUNTS) :]), given=6, adds=tuple(adds))


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
