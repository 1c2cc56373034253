"""Searches for the kept set of a head that perturbs its output least."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from perturbkv.api.inputs import CONFIGS, as_tuple, make_plan
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import Settings
from perturbkv.datasets.encode import Prompt
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.optimum.search import SearchResults
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.run import searching
from perturbkv.pipeline.run.running import provenance
from perturbkv.pipeline.run.searching import SearchSettings
from perturbkv.storage.json_lines import open_sample_lines

_DEFAULT, _SEARCHES = Resources(), SearchSettings()


def search_kept_sets(
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
) -> SearchResults:
    """Search each head's best kept set of the configurations' size, by isolated L (METHOD).

    On the prompts, entries of the best given set are swapped until no swap helps: the best known set. On a prefix of
    64 tokens with 16 kept, integer programs find the best there is, and prove it.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`.
        configs: from `grid`: one window, a kept set per query head, uniform budgets; the methods of every budget are
            the same, in the same order.
        heads: most heads that are searched of each prompt; drawn anew for each.
        proven: most heads of each prompt's prefix, likewise.
        seconds: most seconds for each head and method of search.
        scenario: as in `Settings`.
        seed: seed of the draws.
        path: a jsonl file; a killed run resumes with the next prompt. None: everything stays in memory.
        overwrite: replace a file of other searches.
        resources: memory and kernels.
        progress: whether a bar is shown.

    Returns:
        Per prompt, an object per head, budget and part (the prompt or its prefix): `perturbation`, the L of each
        method's set, `improved` and `best`, the L of the sets that were found, and `lower`, the bound that was proven.
        Every L is isolated, in L1 after W_O, in the units of the residual stream (not relative to ‖o_h‖).

    Raises ConfigError for configurations whose kept sets cannot be compared (several windows, sets shared by heads, few
    bits, corrections, other than uniform budgets) or settings without heads; BudgetError where a budget leaves nothing
    to choose; and what `measure` raises.

    >>> import perturbkv as pk
    >>> model = pk.load_model("random:smollm2-135m")
    >>> prompt = pk.Prompt.from_text("Paris is in France. " * 20, model)
    >>> configs = pk.grid(40, selection=("attention", "two-stage"))
    >>> found = pk.search_kept_sets(model, prompt, configs, heads=2, proven=0, progress=False)
    >>> [len(head["perturbation"]) for head in found.rows[0]["heads"]]
    [2, 2]
    """
    searches = SearchSettings(heads, proven, seconds, seed=seed)
    chosen = as_tuple(EvictionConfig, configs, CONFIGS)
    searching.check_search(chosen, searches)
    ready = make_plan(
        model, prompts, chosen, Settings(steps=1, scenario=scenario), resources, resumable=path is not None
    )
    header = {"run": json.loads(ready.run.to_json()), "searches": asdict(searches)}
    with (
        bar("samples", shown=progress) as progress_bar,
        user_model.eval_mode(model.model),
        open_sample_lines(None if path is None else Path(path), header, overwrite) as lines,
    ):
        rows = searching.search_samples(ready, searches, lines, progress_bar.update)
    return SearchResults(ready.run, rows, asdict(searches), provenance(ready))
