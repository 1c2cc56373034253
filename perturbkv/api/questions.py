"""One configuration's kept sets in some layers or heads, another's in the rest: which of them decide what comes out.

How far kept sets are from the best ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.api.inputs import CONFIGS, all_of, planned
from perturbkv.configs import layer_types
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.patching import Game, PatchingConfig, check_sides, greedy_count, permutation_count
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import Settings
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError, InterruptedRunError
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.optimum.chain import with_references
from perturbkv.optimum.search import FoundSets
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.run import searching
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import provenance
from perturbkv.pipeline.run.searching import Searches
from perturbkv.pipeline.variants.mixtures import Measuring, Told, rows_of, shape_of
from perturbkv.storage.json_lines import open_sample_lines
from perturbkv.storage.output import Lock, translate_os_errors
from perturbkv.storage.patching_file import PatchingStore

if TYPE_CHECKING:
    from perturbkv.analyses.questions.patching.patching import Patching
    from perturbkv.analyses.questions.regret.regret import Regret
    from perturbkv.analyses.stats.coalition import GreedyPath


_DEFAULT, _SETTINGS, _QUESTION = Resources(), Settings(), PatchingConfig()


def patching(
    model: Adapter,
    prompts: Iterable[Prompt],
    baseline: EvictionConfig,
    treatment: EvictionConfig,
    *,
    question: PatchingConfig = _QUESTION,
    settings: Settings = _SETTINGS,
    path: str | Path | None = None,
    overwrite: bool = False,
    wait: bool = False,
    resources: Resources = _DEFAULT,
    progress: bool = True,
) -> Patching:
    """Which layers or heads decide what comes out? The treatment's kept sets in some of them, the baseline's elsewhere.

    A prompt is read once; every mixture of both sides' kept sets is then a row of a batch, really evicted. Drift, KL
    and propagated perturbation are METHOD's, of the whole run with that mixture.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`, or any series of `Prompt`.
        baseline: whose kept sets are everywhere at first.
        treatment: a configuration of the same granularity.
        question: whose kept sets are switched, and what is looked at.
        settings: as in `measure`; answers are graded.
        path: a file where measurements are kept as they come; the same call goes on from there, and other players,
            orders, outcomes and steps of the same run use what is there.
        overwrite: replace those of another run.
        wait: where another process writes there, wait until it is done.
        resources: memory and kernels.
        progress: whether a bar is shown.

    Raises what `measure` raises, and ConfigError for sides that cannot be swapped, unknown layers and too few players.

    >>> import perturbkv as pk
    >>> model = pk.load_model("random:smollm2-135m")
    >>> prompt = pk.Prompt.from_text("Paris is in France. " * 8, model)
    >>> sides = pk.grid(16, selection=("attention", "two-stage"), window=4)
    >>> question = pk.PatchingConfig(layers=[0, 1], treatment_in=[[0]])
    >>> found = pk.patching(model, prompt, *sides, question=question, progress=False)
    >>> [one.name for one in found.named], found.shapley.coalitions
    (['treatment everywhere', 'treatment in 0'], 4)
    """
    check_sides(baseline, treatment)
    ready = planned(model, prompts, (baseline, treatment), settings, resources, kept=path is not None)
    with bar("mixtures", shown=progress) as drawn, user_model.eval_mode(model):
        return run_patching(ready, question, None if path is None else Path(path), overwrite, wait, drawn.at)


def game_of(ready: Plan, asked: PatchingConfig) -> Game:
    """Players and mixtures of a planned run, of which everything is known to be possible. Raises ConfigError."""
    config, shape = ready.files.config, shape_of(ready)
    check_sides(*ready.run.configs)
    if asked.outcome == "score" and not ready.run.generate:
        msg = "outcome score (--outcome score) expects answers; ask for them with --answers (Settings(generate=None))"
        raise ConfigError(msg)
    if asked.step >= ready.run.steps:
        msg = f"expected a step from 0 to {ready.run.steps - 1}, got {asked.step}; --steps {asked.step + 1} records it"
        raise ConfigError(msg)
    if not any(_evicts(ready, prompt) for prompt in ready.prompts):
        longest = max(len(prompt.parts(ready.run.scenario)[0]) for prompt in ready.prompts)
        msg = (
            f"expected a budget below the {longest:,} tokens of the longest prompt, got {ready.run.configs[0].budget}: "
            "nothing is evicted, and nothing differs"
        )
        raise ConfigError(msg)
    granularity = ready.run.configs[0].granularity.name
    heads = shape.heads if granularity == "query" else shape.kv_heads
    game = Game.from_config(asked, layer_types.measured_layers(config), heads, granularity)
    greedy_count(asked, len(game.players), len(ready.prompts))
    return game


def cost(ready: Plan, asked: PatchingConfig, game: Game) -> dict[str, int]:
    """Mixtures of each prompt that a question takes at most, by what they are for, and how many make a batch."""
    from perturbkv.analyses.stats import coalition

    players, samples = len(game.players), len(ready.prompts)
    drawn = permutation_count(asked, players)
    orders = None if drawn is None else coalition.draw_orders(players, drawn, asked.seed)
    of_shapley = len(coalition.required_coalitions(players, orders))
    count = greedy_count(asked, players, samples)
    of_greedy = sum(players - done for done in range(count)) + count
    named = 2 + len(game.mixtures) - 1
    rows = min(rows_of(prompt, ready.resolved, shape_of(ready), ready.resources) for prompt in ready.prompts)
    total = named + of_shapley + of_greedy
    return {"named": named, "shapley": of_shapley, "greedy": of_greedy, "mixtures": total, "rows": rows}


def run_patching(
    ready: Plan,
    asked: PatchingConfig,
    path: Path | None = None,
    overwrite: bool = False,
    wait: bool = False,
    told: Told = lambda done, total: None,
) -> Patching:
    """Measure what a question lacks and answer it, as `patching` does of a plan.

    Raises InterruptedRunError on Ctrl-C.
    """
    game = game_of(ready, asked)
    if path is None:
        return _answered(Measuring(ready, game, PatchingStore(ready.run, game.kept_heads), told), asked)
    with Lock(path, wait), translate_os_errors(path):
        from perturbkv.analyses.json_values import provenance_object

        about = provenance_object(provenance(ready))
        store = PatchingStore(ready.run, game.kept_heads, path, overwrite, about)
        try:
            return _answered(Measuring(ready, game, store, told), asked)
        except KeyboardInterrupt:
            raise InterruptedRunError(len(store.rows), len(ready.prompts), path) from None


def _answered(measuring: Measuring, asked: PatchingConfig) -> Patching:
    from perturbkv.analyses.questions.patching.patching import patching_result
    from perturbkv.analyses.stats import coalition

    game, store = measuring.game, measuring.store
    drawn = permutation_count(asked, len(game.players))
    orders = None if drawn is None else coalition.draw_orders(len(game.players), drawn, asked.seed)
    passed = coalition.required_coalitions(len(game.players), orders)
    found = cost(measuring.ready, asked, game)
    measuring.expect(found["mixtures"], again=found["greedy"] > 0)
    measuring.everywhere([game.mixture(one) for one in passed])
    paths = _greedy(measuring, asked)
    return patching_result(store, game, asked, orders, paths, _digest(store.path))


def _greedy(measuring: Measuring, asked: PatchingConfig) -> list[GreedyPath]:
    """Both paths, one round after the other: each half chooses among mixtures that it alone has to measure."""
    from perturbkv.analyses.questions.patching.patching_values import (
        MixtureOutcomes,
        coalition_outcomes,
        sign_of_better,
    )
    from perturbkv.analyses.stats.coalition import GreedyPath, draw_halves

    measured = MixtureOutcomes(measuring.store, measuring.game, asked.step)
    players, samples = len(measuring.game.players), measured.samples
    count = greedy_count(asked, players, len(samples))
    if count == 0:
        return []
    first, second = draw_halves(len(samples), asked.seed)
    paths = [GreedyPath(first, second), GreedyPath(second, first)]
    for _ in range(count):
        for chosen in paths:
            candidates = chosen.candidates(players)
            measuring.of(candidates, [samples[place] for place in chosen.choosing])
            own = measured.select(chosen.choosing)
            chosen.choose(coalition_outcomes(own, candidates, asked.outcome), sign_of_better(asked.outcome))
    for chosen in paths:
        measuring.of(chosen.coalitions(), [samples[place] for place in chosen.judging])
    return paths


def _evicts(ready: Plan, prompt: Prompt) -> bool:
    n = len(prompt.parts(ready.run.scenario)[0])
    return any(config.kept_entries(n) < n for config in ready.run.configs)


def _digest(path: Path | None) -> str:
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()[:12]


_SEARCHING_DEFAULT, _SEARCHES = Resources(), Searches()


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
    resources: Resources = _SEARCHING_DEFAULT,
    progress: bool = True,
) -> Regret:
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
        scenario: as in `Settings`.
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
    >>> [one.config.selection.name for one in found.parts[0].methods]
    ['two-stage', 'two-stage', 'hindsight']
    """
    asked = Searches(heads, proven, seconds, seed=seed)
    chosen = with_references(all_of(EvictionConfig, configs, CONFIGS))
    searching.check(chosen, asked)
    ready = planned(model, prompts, chosen, Settings(scenario=scenario), resources, kept=path is not None)
    with bar("samples", shown=progress) as drawn, user_model.eval_mode(model):
        return searched(ready, asked, None if path is None else Path(path), drawn.at, overwrite=overwrite)


def searched(
    ready: Plan,
    asked: Searches,
    path: Path | None,
    finished: Callable[[int, int], None],
    *,
    overwrite: bool = False,
    wait: bool = False,
) -> Regret:
    """What a plan's searches say; those that lie in the file of the same question are not made again."""
    from perturbkv.analyses.json_values import provenance_object
    from perturbkv.analyses.questions.regret.regret import regret_of

    told = {"run": json.loads(ready.run.to_json()), "searches": asdict(asked)}
    with open_sample_lines(path, told, overwrite, wait) as lines:
        rows = searching.search_samples(ready, asked, lines, finished)
    return regret_of(FoundSets(ready.run, rows, asdict(asked), provenance_object(provenance(ready))))
