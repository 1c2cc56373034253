"""Grading of answers, the same for answers in a trace and for answers on screen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from perturbkv.datasets import metrics
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.metrics import Metric
from perturbkv.datasets.prompts import Prompts
from perturbkv.errors import DatasetError

Decode = Callable[..., str]
"""A tokenizer's function from token ids to text."""


def metrics_of(prompts: Sequence[Prompt]) -> dict[str, Metric]:
    """Return name -> metric, for the metrics in `Prompt.grading` of prompts with accepted answers.

    Raises DatasetError where a metric is not installed or cannot read a prompt's accepted answers.
    """
    answered = [prompt for prompt in prompts if prompt.grading]
    by_name = {grading: metrics.metric(grading) for grading in {prompt.grading for prompt in answered}}
    known = {grading: metric for grading, metric in by_name.items() if metric is not None}
    for prompt in answered:
        metrics.check(known[prompt.grading], prompt.answers, prompt.classes, prompt.sample_id)
    return known


def check_answers(prompts: Prompts) -> None:
    """Raise DatasetError for a prompt without accepted answers, as its generated answer cannot be graded."""
    without = [prompt.sample_id for prompt in prompts if not prompt.grading]
    if without:
        raise DatasetError(
            f"expected accepted answers in every sample of {prompts.dataset}, to grade generated ones by, got none in "
            f"{len(without)} of {len(prompts)}, such as '{without[0]}'; give `answers`, or use generate, which shows "
            "answers without grading them"
        )


def decode_answer(tokens: Sequence[int], decode: Decode) -> str:
    """Return the text of an answer's tokens for grading, without special tokens."""
    return decode(list(tokens), skip_special_tokens=True)


def grade(text: str, prompt: Prompt, graded: Mapping[str, Metric]) -> float:
    """Return the score of an answer to a prompt, 0 to 1; NaN where `graded` (name -> metric) lacks its metric."""
    metric = graded.get(prompt.grading)
    return metric.grade(text, prompt.answers, prompt.classes) if metric else math.nan
