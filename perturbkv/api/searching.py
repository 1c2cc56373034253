"""How far kept sets are from the best ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.api.planning import CONFIGS, all_of, planned
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.datasets.encode import Prompt
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.optimum.chain import with_references
from perturbkv.optimum.found import FoundSets
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.run import searching
from perturbkv.pipeline.run.plan import Plan, Settings
from perturbkv.pipeline.run.provenance import provenance
from perturbkv.pipeline.run.searching import Searches
from perturbkv.storage.sample_lines import sample_lines

if TYPE_CHECKING:
    from perturbkv.analyses.questions.regret.regret import RegretResult

_DEFAULT, _SEARCHES = Resources(), Searches()


def regret(
    model: Adapter,
    prompts: Iterable[Prompt],
    configs: Iterable[EvictionConfig],
    *,
    heads: int = _SEARCHES.heads,
    proven: int = _SEARCHES.proven,
    seconds: float = _SEARCHES.seconds,
    scenario: str = "regular",
    seed: int = 0,
    path: str | Path | None = None,
    overwrite: bool = False,
    resources: Resources = _DEFAULT,
    progress: bool = True,
) -> RegretResult:
    """How far is each method from the best kept set of its size, head by head, by isolated L (METHOD)?.

    On the prompts, entries of the best given set are swapped until no swap helps: the best known set. On a prefix of
    64 tokens with 16 kept, integer programs find the best there is, and prove it.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`.
        configs: from `grid`: one window, a kept set per query head, uniform budgets. What each would keep
            without pooling and stages, and with the query known, is added.
        heads: searched of each prompt, at most; drawn anew for each.
        proven: heads of each prompt's prefix, likewise.
        seconds: at most for each head and method of search.
        scenario: as in `measure`.
        seed: of the draws.
        path: a jsonl file; a killed run goes on with the next prompt. None: everything stays in memory.
        overwrite: replace a file of another question.
        resources: memory and kernels.
        progress: whether a bar is shown.

    Raises ConfigError and BudgetError for configurations whose sets cannot be compared, and as `measure`.

    >>> import perturbkv as pk
    >>> model = pk.load_model("random:smollm2-135m")
    >>> prompt = pk.Prompt.from_text("Paris is in France. " * 20, model)
    >>> found = pk.regret(model, prompt, pk.grid(40), heads=2, proven=0, progress=False)
    >>> [one.config.selection.name for one in found.parts[0].regrets]
    ['two-stage', 'two-stage', 'hindsight']
    """
    asked = Searches(heads, proven, seconds, seed=seed)
    chosen = with_references(all_of(EvictionConfig, configs, CONFIGS))
    searching.check(chosen, asked)
    ready = planned(model, prompts, chosen, Settings(scenario=scenario), resources, kept=path is not None)
    with bar("samples", shown=progress) as drawn, user_model.evaluating(model):
        return searched(ready, asked, None if path is None else Path(path), drawn.at, overwrite=overwrite)


def searched(
    ready: Plan,
    asked: Searches,
    path: Path | None,
    finished: Callable[[int, int], None],
    *,
    overwrite: bool = False,
    wait: bool = False,
) -> RegretResult:
    """What a plan's searches say; those that lie in the file of the same question are not made again."""
    from perturbkv.analyses.json_values import provenance_object
    from perturbkv.analyses.questions.regret.regret import regret_of

    told = {"run": json.loads(ready.run.to_json()), "searches": asdict(asked)}
    with sample_lines(path, told, overwrite, wait) as lines:
        rows = searching.search_samples(ready, asked, lines, finished)
    return regret_of(FoundSets(ready.run, rows, asdict(asked), provenance_object(provenance(ready))))
