"""Scores of one layer, each once for all configurations, in bounded memory; one that breaks is named in one line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.plugins import is_ours, said
from perturbkv.errors import PerturbkvError, PluginError
from perturbkv.scoring.layer_view import NEEDS, LayerView
from perturbkv.scoring.replay_view import ReplayView
from perturbkv.scoring.score import Score
from perturbkv.theory import WORK


def layer_scores(
    view: LayerView, scores: Sequence[Score], chunk_bytes: int
) -> dict[Score, Float[Tensor, "rows prefix"]]:
    """What each score gives, all heads together. Raises PluginError for one of somebody else that breaks."""
    parts = list(view.parts(chunk_bytes))
    return {
        score: torch.cat([_computed(score, part) for part in ([view] if score.whole_layer else parts)])
        for score in scores
    }


def replayed(score: Score, seen: ReplayView) -> Float[Tensor, "rows chunk"]:
    """What a score gives the part of the context that a pass repeats. Raises PluginError for one that breaks."""
    if is_ours(type(score)):
        return score.replayed(seen)
    try:
        found = score.replayed(seen)
    except PerturbkvError:
        raise
    except Exception as error:
        raise _broken(score, seen, f"raised {said(error)}") from error
    _check_numbers(score, seen, found, [(len(rows), seen.chunk) for rows in (seen.queries, seen.keys)])
    return found.to(seen.keys.device, WORK)


class Shown:
    """A layer as one score sees it: what it named in `needs`, and what says where it is.

    A score of somebody else gets copies: what it writes to them changes nothing for others.
    """

    def __init__(self, view: LayerView, score: Score) -> None:
        self._view, self._score, self._copies = view, score, not is_ours(type(score))

    def __getattr__(self, name: str) -> Any:
        if name in NEEDS and name not in self._score.needs:
            msg = f"score '{self._score.called}' looks at {name}, which its needs {self._score.needs} do not name"
            raise PluginError(msg)
        if not hasattr(type(self._view), name) and name not in type(self._view).__dataclass_fields__:
            msg = (
                f"score '{self._score.called}' asks for '{name}', which no layer shows: what comes after the prompt "
                f"is not known when a cache is evicted; there are {', '.join(NEEDS)}"
            )
            raise PluginError(msg)
        found = getattr(self._view, name)
        return found.clone() if self._copies and isinstance(found, Tensor) else found


def _computed(score: Score, view: LayerView) -> Tensor:
    shown: Any = Shown(view, score)
    if is_ours(type(score)):
        return score.score(shown).to(view.keys.device, non_blocking=True)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = score.score(shown)
    except PerturbkvError:
        raise
    except (Exception, SystemExit) as error:
        raise _broken(score, view, f"raised {said(error)}") from error
    _check(score, view, found)
    return found.to(view.keys.device, WORK)


def _check(score: Score, view: LayerView, found: Any) -> None:
    """Raise PluginError for what is no score of these entries."""
    _check_numbers(score, view, found, [(view.heads, view.prefix), (view.kv_heads, view.prefix)])


def _check_numbers(score: Score, view: LayerView | ReplayView, found: Any, shapes: Sequence[tuple[int, int]]) -> None:
    if not isinstance(found, Tensor):
        raise _broken(score, view, f"gives {type(found).__name__}, expected a tensor")
    if tuple(found.shape) not in shapes:
        expected = f"{shapes[0]}: a row per query head, or {shapes[1]}: per key/value head; n − w entries"
        raise _broken(score, view, f"gives the shape {tuple(found.shape)}, expected {expected}")
    if found.dtype == torch.bool or found.is_complex():
        raise _broken(score, view, f"gives {str(found.dtype).removeprefix('torch.')}, expected numbers")
    if not torch.isfinite(found).all():
        raise _broken(score, view, f"gives NaN or infinity for {int((~torch.isfinite(found)).sum())} entries")
    if not score.signed and bool((found < 0).any()):
        raise _broken(score, view, "gives numbers below 0; say signed = True")


def _broken(score: Score, view: LayerView | ReplayView, what: str) -> PluginError:
    return PluginError(f"score '{score.called}' {what} (layer {view.layer}, sample '{view.sample}')")
