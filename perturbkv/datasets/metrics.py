"""Metrics of answers, from 0 to 1: exact match, F1, RULER's matches, numbers, and the metrics of the datasets.

LongBench's metrics, and ROUGE-L with them, come from the installed lm-eval; the others have no dependency. Exact match
and F1 follow SQuAD (Rajpurkar et al., 2016, https://arxiv.org/abs/1606.05250, section 6.1): both compare lower-case
words without punctuation and articles. An accepted answer that is empty after this, such as the "A" of a multiple
choice or "+", keeps its articles, or its punctuation too: SQuAD's own evaluation gives such an answer 0, and silence 1.
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
from perturbkv.datasets.ruler import tasks
from perturbkv.errors import DatasetError, UnknownNameError

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact_match(text: str, answers: Sequence[str]) -> float:
    """Return 1 if a text has the same words, in the same order, as an accepted answer, else 0."""
    return float(any(words == expected for words, expected in _word_pairs(text, answers)))


def f1(text: str, answers: Sequence[str]) -> float:
    """Return the largest word F1, in [0, 1], between a text and an accepted answer."""
    return max((_word_f1(words, expected) for words, expected in _word_pairs(text, answers)), default=0.0)


def _word_f1(words: list[str], expected: list[str]) -> float:
    """Return the F1 of two lists of words, ignoring order; 0 without a common word."""
    common = (Counter(words) & Counter(expected)).total()
    return 2 * common / (len(words) + len(expected)) if common else 0.0


def _word_pairs(text: str, answers: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield (words of the text, words of an answer) per answer, by the strongest normalisation that keeps any word."""
    for answer in answers:
        normalise = next((normalise for normalise in _NORMALISATIONS if normalise(answer)), str.split)
        yield normalise(text), normalise(answer)


_NORMALISATIONS: tuple[Callable[[str], list[str]], ...] = (
    lambda text: _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split(),
    lambda text: text.lower().translate(_PUNCTUATION).split(),
    lambda text: text.lower().split(),
)
"""Normalisations of a text to lower-case words: without punctuation and articles, without punctuation, with both."""


def string_match_all(text: str, answers: Sequence[str]) -> float:
    """Return the share, in [0, 1], of the accepted answers that occur in a text, ignoring case, as RULER grades."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def contains(text: str, answers: Sequence[str]) -> float:
    """Return 1 if an accepted answer occurs in a text, ignoring case, else 0, as RULER grades its QA tasks."""
    return float(string_match_all(text, answers) > 0)


_NUMBER = re.compile(r"\d[\d,]*")


def exact_number(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the first number in a text, without thousands' commas, equals an answer, else 0 (or without one).

    NaN where no answer is a number.
    """
    accepted = _numbers(answers)
    return float(_first_number(text) in accepted) if accepted else math.nan


def leading_digits(text: str, answers: Sequence[str]) -> float:
    """Return the share, in [0, 1], of an answer's leading digits that the first number in a text matches.

    For several answers the largest share; NaN where no answer is a number.
    """
    first = _first_number(text)
    shares = [len(os.path.commonprefix([first, number])) / len(number) for number in _numbers(answers)]
    return max(shares, default=math.nan)


def _numbers(answers: Sequence[str]) -> list[str]:
    """Return the answers that are plain numbers, without commas."""
    return [answer.replace(",", "") for answer in answers if _NUMBER.fullmatch(answer)]


def _first_number(text: str) -> str:
    """Return the digits of the first number in a text, without commas; empty where there is none."""
    match = _NUMBER.search(text)
    return match[0].replace(",", "") if match else ""


Grade = Callable[[str, Sequence[str], Sequence[str]], float]
"""(text of an answer, accepted answers, classes to choose from) -> score from 0 to 1."""
CONTAINS, STRING_MATCH_ALL = "contains", "string_match_all"
DEFAULT = "f1"
"""Metric for accepted answers without a dataset's metric and without a choice."""
_DEEPEST = 10**6
"""Recursion limit for ROUGE-L, which needs a call per word of an answer and a reference."""


@dataclass(frozen=True)
class Metric:
    """A metric of answers: its name, and the function that grades an answer."""

    name: str
    grade: Grade


