"""The axes that our signatures name are checked in every test; a check that was switched off would be seen here."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from jaxtyping import TypeCheckError

from perturbkv import theory
from perturbkv.pipeline.sample.capture import _give_hidden
from perturbkv.scoring import value_norms


def test_an_axis_of_two_lengths_is_an_error() -> None:
    with pytest.raises(TypeCheckError, match="head"):
        theory.kept_sums(torch.ones(2, 5), torch.ones(1, 5, 6), torch.ones(1, 3, 5).bool())


def test_a_missing_axis_is_an_error() -> None:
    with pytest.raises(TypeCheckError, match="value"):
        value_norms.projected_value_norms(torch.ones(4, 8), torch.ones(16, 8))


def test_functions_made_anew_are_checked_and_keep_what_they_close_over() -> None:
    seen: list[int] = []
    for number in (1, 2):
        hook = partial(_give_hidden, lambda layer, states: seen.append(layer), number)
        hook(torch.nn.Identity(), (), torch.zeros(1, 2, 3))
        with pytest.raises(TypeCheckError, match="module"):
            hook("no module", (), torch.zeros(1, 2, 3))
    assert seen == [1, 2]
