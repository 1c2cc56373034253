"""The known scores, by name: the files of `scores/`, what was registered, installed packages' and single files."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

from perturbkv.configs.choice import Choice, as_choice
from perturbkv.configs.option import completed
from perturbkv.configs.plugins import Catalogue
from perturbkv.configs.selections import SELECTIONS
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.scoring.score import Score

OWN = "own"
"""Where a policy's own score is meant."""


def _base() -> type[Score]:
    from perturbkv.scoring.score import Score as Base

    return Base


SCORES: Catalogue[Score] = Catalogue("score", "perturbkv.scoring.scores", _base, refused=lambda: [*SELECTIONS, OWN])


def build(choice: Choice | str) -> Score:
    """The score with its options, those that were not given at their defaults. Raises as `resolved`."""
    named = as_choice(choice)
    return _built(cast("Any", SCORES.info(named.name)), named)


@functools.cache
def _built(kind: Any, choice: Choice) -> Score:
    found: Score = kind(**resolved(choice).options)
    return found


def resolved(choice: Choice) -> Choice:
    """The choice with every option that makes a difference.

    Raises UnknownNameError, PluginError, and ConfigError for an option that the score lacks, or one without effect.
    """
    if choice.usual is not None:
        return choice
    whole = completed(choice, f"score '{choice.name}'", SCORES.info(choice.name).options())
    if whole.options.get("pool") != "none":
        return whole
    if "kernel" in whole.told:
        msg = f"kernel of score '{choice.name}' has no effect here: it needs a pool other than none; leave it out"
        raise ConfigError(msg)
    return whole.without(["kernel"])
