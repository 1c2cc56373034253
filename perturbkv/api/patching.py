"""Patching of kept sets: which layers and heads decide the output."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from perturbkv.api.inputs import make_plan
from perturbkv.configs import layer_types
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.patching import Game, PatchingConfig, check_sides, greedy_count, permutation_count
from perturbkv.configs.resources import Resources
from perturbkv.configs.run import Settings
from perturbkv.datasets.encode import Prompt
from perturbkv.errors import ConfigError, InterruptedRunError
from perturbkv.models import user_model
from perturbkv.models.adapter import Adapter
from perturbkv.pipeline.progress import bar
from perturbkv.pipeline.run.plan import Plan
from perturbkv.pipeline.run.running import provenance
from perturbkv.pipeline.variants.mixtures import MixtureMeasurer, Progress, rows_per_batch
from perturbkv.storage.json_lines import open_sample_lines
from perturbkv.storage.patching_file import PatchingStore, patching_header

if TYPE_CHECKING:
    from perturbkv.analyses.patching.patching import Patching
    from perturbkv.analyses.stats.coalition import GreedyPath, Orders


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
    """Find the layers or heads that decide the output: the treatment's kept sets in some, the baseline's elsewhere.

    A prompt has one prefill; every mixture of both sides' kept sets is then a row of a batch, really evicted. Drift, KL
    and propagated perturbation are those of METHOD, of the whole run with that mixture.

    Args:
        model: from `load_model`.
        prompts: from `load_prompts`, or any series of `Prompt`.
        baseline: the configuration whose kept sets are everywhere at first.
        treatment: a configuration of the same granularity.
        question: the layers or heads that are switched, and the outcome.
        settings: as in `measure`, but that the steps end with the one looked at unless given; answers are graded.
        path: a file of the measurements, each written at once; the same call resumes from it, and other players,
            orders, outcomes and steps of the same run reuse them.
        overwrite: replace the measurements of another run.
        wait: where another process writes there, wait until it is done.
        resources: memory and kernels.
        progress: whether a bar is shown.

    Returns:
        The outcome with the baseline and the treatment everywhere and in named players, `named`, the effect of every
        player, `shapley`, and the players whose switching helps most, one after the other, `greedy`. KL is in nat,
        drift and propagated perturbation in L1, scores from 0 to 1.

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
    if settings.steps is None:
        settings = replace(settings, steps=question.step + 1)
    ready = make_plan(model, prompts, (baseline, treatment), settings, resources, resumable=path is not None)
    with bar("mixtures", shown=progress) as progress_bar, user_model.eval_mode(model.model):
        return run_patching(ready, question, None if path is None else Path(path), overwrite, wait, progress_bar.update)


def patching_game(ready: Plan, question: PatchingConfig) -> Game:
    """Return the players and mixtures of a planned run. Raises ConfigError if they cannot be measured."""
    config, shape = ready.files.config, ready.shape
    check_sides(*ready.run.configs)
    if question.outcome == "score" and not ready.run.generate:
        raise ConfigError(
            "outcome score (--outcome score) expects answers; ask for them with --answers (Settings(generate=None))"
        )
    if (step := question.step) >= ready.run.steps:
        raise ConfigError(f"expected a step from 0 to {ready.run.steps - 1}, got {step}; --steps {step + 1} records it")
    lengths = [len(prompt.parts(ready.run.scenario)[0]) for prompt in ready.prompts]
    if all(config.kept_entries(n) >= n for config in ready.run.configs for n in lengths):
        raise ConfigError(
            f"expected a budget below the {max(lengths):,} tokens of the longest prompt, got "
            f"{ready.run.configs[0].budget}: nothing is evicted, and nothing differs"
        )
    granularity = ready.run.configs[0].granularity.name
    heads = shape.heads if granularity == "query" else shape.kv_heads
    game = Game.from_config(question, layer_types.measured_layers(config), heads, granularity)
    greedy_count(question, len(game.players), len(ready.prompts))
    return game


