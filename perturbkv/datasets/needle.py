"""Needle in a haystack: a fact at a given depth of a long text, and a question about it at the end (paper, appendix E).

The haystack is English prose that ships with Python, CPython's language reference in `pydoc_data.topics`, or repeated
filler. Lengths count the tokens of the user's turn. A distracted prompt has a second fact in the same words about
another city, so that the city has to be read too.
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
    """Return the prose sentences of CPython's language reference, in its order, without repetitions."""
    from pydoc_data.topics import topics

    paragraphs = [paragraph for name in sorted(topics) for paragraph in _paragraphs(topics[name])]
    return tuple(dict.fromkeys(sentence for paragraph in paragraphs for sentence in _split_sentences(paragraph)))


def _paragraphs(text: str) -> list[str]:
    """Return a text's unindented prose paragraphs, as one-line texts; lists, tables and headings are omitted."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith((" ", "*", "-", "+", "["))]
    return [" ".join(block.split()) for block in blocks if not re.search(r"^[=\-*~^\"]{4,}$", block, re.MULTILINE)]


def _split_sentences(paragraph: str) -> list[str]:
    """Return the plain prose sentences of a paragraph, without markup."""
    cleaned = re.sub(r"\*(\w+)\*", r"\1", _MARKUP.sub("", paragraph))
    return [sentence for sentence in _SENTENCE_END.split(cleaned) if _is_plain(sentence)]


def _is_plain(sentence: str) -> bool:
    """Return whether a sentence is prose of 6 to 60 words, from a capital to a full stop, without code and digits."""
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


_MARGIN = 50
"""Tokens of a sentence or two, by which samples of other cities and numbers differ at most."""


def load(name: str, options: DatasetOptions, tokenizer: Tokenizer) -> LoadedDataset:
    """Return the needle samples, which cycle through lengths × depths; sample i is the same for any number of samples.

    Raises DatasetError where a length is too short for needle and question.
    """
    grid = [(length, depth) for length in options.lengths for depth in options.depths]
    samples = tuple(_sample(index, *grid[index % len(grid)], options, tokenizer) for index in range(options.samples))
    digest = hashlib.sha256("\n".join(_haystack_sentences(options.haystack)).encode()).hexdigest()
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


def _haystack_sentences(haystack: str) -> Sequence[str]:
    """Return the sentences from which a haystack is drawn, for `prose` or `noise`."""
    return sentences() if haystack == "prose" else NOISE


def _sample(index: int, length: int, depth: float, options: DatasetOptions, tokenizer: Tokenizer) -> Sample:
    """Return a sample of at most `length` tokens, its needle at `depth` of the haystack.

    Raises DatasetError where not even an empty haystack fits.
    """
    draw = random.Random(f"needle/{options.seed}/{index}/{length}/{depth}/{options.haystack}")
    city, number = draw.choice(CITIES), str(draw.randrange(1_000_000, 10_000_000))
    needle, question = NEEDLE.format(city=city, number=number), QUESTION.format(city=city)
    hay_tokens = length - _count_tokens(tokenizer, INSTRUCTION + needle + " " + question)
    hay = _draw_haystack(_haystack_sentences(options.haystack), draw, hay_tokens, tokenizer)
    context = INSTRUCTION + " ".join(_insert_needle(hay, needle, depth, tokenizer))
    while _count_tokens(tokenizer, context + question) > length:
        if not hay:
            needed = -(-(_count_tokens(tokenizer, context + question) + _MARGIN) // 100) * 100
            raise DatasetError(
                f"a needle prompt of {length} tokens leaves no room for a haystack; use --length {needed} or more"
            )
        hay.pop()
        context = INSTRUCTION + " ".join(_insert_needle(hay, needle, depth, tokenizer))
    return Sample(
        id=f"{index}-{length}-{depth:g}",
        context=context,
        question=question,
        answers=(number,),
        answer_prefix=PREFIX.format(city=city),
        task="needle",
    )


def _draw_haystack(source: Sequence[str], draw: random.Random, tokens: int, tokenizer: Tokenizer) -> list[str]:
    """Return about `tokens` tokens of consecutive sentences from a random start, wrapping at the end."""
    start, used = draw.randrange(len(source)), 0
    hay: list[str] = []
    while used < tokens:
        hay.append(source[(start + len(hay)) % len(source)])
        used += _count_tokens(tokenizer, " " + hay[-1])
    return hay


def _insert_needle(hay: Sequence[str], needle: str, depth: float, tokenizer: Tokenizer) -> list[str]:
    """Return the sentences with the needle at the sentence boundary nearest to a depth, a share of their tokens."""
    ends = [0]
    for sentence in hay:
        ends.append(ends[-1] + _count_tokens(tokenizer, " " + sentence))
    before = min(range(len(ends)), key=lambda index: abs(ends[index] - depth * ends[-1]))
    return [*hay[:before], needle, *hay[before:]]


def _count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Return the number of tokens of a text, without special tokens."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def add_distraction(sample: Sample, seed: int) -> tuple[Sample, str]:
    """Return a needle sample with an added false needle, and the sentence of the true needle.

    The false needle is the fact of another city. Raises DatasetError for a sample that is not of the needle dataset.
    """
    answer = sample.answers[0] if sample.answers else ""
    facts = [fact for city in CITIES if (fact := NEEDLE.format(city=city, number=answer)) in sample.context]
    if not facts:
        raise DatasetError(
            f"expected sample '{sample.id}' to hold needle's fact, got a context without it; use --dataset needle"
        )
    draw = random.Random(f"distraction/{seed}/{sample.id}")
    other_cities = [city for city in CITIES if f" {city} " not in facts[0]]
    wrong = NEEDLE.format(city=draw.choice(other_cities), number=draw.randrange(1_000_000, 10_000_000))
    return replace(sample, context=sample.context.replace(facts[0], f"{facts[0]} {wrong}", 1)), facts[0]
