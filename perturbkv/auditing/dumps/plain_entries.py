"""The plain model's entries of a dump's requests, their noise floors, and how far the engine's rounding moves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from perturbkv.audit_trace import FLOORS, Floats
from perturbkv.auditing import reference
from perturbkv.auditing.dumps import matching
from perturbkv.auditing.dumps.dump_file import Dump
from perturbkv.auditing.situations import situation
from perturbkv.cache.external_cache import Layers
from perturbkv.models.adapter import Adapter

_MOST_FACTORED = 0.3
"""Distance of an entry up to which `FLOORS` times what rounding gives is allowed; beyond, twice."""


@dataclass(frozen=True)
class Expected:
    """The distances from the plain model of a request's entries in one layer, that the engine's rounding gives.

    Attributes:
        typical: median of keys and of values.
        largest: of each token, over heads and readings, of keys and of values.
    """

    typical: tuple[float, float]
    largest: tuple[Float[Tensor, " token"], Float[Tensor, " token"]]

    def limits(self, positions: Int[Tensor, "kv_head entry"], least: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return the largest distances (kv_head, entry) of keys and values at these positions that do not differ.

        `least` are those of keys and of values without any rounding.
        """
        keys, values = (
            _limit(largest, typical, smallest)[positions.clamp(min=0)]
            for largest, typical, smallest in zip(self.largest, self.typical, least, strict=True)
        )
        return keys, values


def _limit(largest: Float[Tensor, " token"], typical: float, least: float) -> Float[Tensor, " token"]:
    """Return the largest distance of each token's entries that does not differ.

    A few tokens are moved far, in every way of rounding differently: those have more.
    """
    own = torch.maximum((FLOORS * largest).clamp(max=_MOST_FACTORED), 2 * largest)
    return own.clamp(min=max(least, matching.LEVELS * typical))


class PlainEntries:
    """The plain model's entries of all requests, with their noise floors.

    Attributes:
        layers: request -> keys and values (1, kv_head, entry, d_head) of each layer.
        queries: request -> the last token's query (head, d_head) in each layer.
        floors: (layer, kind) the largest distance between two ways of reading the tokens.
        expected: request -> the distances that the engine's rounding gives, in each layer; without those where it is
            not known.
    """

    def __init__(self, adapter: Adapter, dump: Dump) -> None:
        self.layers: dict[str, Layers] = {}
        self.queries: dict[str, dict[int, Tensor]] = {}
        self.expected: dict[str, list[Expected]] = {}
        floors: list[Floats] = []
        for request in dump.requests:
            ids = torch.tensor(request.token_ids, device=adapter.device)
            alone = situation("single", ids, ids[:1], 1)
            if request.finished or len(ids) < 2:
                self.layers[request.id] = reference.read(adapter, alone)
                continue
            entries = reference.prompt_entries(adapter, alone)
            self.layers[request.id] = entries.full
            self.queries[request.id] = _last_query(adapter, ids, entries.full)
            floors.append(torch.stack([entries.floors.key, entries.floors.value], dim=-1).double().numpy())
            moved = [_moved(rounded, entries.full) for rounded in dump.rounded(adapter, request.token_ids)]
            if moved:
                self.expected[request.id] = [_expect(readings) for readings in zip(*moved, strict=True)]
        least = np.full((len(adapter.layers), 2), torch.finfo(adapter.dtype).eps)
        self.floors: Floats = np.max([least, *floors], axis=0)

    def layer(self, index: int) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Return request -> keys and values (kv_head, entry, d_head) in one layer."""
        return {name: (layers[index][0][0], layers[index][1][0]) for name, layers in self.layers.items()}

    def expected_distance(self, index: int, kind: int) -> float | None:
        """Return the median distance of keys (`kind` 0) or values (1) that rounding gives; None where not known."""
        known = [layers[index].typical[kind] for layers in self.expected.values()]
        return max(known) if known else None


def _moved(rounded: Layers, full: Layers) -> list[tuple[Tensor, Tensor]]:
    """Return, per layer, the distances (kv_head, token) of rounded keys and values from the plain model's."""
    return [
        (matching.distance(keys[0], plain[0][0], plain[0][0]), matching.distance(values[0], plain[1][0], plain[1][0]))
        for (keys, values), plain in zip(rounded, full, strict=True)
    ]


def _expect(readings: Sequence[tuple[Tensor, Tensor]]) -> Expected:
    """Return the distances in one layer, given those of every reading.

    Keys have at least what rounding of their angles in float32 gives, ε/2 of the position.
    """
    keys, values = (torch.stack(kind) for kind in zip(*readings, strict=True))
    rotation = torch.arange(keys.shape[-1], device=keys.device) * (torch.finfo(torch.float32).eps / 2)
    return Expected(
        (float(keys.median()), float(values.median())),
        (torch.maximum(keys.amax(dim=0).amax(dim=0), rotation), values.amax(dim=0).amax(dim=0)),
    )


def _last_query(adapter: Adapter, ids: Tensor, full: Layers) -> dict[int, Tensor]:
    """Return, per layer, the query (head, d_head) of the last token, given the entries of all tokens."""
    before = [(keys[:, :, :-1], values[:, :, :-1]) for keys, values in full]
    kept = [torch.ones_like(keys[..., 0], dtype=torch.bool) for keys, _ in before]
    (record,) = reference.decode(adapter, before, situation("single", ids[:-1], ids[-1:], 1), [kept])
    return {layer: query[0, :, -1] for layer, query in record.query.items()}
