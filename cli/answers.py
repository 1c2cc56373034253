"""One sample of `perturbkv generate`: what its line holds, and how its answers are shown beside the expected ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from perturbkv.analyses import numbers
from perturbkv.analyses.naming import counted, short
from perturbkv.cli import console
from perturbkv.configs.eviction import EvictionConfig

if TYPE_CHECKING:
    from perturbkv.datasets.encode import Prompt
    from perturbkv.datasets.metrics import Metric
    from perturbkv.pipeline.generation import Answers

_SHOWN = 400
"""Characters of an answer in a table; the file has all."""


def metrics_of(prompts: Sequence[Prompt]) -> dict[str, Metric]:
    """The metric of each data set that prompts with answers come from, tried on each of them.

    Raises DatasetError where a metric is not installed or cannot read the answers.
    """
    from perturbkv.datasets import metrics

    answered = [prompt for prompt in prompts if prompt.answers]
    found = {task: metrics.metric(task) for task in {prompt.task for prompt in answered}}
    known = {task: metric for task, metric in found.items() if metric is not None}
    for prompt in answered:
        if prompt.task in known:
            metrics.check(known[prompt.task], prompt.answers, prompt.classes, prompt.sample_id)
    return known


def row(
    prompt: Prompt, answers: Answers, labels: Sequence[str], decode: Any, metrics: Mapping[str, Metric]
) -> dict[str, Any]:
    """The sample's line: every answer with its score from 0 to 1, null where it has none, and what its cache held."""
    metric = metrics.get(prompt.task) if prompt.answers else None

    def said(tokens: list[int]) -> dict[str, Any]:
        bare = decode(tokens, skip_special_tokens=True)
        score = metric.grade(bare, prompt.answers, prompt.classes) if metric else None
        return {"tokens": tokens, "text": decode(tokens), "score": score}

    return {
        "sample": prompt.sample_id,
        "prompt_tokens": len(prompt.token_ids),
        "answers": list(prompt.answers),
        "metric": metric.name if metric else None,
        "full": said(answers.full),
        "evicted": {
            label: {"held_share": held, **said(tokens)}
            for label, held, tokens in zip(labels, answers.held, answers.evicted, strict=True)
        },
        "compressions": _compressions(answers, labels),
    }


def _compressions(answers: Answers, labels: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {
            "config": labels[one.config],
            "generated": one.generated,
            "entries_before": one.before,
            "entries_after": one.after,
            "relative": float(one.perturbation.sum() / one.output_norm.sum()),
            "perturbation": one.perturbation.tolist(),
            "output_norm": one.output_norm.tolist(),
            "retained_mass": one.retained_mass.tolist(),
        }
        for one in answers.compressions
    ]


def show(row: Mapping[str, Any], configs: Sequence[EvictionConfig]) -> None:
    """One sample: what was expected, every answer, and how far each compression moved the attention output."""
    console.say(f"\n{row['sample']} · {row['prompt_tokens']:,} tokens", bold=True)
    full, expected, metric = row["full"], row.get("answers"), row.get("metric")
    names = dict(zip(row["evicted"], short(configs), strict=True))
    rows = [("expected", "", "", "", shown(" | ".join(expected)))] if expected else []
    rows.append(("full cache", "", "", _score(full), shown(full["text"])))
    for label, made in row["evicted"].items():
        same = sum(1 for pair in zip(made["tokens"], full["tokens"], strict=False) if pair[0] == pair[1])
        alike = f"{same} of {len(full['tokens'])}"
        rows.append(
            (
                names[label] or "evicted",
                numbers.held(made.get("held_share", math.nan)),
                alike,
                _score(made),
                shown(made["text"]),
            )
        )
    columns = ["cache", "#held /\nfull", "#same\ntokens", f"#{metric},\n0 to 1", "answer"]
    if not metric:
        columns, rows = [*columns[:3], columns[4]], [(*one[:3], one[4]) for one in rows]  # type: ignore[misc]
    console.table("", columns, rows)
    for label in row["evicted"]:
        moved = [one["relative"] for one in row["compressions"] if one["config"] == label]
        if moved:
            listed = ", ".join(f"{value:.2f}" for value in moved)
            console.say(f"{names[label] or 'evicted'}: {counted(len(moved), 'compression')}, Σ L / Σ ‖o_h‖₁: {listed}")


def _score(made: Mapping[str, Any]) -> str:
    score = made.get("score")
    return "" if score is None else f"{score:.3f}"


def shown(text: str) -> str:
    """A text in one line, its end left out where it is long."""
    line = " ".join(text.split()) or "(nothing)"
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}… ({len(line) - _SHOWN:,} more characters)"
