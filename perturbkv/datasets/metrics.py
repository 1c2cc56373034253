"""How good an answer is, from 0 to 1: by the metric of its data set, or by one that is chosen.

LongBench's metrics, and ROUGE-L with them, come from the installed lm-eval; the others need nothing.

How far an answer's words are those that were expected: exact match and F1, as SQuAD's evaluation has them.

Rajpurkar et al., 2016, https://arxiv.org/abs/1606.05250, section 6.1. Both look at lower-case words without punctuation
and without articles. An accepted answer of which nothing is left so, such as the "A" of a multiple choice or "+", is
looked at with its articles, or with its punctuation too: SQuAD's own evaluation gives such an answer 0, and silence 1.

How right is a generated number? Exactly, or as far as its leading digits go.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import string
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from perturbkv.configs.task_kinds import RULER_PREFIX
from perturbkv.datasets import wording
from perturbkv.datasets.external_code import run_file
from perturbkv.datasets.ruler.tasks import grader
from perturbkv.errors import DatasetError, UnknownNameError

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(text: str, answers: Sequence[str]) -> float:
    """1 where the words are those of an accepted answer, in its order, else 0."""
    return float(any(found == expected for found, expected in _words(text, answers)))


def f1(text: str, answers: Sequence[str]) -> float:
    """Harmonic mean of the shares of both texts' words that they have in common, in [0, 1]; of the best answer."""
    return max((_f1(found, expected) for found, expected in _words(text, answers)), default=0.0)


def _f1(found: list[str], expected: list[str]) -> float:
    common = (Counter(found) & Counter(expected)).total()
    return 2 * common / (len(found) + len(expected)) if common else 0.0


def _words(text: str, answers: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """The text's words and each answer's, both as bare as leaves the answer any."""
    for answer in answers:
        bare = next((bare for bare in _BARE if bare(answer)), str.split)
        yield bare(text), bare(answer)


def _content(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _spoken(text: str) -> list[str]:
    return text.lower().translate(_PUNCTUATION).split()


def _typed(text: str) -> list[str]:
    return text.lower().split()


_BARE = (_content, _spoken, _typed)
"""Ways to see a text as words, the barest first."""


_NUMBER = re.compile(r"\d[\d,]*")


def exact_number(text: str, answers: Sequence[str]) -> float:
    """1 where the first number in the text, its thousands' commas left out, is one of the answers, else 0.

    NaN where no answer is a number: how right a text is, this cannot tell.
    """
    wanted = _numbers(answers)
    return float(_first_number(text) in wanted) if wanted else math.nan


def leading_digits(text: str, answers: Sequence[str]) -> float:
    """The share, in [0, 1], of an answer's digits that the text's first number begins with; of the best answer.

    NaN where no answer is a number.
    """
    found = _first_number(text)
    shares = [len(os.path.commonprefix([found, number])) / len(number) for number in _numbers(answers)]
    return max(shares, default=math.nan)


def _numbers(answers: Sequence[str]) -> list[str]:
    """Those answers that are nothing but a number, without commas."""
    return [answer.replace(",", "") for answer in answers if _NUMBER.fullmatch(answer)]


def _first_number(text: str) -> str:
    """Empty where there is none."""
    found = _NUMBER.search(text)
    return found[0].replace(",", "") if found else ""


Grade = Callable[[str, Sequence[str], Sequence[str]], float]
"""Text of an answer, accepted answers, classes to choose from -> 0 to 1, of the best accepted answer."""
DEFAULT = "f1"
"""Of accepted answers that come with no data set's metric and no choice."""
_DEEPEST = 10**6
"""Calls within calls: words of an answer and a reference together."""


@dataclass(frozen=True)
class Metric:
    """A way to grade: its name, and what it gives."""

    name: str
    grade: Grade


def metric(named: str) -> Metric | None:
    """The metric of a data set, or one of `CHOICES`; None for an empty name, which is that of no data set.

    Raises DatasetError where what it needs is not installed, or is another version than ours.
    """
    if named in CHOICES:
        return Metric(named, CHOICES[named]())
    if named == "needle":
        return metric("exact-number")
    if not named:
        return None
    if named.startswith(RULER_PREFIX):
        name, ruler = grader(named)
        return Metric(name, _of_answers(ruler))
    worded = wording.read(named)
    return Metric(worded.metric, _of_longbench(worded.function, worded.until))


def check_name(name: str) -> None:
    """Raise UnknownNameError unless `name` is one of `CHOICES`."""
    if name not in CHOICES:
        raise UnknownNameError(name, "metric", CHOICES)


def check(grading: Metric, answers: Sequence[str], classes: Sequence[str], sample: str) -> None:
    """Grade an empty text once, before a model is loaded. Raises DatasetError where the metric lacks what it needs."""
    needs = ""
    try:
        if math.isnan(grading.grade("", answers, classes)):
            needs = "answers that are numbers"
    except KeyError as error:
        needs = f"the field {error}"
    except IndexError:
        needs = "answers as LongBench writes them"
    if needs:
        got = " | ".join(answers)[:80]
        msg = f"sample '{sample}': the metric {grading.name} needs {needs}; got the answers '{got}'"
        raise DatasetError(msg)


def _of_answers(grade: Callable[[str, Sequence[str]], float]) -> Grade:
    """A metric that asks for no classes."""
    return lambda text, answers, classes: grade(text, answers)


CHOICES: Mapping[str, Callable[[], Grade]] = {
    "f1": lambda: _of_answers(f1),
    "exact-match": lambda: _of_answers(exact_match),
    "rouge-l": lambda: _of_longbench("get_rouge_with_score"),
    "exact-number": lambda: _of_answers(exact_number),
}
"""Metrics that go with any accepted answers."""


def _of_longbench(name: str, until: Sequence[str] = ()) -> Grade:
    """A function of lm-eval's; an answer ends before each of `until`."""
    function = _functions().get(name)
    if function is None:
        msg = f"expected {name} in LongBench's metrics, as lm-eval 0.4.13 has it, got none; {wording.INSTALL}"
        raise DatasetError(msg)

    def grade(text: str, answers: Sequence[str], classes: Sequence[str]) -> float:
        for end in until:
            text = text.split(end)[0]
        row = {"answers": list(answers), **({"all_classes": list(classes)} if classes else {})}
        with warnings.catch_warnings(), _deep_calls():  # jieba opens its dictionary in a way that Python warns of
            warnings.simplefilter("ignore")
            return float(function(row, [text])["score"])

    return grade


@contextmanager
def _deep_calls() -> Iterator[None]:
    """Room for ROUGE-L's recursion, a call per word of both texts: where there is none, lm-eval scores 0 in silence."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@functools.cache
def _functions() -> dict[str, Any]:
    """lm-eval's metrics, from their file alone. Raises DatasetError where they, or what they need, are missing."""
    path = wording.lm_eval_folder("the metric comes from lm-eval") / "metrics.py"
    if not path.is_file():
        msg = f"expected LongBench's metrics at {path}, as lm-eval 0.4.13 has them, got none; {wording.INSTALL}"
        raise DatasetError(msg)
    try:
        with warnings.catch_warnings():  # the old packages that it imports warn of their own syntax
            warnings.simplefilter("ignore")
            found = run_file(path, lambda name: None)
    except ImportError:
        msg = f"LongBench's metrics need jieba, fuzzywuzzy and rouge, which are not installed; {wording.INSTALL}"
        raise DatasetError(msg) from None
    logging.getLogger("jieba").setLevel(logging.WARNING)
    return found
