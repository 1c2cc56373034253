"""What is asked of swapped kept sets: who the players are, what is compared, and how often. No torch here.

Which of two configurations' kept sets each head has: a mixture of both. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from perturbkv.configs import option as numbers
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.errors import ConfigError, UnknownNameError

_LAYER = re.compile(r"[bt]|\([01]+\)")
_WORDS = {False: "b", True: "t"}


@dataclass(frozen=True)
class Mixture:
    """A kept set for every head, the baseline's or the treatment's.

    Attributes:
        layers: per measured layer and kept set (query head, key/value head), True where it is the treatment's.
    """

    layers: tuple[tuple[bool, ...], ...]

    @classmethod
    def of_layers(cls, layers: int, heads: int, treated: Collection[int]) -> Self:
        """The treatment's kept sets in all heads of these layers, by their places, the baseline's elsewhere."""
        return cls(tuple((layer in treated,) * heads for layer in range(layers)))

    @classmethod
    def of_cells(cls, layers: int, heads: int, treated: Collection[tuple[int, int]]) -> Self:
        """The treatment's kept sets in these (layer, head), the baseline's elsewhere."""
        return cls(tuple(tuple((layer, head) in treated for head in range(heads)) for layer in range(layers)))

    @classmethod
    def parse(cls, text: str, heads: int) -> Self:
        """What `str` wrote. Raises ValueError for any other text."""
        words = _LAYER.findall(text)
        layers = tuple(tuple(one == "1" for one in word[1:-1]) or (word == "t",) * heads for word in words)
        if "".join(words) != text or any(len(layer) != heads for layer in layers):
            msg = f"expected a letter or {heads} bits for every layer, got '{text}'"
            raise ValueError(msg)
        return cls(layers)

    def __str__(self) -> str:
        """A letter for each layer, `b` or `t`; one whose heads differ is `(0110)`, 1 where they are the treatment's."""
        return "".join(
            _WORDS[layer[0]] if len(set(layer)) == 1 else f"({''.join(map(str, map(int, layer)))})"
            for layer in self.layers
        )


BY = ("layers", "heads")
OUTCOMES = {
    "drift": "L1 drift after the last layer",
    "kl": "KL(full ‖ evicted) of the next token, nat",
    "score": "score of the answer, 0 to 1",
}
"""What a game is about; of a score more is better, of the others less."""
EXACT, MOST_EXACT = 8, 12
"""Players up to which all subsets are measured unasked, and at most."""
PERMUTATIONS, GREEDY = 16, 10
LEAST = 8
"""Orders, reverses included: the error of drawing fewer is not told rightly."""
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
Coalition = frozenset[int]
"""Players that take the treatment's kept sets, by their places."""


@dataclass(frozen=True, order=True)
class Player:
    """A layer, by its number in the model, or one kept set of it."""

    layer: int
    head: int | None = None

    def __str__(self) -> str:
        """`18`, or `0-3`: as layer-head."""
        return str(self.layer) if self.head is None else f"{self.layer}-{self.head}"


@dataclass(frozen=True)
class SwapConfig:
    """What is asked.

    Attributes:
        by: who the players are: `layers`, or `heads`, one per kept set.
        layers: that play, by their numbers in the model; empty: all measured ones. The others keep the baseline's sets.
        baseline_in: of each mixture that is asked for, the layers with the baseline's kept sets; the treatment's
            elsewhere.
        treatment_in: likewise the layers with the treatment's.
        permutations: of the players, in pairs of an order and its reverse; None: all subsets of few players, else
            `PERMUTATIONS`. 0: no Shapley values.
        exact: whether all subsets are measured.
        greedy: players that are added one after the other, at most; None: `GREEDY`, of two samples or more.
        outcome: a key of `OUTCOMES`.
        step: decode step looked at.
        seed: of permutations, and of which samples choose and which judge.
    """

    by: str = "layers"
    layers: tuple[int, ...] = ()
    baseline_in: tuple[tuple[int, ...], ...] = ()
    treatment_in: tuple[tuple[int, ...], ...] = ()
    permutations: int | None = None
    exact: bool = False
    greedy: int | None = None
    outcome: str = "drift"
    step: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for what, given, known in (("player", self.by, BY), ("outcome", self.outcome, tuple(OUTCOMES))):
            if given not in known:
                raise UnknownNameError(given, what, known)
        for what, number in (("permutations", self.permutations), ("greedy", self.greedy), ("step", self.step)):
            numbers.check_number(what, number or 0, 100_000)
            if (number or 0) < 0:
                msg = f"{what} (--{what}) must be at least 0, got {number}"
                raise ConfigError(msg)
        if self.permutations and (self.permutations % 2 or self.permutations < LEAST):
            wanted = f"an even number from {LEAST} on, or 0 for none"
            msg = f"permutations (--permutations) are orders and their reverses: {wanted}; got {self.permutations}"
            raise ConfigError(msg)
        if self.exact and self.permutations is not None:
            msg = "exact (--exact) measures all subsets, and permutations (--permutations) draws some; give one of them"
            raise ConfigError(msg)


def parse_layers(option: str, text: str) -> tuple[int, ...]:
    """`0,18-23` -> its layers, ascending. Raises ConfigError for anything else."""
    found: list[int] = []
    for piece in text.split(","):
        told = _RANGE.fullmatch(piece.strip())
        ends = (0, -1) if told is None else (int(told[1]), int(told[2] or told[1]))
        if ends[1] < ends[0]:
            msg = f"{option} takes layers, such as 0 or 0,18-23; got '{text}'"
            raise ConfigError(msg)
        found += range(ends[0], ends[1] + 1)
    return tuple(sorted(set(found)))


