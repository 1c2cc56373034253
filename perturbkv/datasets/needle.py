"""A needle in a haystack: a fact at a given depth of a long text, asked for at the end (paper, appendix E).

The haystack is prose that ships with Python, or repeated filler. Lengths count the tokens of the user's turn.

Running English prose that every Python carries: CPython's language reference in `pydoc_data.topics`.

Needle prompts with a second fact of the same words about another city: which one was asked for has to be read.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import replace

from perturbkv.datasets.dataset_registry import DatasetOptions, LoadedDataset
from perturbkv.datasets.encode import Tokenizer
from perturbkv.datasets.sample import Sample
from perturbkv.errors import DatasetError

_MARKUP = re.compile(r"\*\*|``|`|\"\"|\[\d+\]_?|\|")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_ODD = re.compile(r"::|[=<>{}\\^~_@#]|\.\.\.|\(\)|--")


@functools.cache
def sentences() -> tuple[str, ...]:
    """Plain sentences of the manual, in its own order: no code, tables, headings or grammar."""
    from pydoc_data.topics import topics

    found = [sentence for name in sorted(topics) for block in _paragraphs(topics[name]) for sentence in _split(block)]
    return tuple(dict.fromkeys(found))


def _paragraphs(text: str) -> list[str]:
    """Blocks of unindented lines that read as prose."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith((" ", "*", "-", "+", "["))]
    return [" ".join(block.split()) for block in blocks if not re.search(r"^[=\-*~^\"]{4,}$", block, re.MULTILINE)]


def _split(paragraph: str) -> list[str]:
    cleaned = re.sub(r"\*(\w+)\*", r"\1", _MARKUP.sub("", paragraph))
    return [sentence for sentence in _SENTENCE_END.split(cleaned) if _is_plain(sentence)]


def _is_plain(sentence: str) -> bool:
    words = sentence.split()
    return (
        6 <= len(words) <= 60
        and sentence[0].isupper()
        and sentence[-1] in ".!?"
        and not _ODD.search(sentence)
        and not any(character.isdigit() for character in sentence)
    )


CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Dublin", "Prague", "Havana", "Quito", "Riga", "Tunis", "Perth")
INSTRUCTION = "A magic number is hidden in the following text. Remember it. I will ask you about it afterwards.\n\n"
NEEDLE = "The magic number of {city} is {number}."
QUESTION = "\n\nWhat is the magic number of {city} that the text mentions?"
PREFIX = "The magic number of {city} is"
NOISE = (
    "The river is wide and slow.",
    "The hills are green in spring.",
    "A bird sits on the fence.",
    "The road goes on and on.",
    "Clouds come and clouds go.",
)


_ROOM = 50
"""Tokens of a sentence or two, by which samples of other cities and numbers differ at most."""


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """Samples that go through lengths × depths in turn; sample i is the same however many are asked for.

    Raises DatasetError where a length is too short for needle and question.
    """
    grid = [(length, depth) for length in options.lengths for depth in options.depths]
    samples = tuple(_sample(place, *grid[place % len(grid)], options, tokenizer) for place in range(options.samples))
    digest = hashlib.sha256("\n".join(_source(options.haystack)).encode()).hexdigest()
    return LoadedDataset(
        samples,
        {
            "lengths": list(options.lengths),
            "depths": list(options.depths),
            "haystack": options.haystack,
            "haystack_sha256": digest,
            "wording": {"needle": [INSTRUCTION, NEEDLE, QUESTION, PREFIX]},
        },
    )


def _source(haystack: str) -> Sequence[str]:
    return sentences() if haystack == "prose" else NOISE


def _sample(place: int, length: int, depth: float, options: DatasetOptions, tokenizer: Tokenizer) -> Sample:
    draw = random.Random(f"needle/{options.seed}/{place}/{length}/{depth}/{options.haystack}")
    city, number = draw.choice(CITIES), str(draw.randrange(1_000_000, 10_000_000))
    needle, question = NEEDLE.format(city=city, number=number), QUESTION.format(city=city)
    room = length - _count(tokenizer, INSTRUCTION + needle + " " + question)
    hay = _fill(_source(options.haystack), draw, room, tokenizer)
    context = INSTRUCTION + " ".join(_insert(hay, needle, depth, tokenizer))
    while _count(tokenizer, context + question) > length:
        if not hay:
            needed = -(-(_count(tokenizer, context + question) + _ROOM) // 100) * 100
            msg = f"a needle prompt of {length} tokens leaves no room for a haystack; use --length {needed} or more"
            raise DatasetError(msg)
        hay.pop()
        context = INSTRUCTION + " ".join(_insert(hay, needle, depth, tokenizer))
    return Sample(
        id=f"{place}-{length}-{depth:g}",
        context=context,
        question=question,
        answers=(number,),
        answer_prefix=PREFIX.format(city=city),
        task="needle",
    )


def _fill(source: Sequence[str], draw: random.Random, room: int, tokenizer: Tokenizer) -> list[str]:
    """Consecutive sentences from a random place on, going round at the end, about `room` tokens of them."""
    start, used = draw.randrange(len(source)), 0
    hay: list[str] = []
    while used < room:
        hay.append(source[(start + len(hay)) % len(source)])
        used += _count(tokenizer, " " + hay[-1])
    return hay


def _insert(hay: Sequence[str], needle: str, depth: float, tokenizer: Tokenizer) -> list[str]:
    """The needle at the sentence boundary nearest to `depth` of the haystack's tokens."""
    ends = [0]
    for sentence in hay:
        ends.append(ends[-1] + _count(tokenizer, " " + sentence))
    place = min(range(len(ends)), key=lambda index: abs(ends[index] - depth * ends[-1]))
    return [*hay[:place], needle, *hay[place:]]


def _count(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def distracted(sample: Sample, seed: int) -> tuple[Sample, str]:
    """A needle sample with the other city's fact right behind its own, and its own fact's sentence.

    Raises DatasetError where the sample is not needle's.
    """
    answer = sample.answers[0] if sample.answers else ""
    found = [fact for city in CITIES if (fact := NEEDLE.format(city=city, number=answer)) in sample.context]
    if not found:
        msg = f"expected sample '{sample.id}' to hold needle's fact, got a context without it; use --dataset needle"
        raise DatasetError(msg)
    draw = random.Random(f"distraction/{seed}/{sample.id}")
    others = [city for city in CITIES if f" {city} " not in found[0]]
    wrong = NEEDLE.format(city=draw.choice(others), number=draw.randrange(1_000_000, 10_000_000))
    return replace(sample, context=sample.context.replace(found[0], f"{found[0]} {wrong}", 1)), found[0]