def mixture_counts(ready: Plan, question: PatchingConfig, game: Game) -> dict[str, int]:
    """Return the largest numbers of mixtures per prompt, by purpose and in total, and the number of rows of a batch."""
    from perturbkv.analyses.stats import coalition

    players, samples = len(game.players), len(ready.prompts)
    shapley = len(coalition.required_coalitions(players, _shapley_orders(question, players)))
    count = greedy_count(question, players, samples)
    # a prompt tries on one path all players that are left, step by step, and judges every step of the other path
    greedy = sum(players - chosen for chosen in range(count)) + count
    named = 1 + len(game.mixtures)
    rows = min(rows_per_batch(prompt, ready.resolved, ready.shape, ready.resources) for prompt in ready.prompts)
    total = named + shapley + greedy
    return {"named": named, "shapley": shapley, "greedy": greedy, "mixtures": total, "rows": rows}


def _shapley_orders(question: PatchingConfig, players: int) -> Orders | None:
    """Return the random orders (permutation, player) for Shapley values; None if all subsets are measured."""
    from perturbkv.analyses.stats import coalition

    drawn = permutation_count(question, players)
    return None if drawn is None else coalition.draw_orders(players, drawn, question.seed)


def run_patching(
    ready: Plan,
    question: PatchingConfig,
    path: Path | None = None,
    overwrite: bool = False,
    wait: bool = False,
    progress: Progress = lambda done, total: None,
) -> Patching:
    """Return the result of a patching question, after measuring the mixtures missing from its file.

    `path` is that file; None: measurements stay in memory, and `overwrite` and `wait` have no effect. Raises
    InterruptedRunError on Ctrl-C.
    """
    game = patching_game(ready, question)
    from perturbkv.analyses.json_values import provenance_object

    header, made_with = patching_header(ready.run, game.kept_heads), provenance_object(provenance(ready))
    with open_sample_lines(path, header, overwrite, wait, made_with) as lines:
        store = PatchingStore(ready.run, game.kept_heads, lines)
        try:
            return _answer_question(MixtureMeasurer(ready, game, store, progress), question)
        except KeyboardInterrupt:
            if path is None:
                raise
            raise InterruptedRunError(len(store.rows), len(ready.prompts), path) from None


def _answer_question(measuring: MixtureMeasurer, question: PatchingConfig) -> Patching:
    """Return a question's result, after measuring the mixtures that it needs."""
    from perturbkv.analyses.patching.patching import patching_result
    from perturbkv.analyses.stats import coalition

    game, store = measuring.game, measuring.store
    orders = _shapley_orders(question, len(game.players))
    coalitions = coalition.required_coalitions(len(game.players), orders)
    counts = mixture_counts(measuring.planned, question, game)
    measuring.expect(counts["mixtures"], repeated=counts["greedy"] > 0)
    measuring.measure_all([game.mixture(one) for one in coalitions])
    paths = _greedy_paths(measuring, question)
    digest = "" if store.lines.path is None else hashlib.sha256(store.lines.path.read_bytes()).hexdigest()[:12]
    return patching_result(store, game, question, orders, paths, digest)


def _greedy_paths(measuring: MixtureMeasurer, question: PatchingConfig) -> list[GreedyPath]:
    """Return two greedy paths, each chosen on one half of the samples and judged on the other half."""
    from perturbkv.analyses.patching.patching_values import (
        MixtureOutcomes,
        coalition_outcomes,
        sign_of_better,
    )
    from perturbkv.analyses.stats.coalition import GreedyPath, draw_halves

    measured = MixtureOutcomes(measuring.store, measuring.game, question.step)
    players, samples = len(measuring.game.players), measured.samples
    count = greedy_count(question, players, len(samples))
    if count == 0:
        return []
    first, second = draw_halves(len(samples), question.seed)
    paths = [GreedyPath(first, second), GreedyPath(second, first)]
    for _ in range(count):
        for chosen in paths:
            candidates = chosen.candidates(players)
            measuring.measure_coalitions(candidates, [samples[index] for index in chosen.choosing])
            half = measured.select(chosen.choosing)
            chosen.choose(coalition_outcomes(half, candidates, question.outcome), sign_of_better(question.outcome))
    for chosen in paths:
        measuring.measure_coalitions(chosen.coalitions(), [samples[index] for index in chosen.judging])
    return paths
