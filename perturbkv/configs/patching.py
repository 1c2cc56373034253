"""Settings of kept-set patching: mixtures of two configurations' kept sets, the players and the outcome.

Each kept set of a mixture is the baseline's or the treatment's. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

from perturbkv.configs import option as numbers
from perturbkv.configs import selections
from perturbkv.configs.choice import Choice
from perturbkv.configs.eviction import EvictionConfig
from perturbkv.configs.layer_types import format_layers
from perturbkv.errors import ConfigError, UnknownNameError

_LAYER = re.compile(r"[bt]|\([01]+\)")
_LETTERS = {False: "b", True: "t"}


@dataclass(frozen=True)
class Mixture:
    """A choice, per head, of the side that its kept set comes from: the baseline or the treatment.

    Attributes:
        layers: per measured layer and kept set (query head, key/value head), True for the treatment's.
    """

    layers: tuple[tuple[bool, ...], ...]

    @classmethod
    def of_layers(cls, layers: int, heads: int, treated: Collection[int]) -> Self:
        """Return the mixture with the treatment's kept sets in all heads of the layers `treated`."""
        return cls(tuple((layer in treated,) * heads for layer in range(layers)))

    @classmethod
    def parse(cls, text: str, heads: int) -> Self:
        """Return the mixture written as text by `str`, with `heads` kept sets per layer.

        Raises ValueError for any other text.
        """
        codes = _LAYER.findall(text)
        layers = tuple(tuple(bit == "1" for bit in code[1:-1]) or (code == "t",) * heads for code in codes)
        if "".join(codes) != text or any(len(layer) != heads for layer in layers):
            raise ValueError(f"expected a letter or {heads} bits for every layer, got '{text}'")
        return cls(layers)

    def __str__(self) -> str:
        """Return one letter per layer, `b` or `t`; for a layer whose heads differ `(0110)`, 1 for the treatment's."""
        return "".join(
            _LETTERS[layer[0]] if len(set(layer)) == 1 else f"({''.join(map(str, map(int, layer)))})"
            for layer in self.layers
        )


BY = ("layers", "heads")
OUTCOMES = {
    "drift": "L1 drift after the last layer",
    "kl": "KL(full ‖ evicted) of the next token, nat",
    "score": "score of the answer, 0 to 1",
}
"""Outcome -> its description and unit; larger is better for a score, smaller for the other outcomes."""
EXACT, MOST_EXACT = 8, 12
"""Numbers of players up to which all subsets are measured by default, and on request."""
PERMUTATIONS, GREEDY = 16, 10
LEAST = 8
"""Smallest number of permutations, reverses included, whose standard error can be estimated."""
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
Coalition = frozenset[int]
"""Players with the treatment's kept sets, by their indices."""


@dataclass(frozen=True, order=True)
class Player:
    """A player of kept-set patching: a layer, by its number in the model, or one kept set of a layer."""

    layer: int
    head: int | None = None

    def __str__(self) -> str:
        """Return `18` for a layer, or `0-3` for head 3 of layer 0."""
        return str(self.layer) if self.head is None else f"{self.layer}-{self.head}"


