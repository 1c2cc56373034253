"""Which layers and heads decide what comes out? One side's kept sets in some of them, the other side's in the rest.

How swapped kept sets are told: in a sentence, in tables, in the notes beneath them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import perturbkv
from perturbkv.analyses import text
from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.measurements import Floats
from perturbkv.analyses.pairing import counted, folded, side_names
from perturbkv.analyses.questions.patching.patching_values import (
    Found,
    Greedy,
    Measured,
    Named,
    Shapley,
    Shift,
    better,
    divergence,
    greedy,
    named,
    shapley,
)
from perturbkv.analyses.result import Result
from perturbkv.analyses.stats.arithmetic import plain
from perturbkv.analyses.stats.coalition import Orders, Path
from perturbkv.analyses.stats.intervals import COVERED, LEAST, Band, Scalar
from perturbkv.analyses.text import at, decided, too_few
from perturbkv.configs.patching import Game, SwapConfig
from perturbkv.display import Table
from perturbkv.schema import MEASURED
from perturbkv.storage.patching_file import SwapStore

MOST = 36
"""Players of a table at most: of more the largest."""
_NONE, _LETTERS = 1e-9, 13
"""A change that is rounding; of a mixture's name on a line."""
WORDS = {"drift": "the last layer's drift", "kl": "the next token's KL", "score": "the answers' score"}
_NAMED = ("", "#held /\nfull", "#heads\n+ / = / −", "#share\nbetter", "#Σ propa-\ngated", "#last layer's\ndrift",
          "#KL (nat)")  # fmt: skip


def conclusion(result: Found) -> str:
    """The players that change the outcome most, and all together."""
    baseline, treatment = side_names(result.baseline, result.treatment)
    samples, step = len(result.sample_ids), f", step {result.asked.step}" if result.asked.step else ""
    where = f"{counted(samples, 'sample')}, budget {result.baseline.budget}{step}"
    if result.same == 1:
        return f"{treatment} and {baseline} keep the same entries in every head ({where})."
    if result.shapley is None:
        return _of_named(result, baseline, where)
    found, word = result.shapley, WORDS[result.asked.outcome]
    together = signed_percent(found.total, found.total_interval)
    whole = f"all {len(found.value)} {result.asked.by} together {together}"
    if samples < LEAST:
        return f"{too_few(samples)} which {result.asked.by} change {word}; {whole} ({where})."
    sure = sum(bool(decided(at(found.interval, place), 0.0)) for place in range(len(found.value)))
    largest = [
        place for place in np.argsort(-np.abs(found.value), kind="stable")[:3] if abs(found.value[place]) > _NONE
    ]
    listed = ", ".join(f"{_player(result, place)} {_value(found, place)}" for place in largest)
    chance = text.decimal((1 - COVERED) * len(found.value), digits=1)
    known = f"of {len(found.value)} intervals {sure} leave out 0, by chance alone up to {chance} would"
    opening = f"With {treatment}'s kept sets instead of {baseline}'s {word} changes most by {listed}"
    return f"{opening}; {known}; {whole} ({where})."


def tables(result: Found) -> list[Table | str]:
    """Mixtures by name, then Shapley values, then the greedy path, as far as they were asked for."""
    baseline, treatment = side_names(result.baseline, result.treatment)
    found: list[Table | str] = [f"baseline {result.baseline.label()}\ntreatment {result.treatment.label()}"]
    found.append(Table(f"{treatment}'s kept sets instead of {baseline}'s: over the baseline's", _NAMED, _named(result)))
    if result.shapley is not None:
        found += [*_values(result, result.shapley), _efficiency(result.shapley)]
    if result.greedy is not None:
        found.append(_path(result, result.greedy))
    return found


def notes(result: Found) -> str:
    """What the numbers are, and which error is which."""
    baseline, _ = side_names(result.baseline, result.treatment)
    unit = (
        "of the score, in points of 100"
        if result.asked.outcome == "score"
        else f"over {baseline}'s everywhere, Σ over samples"
    )
    lines = [
        text.about_intervals(len(result.sample_ids), medians=True),
        f"Changes: {WORDS[result.asked.outcome]}, {unit}; {_good(result)}.",
        "A Shapley value is what a player's kept sets change, averaged over the orders in which players may be "
        "switched; all of them add up to everybody's. Alone: nobody else is switched; last: all others are. Both are "
        "the value where players do not interact. In brackets: over samples, these orders given."
        if result.shapley is not None
        else "",
        "±: 95 % of drawing orders, these samples given. It does not see players that interact in pairs, whom an "
        "order and its reverse average exactly: alone and last do."
        if result.shapley is not None and result.shapley.permutations
        else "",
        "Greedy: half of the samples choose, the other half judges, and both change places. Chosen flatters. Intervals "
        "of judged are of these two paths: other samples might have chosen others."
        if result.greedy is not None
        else "",
        "+ / = / −: heads whose mean over samples is better, tied, worse; share better: mean over samples. KL: median. "
        + text.ABOUT_TIES,
        f"{text.ABOUT_HELD} {text.about_floor(result.named[0].heads.floor_relative_median)}",
    ]
    return "\n".join(filter(None, lines))