def check_sides(baseline: EvictionConfig, treatment: EvictionConfig) -> None:
    """Raise ConfigError for sides that are equal, keep everything, correct, or whose sets cannot lie in one cache."""
    if baseline == treatment:
        msg = f"expected two different configurations to swap kept sets of, got '{baseline.label()}' twice"
        raise ConfigError(msg)
    if whole := [config.policy.name for config in (baseline, treatment) if not config.evicts]:
        msg = f"expected configurations that evict, so that there are kept sets to swap; policy '{whole[0]}' does not"
        raise ConfigError(msg)
    if corrected := [config for config in (baseline, treatment) if config.corrected]:
        msg = f"expected kept sets alone, with no correction of what goes, got {corrected[0].correction}; leave it out"
        raise ConfigError(msg)
    for what, one, other in (
        ("granularity", baseline.granularity.name, treatment.granularity.name),
        ("precision", str(baseline.precision), str(treatment.precision)),
        ("position of kept keys", _positions(baseline), _positions(treatment)),
    ):
        if one != other:
            msg = f"expected the same {what} on both sides, whose kept sets lie in one cache; got {one} and {other}"
            raise ConfigError(msg)


def _positions(config: EvictionConfig) -> str:
    return str(config.policy.options.get("positions", "kept"))


@dataclass(frozen=True)
class Game:
    """Players and mixtures of a model, as they are asked for.

    Attributes:
        players: who takes one side or the other.
        named: mixtures that were asked for by name, the treatment alone first.
        layers: the model's measured layers, by their numbers.
        kept_heads: kept sets of each.
    """

    players: tuple[Player, ...]
    named: tuple[tuple[str, Mixture], ...]
    layers: tuple[int, ...]
    kept_heads: int

    @classmethod
    def of(cls, asked: SwapConfig, layers: Sequence[int], kept_heads: int, granularity: str) -> Self:
        """The game of a model with these measured layers. Raises ConfigError for a layer that it has not.

        ConfigError too for heads that share a kept set, for fewer than two players, and for too many to measure all of
        their subsets.
        """
        for told in (asked.layers, *asked.baseline_in, *asked.treatment_in):
            _check_layers(told, layers)
        if asked.by == "heads" and granularity == "layer":
            msg = "by heads (--by heads) expects a kept set per head, and granularity 'layer' keeps one for all of them"
            raise ConfigError(msg)
        playing = asked.layers or tuple(layers)
        heads: Sequence[int | None] = (None,) if asked.by == "layers" else range(kept_heads)
        players = tuple(Player(layer, head) for layer in playing for head in heads)
        if len(players) < 2 and not (asked.permutations == 0 and asked.greedy == 0):
            msg = f"expected at least 2 {asked.by} to tell apart, got {len(players)}; give more, or --by heads"
            raise ConfigError(msg)
        if asked.exact and len(players) > MOST_EXACT:
            msg = f"exact (--exact) takes at most {MOST_EXACT} players, got {len(players)}; give fewer layers"
            raise ConfigError(msg)
        return cls(players, _named(asked, layers, kept_heads), tuple(layers), kept_heads)

    @property
    def none(self) -> Mixture:
        """The baseline everywhere."""
        return self.mixture(frozenset())

    @property
    def whole(self) -> Mixture:
        """The treatment everywhere."""
        return Mixture.of_layers(len(self.layers), self.kept_heads, range(len(self.layers)))

    @property
    def everybody(self) -> Coalition:
        """All players."""
        return frozenset(range(len(self.players)))

    def mixture(self, coalition: Collection[int]) -> Mixture:
        """What a coalition keeps: its players the treatment's sets, all others the baseline's."""
        cells = [
            (self.layers.index(player.layer), head)
            for player in (self.players[place] for place in coalition)
            for head in (range(self.kept_heads) if player.head is None else [player.head])
        ]
        return Mixture.of_cells(len(self.layers), self.kept_heads, frozenset(cells))


def permutations_of(asked: SwapConfig, players: int) -> int | None:
    """How many orders are drawn; None: all subsets are measured."""
    if asked.exact or (asked.permutations is None and players <= EXACT):
        return None
    return PERMUTATIONS if asked.permutations is None else asked.permutations


def greedy_of(asked: SwapConfig, players: int, samples: int) -> int:
    """How many players are added one after the other. Raises ConfigError where nobody could judge a choice."""
    if samples < 2 and asked.greedy:
        msg = f"greedy (--greedy) expects at least 2 samples, one to choose and one to judge, got {samples}"
        raise ConfigError(msg)
    wanted = GREEDY if asked.greedy is None else asked.greedy
    return min(wanted, players) if samples > 1 else 0


def layers_told(layers: Sequence[int]) -> str:
    """`0, 18-23` of layers by their numbers, ascending."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _check_layers(told: Sequence[int], layers: Sequence[int]) -> None:
    if unknown := [layer for layer in told if layer not in layers]:
        msg = f"expected layers of {layers_told(layers)}, which are measured, got {unknown[0]}"
        raise ConfigError(msg)


def _named(asked: SwapConfig, layers: Sequence[int], kept_heads: int) -> tuple[tuple[str, Mixture], ...]:
    """The treatment everywhere, then what was asked for by name, each once."""
    whole = range(len(layers))
    found = {Mixture.of_layers(len(layers), kept_heads, whole): "treatment everywhere"}
    for words, lists in (("baseline in", asked.baseline_in), ("treatment in", asked.treatment_in)):
        for told in lists:
            places = {layers.index(layer) for layer in told}
            treated = places if words == "treatment in" else set(whole) - places
            found.setdefault(Mixture.of_layers(len(layers), kept_heads, treated), f"{words} {layers_told(told)}")
    return tuple((name, mixture) for mixture, name in found.items())