def find_metric(name: str) -> Metric | None:
    """Return the metric of a dataset, or of a name in `CHOICES`; None for an empty name.

    Raises DatasetError where a package is missing or of an unknown version.
    """
    if name in CHOICES:
        return Metric(name, CHOICES[name]())
    if name == "needle":
        return find_metric("exact-number")
    if not name:
        return None
    if name.startswith(RULER_PREFIX):
        ruler = tasks.read(name)
        return Metric(  # of a single answer lm-eval's string_match_part is its string_match_all
            ruler.metric,
            lambda text, answers, classes: string_match_all(wording.cut_answer(text, ruler.until), answers),
        )
    task = wording.read(name)
    return Metric(task.metric, _longbench_grade(task.function, task.until))


def check_name(name: str) -> None:
    """Raise UnknownNameError unless `name` is one of `CHOICES`."""
    if name not in CHOICES:
        raise UnknownNameError(name, "metric", CHOICES)


def check_gradable(metric: Metric, answers: Sequence[str], classes: Sequence[str], sample: str) -> None:
    """Raise DatasetError if a metric cannot grade answers to a sample, by its accepted `answers` and its `classes`.

    `sample` is the sample's id, for the message.
    """
    needs = ""
    try:  # on an empty text, before a model is loaded
        score = metric.grade("", answers, classes)
        if math.isnan(score):
            needs = "answers that are numbers"
        elif score and metric.name in (CONTAINS, STRING_MATCH_ALL):
            needs = "answers that are not empty"
    except KeyError as error:
        needs = f"the field {error}"
    except IndexError:
        needs = "answers as LongBench writes them"
    if needs:
        got = " | ".join(answers)[:80]
        raise DatasetError(f"sample '{sample}': the metric {metric.name} needs {needs}; got the answers '{got}'")


def _ignoring_classes(grade: Callable[[str, Sequence[str]], float]) -> Grade:
    """Return a `Grade` from a function of text and answers; the classes are ignored."""
    return lambda text, answers, classes: grade(text, answers)


CHOICES: Mapping[str, Callable[[], Grade]] = {
    "f1": lambda: _ignoring_classes(f1),
    "exact-match": lambda: _ignoring_classes(exact_match),
    "rouge-l": lambda: _longbench_grade("get_rouge_with_score"),
    "exact-number": lambda: _ignoring_classes(exact_number),
    CONTAINS: lambda: _ignoring_classes(contains),
    STRING_MATCH_ALL: lambda: _ignoring_classes(string_match_all),
}
"""Name of a metric that suits any accepted answers -> function that returns how it grades one."""


def _longbench_grade(name: str, until: Sequence[str] = ()) -> Grade:
    """Return a `Grade` by the lm-eval function `name`; the text is cut at the first of the markers `until`."""
    function = _grading_functions().get(name)
    if function is None:
        raise DatasetError(
            f"expected {name} in LongBench's metrics, as lm-eval 0.4.13 has it, got none; {wording.INSTALL}"
        )

    def grade(text: str, answers: Sequence[str], classes: Sequence[str]) -> float:
        text = wording.cut_answer(text, until)
        row = {"answers": list(answers), **({"all_classes": list(classes)} if classes else {})}
        with warnings.catch_warnings(), _raised_recursion_limit():  # Python warns of how jieba opens its dictionary
            warnings.simplefilter("ignore")
            return float(function(row, [text])["score"])

    return grade


@contextmanager
def _raised_recursion_limit() -> Iterator[None]:
    """Raise Python's recursion limit within the block: ROUGE-L needs it, and lm-eval otherwise scores 0."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@functools.cache
def _grading_functions() -> dict[str, Any]:
    """Return name -> grading function of lm-eval's LongBench file, executed without importing lm-eval.

    Raises DatasetError where the file or a package is missing.
    """
    path = wording.lm_eval_folder("the metric comes from lm-eval") / "metrics.py"
    if not path.is_file():
        raise DatasetError(
            f"expected LongBench's metrics at {path}, as lm-eval 0.4.13 has them, got none; {wording.INSTALL}"
        )
    try:
        with warnings.catch_warnings():  # the old packages that it imports warn of their own syntax
            warnings.simplefilter("ignore")
            functions = run_file(path, lambda name: None)
    except ImportError:
        raise DatasetError(
            f"LongBench's metrics need jieba, fuzzywuzzy and rouge, which are not installed; {wording.INSTALL}"
        ) from None
    logging.getLogger("jieba").setLevel(logging.WARNING)
    return functions
