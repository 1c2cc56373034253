"""Computation of a layer's scores, each once for all configurations, in bounded memory; errors of external scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from perturbkv.configs.plugins import commands_for_signed, external_code, is_builtin
from perturbkv.devices import copy_to_device
from perturbkv.errors import PluginError
from perturbkv.scoring.layer_view import NEEDS, LayerView
from perturbkv.scoring.replay_view import ReplayView
from perturbkv.scoring.score import Score
from perturbkv.theory import WORK


def layer_scores(
    view: LayerView, scores: Sequence[Score], chunk_bytes: int
) -> dict[Score, Float[Tensor, "rows prefix"]]:
    """Return score -> its values for all heads of a layer, computed in parts of `chunk_bytes` of attention weights.

    Scores by the same queries of the window share these weights. Raises PluginError where an external score fails.
    """
    results: dict[Score, Tensor] = {}
    for window_queries in dict.fromkeys(score.window_queries for score in scores):
        shown = view.with_window_queries(window_queries)
        parts = list(shown.parts(chunk_bytes))
        for score in scores:
            if score.window_queries == window_queries:
                computed = [_compute(score, part) for part in ([shown] if score.whole_layer else parts)]
                results[score] = torch.cat(computed)
    return results


def compute_replay(score: Score, view: ReplayView) -> Float[Tensor, "rows chunk"]:
    """Return a score of the context entries repeated in a replay pass. Raises PluginError if a plugin's score fails."""
    if is_builtin(type(score)):
        return score.score_replay(view)
    with external_code(f"{_describe(score, view)} raised"):
        scores = score.score_replay(view)
    _check_result(score, view, scores, [(len(rows), view.chunk) for rows in (view.queries, view.keys)])
    return scores.to(view.keys.device, WORK)


class VisibleLayer:
    """A layer as one score sees it: the data named in the score's `needs`, and the layer's sizes and indices.

    An external score gets copies: writing to them changes nothing for other scores.
    """

    def __init__(self, view: LayerView, score: Score) -> None:
        self._view, self._score, self._copies = view, score, not is_builtin(type(score))

    def __getattr__(self, name: str) -> Any:
        if name in NEEDS and name not in self._score.needs:
            raise PluginError(
                f"score '{self._score.display_name}' looks at {name}, which its needs {self._score.needs} do not name"
            )
        if not hasattr(type(self._view), name) and name not in type(self._view).__dataclass_fields__:
            raise PluginError(
                f"score '{self._score.display_name}' asks for '{name}', which no layer shows: what comes after the "
                f"prompt is not known when a cache is evicted; there are {', '.join(NEEDS)}"
            )
        value = getattr(self._view, name)
        return value.clone() if self._copies and isinstance(value, Tensor) else value


def _compute(score: Score, view: LayerView) -> Tensor:
    """Return the values (rows, prefix) of a score on a layer. Raises PluginError if an external score fails."""
    shown: Any = VisibleLayer(view, score)
    if is_builtin(type(score)):
        return copy_to_device(score.score(shown), view.keys.device)
    with external_code(f"{_describe(score, view)} raised"):
        scores = score.score(shown)
    _check_result(score, view, scores, [(view.heads, view.prefix), (view.kv_heads, view.prefix)])
    return scores.to(view.keys.device, WORK)


def _check_result(score: Score, view: LayerView | ReplayView, result: Any, shapes: Sequence[tuple[int, int]]) -> None:
    """Raise PluginError for an external score's result that is not a finite tensor of an allowed shape."""
    if not isinstance(result, Tensor):
        raise _plugin_error(score, view, f"gives {type(result).__name__}, expected a tensor")
    if tuple(result.shape) not in shapes:
        expected = f"{shapes[0]}: a row per query head, or {shapes[1]}: per key/value head; n − w entries"
        raise _plugin_error(score, view, f"gives the shape {tuple(result.shape)}, expected {expected}")
    if result.dtype == torch.bool or result.is_complex():
        raise _plugin_error(score, view, f"gives {str(result.dtype).removeprefix('torch.')}, expected numbers")
    if not torch.isfinite(result).all():
        raise _plugin_error(score, view, f"gives NaN or infinity for {int((~torch.isfinite(result)).sum())} entries")
    if not score.signed and bool((result < 0).any()):
        advice = f"write signed = True into its class, and {commands_for_signed(type(score))}"
        raise _plugin_error(score, view, f"gives numbers below 0; {advice}")


def _plugin_error(score: Score, view: LayerView | ReplayView, what: str) -> PluginError:
    """Return an error for an external score, with layer, sample and the fault `what`, such as "gives NaN"."""
    return PluginError(f"score '{score.display_name}' {what} (layer {view.layer}, sample '{view.sample}')")


def _describe(score: Score, view: LayerView | ReplayView) -> str:
    """Return a score's name with layer and sample, for messages."""
    return f"score '{score.display_name}' (layer {view.layer}, sample '{view.sample}')"
