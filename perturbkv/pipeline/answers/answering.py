"""A run that answers: one prompt after the other, each from all of its caches, as its line of a file tells it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from perturbkv.configs.resources import Resources
from perturbkv.configs.run import RunConfig
from perturbkv.datasets.encode import Prompt
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.answered import row
from perturbkv.pipeline.answers.generation import Answers, answer
from perturbkv.pipeline.answers.grading import metrics_of


@dataclass(frozen=True)
class Asked:
    """What is asked beside a run: how often caches are compressed again, and whether they follow the full one's text.

    Attributes:
        compress_every: entries of a cache above which it is; None: never.
        divergence: whether every cache reads the full one's answer too.
    """

    compress_every: int | None = None
    divergence: bool = False


@dataclass(frozen=True)
class Answered:
    """One prompt's answers, and its line of generation.jsonl."""

    answers: Answers
    row: dict[str, Any]


def answered(adapter: Adapter, prompt: Prompt, run: RunConfig, asked: Asked, resources: Resources) -> Answered:
    """Answer a prompt from its full cache and every configuration's. Raises what `answer` raises."""
    made = answer(
        adapter, prompt, run.configs, run.generate, scenario=run.scenario, layout=run.cache,
        head_scores=run.head_scores, compress_every=asked.compress_every, divergence=asked.divergence,
        resources=resources,
    )  # fmt: skip
    line = row(prompt, made, run.labels(), adapter.tokenizer.decode, metrics_of([prompt]))
    return Answered(_on_cpu(made), line)


def _on_cpu(made: Answers) -> Answers:
    """The answers with nothing left on a device: they outlive the model, and go to other processes."""
    compressions = [
        replace(
            one, perturbation=one.perturbation.cpu(), output_norm=one.output_norm.cpu(),
            retained_mass=one.retained_mass.cpu(),
        )
        for one in made.compressions
    ]  # fmt: skip
    found = made.divergence
    if found is not None:
        found = replace(found, kl=found.kl.cpu(), top1=found.top1.cpu(), noise_floor=found.noise_floor.cpu())
    return replace(made, compressions=compressions, divergence=found)
