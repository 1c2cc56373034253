"""What grades a prompt's answers, and how: one way for answers that a trace stores and for those that are shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from perturbkv.datasets import metrics
from perturbkv.datasets.encode import Prompt
from perturbkv.datasets.metrics import Metric
from perturbkv.datasets.prompts import Prompts
from perturbkv.errors import DatasetError

Decode = Callable[..., str]
"""A tokenizer's: token ids to text."""


def metrics_of(prompts: Sequence[Prompt]) -> dict[str, Metric]:
    """`Prompt.grading` -> the metric, of every prompt with accepted answers, tried on each of them.

    Raises DatasetError where a metric is not installed or cannot read the answers.
    """
    answered = [prompt for prompt in prompts if prompt.grading]
    found = {grading: metrics.metric(grading) for grading in {prompt.grading for prompt in answered}}
    known = {grading: metric for grading, metric in found.items() if metric is not None}
    for prompt in answered:
        metrics.check(known[prompt.grading], prompt.answers, prompt.classes, prompt.sample_id)
    return known


def check_answers(prompts: Prompts) -> None:
    """Raise DatasetError where a prompt has no accepted answers: nothing would tell how good a generated one is."""
    without = [prompt.sample_id for prompt in prompts if not prompt.grading]
    if without:
        msg = (
            f"expected accepted answers in every sample of {prompts.dataset}, to grade generated ones by, got none in "
            f"{len(without)} of {len(prompts)}, such as '{without[0]}'; give `answers`, or use generate, which shows "
            "answers without grading them"
        )
        raise DatasetError(msg)


def text_of(tokens: Sequence[int], decode: Decode) -> str:
    """The answer as it is graded: without the tokens that are special to the model."""
    return decode(list(tokens), skip_special_tokens=True)


def grade(text: str, prompt: Prompt, graded: Mapping[str, Metric]) -> float:
    """The score of an answer to the prompt, 0 to 1; NaN where nothing grades it."""
    metric = graded.get(prompt.grading)
    return metric.grade(text, prompt.answers, prompt.classes) if metric else math.nan
