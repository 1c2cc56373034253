"""Kept-set patching: the effect of replacing a baseline's kept sets by a treatment's in some layers or heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

import perturbkv
from perturbkv.analyses import text
from perturbkv.analyses.columns import Derived, Line, attribute, column, derived, record, table
from perturbkv.analyses.conclusions import COMPARED, Case, Claim
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.names import PairRecord
from perturbkv.analyses.patching.patching_values import (
    Greedy,
    MixtureOutcomes,
    NamedMixture,
    Shapley,
    greedy,
    median_kl,
    named_mixture,
    shapley,
    sign_of_better,
)
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.coalition import GreedyPath, Orders
from perturbkv.analyses.stats.intervals import COVERED, OptionalInterval
from perturbkv.analyses.verdicts import LESS, MORE
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.patching import Game, PatchingConfig
from perturbkv.display import Part
from perturbkv.schema import MEASURED_LAYERS
from perturbkv.storage.patching_file import PatchingStore

MOST = 36
"""Largest number of players in a table; of more players those with the largest values are shown."""
WORDS = {"drift": "the last layer's drift", "kl": "the next token's KL", "score": "the answers' score"}
_CHANGED = {LESS: "lower", MORE: "higher"}
_MIXTURES = ("cache_share", "sum_ratio", "drift_ratio", "kl_median", "score")


@record
class Patching(Result, PairRecord, section="patching", document="of measurements", first="switched"):
    """The effect of switching kept sets from a baseline's to a treatment's, per player: a layer or a head.

    Attributes:
        settings: of the question.
        game: its players, and the mixtures by name.
        sample_ids: names of the samples that all numbers are of.
        identity: of the run.
    """

    baseline: EvictionConfig = column("the configuration whose kept sets are everywhere at first")
    treatment: EvictionConfig = column("the configuration whose kept sets take their places")
    settings: PatchingConfig
    game: Game
    kl_median: float = column(
        "KL of the next token with the baseline everywhere, median over samples",
        unit="nat",
        key="baseline_kl_median",
        heading="#KL",
        text=text.three_digits,
    )
    kl_median_interval: OptionalInterval = column("over samples", key="baseline_kl_median_interval")
    cache_share: float = column(
        "entries of the baseline's cache over those of the full one",
        key="held_over_full_baseline",
        heading="#cache\nshare",
    )
    shapley: Shapley | None = column("values of the players; null with `--permutations 0`")
    greedy: Greedy | None = column("players switched best first; null with `--greedy 0`, and of one sample")
    named: tuple[NamedMixture, ...] = column("the treatment everywhere, then the mixtures that were given by name")
    same: float = column("share of kept sets that both configurations agree in", unit="share", key="same_kept_sets")
    sample_ids: tuple[str, ...]
    failures: Mapping[str, str] = column("failed sample → why", key="failed")
    identity: RunIdentity

    by: ClassVar[Derived[str]] = attribute("settings.by", "Players that are switched: layers or heads")
    outcome: ClassVar[Derived[str]] = attribute("settings.outcome", "Drift, kl or score")
    step: ClassVar[Derived[int]] = attribute("settings.step", "Decode step, from 0")

    @derived()
    def samples(self) -> int:
        """Samples that all numbers are of."""
        return len(self.sample_ids)

    samples_ended_before_step: ClassVar[Derived[int]] = attribute(
        "identity.ended", "Complete samples whose text ends before the step"
    )

    @property
    def names(self) -> list[str]:
        """Names of the players."""
        return list(map(str, self.game.players))

    def claims(self) -> Sequence[Claim]:
        """Return how the outcome changes with all players switched, and with single ones."""
        baseline, treatment = self.sides
        sets = f"{treatment}'s kept sets"
        if self.same == 1:
            where = f" as {baseline} in every head"
            return [Claim(treatment, "keeps", [Case("", self.same, "the same entries")], where=where, is_name=True)]
        if self.shapley is None:
            mixtures = [one.heads.case(one.name) for one in self.named]
            return [Claim(sets, "perturb", mixtures, COMPARED, f"{baseline}'s", noun="mixture", is_name=True)]
        values, player = self.shapley, self.by[:-1]
        write = text.difference_in_points if self.outcome == "score" else text.percent
        total = Case.number("", values.total, values.total_interval, write, 0)
        single = [
            Case.number(f"{player} {one.player}", one.value, one.value_interval, write, 0) for one in values.players
        ]
        whole = Claim(f"{sets} instead of {baseline}'s", f"make {WORDS[self.outcome]}", [total], _CHANGED, is_name=True)
        return [whole, Claim(f"a single {player}", "makes it", single, _CHANGED, noun=player)]

    def scope(self) -> Sequence[str]:
        """Return what the claims are of, with the number of intervals that leave out 0 by chance."""
        count = 0 if self.shapley is None else len(self.shapley.players)
        leave_out = text.decimal((1 - COVERED) * count, digits=1)
        chance = f"by chance alone up to {leave_out} of {count} intervals leave out 0"
        step = [f"step {self.step}"] if self.step else []
        kind = [chance] if count else ["propagated, all heads"]
        return [*kind, f"budget {self.baseline.budget}", *step, *super().scope()]

    def title(self) -> str:
        """Return the quantity that the table shows, and both sides."""
        baseline, treatment = self.sides
        unit = "points of 100" if self.outcome == "score" else "%"
        number = f"change of {WORDS[self.outcome]}, {unit}" if self.shapley else f"over {baseline} everywhere"
        return f"{number}: {treatment} instead of {baseline}, {self.identity.shared}"

    def shown_columns(self) -> Sequence[str]:
        """Return the columns of players or, without Shapley values, of mixtures."""
        return _MIXTURES if self.shapley is None else ("value", "alone", "last", "order_error")

    def lines(self) -> Sequence[Line]:
        """Return a line per player, or of more than 36 the largest; a line per mixture without Shapley values."""
        if self.shapley is None:
            return self._mixture_lines()
        largest = np.argsort(-np.abs(self.shapley.value), kind="stable")[:MOST]
        return [Line(self.names[index], (self.shapley.players[index],)) for index in sorted(largest.tolist())]

    def interval_note(self) -> str:
        """Return the line on n and intervals."""
        return text.intervals_note(self.samples, medians=self.shapley is None)

    def caveats(self) -> Sequence[str]:
        """Return the sign that means better, and a note on the error of drawn orders."""
        if self.shapley is None:
            return ["Below 1 the treatment is better."]
        side = "Above" if sign_of_better(self.outcome) > 0 else "Below"
        drawn = ["± of orders leaves out players that interact in pairs: see alone and last."]
        return [f"{side} 0 the treatment's kept sets are better.", *(drawn if self.shapley.permutations else [])]

    def details(self) -> Sequence[Part]:
        """Return the note on the sum of values, the tables of the greedy path and of mixtures, and notes."""
        baseline, treatment = self.sides
        title = f"{treatment}'s kept sets instead of {baseline}'s: over the baseline's"
        mixtures = [table(title, self._mixture_lines(), _MIXTURES, "mixture")] if self.shapley else []
        floor = text.noise_floor_note(self.named[0].heads.floor_relative_median)
        sums = []
        if values := self.shapley:
            orders = f"{values.permutations} orders" if values.permutations else "all subsets"
            whole = text.percent(values.total, values.total_interval)
            more = f"the {MOST} largest of {len(values.players)}; --json and to_frame() have all. "
            sums.append(
                f"{more if len(values.players) > MOST else ''}Values add up to {text.percent(values.value_sum)}, all "
                f"players switched: {whole} ({orders}, {values.coalitions:,} coalitions). Alone and last are the value "
                "where players do not interact."
            )
        path = [] if self.greedy is None else [
            Line(str(count), (step,)) for count, step in enumerate(self.greedy.steps())
        ]  # fmt: skip
        curves = f"greedy: change of {WORDS[self.outcome]}, %"
        halves = (
            "Half of the samples choose, the other half judges, and both change places. Intervals of judged are of "
            "these two paths: other samples might have chosen others."
        )
        shown: list[Part] = (
            [table(curves, path, ("first", "second", "chosen", "judged"), "switched"), halves] if path else []
        )
        return [*sums, *shown, *mixtures, f"{text.TIES_NOTE} {floor}"]

    def records(self) -> list[dict[str, Any]]:
        """Return a row per player and sample: Shapley value, alone and last, in the outcome's own unit."""
        if self.shapley is None:
            return []
        values = self.shapley
        return [
            {
                "player": str(player),
                "layer": player.layer,
                "head": player.head,
                "sample": sample,
                "outcome": self.outcome,
                "value": float(values.per_sample[index, number]),
                "alone": float(values.alone.per_sample[index, number]),
                "last": float(values.last.per_sample[index, number]),
            }
            for index, player in enumerate(self.game.players)
            for number, sample in enumerate(self.sample_ids)
        ]

    def _mixture_lines(self) -> list[Line]:
        """Return a line for the baseline's kept sets everywhere, then a line per named mixture."""
        baseline, _ = self.sides
        return [Line(f"{baseline} everywhere", (self,)), *(Line(one.name, (one, one.heads)) for one in self.named)]


