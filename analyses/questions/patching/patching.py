"""Which layers and heads decide what comes out? One side's kept sets in some of them, the other side's in the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import perturbkv
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.questions.patching import swap_told as told
from perturbkv.analyses.questions.patching.patching_values import greedy, shapley
from perturbkv.analyses.questions.patching.swap_found import Found
from perturbkv.analyses.questions.patching.swap_named import divergence, named
from perturbkv.analyses.questions.patching.swap_values import Measured
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.coalition import Orders
from perturbkv.analyses.stats.greedy import Path
from perturbkv.analyses.text import at
from perturbkv.configs.patching import Game, SwapConfig
from perturbkv.display import Table
from perturbkv.schema import MEASURED
from perturbkv.storage.patching_file import SwapStore


class Swap(Result, Found):
    """What switching kept sets from a baseline's to a treatment's does, player by player; its fields are `Found`'s."""

    def conclusion(self) -> str:
        """The players that change the outcome most, and all of them together."""
        return told.conclusion(self)

    def tables(self) -> list[Table | str]:
        """Mixtures by name, Shapley values, the greedy path."""
        return told.tables(self)

    def notes(self) -> str:
        """What the numbers are, and which error is which."""
        return told.notes(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything a reader needs, as JSON-able numbers."""
        found: dict[str, Any] = plain(
            {
                "baseline": self.baseline,
                "treatment": self.treatment,
                "by": self.asked.by,
                "outcome": self.asked.outcome,
                "step": self.asked.step,
                "samples": len(self.sample_ids),
                "failed": self.failures,
                "samples_ended_before_step": self.identity.ended,
                "same_kept_sets": self.same,
                "held_over_full_baseline": self.held,
                "baseline_kl_median": self.baseline_kl.median,
                "baseline_kl_median_interval": self.baseline_kl.interval,
                "named": [one.to_dict() for one in self.named],
                "shapley": self._shapley(),
                "greedy": self._greedy(),
            }
        )
        return found

    def _shapley(self) -> dict[str, Any] | None:
        if self.shapley is None:
            return None
        found = self.shapley
        players = [
            {
                "player": name,
                "value": found.value[place],
                "interval": at(found.interval, place),
                "sampling": found.sampling[place],
                "alone": found.alone.value[place],
                "alone_interval": at(found.alone.interval, place),
                "last": found.last.value[place],
                "last_interval": at(found.last.interval, place),
            }
            for place, name in enumerate(self.names)
        ]
        return {
            "permutations": found.permutations,
            "coalitions": found.coalitions,
            "players": players,
            "sum": found.value.sum(),
            "everybody": found.total,
            "everybody_interval": found.total_interval,
        }

    def _greedy(self) -> dict[str, Any] | None:
        if self.greedy is None:
            return None
        found = self.greedy
        return {
            "paths": [[self.names[place] for place in path] for path in found.paths],
            "chosen": found.chosen,
            "chosen_intervals": [at(found.chosen_interval, place) for place in range(len(found.chosen))],
            "judged": found.judged,
            "judged_intervals": [at(found.judged_interval, place) for place in range(len(found.judged))],
        }

    def records(self) -> list[dict[str, Any]]:
        """A row per player and sample: its Shapley value, what it brings alone and last, in the outcome's own unit."""
        if self.shapley is None:
            return []
        found = self.shapley
        return [
            {
                "player": str(player),
                "layer": player.layer,
                "head": player.head,
                "sample": sample,
                "outcome": self.asked.outcome,
                "value": float(found.per_sample[place, column]),
                "alone": float(found.alone.per_sample[place, column]),
                "last": float(found.last.per_sample[place, column]),
            }
            for place, player in enumerate(self.game.players)
            for column, sample in enumerate(self.sample_ids)
        ]


def conclude(
    store: SwapStore, game: Game, asked: SwapConfig, orders: Orders | None, paths: Sequence[Path], digest: str = ""
) -> Swap:
    """The result of what was measured.

    Args:
        store: every mixture that the question needs.
        game: its players.
        asked: the question.
        orders: drawn for Shapley values; None: all subsets were measured; of no rows: there are none.
        paths: of both halves of the samples; empty: there are none.
        digest: of the file of measurements.

    Raises FailedRunError where no sample is complete, ConfigError where none has the step.
    """
    measured = Measured(store, game, asked.step)
    wanted = orders is None or len(orders) > 0
    return Swap(
        baseline=store.run.configs[0],
        treatment=store.run.configs[1],
        asked=asked,
        game=game,
        baseline_kl=divergence(measured, game.none),
        held=float(np.mean([row.held for row in measured.rows(game.none)])),
        shapley=shapley(measured, asked.outcome, orders) if wanted else None,
        greedy=greedy(measured, asked.outcome, paths) if paths else None,
        named=tuple(named(measured, name, mixture) for name, mixture in game.named),
        same=float(np.mean([store.same[name] for name in measured.samples])),
        sample_ids=tuple(measured.samples),
        failures=dict(store.failed),
        identity=_identity(store, measured, digest),
    )


def _identity(store: SwapStore, measured: Measured, digest: str) -> RunIdentity:
    run, made = store.run, store.made_with
    return RunIdentity(
        model=run.model,
        dataset=run.dataset,
        samples=len(measured.samples),
        failed=len(store.failed),
        configs=run.configs,
        trace=digest,
        random_weights=run.random_weights,
        made_with=f"perturbkv {made.get('perturbkv_version', perturbkv.__version__)}",
        scenario=run.scenario,
        weights=str(made.get("weights", "")) if made.get("quantised_weights") is True else "",
        ended=measured.ended,
        source="measurements",
        measured=str(made.get(MEASURED, "")),
    )
