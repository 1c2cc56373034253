"""The known scores by name: the files of `scores/`, registered ones, those of packages and of a user's file."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

from perturbkv.configs.choice import Choice, as_choice
from perturbkv.configs.option import complete_choice
from perturbkv.configs.plugins import Catalogue, instantiate
from perturbkv.configs.selections import SELECTIONS
from perturbkv.errors import ConfigError

if TYPE_CHECKING:
    from perturbkv.scoring.score import Score

OWN = "own"
"""Name that stands for a policy's own score."""


def _base() -> type[Score]:
    """Return the class `Score`, imported on first use."""
    from perturbkv.scoring.score import Score as Base

    return Base


SCORES: Catalogue[Score] = Catalogue("score", "perturbkv.scoring.scores", _base, reserved=lambda: [*SELECTIONS, OWN])


def build(choice: Choice | str) -> Score:
    """Return the score object of a choice, with defaults for missing options. Raises as `complete`."""
    named = as_choice(choice)
    return _build(cast("Any", SCORES.load(named.name)), named)


@functools.cache
def _build(kind: Any, choice: Choice) -> Score:
    """Return an object of the score class `kind` with a choice's options."""
    return cast("Score", instantiate(kind, complete(choice).options, f"score '{choice.name}'"))


def complete(choice: Choice) -> Choice:
    """Return the choice of a score with all its effective options, defaults included.

    Raises UnknownNameError, PluginError, and ConfigError for an unknown option or one without effect.
    """
    if choice.defaults is not None:
        return choice
    completed = complete_choice(choice, f"score '{choice.name}'", SCORES.load(choice.name).options())
    if completed.options.get("pool") != "none":
        return completed
    if "kernel" in completed.shown_options:
        raise ConfigError(
            f"kernel of score '{choice.name}' has no effect here: it needs a pool other than none; leave it out"
        )
    return completed.drop(["kernel"])
