"""What was found of swapped kept sets: the fields of the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.outcomes import Divergence
from perturbkv.analyses.questions.patching.patching_values import Greedy, Shapley
from perturbkv.analyses.questions.patching.swap_named import Named
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.patching import Game, SwapConfig


@dataclass(frozen=True, repr=False)
class Found:
    """What switching kept sets from a baseline's to a treatment's does, player by player.

    Attributes:
        baseline, treatment: the configurations.
        asked: the question.
        game: its players, and mixtures that were asked for by name.
        baseline_kl: of the baseline everywhere.
        held: entries of the baseline's cache over those of the full one.
        shapley: None where no order was asked for.
        greedy: None where it was not asked for, or a single sample could not judge itself.
        named: the treatment everywhere, then what was asked for.
        same: share of kept sets that both sides agree in.
        sample_ids: of the samples behind all numbers.
        failures: sample -> why it could not be measured.
        identity: of the run.
    """

    baseline: EvictionConfig
    treatment: EvictionConfig
    asked: SwapConfig
    game: Game
    baseline_kl: Divergence
    held: float
    shapley: Shapley | None
    greedy: Greedy | None
    named: tuple[Named, ...]
    same: float
    sample_ids: tuple[str, ...]
    failures: Mapping[str, str]
    identity: RunIdentity

    @property
    def names(self) -> list[str]:
        """Of the players."""
        return list(map(str, self.game.players))