def signed_percent(value: float, interval: Scalar = None) -> str:
    """'+9.1 % [4.0, 14.5]' of 0.091."""
    if np.isnan(value):
        return "–"
    digits = 1 if abs(value) < 1 else 0
    shown = text.fixed(100 * value, digits)
    sign = "+" if value > 0 and float(shown) else ""
    return f"{sign}{shown} %" + text.ends(interval, lambda end: text.fixed(100 * end, digits), " ")


def _value(found: Shapley, place: int) -> str:
    return signed_percent(float(found.value[place]), at(found.interval, place))


def _bare(found: Shapley | Shift, place: int) -> str:
    """A player's cell of a column of percentages."""
    return signed_percent(float(found.value[place]), at(found.interval, place)).replace(" %", "")


def _good(result: Found) -> str:
    return "above 0 the treatment is better" if better(result.asked.outcome) > 0 else "below 0 the treatment is better"


def _player(result: Found, place: int) -> str:
    return f"{result.asked.by[:-1]} {result.names[place]}"


def _of_named(result: Found, baseline: str, where: str) -> str:
    """Of mixtures by name alone: what each does to the sum of all heads."""
    listed = "; ".join(
        f"{one.name} {text.decimal(one.heads.sum_ratio, one.heads.sum_ratio_interval)}" for one in result.named
    )
    return f"The propagated sum over {baseline}'s: {listed} ({where})."


def _named(result: Found) -> list[list[str]]:
    baseline, _ = side_names(result.baseline, result.treatment)
    kl = text.significant(result.baseline_kl.median, result.baseline_kl.interval)
    first = [folded(f"{baseline} everywhere", _LETTERS), text.held(result.held), "", "", "1", "1", kl]
    return [first, *map(_named_row, result.named)]


def _named_row(one: Named) -> list[str]:
    score = "" if np.isnan(one.score) else f"\nscore {text.percent(one.score)}"
    return [
        folded(one.name, _LETTERS) + score,
        text.held(one.held),
        text.verdicts(one.heads.verdict),
        text.percent(one.heads.better_share, one.heads.better_share_interval, "\n"),
        text.decimal(one.heads.sum_ratio, one.heads.sum_ratio_interval, apart="\n"),
        text.decimal(one.drift_ratio, one.drift_ratio_interval, apart="\n"),
        text.significant(one.kl.median, one.kl.interval),
    ]


def _values(result: Found, found: Shapley) -> list[Table | str]:
    """A row per player, in their order; of very many the largest."""
    largest = np.argsort(-np.abs(found.value), kind="stable")[:MOST]
    sides = (found, found.alone, found.last)
    rows = [
        [result.names[place], *(_bare(side, place) for side in sides), _error(found, place)]
        for place in sorted(largest.tolist())
    ]
    columns = [result.asked.by[:-1], "#value", "#alone", "#last", "#± of\norders"]
    table = Table(f"Shapley values: change of {WORDS[result.asked.outcome]}, %", columns, rows)
    if len(found.value) <= MOST:
        return [table]
    return [table, f"the {MOST} largest of {len(found.value)}; --json and to_frame() have all"]


def _error(found: Shapley, place: int) -> str:
    return text.fixed(100 * float(found.sampling[place]), 1) if found.permutations else "exact"


def _efficiency(found: Shapley) -> str:
    how = f"{found.permutations} orders" if found.permutations else "all subsets"
    whole = signed_percent(found.total, found.total_interval)
    return (
        f"values add up to {signed_percent(float(found.value.sum()))}, all players switched: {whole} "
        f"({how}, {found.coalitions:,} coalitions)"
    )


def _path(result: Found, found: Greedy) -> Table:
    rows = [
        [
            str(count),
            *("" if count == 0 else result.names[path[count - 1]] for path in found.paths),
            _at(found.chosen, found.chosen_interval, count),
            _at(found.judged, found.judged_interval, count),
        ]
        for count in range(len(found.chosen))
    ]
    columns = ["switched", "first half\nadds", "second half\nadds", "#chosen\n(flatters)", "#judged"]
    return Table(f"greedy: change of {WORDS[result.asked.outcome]}", columns, rows)


def _at(values: Floats, band: Band, place: int) -> str:
    return signed_percent(float(values[place]), at(band, place) if place else None)


class Swap(Result, Found):
    """What switching kept sets from a baseline's to a treatment's does, player by player; its fields are `Found`'s."""

    def conclusion(self) -> str:
        """The players that change the outcome most, and all of them together."""
        return conclusion(self)

    def tables(self) -> list[Table | str]:
        """Mixtures by name, Shapley values, the greedy path."""
        return tables(self)

    def notes(self) -> str:
        """What the numbers are, and which error is which."""
        return notes(self)

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
