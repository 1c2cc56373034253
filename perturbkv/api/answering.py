"""Answers from the full cache and from every evicted cache."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from perturbkv.api.inputs import CONFIGS, as_tuple, make_plan
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources, Workers
from perturbkv.configs.run import Settings
from perturbkv.datasets.encode import Prompt
from perturbkv.engines import engine_choice
from perturbkv.errors import WorkerError
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.answer_rows import AnsweredPrompt, Generation
from perturbkv.pipeline.answers.generation import AnswerOptions, check_answer_options
from perturbkv.pipeline.answers.grading import metrics_of
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import provenance
from perturbkv.storage.answers_file import WrittenAnswers

_DEFAULT, _WORKERS = Resources(), Workers()
_log = logging.getLogger(__name__)


def generate(
    model: Adapter,
    prompts: Iterable[Prompt],
    configs: Iterable[EvictionConfig],
    *,
    max_new_tokens: int | None = None,
    scenario: str = "regular",
    cache: str = "ragged",
    compress_every: int | None = None,
    divergence: bool = False,
    head_scores: Sequence[Sequence[float]] = (),
    workers: Workers = _WORKERS,
    resources: Resources = _DEFAULT,
    progress: bool = True,
) -> Generation:
    """Return greedy answers from the full cache and from every evicted one, one `Answers` per prompt.

    They display as text beside the accepted answers, with a score where the data set has a metric.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`, or any series of `Prompt`.
        configs: from `grid`.
        max_new_tokens: tokens of an answer at most, at least 1; None: as many as the dataset says.
        scenario: as in `Settings`.
        cache: as in `Settings`.
        compress_every: compress to the budget, a number of tokens below this one, again whenever a cache holds more
            entries than this.
        divergence: also decode the full cache's answer from every cache, for `divergence`.
        head_scores: as in `Settings`.
        workers: as in `measure`; a prompt that workers give up is left out, with a warning in the log.
        resources: as in `measure`; where `max_bytes` does not hold all caches at once, the prompt is read once for each
            batch of them.
        progress: whether a bar is shown.

    Raises what `measure` raises, and ConfigError for a configuration that would have to know the next query or cannot
    be compressed again; WorkerError where no prompt is answered.
    """
    from perturbkv.analyses.json_values import provenance_object

    chosen = as_tuple(EvictionConfig, configs, CONFIGS)
    check_answer_options(chosen, max_new_tokens, compress_every)
    settings = Settings(scenario=scenario, cache=cache, generate=max_new_tokens, head_scores=head_scores, scored=False)
    ready = make_plan(model, prompts, chosen, settings, resources)
    metrics_of(ready.prompts)
    with user_model.eval_mode(model):
        answered = _answer_prompts(ready, AnswerOptions(compress_every, divergence), workers, progress)
    made_with = provenance_object(provenance(ready))
    written = WrittenAnswers(ready.run, tuple(one.row for one in answered), compress_every, made_with=made_with)
    return Generation(tuple(one.answers for one in answered), written)


def _answer_prompts(ready: Plan, options: AnswerOptions, workers: Workers, progress: bool) -> list[AnsweredPrompt]:
    """Return the answers to all prompts in order, except prompts that workers gave up."""
    answered: dict[str, AnsweredPrompt] = {}
    failed: dict[str, str] = {}

    def on_answer(prompt: Prompt, answer: AnsweredPrompt) -> None:
        answered[prompt.sample_id] = answer
        progress_bar.advance()

    def on_failure(prompt: Prompt, why: str) -> None:
        failed[prompt.sample_id] = why
        progress_bar.advance()

    with (
        engine_choice.open_engine(workers, [ready]) as engine,
        bar("samples", len(ready.prompts), shown=progress, status=engine.alive) as progress_bar,
    ):
        engine.answer(ready, options, ready.prompts, on_answer, on_failure)
    for why in failed.values():
        _log.warning("left out: %s", why)
    if not answered:
        raise WorkerError(f"no prompt was answered: {next(iter(failed.values()))}")
    return [answered[name] for name in ready.prompts.ids if name in answered]