@dataclass(frozen=True)
class PatchingConfig:
    """Settings of kept-set patching.

    Attributes:
        by: the kind of players: `layers`, or `heads`, one per kept set.
        layers: layers of the players, by number; empty: all measured layers. Other layers keep the baseline's sets.
        baseline_in: for each requested mixture, the layers with the baseline's kept sets; the treatment's elsewhere.
        treatment_in: likewise the layers with the treatment's.
        permutations: number of random orders of the players, in pairs of an order and its reverse; None: all subsets
            for few players, else `PERMUTATIONS`. 0: no Shapley values.
        exact: whether all subsets are measured.
        greedy: largest number of players added greedily; None: `GREEDY`, where there are two samples or more.
        outcome: a key of `OUTCOMES`.
        step: decode step that is measured.
        seed: seed of the permutations and of the split of samples into choosing and judging ones.
    """

    by: str = "layers"
    layers: Sequence[int] = ()
    baseline_in: Sequence[Sequence[int]] = ()
    treatment_in: Sequence[Sequence[int]] = ()
    permutations: int | None = None
    exact: bool = False
    greedy: int | None = None
    outcome: str = "drift"
    step: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        for name in ("baseline_in", "treatment_in"):
            object.__setattr__(self, name, tuple(map(tuple, getattr(self, name))))
        for what, name, known in (("player", self.by, BY), ("outcome", self.outcome, tuple(OUTCOMES))):
            if name not in known:
                raise UnknownNameError(name, what, known)
        for what, number in (("permutations", self.permutations), ("greedy", self.greedy), ("step", self.step)):
            numbers.check_number(what, number or 0, 100_000)
            if (number or 0) < 0:
                raise ConfigError(f"{what} (--{what}) must be at least 0, got {number}")
        if self.permutations and (self.permutations % 2 or self.permutations < LEAST):
            wanted = f"an even number from {LEAST} on, or 0 for none"
            raise ConfigError(
                f"permutations (--permutations) are orders and their reverses: {wanted}; got {self.permutations}"
            )
        if self.exact and self.permutations is not None:
            raise ConfigError(
                "exact (--exact) measures all subsets, and permutations (--permutations) draws some; give one of them"
            )


def parse_layers(option: str, text: str) -> tuple[int, ...]:
    """Return the layer numbers in a text such as `0,18-23`, ascending and each once.

    Raises ConfigError, which names the option, for any other text.
    """
    layers: list[int] = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item.strip())
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if last < first:  # no range at all, or one that runs backwards
            raise ConfigError(f"{option} takes layers, such as 0 or 0,18-23; got '{text}'")
        layers += range(first, last + 1)
    return tuple(sorted(set(layers)))


def check_sides(baseline: EvictionConfig, treatment: EvictionConfig) -> None:
    """Raise ConfigError unless the two configurations differ, evict, are uncorrected, and share a cache layout."""
    if baseline == treatment:
        raise ConfigError(f"expected two different configurations to swap kept sets of, got '{baseline.label()}' twice")
    if full := [config.policy.name for config in (baseline, treatment) if not config.evicts]:
        raise ConfigError(
            f"expected configurations that evict, so that there are kept sets to swap; policy '{full[0]}' does not"
        )
    if corrected := [config for config in (baseline, treatment) if config.corrected]:
        raise ConfigError(f"expected configurations with no correction, got {corrected[0].correction}; leave it out")
    for what, first, second in (
        ("granularity", baseline.granularity.name, treatment.granularity.name),
        ("precision", str(baseline.precision), str(treatment.precision)),
        ("position of kept keys", baseline.positions, treatment.positions),
    ):
        if first != second:
            raise ConfigError(
                f"expected the same {what} on both sides, whose kept sets lie in one cache; got {first} and {second}"
            )


