"""Answers from the full cache and from every evicted one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from perturbkv.api.inputs import CONFIGS, all_of, planned
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources, Workers
from perturbkv.configs.run import Settings
from perturbkv.datasets.encode import Prompt
from perturbkv.engines import engine_choice
from perturbkv.errors import WorkerError
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answers.answer_rows import AnsweredPrompt, Generation
from perturbkv.pipeline.answers.generation import AnswerOptions, check_answer_options, check_memory
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
    """Greedy answers from the full cache and from every evicted one, one `Answers` per prompt.

    They show themselves as text beside what was expected, with a score where the dataset has a metric.

    Args:
        model: from `load_model`.
        prompts: what is answered.
        configs: from `grid`.
        max_new_tokens: tokens of an answer at most, at least 1; None: as many as the dataset says.
        scenario: as in `Settings`.
        cache: as in `Settings`.
        compress_every: compress to the budget, a number of tokens below this one, again whenever a cache holds more
            entries than this.
        divergence: also read the full cache's answer from every cache, which `divergence` then shows.
        head_scores: as in `Settings`.
        workers: as in `measure`; a prompt that workers give up is left out, which is logged.
        resources: as in `measure`.
        progress: whether a bar is shown.

    Raises what `measure` raises, and ConfigError for a configuration that would have to know the next query or cannot
    be compressed again, and where `resources` do not hold all caches at once; WorkerError where no prompt is answered.
    """
    from perturbkv.analyses.json_values import provenance_object

    chosen = all_of(EvictionConfig, configs, CONFIGS)
    check_answer_options(chosen, max_new_tokens, compress_every)
    settings = Settings(scenario=scenario, cache=cache, generate=max_new_tokens, head_scores=head_scores, scored=False)
    ready = planned(model, prompts, chosen, settings, resources)
    check_memory(ready)
    metrics_of(ready.prompts)
    with user_model.eval_mode(model):
        found = _answered(ready, AnswerOptions(compress_every, divergence), workers, progress)
    about = provenance_object(provenance(ready))
    rows = tuple(one.row for one in found)
    return Generation(
        tuple(one.answers for one in found), WrittenAnswers(ready.run, rows, compress_every, made_with=about)
    )


def _answered(ready: Plan, options: AnswerOptions, workers: Workers, progress: bool) -> list[AnsweredPrompt]:
    """Every prompt's answers in their order, but for those given up."""
    found: dict[str, AnsweredPrompt] = {}
    failed: dict[str, str] = {}

    def done(prompt: Prompt, made: AnsweredPrompt) -> None:
        found[prompt.sample_id] = made
        drawn.advance()

    def given_up(prompt: Prompt, why: str) -> None:
        failed[prompt.sample_id] = why
        drawn.advance()

    with (
        engine_choice.open_engine(workers, [ready]) as engine,
        bar("samples", len(ready.prompts), shown=progress, status=engine.alive) as drawn,
    ):
        engine.answer(ready, options, ready.prompts, done, given_up)
    for why in failed.values():
        _log.warning("left out: %s", why)
    if not found:
        msg = f"no prompt was answered: {next(iter(failed.values()))}"
        raise WorkerError(msg)
    return [found[name] for name in ready.prompts.ids if name in found]
