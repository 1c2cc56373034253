"""Cache layers with a recurrent state: of linear attention, Mamba or a short convolution; nothing of it is evicted.

A state changes in place with every token. So the prompt's is copied, and every row of a batch starts from that copy.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from perturbkv.models import recurrent_states

_OF_ATTENTION = frozenset({"keys", "values", "is_initialized"})
"""Attributes of a cache layer that are of its keys and values, and not of its recurrent state."""
if TYPE_CHECKING:
    _Layer = object
else:
    _Layer = recurrent_states.LAYER or object  # older transformers have none


class RecurrentState:
    """A copy of the recurrent state of all rows of a cache layer.

    Args:
        layer: the cache layer.
        names: the attributes that are its state; None: all but those of keys and values, as in transformers' own.
    """

    def __init__(self, layer: Any, names: Sequence[str] | None = None) -> None:
        names = list(vars(layer).keys() - _OF_ATTENTION) if names is None else names
        self._attributes = {name: copy.deepcopy(vars(layer)[name]) for name in names}

    @property
    def names(self) -> list[str]:
        """Attributes of a cache layer that are its state."""
        return list(self._attributes)

    def put_into(self, layer: Any, rows: Sequence[int]) -> None:
        """Set the state of a cache layer's rows to copies of these rows of this state."""
        for name, held in self._attributes.items():
            setattr(layer, name, dict(held) if isinstance(held, dict) else held)
        recurrent_states.LAYER.reorder_cache(layer, torch.tensor(rows))  # which replaces the tensors


class Recurrence:
    """The recurrent state of a layer of a `CompactCache`, one per row.

    Attributes:
        marks: number of decoded tokens -> the state after them, and for each row of the cache its row there.
    """

    marks: dict[int, tuple[RecurrentState, list[int]]]

    def start(self, state: RecurrentState, rows: int) -> None:
        """Let every row start from the prompt's state."""
        self.marks = {0: (state, [0] * rows)}
        state.put_into(self, [0] * rows)

    def mark(self, after: int) -> None:
        """Store the state after the `after` tokens decoded so far, so that it can be gone back to."""
        prompt, rows = self.marks[0]
        self.marks[after] = RecurrentState(self, prompt.names), list(range(len(rows)))

    def go_back(self, after: int) -> None:
        """Set the state to that of the prompt for `after` = 0, or to the one marked after as many tokens."""
        state, rows = self.marks[after]
        state.put_into(self, rows)

    def keep_state_rows(self, rows: Sequence[int]) -> None:
        """Restrict the state to the given rows, in the given order."""
        self.marks = {after: (state, [held[row] for row in rows]) for after, (state, held) in self.marks.items()}
        recurrent_states.LAYER.reorder_cache(self, torch.tensor(rows))


class RecurrentLayer(Recurrence, _Layer):
    """A layer of a `CompactCache` that has a recurrent state, and no entries.

    Args:
        state: the prompt's, which all rows start from.
        rows: number of rows of the batch.
    """

    is_sliding = False
    attached = False

    def __init__(self, state: RecurrentState, rows: int) -> None:
        _Layer.__init__(self)
        self.start(state, rows)

    def fork(self) -> RecurrentLayer:
        """Return a second layer whose rows start from the prompt's state."""
        state, rows = self.marks[0]
        return RecurrentLayer(state, len(rows))

    def forget(self, after: int) -> None:
        """Go back to the state after the first `after` decoded tokens, which must be marked unless it is 0."""
        self.go_back(after)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Restrict the layer to the given rows, in the given order."""
        self.keep_state_rows(rows)
