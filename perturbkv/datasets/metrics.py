"""How good an answer is, from 0 to 1: by LongBench's metrics from the installed lm-eval, or by a needle's number."""

from __future__ import annotations

import functools
import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

from perturbkv.datasets import scoring, wording
from perturbkv.datasets.ruler.metrics import grader
from perturbkv.datasets.ruler.tasks import PREFIX
from perturbkv.errors import DatasetError


@dataclass(frozen=True)
class Metric:
    """A data set's way to grade.

    Attributes:
        name: of the metric.
        grade: text of an answer, accepted answers, classes to choose from -> 0 to 1, of the best accepted answer.
    """

    name: str
    grade: Callable[[str, Sequence[str], Sequence[str]], float]


def metric(task: str) -> Metric | None:
    """The metric of a LongBench data set, of RULER's task or of needle; None for a sample that is of none.

    Raises DatasetError where what it needs is not installed.
    """
    if task == "needle":
        return Metric("exact number", lambda text, answers, classes: scoring.exact_number(text, answers))
    if not task:
        return None
    if task.startswith(PREFIX):
        name, ruler = grader(task)
        return Metric(name, lambda text, answers, classes: ruler(text, answers))
    worded = wording.read(task)
    function = getattr(_functions(), worded.function)

    def grade(text: str, answers: Sequence[str], classes: Sequence[str]) -> float:
        for end in worded.until:
            text = text.split(end)[0]
        row = {"answers": list(answers), **({"all_classes": list(classes)} if classes else {})}
        with warnings.catch_warnings():  # jieba opens its dictionary in a way that newer Pythons warn of
            warnings.simplefilter("ignore")
            return float(function(row, [text])["score"])

    return Metric(worded.metric, grade)


def check(grading: Metric, answers: Sequence[str], classes: Sequence[str], sample: str) -> None:
    """Grade an empty text once, before a model is loaded. Raises DatasetError where the metric lacks what it needs."""
    try:
        grading.grade("", answers, classes)
    except (KeyError, IndexError) as error:
        needs = f"the field {error}" if isinstance(error, KeyError) else "answers as LongBench writes them"
        got = " | ".join(answers)[:80]
        msg = f"sample '{sample}': the metric {grading.name} needs {needs}; got the answers '{got}'"
        raise DatasetError(msg) from None


@functools.cache
def _functions() -> ModuleType:
    """lm-eval's metrics, from their file alone. Raises DatasetError where packages that they need are missing."""
    path = wording.lm_eval_folder("LongBench's metrics come from lm-eval") / "metrics.py"
    found = importlib.util.spec_from_file_location("perturbkv_longbench_metrics", path)
    if found is None or found.loader is None:
        msg = f"expected lm-eval's metrics at {path}, got none; {wording.INSTALL}"
        raise DatasetError(msg)
    module = importlib.util.module_from_spec(found)
    try:
        with warnings.catch_warnings():  # the old packages that it imports warn of their own syntax
            warnings.simplefilter("ignore")
            found.loader.exec_module(module)
    except (ImportError, OSError):
        msg = f"LongBench's metrics need jieba, fuzzywuzzy and rouge, which are not installed; {wording.INSTALL}"
        raise DatasetError(msg) from None
    logging.getLogger("jieba").setLevel(logging.WARNING)
    return module