def patching_result(
    store: PatchingStore,
    game: Game,
    settings: PatchingConfig,
    orders: Orders | None,
    paths: Sequence[GreedyPath],
    digest: str = "",
) -> Patching:
    """Return the result of a patching question from its measurements.

    Args:
        store: every mixture that the question needs.
        game: its players.
        settings: of the question.
        orders: drawn for Shapley values; None: all subsets were measured; without rows: there are no values.
        paths: the greedy paths of both halves of the samples; empty: there are none.
        digest: of the file of measurements.

    Raises FailedRunError where no sample is complete, ConfigError where none has the step.
    """
    measured = MixtureOutcomes(store, game, settings.step)
    has_values = orders is None or len(orders) > 0
    kl, kl_interval = median_kl(measured, game.baseline_everywhere)
    run, made = store.run, store.lines.made_with
    return Patching(
        baseline=store.run.configs[0],
        treatment=store.run.configs[1],
        settings=settings,
        game=game,
        kl_median=kl,
        kl_median_interval=kl_interval,
        cache_share=measured.cache_share(game.baseline_everywhere),
        shapley=shapley(measured, settings.outcome, orders) if has_values else None,
        greedy=greedy(measured, settings.outcome, paths) if paths else None,
        named=tuple(named_mixture(measured, name, mixture) for name, mixture in game.mixtures),
        same=float(np.mean([store.same[name] for name in measured.samples])),
        sample_ids=tuple(measured.samples),
        failures=dict(store.failures),
        identity=RunIdentity(
            model=run.model,
            dataset=run.dataset,
            samples=len(measured.samples),
            failed=len(store.failures),
            configs=run.configs,
            trace=digest,
            random_weights=run.random_weights,
            made_with=f"perturbkv {made.get('perturbkv_version', perturbkv.__version__)}",
            scenario=run.scenario,
            weights=str(made.get("weights", "")) if made.get("quantised_weights") is True else "",
            ended=measured.ended,
            source="measurements",
            measured_layers=str(made.get(MEASURED_LAYERS, "")),
        ),
    )