@dataclass(frozen=True)
class Game:
    """The players of kept-set patching in a model, and the mixtures that are requested by name.

    Attributes:
        players: players of the game, in order.
        mixtures: requested mixtures with their names, the treatment everywhere first.
        layers: the model's measured layers, by their numbers.
        kept_heads: kept sets per layer.
    """

    players: tuple[Player, ...]
    mixtures: tuple[tuple[str, Mixture], ...]
    layers: tuple[int, ...]
    kept_heads: int

    @classmethod
    def from_config(cls, config: PatchingConfig, layers: Sequence[int], kept_heads: int, granularity: str) -> Self:
        """Return the game for a model with the given measured layers and `kept_heads` kept sets per layer.

        Raises ConfigError for a requested layer that is not measured, for players by heads where heads share a kept
        set, for fewer than two players, and for too many players to measure all of their subsets.
        """
        for layer_numbers in (config.layers, *config.baseline_in, *config.treatment_in):
            if unknown := [layer for layer in layer_numbers if layer not in layers]:
                raise ConfigError(f"expected layers of {format_layers(layers)}, which are measured, got {unknown[0]}")
        if config.by == "heads" and selections.shares_heads(Choice(granularity)):
            raise ConfigError(
                f"by heads (--by heads) expects a kept set per head, and granularity '{granularity}' keeps one for all "
                "of them"
            )
        playing = config.layers or tuple(layers)
        heads: Sequence[int | None] = (None,) if config.by == "layers" else range(kept_heads)
        players = tuple(Player(layer, head) for layer in playing for head in heads)
        if len(players) < 2 and not (config.permutations == 0 and config.greedy == 0):
            raise ConfigError(
                f"expected at least 2 {config.by} to tell apart, got {len(players)}; give more, or --by heads"
            )
        if config.exact and len(players) > MOST_EXACT:
            raise ConfigError(
                f"exact (--exact) takes at most {MOST_EXACT} players, got {len(players)}; give fewer layers"
            )
        return cls(players, _named_mixtures(config, layers, kept_heads), tuple(layers), kept_heads)

    @property
    def baseline_everywhere(self) -> Mixture:
        """Mixture with the baseline's kept sets everywhere."""
        return self.mixture(frozenset())

    @property
    def treatment_everywhere(self) -> Mixture:
        """Mixture with the treatment's kept sets everywhere."""
        return Mixture.of_layers(len(self.layers), self.kept_heads, range(len(self.layers)))

    @property
    def all_players(self) -> Coalition:
        """Coalition of all players."""
        return frozenset(range(len(self.players)))

    def mixture(self, coalition: Collection[int]) -> Mixture:
        """Return the mixture of a coalition: the treatment's kept sets for its players, the baseline's elsewhere."""
        cells = {
            (self.layers.index(player.layer), head)
            for player in (self.players[index] for index in coalition)
            for head in (range(self.kept_heads) if player.head is None else [player.head])
        }
        layers, heads = range(len(self.layers)), range(self.kept_heads)
        return Mixture(tuple(tuple((layer, head) in cells for head in heads) for layer in layers))


def permutation_count(config: PatchingConfig, players: int) -> int | None:
    """Return the number of random orders of the `players` players to measure; None if all subsets are measured."""
    if config.exact or (config.permutations is None and players <= EXACT):
        return None
    return PERMUTATIONS if config.permutations is None else config.permutations


def greedy_count(config: PatchingConfig, players: int, samples: int) -> int:
    """Return the number of the `players` players to add greedily; 0 where a single sample leaves none to judge.

    Raises ConfigError where it is requested and no sample is left to judge the choice.
    """
    if samples < 2 and config.greedy:
        raise ConfigError(
            f"greedy (--greedy) expects at least 2 samples, one to choose and one to judge, got {samples}"
        )
    most = GREEDY if config.greedy is None else config.greedy
    return min(most, players) if samples > 1 else 0


def _named_mixtures(config: PatchingConfig, layers: Sequence[int], kept_heads: int) -> tuple[tuple[str, Mixture], ...]:
    """Return (name, mixture) pairs without duplicates: the treatment everywhere, then the requested mixtures."""
    everywhere = range(len(layers))
    mixtures = {Mixture.of_layers(len(layers), kept_heads, everywhere): "treatment everywhere"}
    for side, lists in (("baseline in", config.baseline_in), ("treatment in", config.treatment_in)):
        for layer_numbers in lists:
            indices = {layers.index(layer) for layer in layer_numbers}
            treated = indices if side == "treatment in" else set(everywhere) - indices
            mixtures.setdefault(
                Mixture.of_layers(len(layers), kept_heads, treated), f"{side} {format_layers(layer_numbers)}"
            )
    return tuple((name, mixture) for mixture, name in mixtures.items())
