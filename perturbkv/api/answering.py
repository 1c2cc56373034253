"""Answers from the full cache and from every evicted one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perturbkv.api.planning import CONFIGS, all_of, planned
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.models import given
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.answered import Generation, row
from perturbkv.pipeline.generation import Answers, answer, check_asked, check_memory
from perturbkv.pipeline.grading import metrics_of
from perturbkv.pipeline.plan import Plan, Settings
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.provenance import provenance
from perturbkv.storage.answers_file import WrittenAnswers

_DEFAULT = Resources()


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
        scenario: as in `measure`.
        cache: as in `measure`.
        compress_every: compress to the budget, a number of tokens below this one, again whenever a cache holds more
            entries than this.
        divergence: also read the full cache's answer from every cache, which `divergence` then shows.
        head_scores: as in `measure`.
        resources: as in `measure`.
        progress: whether a bar is shown.

    Raises what `measure` raises, and ConfigError for a configuration that would have to know the next query or cannot
    be compressed again, and where `resources` do not hold all caches at once.
    """
    from perturbkv.analyses.objects import provenance_object

    chosen = all_of(EvictionConfig, configs, CONFIGS)
    check_asked(chosen, max_new_tokens, compress_every)
    settings = Settings(scenario=scenario, cache=cache, generate=max_new_tokens, head_scores=head_scores, scored=False)
    ready = planned(model, prompts, chosen, settings, resources)
    check_memory(ready)
    graded, found = metrics_of(ready.prompts), _answered(ready, model, compress_every, divergence, progress)
    told = zip(ready.prompts, found, strict=True)
    labels, decode = ready.run.labels(), model.tokenizer.decode
    rows = tuple(row(prompt, one, labels, decode, graded) for prompt, one in told)
    about = provenance_object(provenance(ready))
    return Generation(tuple(found), WrittenAnswers(ready.run, rows, compress_every, made_with=about))


def _answered(
    ready: Plan, model: Adapter, compress_every: int | None, divergence: bool, progress: bool
) -> list[Answers]:
    run, found = ready.run, []
    with bar("samples", shown=progress) as drawn, given.evaluating(model):
        for done, prompt in enumerate(ready.prompts):
            drawn.at(done, len(ready.prompts))
            found.append(
                answer(
                    model, prompt, run.configs, run.generate, scenario=run.scenario, layout=run.cache,
                    head_scores=run.head_scores, compress_every=compress_every, divergence=divergence,
                    resources=ready.resources,
                )
            )  # fmt: skip
    return found
